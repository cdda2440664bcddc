"""The cures that a replay prints save the step when they are pasted into a new run."""

from __future__ import annotations

import mpgluon
from mpgluon import Policy, StaticLossScale, amp
from mpgluon.diagnostics import FlightRecorder, replay

import mxnet as mx
import numpy as np
import pytest
from diagnostics_helpers import Times
from helpers import autocast_net, backward_from
from mxnet import gluon
from mxnet.gluon import nn

INPUTS = mx.nd.array(np.random.RandomState(0).standard_normal((4, 6)))


class Square(nn.HybridBlock):
    """Returns the square root of a sum of squares, which are too large."""

    def hybrid_forward(self, F, x):
        return F.sqrt(x * x + 1)


class OnlyFloat16(nn.HybridBlock):
    """Adds an array in float16, which an operator of MXNet's refuses to add to FP32."""

    def hybrid_forward(self, F, x):
        return F.broadcast_add(x, mx.nd.ones(x.shape, dtype="float16"))


class OnlyFloat16Later(nn.HybridBlock):
    """Multiplies by a matrix in float16, which MXNet refuses on a CPU, when it is waited for."""

    def hybrid_forward(self, F, x):
        return F.dot(F.cast(x, "float16"), mx.nd.ones((x.shape[1], 5), dtype="float16"))


def outputs_alone(outputs, _):
    return outputs


def network(*layers):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(5, in_units=6), *(layer() for layer in layers), nn.Dense(3, in_units=5))
    mx.random.seed(0)
    net.initialize(mx.init.Normal(0.5))
    return net


def squares():
    return network(lambda: Times(2.0**9, "large_"), lambda: Square(prefix="square_"))


def normalized():
    net = network(lambda: nn.LayerNorm(in_channels=5), lambda: nn.BatchNorm(in_channels=5))
    net[1].gamma.set_data(mx.nd.ones(5) * 2.0**19)
    return net


def large_weights():
    net = network(lambda: nn.BatchNorm(in_channels=5))
    net[0].weight.set_data(net[0].weight.data() * 2.0**16)
    return net


def growing():
    """Return a network whose gradient grows between two layers, where nothing is large forward."""
    down, up = (lambda: Times(2.0**-14, "down_")), (lambda: Times(2.0**14, "up_"))
    return network(down, lambda: nn.Activation("tanh"), up)


def step(net, trainer, inputs, loss_fn):
    """Return whether the losses and the gradients of a step are finite."""
    loss = backward_from(lambda: loss_fn(net(inputs), None), trainer)
    gradients = [p.grad() for p in net.collect_params().values() if p.grad_req != "null"]
    return all(np.isfinite(array.asnumpy()).all() for array in (loss, *gradients))


def trainer_of(net):
    options = {"learning_rate": 0.01, "multi_precision": True}
    return gluon.Trainer(net.collect_params(), "sgd", options)


def recorded(make, folder, cast, *, scale=1.0, loss_fn=outputs_alone, inputs=INPUTS):
    """Return a step of a cast network that was skipped, run again with all cures."""
    net = make()
    cast(net)
    trainer = trainer_of(net)
    amp.init_trainer(trainer, StaticLossScale(scale))
    recorder = FlightRecorder(net, trainer, folder)
    with recorder.step(inputs, None):
        step(net, trainer, inputs, loss_fn)
        trainer.step(4)
    assert amp.step_was_skipped(trainer)
    (file,) = folder.iterdir()
    again = replay(file, make(), loss_fn=loss_fn)
    assert again.same_bits
    return again


def pasted(cure, make, cast, *, scale=1.0, loss_fn=outputs_alone):
    """Return whether a step is finite in a new run into which a cure was pasted."""
    net, code = make(), cure.code.replace("no cast", 'amp.init_trainer(trainer, "none")')
    if code.startswith("amp.init_trainer") and "no cast" not in cure.code:
        cast(net)
    names = {"net": net, "mpgluon": mpgluon, "amp": amp}
    if "init_trainer" in code:
        names["trainer"] = trainer_of(net)
        exec(code, names)
    else:
        exec(code, names)
        names["trainer"] = trainer_of(net)
        amp.init_trainer(names["trainer"], StaticLossScale(scale))
    return step(net, names["trainer"], INPUTS, loss_fn)


CASTS = {
    "float16": mpgluon.cast_block,
    "auto float16": amp.autocast,
    "volta": lambda net: mpgluon.cast_block(
        net, Policy.parse("params=float16,compute=float16,accumulation=volta")
    ),
    "with rules": lambda net: amp.autocast(
        net, keep_fp32=[net[-1], "sigmoid"], compute_16=["softmax", "0:mean"]
    ),
    "norms cast": lambda net: mpgluon.cast_block(net, keep_fp32=()),
}


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("native_operators")
@pytest.mark.parametrize("cast", CASTS.values(), ids=list(CASTS))
@pytest.mark.parametrize(
    ("make", "scale", "loss_fn"),
    [
        (squares, 1.0, outputs_alone),
        (normalized, 4.0, outputs_alone),
        (large_weights, 2.0**8, outputs_alone),
        (growing, 2.0**3, outputs_alone),
        (growing, 1.0, lambda y, _: y * 2.0**20),
    ],
    ids=["product", "normalization", "dense", "backward", "backward at 1"],
)
def test_each_cure_that_saves_the_step_does_so_pasted_into_a_new_run(
    make, scale, loss_fn, cast, tmp_path
):
    again = recorded(make, tmp_path, cast, scale=scale, loss_fn=loss_fn)
    saving = [cure for cure in again.cures if cure.saves]
    assert len(saving) >= 2
    for cure in saving:
        assert pasted(cure, make, cast, scale=scale, loss_fn=loss_fn), cure
        assert cure.code in str(again)
    assert all(cure.code == "-" for cure in again.cures if not cure.saves)


def test_one_operator_is_tried_before_its_layer_and_written_with_its_place(tmp_path):
    again = recorded(squares, tmp_path, mpgluon.cast_block)
    names = [cure.name for cure in again.cures]
    assert names == [
        "half the loss scale: 0.5",
        "any loss scale down to 2^-24",
        "broadcast_mul of net[2] in FP32",
        "net[2] in FP32",
        "bfloat16, no loss scale",
        "all in FP32, no loss scale",
    ]
    assert [cure.saves for cure in again.cures] == [False] * 2 + [True] * 4
    assert again.cures[2].code == (
        'mpgluon.cast_block(net, keep_fp32=(*mpgluon.NORMALIZATION_LAYERS, "2:broadcast_mul"))'
    )


class WithADot(nn.HybridBlock):
    """Has a child whose name has a dot in it, as in networks from PyTorch."""

    def __init__(self):
        super().__init__(prefix="dotted_")
        with self.name_scope():
            setattr(self, "layer1.0", Square(prefix="square_"))

    def hybrid_forward(self, F, x):
        return getattr(self, "layer1.0")(x)


def test_a_layer_whose_name_has_a_dot_is_found_and_cured(tmp_path):
    def make():
        return network(lambda: Times(2.0**9, "large_"), WithADot)

    again = recorded(make, tmp_path, mpgluon.cast_block)
    assert again.layer == "net[2]._children['layer1.0']"
    saving = [cure for cure in again.cures if cure.saves]
    assert [cure.name for cure in saving[:2]] == [
        f"broadcast_mul of {again.layer} in FP32",
        f"{again.layer} in FP32",
    ]
    for cure in saving:
        assert pasted(cure, make, mpgluon.cast_block), cure


@pytest.mark.sampled(5)
@pytest.mark.parametrize("power", [4, 12, 20, 27, 40])
def test_the_largest_loss_scale_that_fits_is_found_down_to_a_tiny_one(power, tmp_path):
    def loss_fn(y, _):
        return y * 2.0**power

    def fits(exponent):
        net = autocast_net(network())
        trainer = trainer_of(net)
        amp.init_trainer(trainer, StaticLossScale(2.0**exponent))
        return step(net, trainer, INPUTS, loss_fn)

    again = recorded(network, tmp_path, amp.autocast, scale=2.0**14, loss_fn=loss_fn)
    largest = max((exponent for exponent in range(-24, 14) if fits(exponent)), default=None)
    if largest is None:
        assert power == 40
        assert again.cures[1].name == "any loss scale down to 2^-24"
        assert not again.cures[1].saves
        return
    (cure,) = [cure for cure in again.cures[:2] if cure.saves]
    floor = f", min_scale=2.0**{largest - 10}" if largest < 0 else ""
    scale = f"mpgluon.DynamicLossScale(init_scale=2.0**{largest}{floor})"
    assert cure.code == f"amp.init_trainer(trainer, {scale})"
    twice = {"scale": 2.0 ** (largest + 1), "loss_fn": loss_fn}
    half = recorded(network, tmp_path / "twice", amp.autocast, **twice).cures[0]
    assert half.name == f"half the loss scale: {2.0**largest:g}"
    note = "  # a dynamic one does so by itself" if largest >= 0 else ""
    assert half.code == f"{cure.code}{note}"
    assert pasted(half, network, amp.autocast, loss_fn=loss_fn)


@pytest.mark.parametrize("cast", [mpgluon.cast_block, amp.autocast])
@pytest.mark.parametrize("layer", [OnlyFloat16, OnlyFloat16Later])
def test_a_cure_that_cannot_run_says_why_in_its_row_and_the_others_are_tried(layer, cast, tmp_path):
    def make():
        return network(lambda: Times(2.0**9, "large_"), layer, Square)

    again = recorded(make, tmp_path, cast)
    rows = {cure.name: cure for cure in again.cures}
    assert rows["broadcast_mul of net[3] in FP32"].saves
    assert rows["net[3] in FP32"].saves
    failed = [cure for cure in again.cures if cure.error]
    assert failed[-1] is rows["all in FP32, no loss scale"]
    assert {(cure.saves, cure.code) for cure in failed} == {(False, "-")}
    for cure in failed:
        (line,) = [line for line in str(again).splitlines() if line.startswith(f"{cure.name}  ")]
        assert line.endswith(cure.error)
        assert " not run " in line
        assert "float16" in cure.error or "FP16" in cure.error
    mx.nd.waitall()  # nothing is left to fail later


def test_inputs_and_labels_in_float16_are_widened_for_other_formats(tmp_path):
    def cast(net):
        mpgluon.cast_block(net, Policy("float16", "float16", "float16"))

    def loss_fn(y, labels):
        return mx.nd.elemwise_sub(y, labels).astype("float32") * 2.0**20

    net = network()
    cast(net)
    trainer = trainer_of(net)
    amp.init_trainer(trainer, StaticLossScale(1.0))
    recorder = FlightRecorder(net, trainer, tmp_path)
    inputs, labels = INPUTS.astype("float16"), mx.nd.ones((4, 3), dtype="float16")
    with recorder.step(inputs, labels):
        backward_from(lambda: loss_fn(net(inputs), labels), trainer)
        trainer.step(4)
    (file,) = tmp_path.iterdir()
    again = replay(file, network(), loss_fn=loss_fn)
    assert again.same_bits
    assert [cure.error for cure in again.cures] == [""] * len(again.cures)
    assert [cure.saves for cure in again.cures[-2:]] == [True, True]
