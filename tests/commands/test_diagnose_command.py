"""``mpgluon diagnose``: of a zoo's network, and of a user's with one or more inputs and outputs."""

from __future__ import annotations

import pytest


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_network_of_the_zoo_is_looked_at_on_noise(printed, folder, dtype):
    options = ("--image-size=16", "--classes=10", "--batch-size=4", f"--dtype={dtype}")
    output = printed("diagnose", "cifar_resnet20_v1", *options)
    assert "Images of normal noise, (4, 3, 16, 16): no data set." in output
    assert "Weights as they were drawn: an untrained network." in output
    assert f"{dtype} against FP32, layer by layer" in output
    assert ("Gradients at the recommended loss scale" in output) == (dtype == "float16")
    assert output.endswith("written to report.html\n")
    assert "cifar_resnet20_v1 in" in (folder / "report.html").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["80", "120"])
def test_what_is_printed_fits_the_width_except_for_python(printed, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    output = printed("diagnose", "mine:small", "--image-size=8")
    assert "HybridSequential from mine:small." in output
    longest = max(map(len, output.splitlines()))
    assert int(columns) - 30 < longest <= int(columns)


@pytest.mark.slow
def test_two_inputs_and_two_outputs_have_indices_noise_and_a_loss_each(printed):
    output = printed("diagnose", "mine:two", "--input-shape=4,6", "--input-shape=4,7")
    assert "Input: random indices (4, 6), normal noise (4, 7); no data set." in output
    assert "float16 is safe for this network" in output
    assert "net(*inputs)" in output
    for layer in ("two_embedding0", "two_dense0", "two_dense1", "two_dense2"):
        assert layer in output


@pytest.mark.slow
def test_a_function_may_return_its_own_batch(printed):
    output = printed("diagnose", "mine:with_batch")
    assert "Its own batch: (6, 5)." in output
    assert "no data set" not in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_network"], "no model zoo has a network called 'no_such_network'"),
        (["mine:small", "--device=gpu:99"], "sees 0 GPUs"),
        (["mine:small", "--device=cpu:0,1"], "--device takes one device, received 'cpu:0,1'"),
        (["mine:small", "--parameters=nowhere.params"], "there is no parameter file nowhere"),
    ],
)
def test_what_cannot_be_looked_at_is_said_in_a_line(refused, folder, arguments, message):
    assert message in refused("diagnose", *arguments)
    assert not (folder / "report.html").exists()
