"""The library is compiled for each level by each compiler without a warning, and is right."""

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from mpgluon.kernels import compiling, library, processor

import pytest
from helpers import soon_ends, starting_a_sleeper

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("level", processor.LEVELS)
def test_the_wheels_library_is_compiled_without_a_warning_and_has_mxnets_bits(built_for, level):
    path = built_for(level)
    if level not in processor.levels():
        pytest.skip(f"this processor cannot run {level}: it is {processor.level()}")
    library.check_library(path)


@pytest.mark.slow
@pytest.mark.parametrize("level", processor.LEVELS)
def test_clang_compiles_it_too(level, tmp_path, monkeypatch):
    if shutil.which("clang++") is None:
        pytest.skip("clang++ is not installed")
    if level not in processor.levels():
        pytest.skip(f"this processor cannot run {level}: it is {processor.level()}")
    monkeypatch.setenv("CXX", "clang++")
    assert compiling.compile_library(tmp_path / "native.so", level) == ""
    library.check_library(tmp_path / "native.so")


@pytest.mark.slow
def test_a_prebuilt_library_needs_no_newer_system_than_mxnet_and_has_no_path_of_this_one(built_for):
    content = built_for("x86-64-v3").read_bytes()

    def newest(name):
        versions = re.findall(name.encode() + rb"_(\d+(?:\.\d+)+)\0", content)
        return max(tuple(map(int, version.split(b"."))) for version in versions)

    assert newest("GLIBC") <= (2, 17)  # manylinux2014's
    assert newest("GLIBCXX") <= (3, 4, 19)
    assert newest("CXXABI") <= (1, 3, 7)
    assert b"libmxnet.so\0" in content  # by name only
    for folder in (ROOT, compiling.mxnet_library().parent, Path.home()):
        assert str(folder).encode() not in content


def test_a_system_other_than_linux_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(compiling.sys, "platform", "darwin")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with pytest.raises(compiling.CompilationError, match=r"on Linux only.*Darwin uses another"):
        compiling.compile_library(tmp_path / "native.so")


def test_a_compiler_may_have_arguments(monkeypatch):
    monkeypatch.setenv("CXX", "ccache 'g++ of mine' -m64")
    assert compiling.compiler() == ["ccache", "g++ of mine", "-m64"]


def test_a_compiler_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(compiling, "_TIME_LIMIT_S", 0.1)
    with pytest.raises(compiling.CompilationError, match=r"sleep took over 0\.1 s"):
        compiling.run(["sleep", "10"])


def test_what_such_a_compiler_has_started_ends_with_it(monkeypatch, tmp_path):
    monkeypatch.setattr(compiling, "_TIME_LIMIT_S", 2)
    with pytest.raises(compiling.CompilationError, match="took over 2 s"):
        compiling.run([sys.executable, "-c", starting_a_sleeper(tmp_path / "sleeper")])
    assert soon_ends(tmp_path / "sleeper")


def test_a_process_that_is_ended_by_a_signal_is_named_with_it():
    with pytest.raises(compiling.CompilationError, match="sh was ended by SIGSEGV"):
        compiling.run(["sh", "-c", "kill -SEGV $$"])


def test_this_machines_compiler_agrees_about_its_level():
    if shutil.which("g++") is None or not processor.levels():
        pytest.skip("there is no g++, or no level")
    command = ["g++", "-march=native", "-dM", "-E", "-x", "c++", "/dev/null"]
    macros = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for level, macro in (("x86-64-v3", "__F16C__"), ("x86-64-v4", "__AVX512VL__")):
        assert (macro in macros) == (level in processor.levels())
