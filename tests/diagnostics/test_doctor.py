"""The doctor's look at machines: every verdict on made-up ones, and this one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from mpgluon import kernels
from mpgluon.base.processor import parse_cpuinfo
from mpgluon.kernels.bfloat16 import has_native_bfloat16
from mpgluon_tools.diagnostics.doctor import check_machine, judge_machine, machine
from mpgluon_tools.diagnostics.doctor.installation import CUDA_WHEELS
from mpgluon_tools.diagnostics.doctor.machine import Gpu, MachineFacts, MxnetFacts, gather

import mxnet as mx
import numpy as np
import pytest
from helpers import soon_ends, starting_a_sleeper

ROOT = Path(__file__).resolve().parents[2]

CPU_BUILD = MxnetFacts(
    features=frozenset({"MKLDNN", "OPENMP"}), bfloat16="native", native_state="compiled"
)
CUDA_BUILD = MxnetFacts(
    features=frozenset({"MKLDNN", "CUDA", "CUDNN"}), gpus=1, gpu_error="", cudnn=8906
)
A100 = Gpu("NVIDIA A100", (8, 0), "535.104.05")
HEALTHY = MachineFacts(
    python=(3, 11),
    distributions={"mxnet": "1.9.1", "numpy": "1.23.5"},
    mxnet=CPU_BUILD,
    processor="Some CPU",
    cpu_flags=frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"}),
    cores=8,
    shared_memory_bytes=2**34,
    environment={"MXNET_SAFE_ACCUMULATION": "1", "OMP_NUM_THREADS": "8"},
)
HEALTHY_GPU = replace(
    HEALTHY,
    distributions={"mxnet-cu117": "1.9.1", "numpy": "1.23.5", "nvidia-cudnn-cu11": "8.9.6.50"},
    mxnet=CUDA_BUILD,
    gpus=(A100,),
)
NO_MXNET = replace(HEALTHY, mxnet=None, import_error="OSError: odd")
NO_CUDA_MXNET = replace(HEALTHY_GPU, mxnet=None)


def having(facts, **distributions):
    names = {name.replace("_", "-"): version for name, version in distributions.items()}
    return replace(facts, distributions={**facts.distributions, **names})


def without(facts, name):
    return replace(facts, distributions={n: v for n, v in facts.distributions.items() if n != name})


def setting(facts, **variables):
    return replace(facts, environment={**facts.environment, **variables})


def with_gpu(facts, capability, name="a GPU"):
    return replace(facts, gpus=(Gpu(name, capability, "535.104.05"),))


def saying(facts, **answers):
    return replace(facts, mxnet=replace(facts.mxnet, **answers))


def cannot(facts, message):
    return replace(facts, mxnet=None, import_error=message)


def loader_error(library):
    return f"OSError: {library}: cannot open shared object file: No such file or directory"


CUDA_TOPICS = {"cuDNN", "driver", "kernels", "autotune"}


@pytest.mark.parametrize(
    ("facts", "notes", "topics"),
    [(HEALTHY, [("note", "GPU")], set()), (HEALTHY_GPU, [], CUDA_TOPICS)],
    ids=["CPU", "GPU"],
)
def test_a_healthy_machine_has_at_most_the_note_that_it_has_no_gpu(facts, notes, topics):
    report = judge_machine(facts)
    assert [(f.level, f.topic) for f in report.findings if f.level != "ok"] == notes
    assert not report.has_errors
    assert CUDA_TOPICS & {f.topic for f in report.findings} == topics
    assert "GPU" in {f.topic for f in report.findings}


# Facts; the topic and level of the finding; words in its sentence, reason and remedy.
MACHINES = {
    "Python 3.12 has no distutils": (replace(HEALTHY, python=(3, 12)),
        ("Python", "error", "without setuptools", "distutils", "setuptools<81")),
    "Python 3.12 with setuptools": (having(replace(HEALTHY, python=(3, 12)), setuptools="80"),
        ("Python", "ok", "3.12", "", "")),
    "Python 3.13": (having(replace(HEALTHY, python=(3, 13)), setuptools="80"),
        ("Python", "warning", "3.13", "3.9 to 3.12", "3.11")),
    "Python 3.8": (replace(HEALTHY, python=(3, 8)), ("Python", "warning", "3.8", "", "3.11")),
    "two builds": (having(HEALTHY, mxnet_cu117="1.9.1"),
        ("MXNet", "error", "mxnet 1.9.1, mxnet-cu117 1.9.1", "one folder", "uninstall -y mxnet m")),
    "no MXNet": (without(cannot(HEALTHY, "ModuleNotFoundError: No module named 'mxnet'"), "mxnet"),
        ("MXNet", "error", "not installed", "built on it", "mxnet==1.9.1")),
    "a build from source": (without(HEALTHY, "mxnet"),
        ("MXNet", "note", "not installed from a wheel", "may not hold", "compare")),
    "an older MXNet": (having(HEALTHY, mxnet="1.8.0.post0"),
        ("MXNet", "warning", "1.8.0", "1.9.1, the last release", "mxnet==1.9.1")),
    "an import that fails in an unknown way": (NO_MXNET,
        ("MXNet", "error", "cannot be imported: OSError: odd", "without it", "force-reinstall")),
    "no driver": (cannot(NO_CUDA_MXNET, loader_error("libcuda.so.1")),
        ("MXNet", "error", "libcuda.so.1", "driver", "--gpus all")),
    "no CUDA runtime": (cannot(NO_CUDA_MXNET, loader_error("libcudart.so.11.0")),
        ("MXNet", "error", "libcudart", "nvidia-cuda-runtime-cu11 has", ".[cu117]")),
    "no cuBLASLt": (cannot(NO_CUDA_MXNET, loader_error("libcublasLt.so.11")),
        ("MXNet", "error", "libcublasLt", "nvidia-cublas-cu11", "pip install")),
    "a CUDA library whose wheel has lost it": (
        cannot(NO_CUDA_MXNET, loader_error("libcudnn.so.8")),
        ("MXNet", "error", "libcudnn.so.8", "8.9.6.50 is installed, but its file",
        "--force-reinstall --no-deps nvidia-cudnn-cu11==8.9.6.50")),
    "a damaged CUDA library": (
        cannot(NO_CUDA_MXNET, "OSError: /s/nvidia/cudnn/lib/libcudnn.so.8: file too short"),
        ("MXNet", "error", "too short", "not whole", "--no-deps nvidia-cudnn-cu11==8.9.6.50")),
    "no OpenMP library": (cannot(HEALTHY, loader_error("libgomp.so.1")),
        ("MXNet", "error", "libgomp.so.1", "operating system", "package that has libgomp.so.1")),
    "NumPy 2": (having(HEALTHY, numpy="2.0.1"), ("NumPy", "error", "2.0.1", "NumPy 2", "numpy<2")),
    "NumPy 1.26": (having(HEALTHY, numpy="1.26.4"),
        ("NumPy", "note", "1.26.4", "np.bool", "import mpgluon before mxnet")),
    "NumPy 1.24": (having(HEALTHY, numpy="1.24.0"), ("NumPy", "note", "1.24", "", "before mxnet")),
    "NumPy 1.23": (HEALTHY, ("NumPy", "ok", "1.23.5", "", "")),
    "an old cuDNN is loaded": (saying(HEALTHY_GPU, cudnn=8500),
        ("cuDNN", "error", "8.5.0 is loaded", "8.9.6", "nvidia-cudnn-cu11==8.9.6.50")),
    "the oldest right cuDNN": (HEALTHY_GPU, ("cuDNN", "ok", "8.9.6", "", "")),
    "one patch before it": (saying(HEALTHY_GPU, cudnn=8905), ("cuDNN", "error", "8.9.5", "", "")),
    "cuDNN 9 is installed": (
        cannot(having(HEALTHY_GPU, nvidia_cudnn_cu11="9.1.0.70"), "OSError: odd"),
        ("cuDNN", "error", "9.1.0.70 is installed", "libcudnn.so.8", "8.9.6.50")),
    "wheels for CUDA 12": (having(HEALTHY_GPU, nvidia_cublas_cu12="12.1"),
        ("CUDA", "warning", "nvidia-cublas-cu12", "same files", "environment of its own")),
    "nvidia-smi fails": (replace(HEALTHY, driver_error="NVIDIA-SMI has failed"),
        ("driver", "warning", "NVIDIA-SMI has failed", "no program", "restart")),
    "an old driver": (replace(HEALTHY_GPU, gpus=(replace(A100, driver="440.33"),)),
        ("driver", "error", "440.33", "450.80.02", "update")),
    "the oldest right driver": (replace(HEALTHY_GPU, gpus=(replace(A100, driver="450.80.02"),)),
        ("driver", "ok", "450.80.02", "", "")),
    "no GPU": (HEALTHY, ("GPU", "note", "none", "FP32 sums and one rounding", "bfloat16")),
    "a CUDA build without a GPU": (saying(replace(HEALTHY_GPU, gpus=()), gpus=0),
        ("GPU", "note", "MXNet's build is for CUDA", "shows no GPU", "mxnet==1.9.1")),
    "a CUDA build that cannot be imported, without a GPU": (
        replace(cannot(NO_CUDA_MXNET, "OSError: odd"), gpus=()),
        ("GPU", "note", "none, though", "at best", "CPU build saves 4 GB")),
    "a GPU that does not say what it is": (with_gpu(HEALTHY_GPU, None),
        ("GPU", "note", "unknown", "sm_50 to sm_89", "cuda-gpus")),
    "a GPU that the CPU build leaves idle": (with_gpu(HEALTHY, (8, 6)),
        ("GPU", "warning", "build is for the CPU", "not used", "uninstall -y mxnet, then")),
    "Hopper with the CPU build": (with_gpu(HEALTHY, (9, 0)),
        ("GPU", "warning", "sm_90", "no kernel image", "or the CPU")),
    "Kepler with the CPU build": (with_gpu(HEALTHY, (3, 5)),
        ("GPU", "warning", "sm_35", "too old", "later GPU")),
    "an unknown build": (without(having(HEALTHY_GPU, mxnet_cu102="1.9.1"), "mxnet-cu117"),
        ("GPU", "note", "mxnet-cu102", "not examined", ".[cu117]")),
    "a kernel fails": (saying(HEALTHY_GPU, gpu_error="out of memory"),
        ("kernels", "error", "out of memory", "every step", "driver")),
    "there is no kernel": (
        saying(with_gpu(HEALTHY_GPU, (9, 0)), gpu_error="no kernel image is available"),
        ("kernels", "error", "no kernel image", "no code", "nvcr.io/nvidia/mxnet")),
    "MXNet sees no GPU": (saying(HEALTHY_GPU, gpus=0),
        ("kernels", "error", "driver sees 1 GPU, MXNet none", "mx.gpu()", "update the driver")),
    "the GPU is hidden": (setting(saying(HEALTHY_GPU, gpus=0), CUDA_VISIBLE_DEVICES=""),
        ("kernels", "error", "MXNet none", "", "unset CUDA_VISIBLE_DEVICES, which is ''")),
    "no oneDNN": (saying(HEALTHY, features=frozenset()),
        ("oneDNN", "warning", "without it", "slower", "mxnet==1.9.1")),
    "bfloat16 instructions": (HEALTHY, ("bfloat16", "ok", "Some CPU has", "", "")),
    "no bfloat16 instructions": (
        saying(replace(HEALTHY, cpu_flags=frozenset({"avx2", "f16c"})), bfloat16="none"),
        ("bfloat16", "note", "Some CPU has no instructions", "emulated in FP32", "float32")),
    "oneDNN emulates more slowly": (
        saying(replace(HEALTHY, cpu_flags=frozenset({"avx512f"})), bfloat16="slow"),
        ("bfloat16", "note", "no instructions", "emulated in FP32", "float32")),
    "another architecture": (
        saying(replace(HEALTHY, architecture="aarch64", processor=""), bfloat16="none"),
        ("bfloat16", "note", "aarch64 has no instructions", "emulated", "float32")),
    "oneDNN is held back": (
        setting(saying(HEALTHY, bfloat16="slow"), DNNL_MAX_CPU_ISA="avx512_core"),
        ("bfloat16", "warning", "DNNL_MAX_CPU_ISA=AVX512_CORE", "emulated", "unset")),
    "oneDNN is held back, but not so far": (setting(HEALTHY, DNNL_MAX_CPU_ISA="AVX512_CORE_BF16"),
        ("bfloat16", "ok", "Some CPU has", "", "")),
    "native operators": (
        saying(HEALTHY, native_sentence="Native operators: prebuilt for x86-64-v3, there."),
        ("operators", "ok", "prebuilt for x86-64-v3", "", "")),
    "native operators that failed": (
        saying(HEALTHY, native_state="failed", native_sentence="No native operators: a reason."),
        ("operators", "warning", "a reason", "three times", "python -m mpgluon.kernels")),
    "no compiler": (saying(HEALTHY, native_state="no compiler"),
        ("operators", "warning", "no compiler", "three times", "g++")),
    "native operators that are switched off": (saying(HEALTHY, native_state="switched off"),
        ("operators", "note", "switched off", "three times", "unset MPGLUON_NATIVE")),
    "too many threads": (setting(HEALTHY, OMP_NUM_THREADS="9"),
        ("threads", "warning", "9 OpenMP threads times 1", "wait", "OMP_NUM_THREADS=8")),
    "too many workers": (setting(HEALTHY, MXNET_CPU_WORKER_NTHREADS="2"),
        ("threads", "warning", "8 OpenMP threads times 2 workers", "", "WORKER_NTHREADS=1")),
    "few threads": (setting(HEALTHY, OMP_NUM_THREADS="4,2"),
        ("threads", "note", "OMP_NUM_THREADS=4", "loader workers", "OMP_NUM_THREADS=8")),
    "threads shared out": (setting(HEALTHY, OMP_NUM_THREADS="4", MXNET_CPU_WORKER_NTHREADS="2"),
        ("threads", "ok", "4 on 8 usable cores", "", "")),
    "no number of threads": (setting(HEALTHY, OMP_NUM_THREADS="many"),
        ("threads", "note", "MXNet computes with 4 of 8", "half", "OMP_NUM_THREADS=8")),
    "half of the hyperthreads": (replace(HEALTHY, environment={}, hyperthreads=True),
        ("threads", "ok", "4 on 8", "", "")),
    "all cores of another architecture": (
        replace(HEALTHY, environment={}, architecture="aarch64"),
        ("threads", "ok", "8 on 8", "", "")),
    "one core": (replace(HEALTHY, environment={}, cores=1),
        ("threads", "ok", "1 on 1", "", "")),
    "Intel's variable": (setting(HEALTHY, KMP_AFFINITY="compact"),
        ("pinning", "note", "KMP_AFFINITY=compact", "Intel's OpenMP", "OMP_PROC_BIND")),
    "a container's shared memory": (replace(HEALTHY, shared_memory_bytes=2**26),
        ("memory", "warning", "64 MiB", "bus error", "--shm-size")),
    "unsafe sums": (replace(HEALTHY, environment={}),
        ("sums", "note", "is off", "accumulate in float16", "MXNET_SAFE_ACCUMULATION=1")),
    "unsafe sums on purpose": (setting(HEALTHY, MXNET_SAFE_ACCUMULATION="0"),
        ("sums", "note", "is off", "", "")),
    "no autotune": (setting(HEALTHY_GPU, MXNET_CUDNN_AUTOTUNE_DEFAULT="0"),
        ("autotune", "warning", "=0", "Tensor Cores", "unset")),
    "more autotune": (setting(HEALTHY_GPU, MXNET_CUDNN_AUTOTUNE_DEFAULT="2"),
        ("autotune", "ok", "=2", "", "")),
}  # fmt: skip


@pytest.mark.parametrize("case", MACHINES)
def test_each_machine_gets_its_finding_and_a_report_of_a_hundred_columns(case):
    facts, (topic, level, *words) = MACHINES[case]
    report = judge_machine(facts)
    matching = [f for f in report.findings if (f.topic, f.level) == (topic, level)]
    assert len(matching) == 1, report
    for text, word in zip((matching[0].what, matching[0].why, matching[0].fix), words):
        assert word in text
    bad = {f.topic for f in report.findings if f.level in ("warning", "error")}
    assert bad <= {topic, "MXNet", "GPU"}  # one cause, one topic

    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 100
    squeezed = " ".join(str(report).split())
    for finding in report.findings:
        for part in (finding.what, finding.why, finding.fix):
            assert " ".join(part.split()) in squeezed
    assert sum(map(int, re.findall(r"\d+", lines[-1]))) == len(report.findings)


def test_the_wheels_that_are_named_are_those_of_the_extra():
    extra = (ROOT / "pyproject.toml").read_text().split("cu117 = [")[1].split("]")[0]
    listed = set(re.findall(r'"(nvidia-[\w-]+)==', extra))
    assert len(listed) == 10
    assert set(CUDA_WHEELS.values()) == listed


def test_the_first_processor_of_cpuinfo_is_read():
    text = "processor\t: 0\nmodel name\t: AMD: one\nflags\t\t: fpu f16c\n\nflags\t: other\n"
    assert parse_cpuinfo(text) == ("AMD: one", frozenset({"fpu", "f16c"}))
    assert parse_cpuinfo("Features : asimd\n") == ("", frozenset({"asimd"}))
    assert parse_cpuinfo("") == ("", frozenset())


FAKE_MXNET = """
from types import SimpleNamespace as Space
class MXNetError(RuntimeError): pass
class Features(dict):
    def is_enabled(self, name): return self[name]
def ones(shape, ctx): raise MXNetError("trace\\nCUDA: no kernel image is available\\n")
__version__ = "1.9.1"
base = Space(MXNetError=MXNetError)
runtime = Space(Features=lambda: Features(CUDA=True, CUDNN=False))
context = Space(num_gpus=lambda: 2)
nd, gpu = Space(ones=ones), lambda: None
print("something else")
"""


@pytest.mark.multiprocess
def test_mxnet_is_asked_in_a_process_of_its_own_and_the_driver_through_nvidia_smi(
    tmp_path, monkeypatch
):
    for module, text in {"mpgluon": "", "mxnet": FAKE_MXNET}.items():
        (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program = tmp_path / "nvidia-smi"
    no_kernel = "CUDA: no kernel image is available"
    for text, gpus, error in (
        ('echo "NVIDIA A100, 8.0, $#"', (Gpu("NVIDIA A100", (8, 0), "2"),), ""),
        ("echo no communication\necho with the driver >&2\nexit 9", (),
         "no communication with the driver"),
    ):  # fmt: skip
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
        facts = gather()
        assert (facts.gpus, facts.driver_error) == (gpus, error)
        assert facts.mxnet == MxnetFacts("1.9.1", frozenset({"CUDA"}), 2, no_kernel, None)
        assert facts.import_error == ""
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert (gather().gpus, gather().driver_error) == ((), "")


CPU_MXNET = FAKE_MXNET.replace("CUDA=True", "CUDA=False")
SLOW_COMPILATION = """
import sys, time, types
def build():
    print("compiling", file=sys.stderr)
    time.sleep(1.1)
    return types.SimpleNamespace(state="compiled", sentence="on")
"""


@pytest.mark.multiprocess
def test_mxnets_import_has_a_time_limit_and_compiling_has_none(tmp_path, monkeypatch, capfd):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(machine, "_PATIENCE", 1)
    texts = {
        "mxnet.py": CPU_MXNET,
        "mpgluon/__init__.py": "",
        "mpgluon/kernels/__init__.py": SLOW_COMPILATION,
        "mpgluon/kernels/bfloat16.py": "bfloat16_products = lambda: 'slow'",
    }
    (tmp_path / "mpgluon" / "kernels").mkdir(parents=True)
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    mxnet = gather().mxnet
    assert (mxnet.native_state, mxnet.native_sentence, mxnet.bfloat16) == ("compiled", "on", "slow")
    assert capfd.readouterr().err == "compiling\n"
    (tmp_path / "mpgluon" / "kernels" / "__init__.py").write_text("raise SystemExit(3)")
    mxnet = gather().mxnet
    assert mxnet.native_state == "failed"
    assert "status 3" in mxnet.native_sentence
    (tmp_path / "mxnet.py").write_text(starting_a_sleeper(tmp_path / "sleeper"))
    facts = gather()
    assert facts.mxnet is None
    assert "longer than 1 s" in facts.import_error
    assert soon_ends(tmp_path / "sleeper")


@pytest.mark.multiprocess
def test_the_report_on_this_machine_agrees_with_what_its_parts_say(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    report = check_machine()
    by_topic = {f.topic: f for f in report.findings}
    assert by_topic["Python"].what == f"Python {sys.version_info[0]}.{sys.version_info[1]}"
    assert by_topic["NumPy"].what == np.__version__
    assert mx.__version__ in by_topic["MXNet"].what
    assert not [f for f in report.findings if f.topic == "MXNet" and f.level == "error"]
    assert (by_topic["bfloat16"].level == "ok") == has_native_bfloat16()
    assert (by_topic["operators"].level == "ok") == kernels.load()
    assert ("oneDNN" in by_topic) != mx.runtime.Features().is_enabled("MKLDNN")
    # The tests may themselves have been started on one core only.
    assert by_topic["threads"].level == ("ok" if len(os.sched_getaffinity(0)) == 1 else "note")
    assert "1 " in by_topic["threads"].what or "=1" in by_topic["threads"].what


@pytest.mark.slow
@pytest.mark.multiprocess
def test_without_avx512_bfloat16_is_emulated_as_the_finding_says():
    code = """
import mpgluon
import mxnet as mx
from mpgluon import amp
from mpgluon_tools.diagnostics.doctor import check_machine
layer = mx.gluon.nn.Conv2D(8, 3, in_channels=8)
layer.initialize()
print(amp.autocast(layer, "bfloat16"))
layer(mx.nd.ones((1, 8, 8, 8))).wait_to_read()
print(next(f for f in check_machine().findings if f.topic == "bfloat16").why)
"""
    environment = {**os.environ, "DNNL_MAX_CPU_ISA": "AVX2"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    assert "computes in bfloat16, emulated" in done.stdout
    assert "bfloat16 is emulated in FP32 arithmetic" in done.stdout
