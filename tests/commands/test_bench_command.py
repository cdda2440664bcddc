"""``mpgluon bench``: a table of a training step in each format, its conditions, and profiles."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from mpgluon import amp
from mpgluon_tools.commands import parser_of
from mpgluon_tools.commands.bench import _training_step
from mpgluon_tools.step_profile import Cost, is_slow_code, read_profile
from mpgluon_tools.timing import interleave

import pytest
from mxnet import gluon

FORMATS = ["float32", "float32, prepared", "float16, cast", "bfloat16, autocast"]


def rows_of(output: str) -> dict[str, list[str]]:
    _, _, heading, *lines = output.splitlines()
    assert heading.split()[-2:] == ["peak", "MiB"]
    return {
        name: line[len(name) :].split()
        for name in FORMATS
        for line in lines
        if line.startswith(f"{name}  ")
    }


@pytest.mark.parametrize(
    ("network", "shapes", "batch"),
    [
        ("mine:small", ["--image-size=8", "--batch-size=2"], 2),
        ("mine:two", ["--input-shape=4,6", "--input-shape=4,7"], 4),
        ("mine:with_batch", [], 6),
    ],
)
def test_each_format_has_a_row_of_numbers_that_agree(printed, network, shapes, batch):
    output = printed("bench", network, *shapes, "--rounds=3", "--no-memory")
    assert f"a training step with a batch of {batch}, 3 rounds in turn" in output
    rows = rows_of(output)
    assert list(rows) == FORMATS
    for median, lower, _, upper, speedup, samples, peak in rows.values():
        assert 0 < float(lower) <= float(median) <= float(upper)
        assert float(speedup) > 0
        # A tenth of a millisecond is printed.
        assert batch / float(samples) == pytest.approx(float(median) / 1e3, abs=0.6e-4)
        assert peak == "-"
    assert rows["float32"][4] == "1.00"
    assert max(map(len, output.splitlines()[:-1])) <= 80


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux only")
def test_memory_is_that_of_a_process_for_each_format(started):
    done = started("bench", "mine:small", "--image-size=8", "--rounds=1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 round in turn" in done.stdout
    assert all(50 < int(row[-1]) < 2000 for row in rows_of(done.stdout).values())


def test_steps_that_a_falling_loss_scale_skips_are_not_timed(monkeypatch):
    # They update nothing: they are faster, and the optimizer has no states before its first update.
    skipped = []

    def step(trainer, *arguments):
        real(trainer, *arguments)
        skipped.append(amp.step_was_skipped(trainer))

    real = gluon.Trainer.step
    monkeypatch.setattr(gluon.Trainer, "step", step)
    options = parser_of("bench").parse_args(["mine:steep"])
    timed = _training_step(options, "float16", warm_up=1)
    assert skipped[0]
    assert not skipped[-1]
    timed()
    assert not skipped[-1]


@pytest.mark.parametrize(
    ("load", "said"),
    [(0.0, "compare them only if nothing else ran"), (99.0, "was busy: a load of")],
)
def test_the_load_of_the_machine_is_said(printed, monkeypatch, load, said):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    output = printed("bench", "mine:dense", "--input-shape=2,5", "--rounds=1", "--no-memory")
    assert said in output
    assert re.search(r"\d+ cores? of .*bfloat16 is computed (natively|emulated) here", output)


def test_no_round_begins_after_the_limit_and_one_is_done():
    calls = []
    cases = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    found = interleave(cases, rounds=9, warm_up=1, limit_s=0.0)
    assert {name: len(times) for name, times in found.items()} == {"a": 1, "b": 1}
    assert calls == ["a", "b", "a", "b"]


RESIDUAL = """
import mxnet as mx
from mxnet import gluon


class Residual(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.convolution, self.dense = gluon.nn.Conv2D(4, 3), gluon.nn.Dense(3)

    def hybrid_forward(self, F, x):
        hidden = self.convolution(x)
        return self.dense(hidden + F.sin(hidden))


def net():
    made = Residual()
    made.initialize(mx.init.Xavier())
    return made
"""


CLIPPED = """
import mxnet as mx
from mxnet.gluon import nn


def net():
    made = nn.HybridSequential()
    made.add(nn.Conv2D(16, 3), nn.BatchNorm(), nn.HybridLambda(lambda F, x: F.clip(x, 0, 6)))
    made.add(nn.Conv2D(16, 3), nn.Dropout(0.5), nn.Dense(3))
    made.initialize(mx.init.Xavier())
    return made
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("dtype", "title"), [("float32", "float32"), ("bfloat16", "bfloat16, autocast")]
)
def test_a_profile_has_the_operators_and_primitives_of_a_format(
    dtype, title, printed, folder, request
):
    if dtype == "bfloat16":  # computed by operators of other names elsewhere
        request.getfixturevalue("native_bfloat16")
    shapes = ("--image-size=8", "--batch-size=2", "--rounds=3")
    (folder / "residual.py").write_text(RESIDUAL)
    output = printed("bench", "residual:net", "--profile", *shapes, f"--dtype={dtype}")
    assert re.findall(r"a training step, (.*)", output) == [title]
    operators, primitives = output.split("Primitives of oneDNN")
    # The images have 2 * 3 * 8 * 8 elements, and the result 2 * 4 * 6 * 6.
    (backward,) = re.findall(r"^_backward_Convolution .*", operators, re.MULTILINE)
    _, calls, ms, share, percent, elements, ns = backward.split()
    assert (calls, percent, elements) == ("1", "%", "384")
    assert 1e6 * float(ms) / 384 == pytest.approx(float(ns), abs=1e6 * 0.006 / 384)
    assert 0 < float(share) < 100
    # Two gradients of the result are added.
    assert re.search(r"^add_n +1 .* 288 ", operators, re.MULTILINE)
    assert re.search(r"^convolution .*", primitives, re.MULTILINE)
    assert not list(folder.glob("*.json"))  # of MXNet's profiler
    assert Path(os.devnull).is_char_device()  # which it replaces for root, if told to write there


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.usefixtures("native_operators")
def test_float32_is_plain_mxnet_and_prepared_has_own_operators(printed, folder):
    (folder / "clipped.py").write_text(CLIPPED)
    formats = ("--dtype=float32", "--dtype=prepared")
    output = printed("bench", "clipped:net", "--profile", "--image-size=8", "--rounds=1", *formats)
    plain, prepared = output.split("a training step, float32, prepared")
    assert "_mpgluon" not in plain
    assert re.search(r"^clip ", plain, re.MULTILINE)
    assert re.search(r"^_mpgluon_any_layout_clip ", prepared, re.MULTILINE)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--dtype=float16"], "the table of times has every format; leave out --dtype"),
        (["--profile", "--device=gpu:0"], "steps on the CPU; leave out --device"),
        (["--profile", "--image-size=8"], "mine:raw must initialize its network"),
    ],
)
@pytest.mark.multiprocess
def test_options_without_effect_and_networks_that_fail_are_refused(refused, options, said):
    assert said in refused("bench", "mine:raw", *options)


@pytest.mark.parametrize("options", [(), ("--profile-of=float16",)], ids=["times", "profile"])
def test_a_network_without_a_parameter_to_train_is_refused(refused, folder, options):
    (folder / "frozen.py").write_text(
        "from mxnet.gluon import nn\n\ndef net():\n    frozen = nn.Dense(2, in_units=3)\n"
        "    frozen.initialize()\n    frozen.collect_params().setattr('grad_req', 'null')\n"
        "    return frozen\n"
    )
    said = refused("bench", "frozen:net", "--input-shape=2,3", "--no-memory", *options)
    assert "has no trainable parameters, so it has no training step" in said


PROFILE = """
dnnl_verbose,exec,cpu,convolution,jit:avx512,forward_training,src_f32,,alg:direct,mb1ic1oc1,9.0
mpgluon_step {}
dnnl_verbose,exec,cpu,convolution,x64:gemm:jit,backward_data,wei_f32,,alg:direct,\
g2mb2_ic4oc6_ih8oh6kh3sh1dh0ph0_iw8ow6kw3sw1dw0pw0,0.5
dnnl_verbose,exec,cpu,concat,simple:any,undef,src_f32,,axis:1,8x3x2x2:8x4x2x2,0.25
dnnl_verbose,exec,cpu,concat,simple:any,undef,src_f32,,axis:1,8x1x2x2:8x1x2x2,0.25

mpgluon_step {"Convolution": [2, 3.0], "_backward_Convolution": [2, 7.0], "mean": [3, 1.0],
 "_mpgluon_x_backward_clip": [1, 4.0], "sgd_mom_update": [2, 2.0],
 "_backward_Pooling": [2, 0.5], "_mpgluon_to_bfloat16": [5, 9.0]}
dnnl_verbose,exec,cpu,convolution,x64:gemm:jit,backward_data,wei_f32,,alg:direct,\
g2mb2_ic4oc6_ih8oh6kh3sh1dh0ph0_iw8ow6kw3sw1dw0pw0,0.75
dnnl_verbose,exec,cpu,inner_product,x64:gemm:jit,backward_data,wei_f32,,,mb2ic1024oc1000,0.5
dnnl_verbose,exec,cpu,rnn,ref:any,forward_training,src_f32,,alg:lstm,l1t35mb25sic64slc64dhc64,0.1

mpgluon_step {"Convolution": [2, 2.0], "_backward_Convolution": [2, 8.0], "mean": [3, 1.0],
 "_mpgluon_x_backward_clip": [1, 4.0], "sgd_mom_update": [2, 2.0],
 "_backward_Pooling": [2, 0.5], "_mpgluon_to_bfloat16": [5, 9.0]}
mpgluon_sizes {"nodes": {"Convolution": [2, 1000], "mean": [2, 50], "_mpgluon_x_clip": [1, 10],
 "Pooling": [1, 5], "_mpgluon_keep_nan_Pooling": [1, 15],
 "_mpgluon_to_bfloat16": [2, 8], "_mpgluon_from_bfloat16": [3, 5]}, "parameters": [2, 40]}
""".replace("\\\n", "").replace(",\n ", ", ")


def test_a_profile_takes_the_fastest_step_and_leaves_unknown_elements_empty():
    operators, primitives = profile = read_profile(PROFILE)
    assert operators == {
        "_mpgluon_to_bfloat16": Cost(5, 9.0, 13),  # 2 of the graph and 3 gradients
        "_backward_Convolution": Cost(2, 7.0, 1000),
        "_mpgluon_x_backward_clip": Cost(1, 4.0, 10),
        "Convolution": Cost(2, 2.0, 1000),
        "sgd_mom_update": Cost(2, 2.0, 40),
        "mean": Cost(3, 1.0, None),  # one is not of the graph
        "_backward_Pooling": Cost(2, 0.5, 20),  # of two operators
    }
    assert operators["Convolution"].ns_an_element == 2000
    assert primitives == {  # of both steps
        ("convolution", "x64:gemm:jit"): Cost(1, 0.5, 2 * 4 * 8 * 8),
        ("concat", "simple:any"): Cost(2, 0.5, 8 * 7 * 4 + 8 * 2 * 4),
        ("inner_product", "x64:gemm:jit"): Cost(1, 0.5, 1024 * 1000),
        ("rnn", "ref:any"): Cost(1, 0.1, None),
    }
    assert profile.table_of_primitives().rows[0][-1] == "slow"
    with pytest.raises(ValueError, match="there is no step in the output of the profile: 'Killed'"):
        read_profile("Killed")


def test_a_profile_leaves_out_the_operators_of_a_step_that_was_skipped():
    ordinary = 'mpgluon_step {"Convolution": [2, 3.0], "sgd_mom_update": [2, 2.0]}\n'
    skipped = 'mpgluon_step {"Convolution": [2, 1.0], "amp_cast": [55, 2.0]}\n'
    operators, _ = read_profile(f"mpgluon_step {{}}\n{ordinary}{skipped}{ordinary}")
    assert operators == {"sgd_mom_update": Cost(2, 2.0, None), "Convolution": Cost(2, 1.0, None)}


@pytest.mark.parametrize(
    ("kind", "implementation", "slow"),
    [
        ("batch_normalization", "bnorm_ref:any", True),
        ("batch_normalization", "ncsp_bnorm:any", True),
        ("convolution", "ref:any", True),
        ("convolution", "x64:gemm:jit", True),
        ("inner_product", "x64:gemm:jit", False),
        ("reorder", "simple:any", True),
        ("reorder", "jit:uni", False),
        ("convolution", "jit_bf16_1x1:avx512_core_bf16", False),
    ],
)
def test_slow_code_is_recognized_by_its_name(kind, implementation, slow):
    assert is_slow_code(kind, implementation) is slow
