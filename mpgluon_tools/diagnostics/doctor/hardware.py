"""Whether the machine is fit for 16 bits: GPU and driver, processor, threads, settings.

Functions of the facts alone; they do not look at the machine.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpgluon.base.cuda_libraries import INSTALL_FOR_CPU, INSTALL_FOR_CUDA
from mpgluon.base.findings import Finding, error, note, ok, warning
from mpgluon.base.processor import first_number, unasked_threads
from mpgluon_tools.diagnostics.doctor.machine import Gpu, MachineFacts, numbers_in
from mpgluon_tools.tables import counted

__all__ = ["hardware"]

# The wheels for CUDA 11.2 and 11.7 have machine code for these. It runs on later minor versions of
# the same major one; there is no PTX, from which a driver could make code for the next.
_MAJOR_VERSIONS = (5, 6, 7, 8)
_KNOWN_BUILDS = ("mxnet-cu112", "mxnet-cu117")
_OLDEST_DRIVER = (450, 80)  # from which on every CUDA 11.x runs
_INSTEAD_OF_HOPPER = (
    "use a GPU of sm_50 to sm_89 (Maxwell to Ada: V100, T4, A100, RTX 30 and 40), NVIDIA's last "
    "MXNet container (nvcr.io/nvidia/mxnet), if its notes list this GPU, or the CPU: "
    f"pip uninstall the CUDA build, then {INSTALL_FOR_CPU}"
)


def hardware(facts: MachineFacts) -> Iterator[Finding]:
    """Yield findings about devices, and about the settings that matter to them."""
    for check in (
        _driver,
        _gpus,
        _kernels,
        _onednn,
        _native_operators,
        _bfloat16,
        _threads,
        _shared_memory,
        _accumulation,
        _autotune,
    ):
        yield from check(facts)


def _driver(facts: MachineFacts) -> Iterator[Finding]:
    if facts.driver_error:
        yield warning(
            "driver",
            f"nvidia-smi failed: {facts.driver_error}",
            "no program can use the GPU without a working driver",
            "reinstall the driver, or restart after an update of it; in a container, start it "
            "with the GPUs",
        )
    elif facts.gpus:
        driver = facts.gpus[0].driver
        if numbers_in(driver) < _OLDEST_DRIVER and facts.is_for_cuda:
            yield error(
                "driver",
                driver,
                "CUDA 11 needs a driver of 450.80.02 or later",
                "update NVIDIA's driver",
            )
        else:
            yield ok("driver", driver)


def _gpus(facts: MachineFacts) -> Iterator[Finding]:
    if not facts.gpus and not facts.is_for_cuda:
        yield note(
            "GPU",
            "none",
            "float16 runs on the CPU with FP32 sums and one rounding: hybridized and with native "
            "operators (below), at about FP32's speed",
            'for more speed use amp.autocast(net, "bfloat16"), if the processor has it (below)',
        )
    seen = facts.mxnet.gpus if facts.mxnet is not None else 0
    if not facts.gpus and facts.is_for_cuda and not seen:
        yield note(
            "GPU",
            "none, though MXNet's build is for CUDA",
            "at best everything runs on the CPU"
            if facts.mxnet is None
            else "the driver's library is there and shows no GPU; everything runs on the CPU",
            "on a machine with a GPU check its driver, and start a container with the GPUs; "
            "elsewhere the CPU build saves 4 GB: "
            f"pip uninstall this one, then {INSTALL_FOR_CPU}",
        )
    for gpu in facts.gpus:
        yield _gpu(gpu, facts)


def _gpu(gpu: Gpu, facts: MachineFacts) -> Finding:
    if gpu.capability is None:
        return note(
            "GPU",
            f"{gpu.name}, architecture unknown",
            "MXNet's wheels have code for sm_50 to sm_89 only",
            "look the name up at developer.nvidia.com/cuda-gpus",
        )
    major, minor = gpu.capability
    name = f"{gpu.name}, sm_{major}{minor}"
    if major not in _MAJOR_VERSIONS:
        why, fix = (
            "MXNet's wheels hold code up to sm_86 and no PTX: each kernel fails with \"no kernel "
            'image is available"',
            _INSTEAD_OF_HOPPER,
        )
        if major < min(_MAJOR_VERSIONS):
            why = "too old for CUDA 11 and for MXNet's wheels, which begin with sm_50"
            fix = f"use a later GPU, or the CPU: {INSTALL_FOR_CPU}"
        return Finding("error" if facts.is_for_cuda else "warning", "GPU", name, why, fix)
    if not facts.is_for_cuda:
        return warning(
            "GPU",
            f"{name}, but MXNet's build is for the CPU",
            "the GPU is not used",
            f"pip uninstall -y {' '.join(facts.builds) or 'mxnet'}, then {INSTALL_FOR_CUDA}",
        )
    unknown = [build for build in facts.builds if build not in _KNOWN_BUILDS]
    if unknown:
        return note(
            "GPU",
            f"{name}, with {unknown[0]}",
            f"the code of this build was not examined; {' and '.join(_KNOWN_BUILDS)} have "
            "code for sm_50 to sm_89",
            f"if kernels fail, an environment of its own: {INSTALL_FOR_CUDA}",
        )
    if major < 7:
        return note(
            "GPU",
            f"{name}, without Tensor Cores",
            "float16 saves memory here and little or no time; many of these GPUs compute it more "
            "slowly than FP32",
            "measure with study/scripts/benchmark.py before relying on float16 for speed",
        )
    return ok("GPU", name)


def _kernels(facts: MachineFacts) -> Iterator[Finding]:
    """Judge how MXNet's use of the GPU went."""
    if facts.mxnet is None or not facts.is_for_cuda:
        return
    if facts.mxnet.gpu_error:
        too_new = "no kernel image" in facts.mxnet.gpu_error
        yield error(
            "kernels",
            f"MXNet could not compute on the GPU: {facts.mxnet.gpu_error}",
            "the wheels hold no code for it"
            if too_new
            else "every step on the GPU will fail like this",
            _INSTEAD_OF_HOPPER if too_new else "check the driver and the libraries above",
        )
    elif facts.gpus and not facts.mxnet.gpus:
        hidden = facts.environment.get("CUDA_VISIBLE_DEVICES")
        yield error(
            "kernels",
            f"the driver sees {counted(len(facts.gpus), 'GPU')}, MXNet none",
            "mx.gpu() cannot be used",
            f"unset CUDA_VISIBLE_DEVICES, which is {hidden!r}"
            if hidden is not None
            else "update the driver; in a container, start it with the GPUs",
        )
    elif facts.mxnet.gpus:
        yield ok("kernels", f"MXNet sees {counted(facts.mxnet.gpus, 'GPU')} and computes on gpu(0)")


def _onednn(facts: MachineFacts) -> Iterator[Finding]:
    if facts.mxnet is not None and "MKLDNN" not in facts.mxnet.features:
        yield warning(
            "oneDNN",
            "MXNet was built without it",
            "convolutions on the CPU are several times slower",
            "install the wheel: pip install mxnet==1.9.1",
        )


def _bfloat16(facts: MachineFacts) -> Iterator[Finding]:
    if facts.mxnet is None or facts.mxnet.bfloat16 is None:
        return
    name = facts.processor or facts.architecture
    cap = facts.environment.get("DNNL_MAX_CPU_ISA", "").upper()
    if facts.mxnet.bfloat16 == "native":
        yield ok("bfloat16", f"{name} has instructions for it")
        return
    why = "bfloat16 is emulated in FP32 arithmetic: right, at about FP32's speed and not faster"
    if facts.cpu_flags & {"avx512_bf16", "amx_bf16"} and cap:
        yield warning(
            "bfloat16",
            f"DNNL_MAX_CPU_ISA={cap} keeps oneDNN from the processor's bfloat16 instructions",
            why,
            "unset DNNL_MAX_CPU_ISA",
        )
        return
    yield note(
        "bfloat16",
        f"{name} has no instructions for it, or oneDNN does not use them",
        why,
        "train in float32 for speed; in float16 or bfloat16 for their arithmetic",
    )


def _native_operators(facts: MachineFacts) -> Iterator[Finding]:
    if facts.mxnet is None or not facts.mxnet.native_state:
        return
    state, sentence = facts.mxnet.native_state, facts.mxnet.native_sentence
    if state in ("compiled", "prebuilt"):
        yield ok("operators", sentence or state)
        return
    fixes = {
        "no compiler": "install a C++ compiler (g++), or mpgluon from a wheel that carries them",
        "switched off": "unset MPGLUON_NATIVE",
    }
    yield Finding(
        "note" if state == "switched off" else "warning",
        "operators",
        sentence or state,
        "16 bits on a CPU run with MXNet's own operators, about three times more slowly",
        fixes.get(state, "python -m mpgluon.kernels tries again and shows the compiler's words"),
    )


def _threads(facts: MachineFacts) -> Iterator[Finding]:
    cores = counted(facts.cores, "usable core")
    threads, workers = (
        first_number(facts.environment.get(name, ""))
        for name in ("OMP_NUM_THREADS", "MXNET_CPU_WORKER_NTHREADS")
    )
    unasked = unasked_threads(facts.cores, facts.architecture)
    if (threads or unasked) * (workers or 1) > facts.cores:
        yield warning(
            "threads",
            f"{counted(threads or unasked, 'OpenMP thread')} times "
            f"{counted(workers or 1, 'worker')} on {cores}",
            "threads that share a core wait for each other at the end of every operator",
            f"export OMP_NUM_THREADS={facts.cores} MXNET_CPU_WORKER_NTHREADS=1",
        )
    elif threads and threads * (workers or 1) < facts.cores:
        yield note(
            "threads",
            f"OMP_NUM_THREADS={threads} leaves some of {cores} to others",
            "training on the CPU uses no more; right if loader workers or other jobs take the rest",
            f"export OMP_NUM_THREADS={facts.cores} for all of them",
        )
    elif not threads and unasked * (workers or 1) < facts.cores and not facts.hyperthreads:
        yield note(
            "threads",
            f"without a number in OMP_NUM_THREADS MXNet computes with {unasked} of {cores}",
            "it takes half of them for hyperthreads, which they are not here",
            f"export OMP_NUM_THREADS={facts.cores} for all of them",
        )
    else:
        yield ok("threads", f"{threads or unasked} on {cores}")
    if "KMP_AFFINITY" in facts.environment:
        yield note(
            "pinning",
            f"KMP_AFFINITY={facts.environment['KMP_AFFINITY']}",
            "only Intel's OpenMP reads it; MXNet's wheels load GNU's (libgomp)",
            "use OMP_PROC_BIND and OMP_PLACES to pin threads",
        )


def _shared_memory(facts: MachineFacts) -> Iterator[Finding]:
    if facts.shared_memory_bytes is not None and facts.shared_memory_bytes < 2**30:
        yield warning(
            "memory",
            f"/dev/shm holds {facts.shared_memory_bytes / 2**20:.0f} MiB",
            "Gluon's DataLoader passes batches through it, 38 MB for 64 images of 224 pixels, and "
            "its workers die with a bus error when it is full",
            "docker run --shm-size 8g; mpgluon's own loaders do not use it",
        )


def _accumulation(facts: MachineFacts) -> Iterator[Finding]:
    if facts.environment.get("MXNET_SAFE_ACCUMULATION") == "1":
        yield ok("sums", "MXNET_SAFE_ACCUMULATION=1")
        return
    yield note(
        "sums",
        "MXNET_SAFE_ACCUMULATION is off",
        "MXNet's float16 softmax, norm and sum accumulate in float16; a network of cast_block or "
        "autocast computes them in FP32 anyway",
        "export MXNET_SAFE_ACCUMULATION=1 if you call such operators on float16 arrays yourself",
    )


def _autotune(facts: MachineFacts) -> Iterator[Finding]:
    if not facts.is_for_cuda:
        return
    value = facts.environment.get("MXNET_CUDNN_AUTOTUNE_DEFAULT", "1")
    if value == "0":
        yield warning(
            "autotune",
            "MXNET_CUDNN_AUTOTUNE_DEFAULT=0",
            "cuDNN guesses its convolution algorithms instead of trying them; often not the ones "
            "that use Tensor Cores well",
            "unset MXNET_CUDNN_AUTOTUNE_DEFAULT, unless every batch has another shape",
        )
    else:
        yield ok("autotune", f"MXNET_CUDNN_AUTOTUNE_DEFAULT={value}")
