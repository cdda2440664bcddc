"""Which library is used, what is recorded, and what happens to a damaged one."""

import logging
import os
import shutil
import subprocess
import time

import mpgluon
from mpgluon import amp, kernels
from mpgluon.kernels import compiling, library, processor, records

import mxnet as mx
import pytest
from mxnet.gluon import nn
from native_builds import copying, make_for_another_architecture, put_compiler, truncate


def no_more(*_, **__):
    raise AssertionError("tried again")


COMPILING = "compiling the native operators for this processor, once: "


def warnings_of(caplog):
    """Return the warnings of a process that loads them now, except that it compiles."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        kernels.load.__wrapped__()
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if not message.startswith(COMPILING)]


# ---- The environment.


@pytest.mark.usefixtures("place")
def test_the_environment_can_switch_the_operators_off(monkeypatch, caplog):
    monkeypatch.setenv("MPGLUON_NATIVE", "0")
    assert kernels.load.__wrapped__() is False
    assert warnings_of(caplog) == []
    found = kernels.build()
    assert (found.state, found.path) == ("switched off", None)
    assert "MPGLUON_NATIVE=0" in found.sentence


@pytest.mark.usefixtures("place")
def test_an_unknown_level_is_refused(monkeypatch, caplog):
    monkeypatch.setenv("MPGLUON_NATIVE", "avx2")
    (warning,) = warnings_of(caplog)
    assert "is 'avx2'; allowed are 0 (off), x86-64-v2, x86-64-v3, x86-64-v4" in warning
    assert kernels.build().state == "failed"


def test_a_requested_level_is_compiled(place, monkeypatch, good_library):
    monkeypatch.setenv("MPGLUON_NATIVE", "x86-64-v3")
    seen = place.parent / "arguments"
    script = f"echo $@ >{seen}; {copying(good_library)}"
    put_compiler(place.parent, monkeypatch, script)
    found = kernels.build()
    assert (found.state, found.level) == ("compiled", "x86-64-v3")
    assert "-march=x86-64-v3" in seen.read_text().split()


# ---- Compiling.


def test_it_is_compiled_once_for_this_processor_and_one_line_says_so(
    place, monkeypatch, good_library, caplog
):
    calls = put_compiler(place.parent, monkeypatch, copying(good_library))
    monkeypatch.setattr(kernels, "_loaded", [])
    assert not kernels.available()
    assert kernels.status().state == "not built yet"
    assert calls.read_text() == ""  # questions compile nothing
    found = kernels.build()
    assert (found.state, found.level) == ("compiled", f"native ({processor.level()})")
    assert f"compiled for this processor ({processor.level()})" in found.sentence
    assert found.path.parent == records.cache_folder()
    assert found.path.read_bytes() == good_library.read_bytes()
    monkeypatch.setattr(library, "check_library", no_more)
    assert kernels.status() == kernels.build() == found
    assert len(calls.read_text().split()) == 1
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.getMessage().startswith(COMPILING)
    assert warning.getMessage().endswith(f"they are kept in {library.cache_folder()}")


def test_folders_of_processes_killed_while_compiling_are_removed(place, monkeypatch, good_library):
    put_compiler(place.parent, monkeypatch, copying(good_library))
    cache = records.cache_folder()
    for name, seconds in {"tmp_killed": 700, "tmp_running": 600}.items():
        (cache / name).mkdir(parents=True)
        os.utime(cache / name, (time.time() - seconds,) * 2)
    kernels.build()
    assert [path.name for path in cache.iterdir() if path.is_dir()] == ["tmp_running"]


@pytest.mark.parametrize("cast", [mpgluon.cast_block, amp.autocast])
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_cast_loads_them_for_a_cpu_only(cast, device, monkeypatch):
    loads = []
    monkeypatch.setattr(kernels, "load", lambda: loads.append(device))
    net = nn.Dense(2)
    with mx.Context(device):
        cast(net)
    assert loads == ["cpu"] * (device == "cpu")


def test_a_missing_compiler_is_reported_once(place, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(place))
    (warning,) = warnings_of(caplog)
    assert "no C++ compiler: none of g++, c++ and clang++ is on the PATH" in warning
    assert "MXNet's own operators" in warning
    assert "install g++" in warning
    assert warnings_of(caplog) == []
    assert kernels.build().state == "no compiler"
    assert kernels.load.__wrapped__() is False


def test_a_compiler_that_fails_is_not_run_again_and_is_reported_once(place, monkeypatch, caplog):
    script = 'echo "a.h: In function" >&2; echo "a.h:3: error: no such thing" >&2; exit 3'
    calls = put_compiler(place.parent, monkeypatch, script)
    (warning,) = warnings_of(caplog)
    assert "compiling failed (a.h:3: error: no such thing)" in warning
    assert "`python -m mpgluon.kernels` tries again" in warning
    assert warnings_of(caplog) == []
    found = kernels.build()
    assert (found.state, found.path, found.is_news) == ("failed", None, False)
    assert len(calls.read_text().split()) == 1
    assert not list(records.cache_folder().glob("*.so"))


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("command", ["/no/such/compiler", 'g++ "-O'])  # whose mark is not closed
def test_a_compiler_that_does_not_exist_is_named(monkeypatch, command):
    monkeypatch.setenv("CXX", command)
    found = kernels.build()
    assert found.state == "failed"
    assert f"{command} cannot be run: No such file or directory" in found.sentence


@pytest.mark.slow
def test_a_compiled_library_that_does_not_load_is_not_kept(place, monkeypatch):
    nonsense = place.parent / "nonsense"
    nonsense.write_text("nonsense")
    put_compiler(place.parent, monkeypatch, copying(nonsense))
    found = kernels.build()
    assert "checking what was compiled failed (it cannot be loaded: " in found.sentence
    assert not list(records.cache_folder().glob("*.so"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ('#include <cstdlib>\nextern "C" void mpgluon_register() { abort(); }', "ended by SIGABRT"),
        (
            'extern "C" { void mpgluon_register() {} void mpgluon_register_format() {} }',
            "its results are not MXNet's",
        ),
        ("int nothing;", "undefined symbol: mpgluon_register"),
    ],
)
def test_a_library_that_is_wrong_or_crashes_is_not_kept(place, monkeypatch, source, complaint):
    if not compiling.compiler():
        pytest.skip("there is no C++ compiler")
    wrong = place.parent / "wrong.so"
    command = [*compiling.compiler(), "-x", "c++", "-", "-shared", "-fPIC", "-o", wrong]
    subprocess.run(command, input=source, text=True, check=True)
    put_compiler(place.parent, monkeypatch, copying(wrong))
    assert complaint in kernels.build().sentence
    assert not list(records.cache_folder().glob("*.so"))


def test_a_cache_folder_that_cannot_be_written_leaves_mxnets_operators(place, monkeypatch, caplog):
    put_compiler(place.parent, monkeypatch, "exit 0")
    records.cache_folder().parent.write_text("a file where a folder should be")
    (warning,) = warnings_of(caplog)
    assert "cannot be written" in warning
    assert "XDG_CACHE_HOME" in warning


def test_a_damaged_library_in_the_cache_is_compiled_again(place, monkeypatch, good_library):
    calls = put_compiler(place.parent, monkeypatch, copying(good_library))
    path = kernels.build().path
    truncate(path)
    found = kernels.build()
    assert "checking the library in the cache failed (" in found.sentence
    assert found.path.read_bytes() == good_library.read_bytes()
    assert len(calls.read_text().split()) == 2
    assert not kernels.build().is_news


# ---- Prebuilt libraries.


@pytest.fixture
def with_prebuilt(place, monkeypatch, good_library):
    """No compiler, and the same good library for two levels."""
    monkeypatch.setenv("PATH", str(place))
    for level in ("x86-64-v2", "x86-64-v3"):
        shutil.copy(good_library, place / f"native-{level}.so")
    return place


def test_the_best_prebuilt_library_is_checked_once(with_prebuilt, monkeypatch, caplog):
    assert kernels.status().state == "not built yet"
    found = kernels.build()
    assert (found.state, found.level) == ("prebuilt", "x86-64-v3")
    assert found.path == with_prebuilt / "native-x86-64-v3.so"
    monkeypatch.setattr(library, "check_library", no_more)
    assert kernels.build() == kernels.status() == found
    assert warnings_of(caplog) == []


@pytest.mark.usefixtures("with_prebuilt")
def test_a_requested_level_is_used(monkeypatch):
    monkeypatch.setenv("MPGLUON_NATIVE", "x86-64-v2")
    assert kernels.build().level == "x86-64-v2"


@pytest.mark.usefixtures("with_prebuilt")
def test_a_processor_gets_no_library_of_a_level_above_its_own(monkeypatch):
    monkeypatch.setattr(processor, "levels", lambda: ("x86-64-v2",))
    assert kernels.build().level == "x86-64-v2"


@pytest.mark.parametrize(
    ("damage", "checked_before"), [(truncate, True), (make_for_another_architecture, False)]
)
def test_a_damaged_prebuilt_library_is_passed_over(with_prebuilt, damage, checked_before, caplog):
    if checked_before:
        kernels.build()
    damage(with_prebuilt / "native-x86-64-v3.so")
    (warning,) = warnings_of(caplog)
    assert "prebuilt for x86-64-v2" in warning
    assert "checking the prebuilt library for x86-64-v3 failed (" in warning
    # A part of a library may end the process that loads it, if that part is long enough.
    assert "ended by SIGBUS" in warning or "it cannot be loaded: " in warning
    assert warnings_of(caplog) == []
    assert kernels.build().level == "x86-64-v2"


@pytest.mark.slow
def test_without_a_good_prebuilt_library_one_is_compiled(with_prebuilt, monkeypatch, good_library):
    for path in with_prebuilt.glob("*.so"):
        truncate(path)
    sentence = kernels.build().sentence
    assert sentence.index("x86-64-v3 failed") < sentence.index("x86-64-v2 failed")
    assert "no C++ compiler" in sentence
    put_compiler(with_prebuilt.parent, monkeypatch, copying(good_library))
    assert kernels.build().state == "compiled"


@pytest.mark.usefixtures("with_prebuilt")
def test_another_mxnet_or_processor_or_check_means_another_check(monkeypatch, tmp_path):
    assert kernels.build().state == "prebuilt"
    other_check = tmp_path / "check.py"
    other_check.write_text("")
    for thing, name, value in (
        (library.mx, "__version__", "1.9.0"),
        (processor, "features", lambda: frozenset({"another"})),
        (library, "_CHECK", other_check),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(thing, name, value)
            patch.setattr(processor, "levels", lambda: processor.LEVELS[:2])
            assert kernels.status().state == "not built yet"


@pytest.mark.usefixtures("with_prebuilt")
def test_a_cache_folder_that_cannot_be_written_costs_a_check_in_each_process(caplog):
    records.cache_folder().parent.write_text("a file where a folder should be")
    assert warnings_of(caplog) == []
    assert kernels.build().state == "prebuilt"
    assert kernels.status().state == "not built yet"
