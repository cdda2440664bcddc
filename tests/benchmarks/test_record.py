"""Records: what they say of the machine, that they come back as they were, and the tables."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import mpgluon
from mpgluon.errors import DataError

import mxnet as mx
import numpy as np
import pytest

from benchmarks import machine as machine_module
from benchmarks.machine import (
    describe_machine,
    describe_source,
    file_stem,
    instruction_set,
    usable_cores,
)
from benchmarks.race import CaseResult, Conditions, Failure, Result
from benchmarks.record import BenchmarkRecord, begin_record, read_record, write_record
from benchmarks.report import (
    case_report,
    case_table,
    duration,
    heading,
    networks_table,
    rounded,
)

ROOT = Path(__file__).resolve().parents[2]

BASE = Result("base", [1.0, 2.0, 4.0], 300.0, 200.0, 0.001, {"images": 8, "parameters": 5})
FAST = Result(
    "fast", [0.5, 0.5, 1.0], None, None, 0.0, {"images": 8, "note": "without native operators"}
)
CASE = CaseResult(
    "training",
    "training step, some network",
    {"model": "some", "batch_size": 8},
    "base",
    [BASE, FAST],
    [Failure("bad", "ended with status 1", "Traceback in /home/somebody\nRuntimeError: no")],
)
GEMM = CaseResult("gemm", "matrix product", {"size": 2}, "a", [Result("a", [0.0125], 1, 1, 0)])
RECORD = BenchmarkRecord(
    date="2020-02-02T20:20:20+00:00",
    source={"commit": "0123456789abcdef", "has_changes": False},
    machine={
        "processor": "Some CPU",
        "architecture": "x86_64",
        "cpu_flags": ["avx2", "f16c"],
        "cores": 4,
        "gpus": [],
    },
    versions={"python": "3.11.0", "mxnet": "1.9.1"},
    conditions=Conditions(threads=4, rounds=3),
    load_average=0.25,
    cases=[CASE, GEMM],
)


# --- the file --------------------------------------------------------------------------------


def test_a_record_comes_back_as_it_was_but_for_what_failures_printed(tmp_path):
    path = tmp_path / "a folder" / "record.json"
    write_record(RECORD, path)
    failure = Failure("bad", "ended with status 1")
    assert read_record(path) == replace(RECORD, cases=[replace(CASE, failures=[failure]), GEMM])
    assert "somebody" not in path.read_text()


def test_the_file_has_medians_quartiles_and_ratios_for_readers_without_this_package(tmp_path):
    write_record(RECORD, tmp_path / "record.json")
    case, _ = json.loads((tmp_path / "record.json").read_text())["cases"]
    base, fast = case["results"]

    def quartiles(values):
        return dict(zip(("lower", "median", "upper"), np.percentile(values, [25, 50, 75])))

    assert base["time"] == quartiles([1, 2, 4])
    assert fast["time"] == quartiles([0.5, 0.5, 1])
    assert base["relative"] == quartiles([1, 1, 1])
    assert fast["relative"] == quartiles([0.5, 0.25, 0.25])
    assert (base["images_per_second"], fast["images_per_second"]) == (4, 16)


def test_a_case_brings_the_versions_that_its_contestants_told():
    told = replace(GEMM, results=[replace(BASE, facts={"versions": {"torch": "2.13"}})])
    record = replace(RECORD, cases=[]).with_case(told)
    assert record.versions == {**RECORD.versions, "torch": "2.13"}
    assert record.cases == [told]
    assert record.with_case(CASE).cases == [told, CASE]
    assert record.with_case(CASE).failures == [(CASE, CASE.failures[0])]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a record of a benchmark .JSONDecodeError"),
        ("[]", "is not a record of a benchmark .TypeError"),
        ('{"format": 1}', "is not a record of a benchmark .KeyError: 'cases'"),
        ('{"format": 99}', "record of format 99, and this version reads 1; run the benchmark"),
    ],
)
def test_other_files_are_refused(content, message, tmp_path):
    (tmp_path / "file.json").write_text(content)
    with pytest.raises(DataError, match=message):
        read_record(tmp_path / "file.json")


def test_a_file_that_is_not_there_or_cannot_be_written_is_named(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*lost\.json: No such file"):
        read_record(tmp_path / "lost.json")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot write .*record\.json"):
        write_record(RECORD, tmp_path / "file" / "record.json")


# --- the machine -----------------------------------------------------------------------------


def test_a_new_record_says_when_on_what_and_with_what():
    record = begin_record(Conditions(threads=1))
    age = datetime.now(timezone.utc) - datetime.fromisoformat(record.date)
    assert -2 < age.total_seconds() < 120
    assert record.versions["mxnet"] == mx.__version__
    assert record.versions["mpgluon"] == mpgluon.__version__
    assert record.versions["numpy"] == np.__version__
    assert record.machine["architecture"] == platform.machine()
    assert record.machine["cores"] == usable_cores() == len(os.sched_getaffinity(0))
    assert record.load_average >= 0
    assert record.cases == []


def test_the_flags_are_those_of_this_processor_that_matter():
    words = Path("/proc/cpuinfo").read_text().split()
    found = describe_machine()["cpu_flags"]
    for flag in ("avx2", "f16c", "avx512f", "avx512_bf16", "amx_bf16"):
        assert (flag in found) == (flag in words)


@pytest.mark.parametrize(
    ("flags", "limit", "expected"),
    [
        ({"sse4_1", "avx", "avx2"}, "", "AVX2"),
        ({"sse4_1", "avx", "avx2", "avx512bw", "avx512_bf16"}, "", "AVX-512-BF16"),
        ({"sse4_1", "avx", "avx2", "avx512bw", "avx512_bf16"}, "avx512_core", "AVX-512"),
        ({"sse4_1", "avx", "avx2", "avx512bw", "avx512_bf16"}, "AVX2", "AVX2"),
        ({"sse4_1", "avx", "avx2"}, "AVX512_CORE", "AVX2"),
        ({"asimd"}, "", "aarch64"),
    ],
)
def test_the_instruction_set_is_the_widest_that_onednn_may_use(flags, limit, expected):
    assert instruction_set(flags, limit, "aarch64") == expected


def test_a_record_does_not_tell_whose_machine_it_is(tmp_path):
    write_record(begin_record(Conditions(threads=1)), tmp_path / "record.json")
    text = (tmp_path / "record.json").read_text()
    assert str(Path.home()) not in text
    assert str(ROOT) not in text
    assert f'"{platform.node()}' not in text


def commit_into(root: Path) -> str:
    """Commit a package of a module each in the folders of a repository; return the commit."""

    def git(*arguments):
        identity = ("-c", "user.name=Nobody", "-c", "user.email=nobody@example.org")
        command = ["git", *identity, *arguments]
        done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init")
    for folder in ("mpgluon", "benchmarks", "experiments"):
        (root / folder).mkdir()
        (root / folder / "__init__.py").touch()
    git("add", ".")
    git("commit", "-m", "first")
    return git("rev-parse", "HEAD")


@pytest.mark.parametrize("folder", ["mpgluon", "benchmarks"])
def test_the_source_is_a_commit_and_whether_package_or_benchmarks_differ_from_it(
    folder, tmp_path, monkeypatch
):
    commit = commit_into(tmp_path)
    monkeypatch.setattr(machine_module, "_ROOT", tmp_path)
    (tmp_path / "results.json").touch()  # beside them: not a change
    (tmp_path / "experiments" / "new.py").touch()
    assert describe_source() == {"commit": commit, "has_changes": False}
    assert describe_source("experiments") == {"commit": commit, "has_changes": True}
    (tmp_path / folder / "new.py").touch()
    assert describe_source() == {"commit": commit, "has_changes": True}


def test_a_package_outside_a_repository_or_not_tracked_by_it_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_module, "_ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert describe_source() == {"commit": None, "has_changes": False}
    commit_into(tmp_path)
    (tmp_path / "installed" / "mpgluon").mkdir(parents=True)
    (tmp_path / "installed" / "mpgluon" / "__init__.py").touch()
    monkeypatch.setattr(machine_module, "_ROOT", tmp_path / "installed")
    assert describe_source() == {"commit": None, "has_changes": False}


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert describe_source() == {"commit": None, "has_changes": False}


@pytest.mark.parametrize(
    ("processor", "cores", "gpus", "device", "stem"),
    [
        ("AMD EPYC", 2, [], "cpu", "cpu-amd-epyc-2-cores"),
        ("AMD EPYC 9B14 96-Core Processor", 4, [], "cpu", "cpu-amd-epyc-9b14-96-core-4-cores"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", 8, ["T4"], "cpu", "cpu-intel-xeon-8-cores"),
        ("AMD EPYC", 2, ["NVIDIA A100-SXM4-40GB"], "gpu:0", "gpu-nvidia-a100-sxm4-40gb"),
    ],
)
def test_a_machine_names_its_file(processor, cores, gpus, device, stem):
    described = {"processor": processor, "cores": cores, "gpus": gpus}
    assert file_stem(described, device) == stem


# --- in words --------------------------------------------------------------------------------


def test_the_table_has_medians_quartiles_ratios_speed_and_memory():
    table = case_table(CASE)
    assert table.headings == [
        *("", "seconds", "quartiles", "relative", "quartiles", "images/s", "peak MiB")
    ]
    assert table.rows == [
        ["base", "2.00", "1.50 to 3.00", "1.000", "1.000 to 1.000", "4.00", "300"],
        ["fast", "0.500", "0.500 to 0.750", "0.250", "0.250 to 0.375", "16.0", "-"],
    ]
    *_, base, fast = str(table).splitlines()
    assert base.index("300") == fast.index("-") - 2  # aligned


def test_columns_that_nobody_fills_are_left_out():
    alone = replace(CASE, baseline="bad", results=[replace(FAST, facts={})])
    assert case_table(alone).headings == ["", "seconds", "quartiles"]


def test_the_report_names_what_has_no_result_and_what_is_to_be_noted():
    lines = case_report(CASE).splitlines()
    assert lines[0] == "training step, some network"
    assert lines[-4:] == [
        "fast: without native operators",
        "no result for bad: it ended with status 1",
        "    Traceback in /home/somebody",
        "    RuntimeError: no",
    ]
    nobody = replace(CASE, results=[], failures=[Failure("bad", "was ended by SIGSEGV")])
    assert case_report(nobody).splitlines() == [
        "training step, some network",
        "no result for bad: it was ended by SIGSEGV",
    ]


def test_the_heading_says_what_was_measured_on_what_and_whether_the_machine_was_busy():
    words = heading(RECORD)
    for part in ("Some CPU, 4 cores, avx2 f16c", "mxnet 1.9.1", "commit 0123456789;", "3 rounds"):
        assert part in words
    assert "busy" not in words
    changed = replace(
        RECORD, load_average=3.21, source={"commit": "0123456789abcdef", "has_changes": True}
    )
    assert "commit 0123456789 with changes" in heading(changed)
    assert "the machine was busy: 3.2 processes" in heading(changed)
    unknown = replace(RECORD, source={"commit": None, "has_changes": False})
    assert "no commit known" in heading(unknown)


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234.4, "1234"), (123.4, "123"), (12.34, "12.3"), (1.0, "1.00"), (0.01234, "0.0123")],
)
def test_figures_have_three_significant_digits(value, text):
    assert rounded(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(13.12, "13.1 s"), (0.1, "0.100 s"), (0.0999, "99.9 ms"), (2e-5, "0.0200 ms")],
)
def test_short_times_are_in_milliseconds(seconds, text):
    assert duration(seconds) == text


# --- tables of several cases -----------------------------------------------------------------


def network(model: str, *seconds: float) -> CaseResult:
    names = ["base", "cast", "autocast"]
    results = [Result(n, [s] * 3, None, None, 0) for n, s in zip(names, seconds)]
    return CaseResult(
        "zoo", "", {"model": model, "batch_size": 8, "image_size": 64}, "base", results
    )


def test_networks_have_a_row_each_then_their_geometric_mean_and_the_largest():
    table = networks_table([network("one", 2, 2, 2.4), network("two", 0.5, 1, 0.5)])
    assert table.headings[:5] == ["network", "batch", "px", "base (s)", "quartiles"]
    assert table.headings[5:] == ["cast", "quartiles", "autocast", "quartiles"]
    one, two, mean, largest = table.rows
    assert one[:5] == ["one", "8", "64", "2.00", "2.00 to 2.00"]
    assert one[5:] == ["1.000", "1.000 to 1.000", "1.200", "1.200 to 1.200"]
    assert two[5::2] == ["2.000", "1.000"]
    assert mean == ["geometric mean", *[""] * 4, "1.414", "of 2", "1.095", "of 2"]
    assert largest == ["largest", *[""] * 4, "2.000", "two", "1.200", "one"]


def test_a_network_without_a_result_has_an_empty_cell_and_is_no_part_of_the_mean():
    failed = network("three", 1.0)
    table = networks_table([network("one", 2, 3, 2), failed])
    assert table.rows[1][3:] == ["1.00", "1.00 to 1.00", *["-"] * 4]
    assert table.rows[2][5:] == ["1.500", "of 1", "1.000", "of 1"]
    nobody = CaseResult("zoo", "", failed.settings, "base", [])
    assert [row[3:] for row in networks_table([nobody]).rows] == [["-", "-"], ["", ""], ["", ""]]
