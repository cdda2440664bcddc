"""MXNet's contestants do their work in their format."""

from __future__ import annotations

import warnings

import mxnet as mx
import numpy as np
import pytest

from recipes.data.shapes import render_shapes
from study.benchmarks import loading, workloads
from study.benchmarks.contestant import Contestant, Process
from study.benchmarks.sequences import KINDS

pytestmark = pytest.mark.slow  # figures are made by hand, and rarely

NETWORK = {"model": "resnet18_v1", "batch_size": 4, "image_size": 64}
MXNET = [("gluon", "float32"), *(("mpgluon", t) for t in ("float32", "float16", "bfloat16"))]


@pytest.fixture
def built(monkeypatch):
    """Return the networks that workloads build."""
    nets = []
    original = workloads.build_network

    def build_network(*arguments, **options):
        nets.append(original(*arguments, **options))
        return nets[-1]

    monkeypatch.setattr(workloads, "build_network", build_network)
    return nets


def loss_scale_of(library: str, dtype: str):
    if library == "gluon":
        return None
    return "dynamic" if dtype == "float16" else "none"


def values_of(parameter) -> np.ndarray:
    return parameter.data().asnumpy().astype("float64")


def relative_error(found, expected) -> float:
    found, expected = (np.asarray(values, dtype="float64") for values in (found, expected))
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


# Half the distance of two neighbours above 1, times 20 layers whose errors add up at worst; the
# network is not deeper. float32 results differ by the order of their sums.
ROUNDING = {"float32": 20 * 2.0**-20, "float16": 20 * 2.0**-11, "bfloat16": 20 * 2.0**-8}


def is_in_format(found, expected, dtype: str) -> bool:
    """Whether values are equal up to the rounding of a format, and show it if it is a short one."""
    error = relative_error(found, expected)
    return error < ROUNDING[dtype] and (dtype == "float32" or error > 2.0**-16)


@pytest.mark.parametrize(
    ("library", "dtype", "autocast"),
    [*((*one, False) for one in MXNET), ("mpgluon", "float16", True)],
)
def test_a_training_step_changes_the_weights_in_its_format(
    library, dtype, autocast, built, monkeypatch
):
    monkeypatch.setattr(workloads, "_LEARNING_RATE", 2.0**-10)  # so that float16 weights change
    options = {"loss_scale": loss_scale_of(library, dtype), "autocast": autocast, **NETWORK}
    step, facts = workloads.training(library=library, dtype=dtype, **options)
    learning = [p for p in built[0].collect_params().values() if p.grad_req != "null"]
    before = [values_of(parameter) for parameter in learning]
    losses = [step().asnumpy() for _ in range(2)]
    after = [values_of(parameter) for parameter in learning]
    assert any((x != y).any() for x, y in zip(before, after))
    assert losses[0].shape == (4,)
    assert np.isfinite(losses).all()
    weights = {np.dtype(p.dtype).name for p in learning if p.name.endswith("weight")}
    assert weights == {"float16" if dtype == "float16" and not autocast else "float32"}
    if dtype == "float16":
        images, _ = workloads._batch(4, 64, mx.cpu())
        logits = built[0](images).asnumpy()
        assert (logits == logits.astype("float16")).all()
    assert facts["images"] == 4
    assert facts["parameters"] == sum(value.size for value in before)


@pytest.mark.usefixtures("numpy_interface")
@pytest.mark.parametrize(("library", "dtype"), [("gluon", "float32"), ("mpgluon", "float16")])
def test_a_step_may_be_that_of_a_network_of_the_numpy_interface(library, dtype, built):
    options = {"loss_scale": loss_scale_of(library, dtype), "in_numpy": True, **NETWORK}
    step, _ = workloads.training(library=library, dtype=dtype, **options)
    assert isinstance(step(), mx.np.ndarray)
    weight = next(iter(built[0].collect_params().values()))
    assert isinstance(weight.data(), mx.np.ndarray)


def test_the_arithmetic_is_counted_where_it_is_asked_for():
    def multiply_adds(**options):
        common = {"library": "gluon", "dtype": "float32", "loss_scale": None}
        return workloads.training(**common, **NETWORK, **options)[1].get("multiply_adds")

    assert multiply_adds() is None
    # ResNet-18 is known for 1.8e9 at 224 pixels. At 64 pixels there are 12.25 times fewer
    # positions, and the 512 x 1000 of the dense layer stay; four images.
    assert multiply_adds(counted=True) == pytest.approx(4 * (1.8e9 / 12.25 + 512_000), rel=0.02)


SCALED = {"library": "mpgluon", "dtype": "float16", "loss_scale": "dynamic", **NETWORK}


def test_the_loss_scale_shrinks_before_the_first_run_and_leaves_room_for_later_steps(monkeypatch):
    trainers = []
    original = workloads.amp.init_trainer

    def init_trainer(trainer, scale):
        trainers.append(trainer)
        scale.scale = 2.0**24
        original(trainer, scale)

    monkeypatch.setattr(workloads.amp, "init_trainer", init_trainer)
    step, _ = workloads.training(**SCALED)
    skipped = workloads.amp.skipped_steps(trainers[0])
    assert skipped > 0
    assert workloads.amp.loss_scale(trainers[0]) == 2.0 ** (24 - skipped - 2)
    step()
    assert workloads.amp.skipped_steps(trainers[0]) == skipped


def test_a_skipped_step_is_not_timed(monkeypatch):
    original = workloads.amp.init_trainer
    monkeypatch.setattr(workloads.amp, "init_trainer", lambda one, _: original(one, 2.0**24))
    step, _ = workloads.training(**SCALED)
    with pytest.raises(RuntimeError, match="a step was skipped"):
        step()


@pytest.mark.parametrize(
    ("library", "dtype", "folded"),
    [*((*one, False) for one in MXNET), *((*one, True) for one in MXNET if one[0] == "mpgluon")],
)
def test_a_prediction_is_that_of_the_network_up_to_the_rounding_of_the_format(
    library, dtype, folded
):
    options = {"library": library, "dtype": dtype, "folded": folded, "calls": 3}
    predict, facts = workloads.inference(**options, **NETWORK)
    plain, _ = workloads.inference(library="gluon", dtype="float32", **NETWORK)
    logits = predict().asnumpy()
    assert logits.shape == (4, 1000)
    assert is_in_format(logits, plain().asnumpy(), dtype)
    assert (facts["images"], facts["calls"]) == (4, 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("library", "dtype", "autocast"),
    [
        *((*one, False) for one in MXNET),
        ("mpgluon", "float16", True),
    ],
)
def test_a_step_on_sequences_changes_the_weights_in_its_format(
    library, dtype, autocast, kind, monkeypatch
):
    monkeypatch.setattr(workloads, "_LEARNING_RATE", 2.0**-4)
    built = []
    original = workloads.build_sequence_network

    def build(*arguments, **options):
        built.append(original(*arguments, **options))
        return built[-1]

    monkeypatch.setattr(workloads, "build_sequence_network", build)
    sizes = {"kind": kind, "layers": 2, "width": 16, "length": 5, "batch_size": 3, "calls": 2}
    scale = {"loss_scale": loss_scale_of(library, dtype), "autocast": autocast}
    step, facts = workloads.sequence_training(library=library, dtype=dtype, **scale, **sizes)
    parameters = built[0].collect_params().values()
    before = [values_of(parameter) for parameter in parameters]
    losses = [step().asnumpy() for _ in range(3)]
    assert losses[0].shape == (5,)  # the mean over the sequences at each place
    assert losses[2].mean() < losses[0].mean() < 1.2 * np.log(1000)
    assert all((x != values_of(parameter)).any() for x, parameter in zip(before, parameters))
    formats = {np.dtype(p.dtype).name for p in parameters if p.name.endswith("weight")}
    assert formats == {"float16" if dtype == "float16" and not autocast else "float32"}
    assert facts["parameters"] == sum(value.size for value in before)
    assert facts["calls"] == 2


def test_float16_without_native_operators_is_noted(monkeypatch):
    monkeypatch.setattr(workloads.kernels, "load", lambda: False)
    common = {"library": "mpgluon", "kind": "dense", "batch_size": 2, "size": 4}
    assert workloads.layer(dtype="float16", **common)[1] == {"note": "without native operators"}
    assert workloads.layer(dtype="float32", **common)[1] == {}


@pytest.mark.parametrize(("library", "dtype"), MXNET)
@pytest.mark.parametrize("kind", ["dense", "convolution"])
def test_a_layer_goes_forward_and_backward_in_its_format(library, dtype, kind):
    common = {"kind": kind, "batch_size": 2, "size": 4}
    run, _ = workloads.layer(library=library, dtype=dtype, **common)
    plain, _ = workloads.layer(library="gluon", dtype="float32", **common)
    gradient = run().asnumpy()
    assert gradient.shape == ((2, 4) if kind == "dense" else (2, 128, 4, 4))
    assert is_in_format(gradient, plain().asnumpy(), dtype)


CONTRIB_AMP = {
    "training with a loss scale": {"loss_scale": "dynamic", **NETWORK},
    "inference": NETWORK,
    "layer": {"kind": "dense", "batch_size": 2, "size": 4},
}


@pytest.mark.usefixtures("native_bfloat16")
@pytest.mark.parametrize("what", CONTRIB_AMP)
def test_contrib_amp_takes_part_in_bfloat16(what):
    factory = f"study.benchmarks.workloads:{what.split()[0]}"
    options = {"library": "contrib.amp", "dtype": "bfloat16", **CONTRIB_AMP[what]}
    with Process(Contestant("peer", factory, options), threads=1, limit_s=120) as process:
        process.wait_until_ready()
        assert process.run()["seconds"] > 0
        assert process.facts.get("images") == options.get("batch_size" if "model" in options else 0)


# --- the pipeline ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return render_shapes(tmp_path_factory.mktemp("images"), images_per_class=2)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("factory", [loading.image_loader, loading.gluon_data_loader])
def test_a_pass_makes_all_whole_batches(factory, workers, folder):
    options = {"batch_size": 8, "image_size": 16, "workers": workers}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run, facts = factory(images=str(folder), **options)
        assert facts == {"images": 16}  # of 20
        for _ in range(2):
            assert run() == 16
