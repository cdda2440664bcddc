"""The model of many GPUs: sums by hand, a ring that is really run, its page, and the script."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers import module_from
from PIL import Image

from study.benchmarks.measured_link import fit_link

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "study" / "scripts" / "plan_scaling.py"
DOCUMENT = ROOT / "docs" / "scaling.md"
SMALL = ["--model", "resnet18_v1", "--gpus", "8", "64"]
# At NVLink's 300 GB/s and 3.4 us: the model's inner link.
NVLINK_S_PER_BYTE, NVLINK_HOP_S = 1 / 300e9, 3.4e-6


@pytest.fixture(scope="module")
def script():
    return module_from(SCRIPT)


def ring(script, gpus: int, gbit_per_s: float, latency_us: float, per_machine: int = 1):
    (found,) = script.rings([gpus], {"link": gbit_per_s}, latency_us, per_machine)
    return found


def work(script):
    """1000 gradients; an image takes 1 s in FP32 and half a second in float16."""
    return script.Workload(1000, {"float32": 1.0, "float16": 0.5})


# --- the model -------------------------------------------------------------------------------


def ring_of(gpus: int, chunks: int) -> tuple[int, int]:
    """Run a ring: return the hops one after another, and the chunks that each GPU has sent.

    Each GPU holds as many chunks as there are GPUs. A chunk goes round to be added up, and round
    again to be given to all.
    """
    have = [[{owner} for _ in range(chunks)] for owner in range(gpus)]
    hops = sent = 0
    for turn in range(2 * (gpus - 1)):
        moving = [(gpu, (gpu - turn) % gpus) for gpu in range(gpus)]
        carried = [set(have[gpu][chunk]) for gpu, chunk in moving]
        for (gpu, chunk), values in zip(moving, carried):
            have[(gpu + 1) % gpus][chunk] |= values
        hops, sent = hops + 1, sent + 1
    assert all(len(chunk) == gpus for gpu in have for chunk in gpu)
    return hops, sent


@pytest.mark.parametrize("gpus", [2, 3, 8])
def test_bytes_and_hops_are_those_of_a_ring_that_is_run(gpus, script):
    hops, sent = ring_of(gpus, gpus)
    found = ring(script, gpus, 80, 10.0)
    assert found.sent(12.0) == pytest.approx(sent * 12 / gpus)
    assert found.latency_s == pytest.approx(hops * 10e-6)


def schedule(each: float, backward: float, messages: int) -> float:
    """Return when the last message has come after the end of backward, one by one."""
    free = 0.0
    for number in range(1, messages + 1):
        free = max(free, backward * number / messages) + each
    return free - backward


@pytest.mark.parametrize("messages", [1, 2, 7, 64])
@pytest.mark.parametrize("gbit_per_s", [1e-6, 1e-5, 1.0])
def test_what_is_exposed_is_what_a_schedule_of_the_messages_leaves(
    messages, gbit_per_s, script, monkeypatch
):
    monkeypatch.setattr(script, "MESSAGES", (messages,))
    found = ring(script, 4, gbit_per_s, 5.0)
    efficiency, hidden, number = work(script).step(found, 1, "float16", 2)
    each = found.seconds(2000 / messages)
    # At most 64 additions, each with an error of 2**-53 of the sum, which begins with 1/3 s.
    left = schedule(each, 0.5 * 2 / 3, messages)
    bound = 64 * 2.0**-53
    assert efficiency == pytest.approx(0.5 / (0.5 + left), rel=bound, abs=bound)
    assert hidden == pytest.approx(1 - left / (messages * each))
    assert number == messages


# --- the page and the command line -----------------------------------------------------------


@pytest.mark.slow
def test_the_pages_tables_and_figure_are_those_that_the_model_makes(script, tmp_path):
    source = DOCUMENT.read_text(encoding="utf-8")
    emptied = re.sub(r"(<!-- table: \w+ -->\n).*?(<!-- end)", r"\1\2", source, flags=re.S)
    assert emptied != source
    (tmp_path / "scaling.md").write_text(emptied, encoding="utf-8")
    assert script.main(["--document", str(tmp_path / "scaling.md")]) == 0
    made = (tmp_path / "scaling.md").read_text(encoding="utf-8")
    assert made == source, "run python study/scripts/plan_scaling.py --document docs/scaling.md"
    with Image.open(tmp_path / "scaling.png") as image:
        assert image.width == 992  # 6.2 inches: words stay legible on a page of 420 pixels


def test_tables_fit_into_the_terminal(script, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    assert script.main(SMALL) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 90


def test_a_users_cluster_is_in_the_tables(script, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    # 11.7 million parameters; 8 GPUs in 8 machines at 1 Gbit/s: 2 * 7 / 8 * 46.8 MB, 0.65 s.
    options = ["--link-gbit-per-s", "1", "--gpus-per-machine", "1", "--latency-us", "0"]
    speeds = ["--images-per-second", "float16=1000", "float32=500"]
    assert script.main([*SMALL, *options, *speeds]) == 0
    output = capsys.readouterr().out
    assert "resnet18_v1, 11.7 million gradients" in output
    numbers = r"([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)"
    (row,) = re.findall(rf"^ *8  1 Gbit/s, 1 per machine +{numbers} +0.00$", output, re.M)
    sent, half, seconds, halved = map(float, row)
    assert sent == pytest.approx(2 * 7 / 8 * 46.8, rel=2e-3)  # three digits of 46.8
    assert seconds == pytest.approx(8 * sent, abs=0.5)
    assert (half, halved) == (pytest.approx(sent / 2, abs=0.1), pytest.approx(seconds / 2, abs=0.1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "12"], "12 GPUs do not fill machines of 8"),
        (["--link-gbit-per-s", "0"], "positive and its latency at least 0, received 0 Gbit/s and"),
        (["--latency-us", "-1"], "Gbit/s and -1 us"),
        (["--link-gbit-per-s", "nan"], "received nan Gbit/s and"),
        (["--images-per-second", "float16"], "as in float16=2180 float32=1022; received float16"),
        (["--images-per-second", "float16=10"], "for both formats"),
        (["--images-per-second", "float16=10", "float32=-1"], "takes a positive number"),
        (["--model", "resnet1000"], "resnet1000"),
        (["--document", "nowhere.md"], "nowhere.md"),
        (
            ["--document", str(ROOT / "README.md")],
            "needs marks for ['batches', 'exchange', 'sums']",
        ),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(script, capsys, options, message):
    assert script.main([*SMALL, *options]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


# --- measuring a link ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_measurement_over_mpi_prints_times_and_the_link_that_fits_them(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "distributed"))
    from distributed_helpers import mpirun, succeeded

    output = succeeded(mpirun(2, SCRIPT, "--measure", "--rounds", "3")).output
    rows = re.findall(r"^ *([\d.]+) +([\d.]+)$", output, re.M)
    seconds = {round(1e6 * float(size)): float(ms) / 1e3 for size, ms in rows}
    assert len(seconds) == 7
    (found,) = re.findall(r"--link-gbit-per-s (\S+) --latency-us (\S+)", output)
    # The times are printed with three digits behind the point of a millisecond, the link with three
    # in all; the smallest sum may take 10 us, of which that is a twentieth.
    assert float(found[0]) == pytest.approx(fit_link(2, seconds)[0], rel=0.1)
