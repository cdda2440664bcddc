"""Shares of Tensor Cores, read from an export that is written here by hand."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from helpers import module_from

from study.benchmarks.nsys import Kernel, TensorCoreShare, read_export, uses_tensor_cores

main = module_from(Path(__file__).resolve().parents[2] / "study/scripts/tensor_core_share.py").main
THREAD, OTHER_THREAD = 0x1000000 * 7 + 1, 0x1000000 * 7 + 2
CONVOLUTION = "sm80_xmma_fprop_implicit_gemm_f16f16_f16f16_f16_nhwckrsc_nhwc_tensor16x8x16_kernel"
NAMES = {
    1: CONVOLUTION,
    2: "mxnet::op::BatchNormKernel<float>",
    3: "volta_sgemm_128x64_tn",
    4: "fc",
}
# Name, beginning and end on the GPU, moment and thread of the launch.
KERNELS = [
    (1, 1000, 7000, 110, THREAD),
    (2, 7000, 8000, 130, THREAD),
    (3, 8000, 9500, 210, THREAD),
    (2, 9500, 10000, 210, OTHER_THREAD),
]
# Text or identity of text, beginning, end, thread: conv0 within forward, then dense0.
RANGES = [
    ("forward", None, 100, 190, THREAD),
    ("conv0", None, 105, 120, THREAD),
    (None, 4, 200, 220, THREAD),
]


def export(path, *, with_ranges=True):
    """Write the tables of nsys' documented schema that matter."""
    with sqlite3.connect(path) as database:
        database.executescript(
            """
            CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT,
                correlationId INT, globalPid INT, demangledName INT, shortName INT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, globalTid INT,
                correlationId INT, nameId INT);
            """
        )
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", NAMES.items())
        for number, (name, start, end, launch, thread) in enumerate(KERNELS):
            kernel = (start, end, 0, number, 0x1000000 * 7, name, name)
            database.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?)", kernel
            )
            # Another process has the same correlation identity.
            for process in (0, 0x1000000 * 90):
                launched = (launch, launch + 1, thread + process, number, 1)
                database.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", launched
                )
        if with_ranges:
            database.execute(
                "CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT, text TEXT, "
                "textId INT, globalTid INT)"
            )
            for text, identity, start, end, thread in RANGES:
                database.execute(
                    "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, ?, ?, ?)",
                    (start, end, text, identity, thread),
                )
    database.close()
    return path


def test_the_share_and_the_layers_without_tensor_cores_are_read(tmp_path):
    share = read_export(export(tmp_path / "run.sqlite"))
    assert share.kernels == (
        Kernel(CONVOLUTION, 6000, "conv0"),
        Kernel(NAMES[2], 1000, "forward"),
        Kernel(NAMES[3], 1500, "fc"),
        Kernel(NAMES[2], 500, None),
    )
    assert share.share == 6000 / 9000
    assert share.layers_without() == {"fc": 1500, "forward": 1000}


def test_without_ranges_kernels_are_named_and_layers_are_not(tmp_path):
    share = read_export(export(tmp_path / "run.sqlite", with_ranges=False))
    assert share.share == 6000 / 9000
    assert share.layers_without() == {}
    assert "No NVTX ranges" in str(share)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("volta_fp16_s884cudnn_fp16_128x128_ldg8_relu_exp_interior_nhwc_tn_v1", True),
        ("turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_nn", True),
        ("ampere_fp16_s16816gemm_fp16_64x64_ldg8_f2f_stages_64x5_tn", True),
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688f16>", True),
        ("volta_scudnn_128x64_relu_interior_nn_v1", False),
        ("volta_sgemm_128x128_nn", False),
        ("kernel_of_size_18840", False),
    ],
)
def test_names_of_kernels_say_whether_tensor_cores_compute(kernel, expected):
    assert uses_tensor_cores(kernel) is expected


def test_the_script_prints_tables_of_80_columns(tmp_path, capsys):
    assert main([str(export(tmp_path / "run.sqlite"))]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("66.7% of 0.01 ms in 4 kernels are on Tensor Cores")
    assert "Layers without Tensor Cores" in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_the_script_refuses_what_is_not_an_export(tmp_path, capsys):
    text, empty = tmp_path / "text.sqlite", tmp_path / "empty.sqlite"
    text.write_text("not a database, but long enough to be read as one " * 9)
    sqlite3.connect(empty).close()
    empty.touch()
    for path, message in (
        (tmp_path / "missing", "does not exist"),
        (text, "is not an SQLite export"),
        (empty, "has no kernels"),
    ):
        assert main([str(path)]) == 2
        assert message in capsys.readouterr().err


def test_no_kernels_at_all_are_a_share_of_zero():
    assert TensorCoreShare(()).share == 0


# Kernels of an H100, with microseconds, from PyTorch 2.11's profiler: products of 4,096 x 4,096
# numbers and N columns, and forward and backward passes of ResNet-50 with 64 images.
H100 = json.loads(Path(__file__).with_name("h100_kernels.json").read_text())


@pytest.mark.parametrize("case", H100)
def test_fp32_never_and_sixteen_bits_always_compute_products_on_tensor_cores(case):
    kernels = [Kernel(name, int(1000 * time), None) for name, time in H100[case].items()]
    share = TensorCoreShare(tuple(kernels)).share
    if case.startswith("float32"):
        assert share == 0
    elif case.endswith("resnet50"):  # most of the time goes to BatchNorm, ReLU and sums
        assert 0.25 < share < 0.4
    else:
        assert share > 0.99


@pytest.mark.parametrize(
    "kernel",
    [
        "void mshadow::cuda::MapPlanKernel<mshadow::sv::saveto, 8, mshadow::expr::Plan<mshadow::"
        "Tensor<mshadow::gpu, 2, float>, float> >",
        "void cudnn::ops::scalePackedTensor_kernel<float, float>(long, float*, float)",
        "void tensorTransformGeneric<__half, __half, float, true, false, false>",
    ],
)
def test_the_word_tensor_does_not_mean_tensor_cores(kernel):
    assert not uses_tensor_cores(kernel)
