"""How oneDNN computes bfloat16 is tried once; after a lost record it is tried again."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

from mpgluon import PrecisionError, amp
from mpgluon.cast import block
from mpgluon.cast.forward import forward_of
from mpgluon.deployment import export_mxnet, import_mxnet
from mpgluon.deployment import mxnet_export as exporting
from mpgluon.kernels import bfloat16

import mxnet as mx
import pytest
from mxnet.gluon import nn

LINE = "dnnl_verbose,exec,cpu,convolution,{},forward_training,src_bf16::blocked\n"
ANSWERS = {
    "native": (0, LINE.format("jit_bf16:avx512_core_bf16")),
    "slow": (0, LINE.format("jit_bf16:avx512_core")),
    "none": (1, "could not create a primitive descriptor iterator"),
}


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Count the processes that are started; each finds what ``asked.answer`` says."""

    class Asked:
        answer, count = "native", 0

        def run(self, command, **options):
            self.count += 1
            assert options["env"]["DNNL_VERBOSE"] == "1"
            code, output = ANSWERS[self.answer]
            return subprocess.CompletedProcess(command, code, output, "")

    found = Asked()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bfloat16.subprocess, "run", found.run)
    return found


def ask() -> str:
    """Return the answer without the cache of this process, as a new one does."""
    return bfloat16.bfloat16_products.__wrapped__()


@pytest.mark.parametrize("answer", ANSWERS)
def test_the_implementation_that_onednn_names_is_the_answer_and_is_recorded(asked, answer):
    asked.answer = answer
    assert ask() == ask() == answer
    assert asked.count == 1


def test_each_limit_of_onednn_has_a_record_of_its_own(asked, monkeypatch):
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    assert ask() == "native"
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    asked.answer = "none"
    assert ask() == "none"


def test_a_cache_that_cannot_be_written_costs_no_answer(asked, tmp_path):
    (tmp_path / "cache").write_text("a file where a folder should be")
    assert ask() == ask() == "native"
    assert asked.count == 2


@pytest.mark.usefixtures("asked")
def test_a_process_that_cannot_be_started_means_emulation(monkeypatch, caplog):
    def refuse(*_, **__):
        raise OSError("no more processes")

    monkeypatch.setattr(bfloat16.subprocess, "run", refuse)
    with caplog.at_level(logging.WARNING):
        assert ask() == "none"
    assert "bfloat16 is emulated, since trying it natively failed: no more processes" in caplog.text


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_answer_of_this_machine_is_what_a_convolution_does(tmp_path):
    # Under AVX2 there is none, whatever the processor; MXNet's error stays in the other process.
    code = (
        "import mpgluon, mxnet as mx; from mpgluon.kernels.bfloat16 import bfloat16_products; "
        "print(bfloat16_products()); mx.nd.waitall()"
    )
    environment = {**os.environ, "DNNL_MAX_CPU_ISA": "AVX2", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=environment,
    )
    assert done.stdout == "none\n"


def small_network() -> nn.HybridSequential:
    net = nn.HybridSequential()
    net.add(nn.Conv2D(16, 3, in_channels=3), nn.Dense(4, in_units=16 * 36))
    net.initialize()
    return net


def test_a_format_that_a_device_cannot_carry_is_refused_before_anything_is_changed(monkeypatch):
    net = small_network()
    monkeypatch.setattr(block, "device_type_of", lambda _: "gpu")
    with pytest.raises(PrecisionError, match="no bfloat16 kernels for a GPU; use float16 there"):
        amp.autocast(net, "bfloat16")
    assert all(forward_of(block) is None for block in block.blocks_of(net))


@pytest.mark.usefixtures("native_bfloat16")
def test_a_graph_in_native_bfloat16_is_refused_where_there_is_none(tmp_path, monkeypatch):
    export_mxnet(small_network(), tmp_path / "net", dtype="bfloat16")
    monkeypatch.setattr(exporting.bfloat16, "bfloat16_products", lambda: "none")
    with pytest.raises(PrecisionError, match=r"computes 2 operators in bfloat16 .* Export it on"):
        import_mxnet(tmp_path / "net", ctx=mx.cpu())
