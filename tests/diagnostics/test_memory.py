"""Memory: counts by hand, MXNet's own gradient graph, and its profiler on a real step."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn
from mxnet.gluon.model_zoo import vision

import mpgluon
from mpgluon.diagnostics.memory import _KEPT, memory_estimate
from mpgluon.diagnostics.optimizers import optimizer_names

BATCH, IN, WIDTH, CLASSES = 4, 6, 10, 3
WEIGHTS = IN * WIDTH + WIDTH + WIDTH * CLASSES + CLASSES


def two_layers():
    net = nn.HybridSequential()
    net.add(nn.Dense(WIDTH, activation="relu"), nn.Dense(CLASSES))
    return net


class Branches(nn.HybridBlock):
    """A convolution whose result two others take: BatchNorm, and a sum with what that returns."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.first = nn.Conv2D(16, 3, padding=1, in_channels=3, use_bias=False)
            self.norm = nn.BatchNorm(in_channels=16)
            self.last = nn.Conv2D(16, 3, padding=1, in_channels=16, use_bias=False)

    def hybrid_forward(self, F, x):
        x = self.first(x)
        return self.last(F.Activation(self.norm(x) + x, act_type="relu")).sum()


def of(estimate, name):
    return next(one for one in estimate.policies if one.name == name)


def test_parameters_gradients_masters_and_state_are_those_counted_by_hand():
    estimate = memory_estimate(two_layers(), (BATCH, IN), optimizer_params={"momentum": 0.9})
    found = {
        one.name: (one.parameters, one.gradients, one.masters, one.optimizer_state)
        for one in estimate.policies
    }
    fp32 = (4 * WEIGHTS, 4 * WEIGHTS, 0, 4 * WEIGHTS)
    assert found == {
        "float32": fp32,
        "float16": (2 * WEIGHTS, 2 * WEIGHTS, 4 * WEIGHTS, 4 * WEIGHTS),
        "mixed_float16": fp32,
        "mixed_bfloat16": fp32,
    }


def test_activations_are_the_input_and_what_each_relu_returns():
    estimate = memory_estimate(two_layers(), (BATCH, IN), ctx=mx.gpu())
    batch, hidden = BATCH * IN, BATCH * WIDTH
    assert of(estimate, "float32").activations == 4 * (batch + hidden)
    # The FP32 batch is not needed once it is rounded.
    assert of(estimate, "float16").activations == 2 * (batch + hidden)
    # Rounded weights wait beside the FP32 ones, but biases enter no gradient.
    weights = IN * WIDTH + WIDTH * CLASSES
    assert of(estimate, "mixed_float16").activations == 2 * (batch + hidden + weights)


def test_emulated_float16_keeps_the_widened_operands():
    estimate = memory_estimate(two_layers(), (BATCH, IN), ctx=mx.cpu())
    batch, hidden, weights = BATCH * IN, BATCH * WIDTH, IN * WIDTH + WIDTH * CLASSES
    # ReLU returns FP32, which waits, and the next layer's input is that rounded and widened.
    assert of(estimate, "float16").activations == 4 * (batch + 2 * hidden + weights)


def test_between_convolution_and_relu_two_arrays_wait():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(5, 3, padding=1, use_bias=False), nn.BatchNorm(), nn.Activation("relu"))
    one = memory_estimate(net, (2, 3, 8, 8), policies=["float32"]).policies[0]
    assert one.activations == 4 * 2 * 8 * 8 * (3 + 5 + 5)
    assert one.parameters == 4 * (5 * 3 * 9 + 4 * 5)
    assert one.gradients == 4 * (5 * 3 * 9 + 2 * 5)  # running statistics have none
    half = memory_estimate(net, (2, 3, 8, 8), policies=["float16"]).policies[0]
    assert half.parameters == 2 * 5 * 3 * 9 + 4 * 4 * 5  # BatchNorm stays FP32


def test_dropout_and_pooling_keep_what_only_they_read():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(5, 1), nn.MaxPool2D(2), nn.Dropout(0.5), nn.Dense(2))
    one = memory_estimate(net, (2, 3, 8, 8), policies=["float32"]).policies[0]
    batch, full, pooled = 2 * 3 * 64, 2 * 5 * 64, 2 * 5 * 16
    # Pooling: its input, its result and as many positions; Dropout: a mask; Dense: its input.
    assert one.activations == 4 * (batch + full + 2 * pooled + pooled + pooled)


def test_layers_that_gradients_do_not_reach_keep_nothing():
    net = two_layers()
    net[0].collect_params().setattr("grad_req", "null")
    one = memory_estimate(net, (BATCH, IN), policies=["float32"]).policies[0]
    assert one.activations == 4 * BATCH * WIDTH
    assert one.gradients == 4 * (WIDTH * CLASSES + CLASSES)


@pytest.mark.parametrize("name", optimizer_names())
def test_the_state_of_each_optimizer_is_what_it_makes_for_the_real_weights(name):
    net = nn.HybridSequential()  # without biases: one optimizer takes matrices only
    net.add(nn.Dense(WIDTH, use_bias=False), nn.Dense(CLASSES, use_bias=False))
    one = memory_estimate(net, (BATCH, IN), optimizer=name, policies=["float32"]).policies[0]
    net.initialize()
    net(mx.nd.ones((BATCH, IN)))
    optimizer = mx.optimizer.create(name)

    def size(state):
        if isinstance(state, (list, tuple)):
            return sum(size(part) for part in state)
        return state.size * np.dtype(state.dtype).itemsize if state is not None else 0

    parameters = net.collect_params().values()
    assert one.optimizer_state == sum(
        size(optimizer.create_state(i, p.data())) for i, p in enumerate(parameters)
    )


def test_without_multi_precision_there_are_no_masters():
    options = {"momentum": 0.9, "multi_precision": False}
    estimate = memory_estimate(
        two_layers(), (BATCH, IN), optimizer_params=options, policies=["float16"]
    )
    assert estimate.policies[0].masters == 0
    assert estimate.policies[0].optimizer_state == 2 * WEIGHTS


def test_an_optimizer_itself_and_a_policy_itself_are_taken():
    policy = mpgluon.Policy("float32", "float16", "float16")
    optimizer = mx.optimizer.Adam(multi_precision=True)
    estimate = memory_estimate(two_layers(), (BATCH, IN), optimizer=optimizer, policies=[policy])
    assert estimate.optimizer == "Adam"
    assert estimate.policies[0].name == str(policy)
    assert estimate.policies[0].optimizer_state == 8 * WEIGHTS


@pytest.mark.parametrize("initialized", [True, False])
def test_the_network_is_as_it_was_afterwards(initialized):
    net = two_layers()
    if initialized:
        net.initialize()
        net.hybridize()
        net(mx.nd.ones((BATCH, IN)))
    parts = [net, *net, *net.collect_params().values()]
    before = [dict(vars(part)) for part in parts]
    memory_estimate(net, (BATCH, IN))
    assert [dict(vars(part)) for part in parts] == before
    if not initialized:
        assert all(p._data is None and p.shape.count(0) for p in [net[0].weight, net[1].weight])


def test_a_policy_that_a_device_has_not_is_named_with_the_reason():
    estimate = memory_estimate(two_layers(), (BATCH, IN), ctx=mx.gpu())
    assert [one.name for one in estimate.policies] == ["float32", "float16", "mixed_float16"]
    assert "mixed_bfloat16: MXNet 1.9.1 has no bfloat16 kernels for a GPU" in str(estimate)


def test_the_table_is_in_mib():
    estimate = memory_estimate(vision.resnet18_v1(), (8, 3, 224, 224), policies=["float32"])
    (row,) = estimate.table().rows
    # 11,689,512 learned numbers in the paper's network, and 9,600 running statistics.
    assert row[:3] == ("float32", f"{11_699_112 * 4 / 2**20:.1f}", f"{11_689_512 * 4 / 2**20:.1f}")
    assert estimate.table().headings[-1] == "total MiB"
    assert str(estimate).splitlines()[0].endswith("workspaces not counted")


def test_a_cast_network_a_plain_block_and_an_unknown_policy_are_refused():
    net = two_layers()
    mpgluon.cast_block(net[0])
    with pytest.raises(mpgluon.PrecisionError, match=r"dense\d+ is cast, and policies are"):
        memory_estimate(net, (BATCH, IN))
    with pytest.raises(TypeError, match="received Sequential"):
        memory_estimate(nn.Sequential(), (BATCH, IN))
    with pytest.raises(TypeError, match="received int"):
        memory_estimate(3, (BATCH, IN))
    with pytest.raises(ValueError, match="a policy is one of"):
        memory_estimate(two_layers(), (BATCH, IN), policies=["float8"])


IMAGES = (2, 4, 6, 6)
OPTIONS = {
    "Convolution": {"num_filter": 4, "kernel": (3, 3)},
    "Deconvolution": {"num_filter": 4, "kernel": (3, 3)},
    "FullyConnected": {"num_hidden": 4},
    "Embedding": {"input_dim": 9, "output_dim": 5},
    "LRN": {"nsize": 3},
    "clip": {"a_min": 0, "a_max": 6},
    "Cast": {"dtype": "float32"},
    "amp_cast": {"dtype": "float32"},
    "Reshape": {"shape": (-1,)},
    "expand_dims": {"axis": 0},
    "slice": {"begin": (0,), "end": (1,)},
    "slice_axis": {"axis": 1, "begin": 0, "end": 1},
    "SliceChannel": {"num_outputs": 2},
    "mean": {"axis": 1},
    "sum": {"axis": 1},
    "Pad": {"mode": "constant", "pad_width": (0, 0, 0, 0, 1, 1, 1, 1)},
    "UpSampling": {"scale": 2, "sample_type": "nearest"},
    "_contrib_BilinearResize2D": {"height": 8, "width": 8},
    "broadcast_to": {"shape": IMAGES},
    "broadcast_axis": {"axis": 3, "size": 4},
    "tile": {"reps": (1, 1, 1, 2)},
    "repeat": {"repeats": 2},
    "GroupNorm": {"num_groups": 2},
    "Activation": {"act_type": "relu"},
    "Pooling": {"kernel": (2, 2)},
    "LeakyReLU": {"act_type": "elu"},
}
SHAPES = {
    "dot": (4, 4),
    "batch_dot": (2, 4, 4),
    "_linalg_gemm": (2, 4, 4),
    "_linalg_gemm2": (2, 4, 4),
    "_rnn_param_concat": (4,),
    "broadcast_to": (2, 4, 1, 1),
    "broadcast_axis": (2, 4, 1, 1),
    "squeeze": (2, 1, 3),
}
SEVERAL = {"Concat": 2, "stack": 2, "add_n": 2, "_rnn_param_concat": 2, "_linalg_gemm": 3}
PAIRS = ("elemwise_", "broadcast_", "_maximum", "dot", "batch_dot", "_linalg_gemm2")


def symbol_of(name):
    """Return an operator's symbol on variables called x0, x1 and so on."""
    places = [mx.sym, mx.sym._internal, mx.sym.contrib, mx.sym.linalg]
    short = name.replace("_contrib_", "").replace("_linalg_", "")
    functions = [getattr(place, n, None) for place in places for n in (name, short)]
    function = next(found for found in functions if found is not None)
    pair = name.startswith(PAIRS) and name not in ("broadcast_to", "broadcast_axis", "_linalg_gemm")
    count = 2 if pair and not name.endswith("_scalar") else SEVERAL.get(name, 1)
    options = {"scalar": 2.0} if name.endswith("_scalar") else OPTIONS.get(name, {})
    if name in ("Concat", "_rnn_param_concat"):
        options = {"dim": 0}
    return function(*(mx.sym.var(f"x{i}") for i in range(count)), name="node", **options)


SOURCES = ("_zeros", "_ones", "BlockGrad")  # without a gradient


@pytest.mark.parametrize("name", [*sorted(set(_KEPT) - set(SOURCES)), "Activation"])
def test_the_gradient_of_each_operator_reads_no_array_that_the_table_lets_go(name):
    symbol = symbol_of(name)
    shapes = {
        argument: SHAPES.get(name, IMAGES)
        for argument in symbol.list_arguments()
        if argument.startswith("x")
    }
    executor = mx.sym.identity(symbol[0], name="tail").simple_bind(mx.cpu(), **shapes)
    operators = executor.debug_str().split("Op:")
    backward = [text for text in operators if re.match(r"\S+, Name=\S*backward", text)]
    read = set(re.findall(r"arg\[\d+\]=(\w+\(\d+\))", "".join(backward)))
    table = "o" if name == "Activation" else _KEPT[name]
    assert f"{name}, Name=node" in executor.debug_str()
    assert ("node(0)" in read) <= ("o" in table)
    inputs = {entry for entry in read if entry.startswith("x") or "weight" in entry}
    if table.isdigit():
        arguments = [f"{argument}(0)" for argument in symbol.list_arguments()]
        assert read & set(arguments) == set(arguments[: int(table)])
    else:
        assert bool(inputs) is ("i" in table)
    if table == "o":
        assert "node(0)" in read


@pytest.mark.usefixtures("native_operators")
@pytest.mark.parametrize("policy", ["float16", "mixed_float16", "emulated_bfloat16"])
def test_a_hybridized_network_on_a_cpu_keeps_codes_and_rounds_its_weights_in_each_call(policy):
    shape = (BATCH, 3, 8, 8)

    def estimate(*, hybridized):
        found = memory_estimate(Branches(), shape, policies=[policy], hybridized=hybridized)
        return of(found, policy).activations

    # The batch, the first convolution's result and ReLU's.
    assert estimate(hybridized=True) == 2 * (BATCH * 3 * 64 + 2 * BATCH * 16 * 64)
    assert estimate(hybridized=False) > 2 * estimate(hybridized=True)


STEP = """
    import json, sys
    import mpgluon
    import mxnet as mx
    from mxnet import autograd, gluon, profiler
    from mxnet.gluon import nn

    profiler.set_config(profile_memory=True, filename=sys.argv[1])
    profiler.set_state("run")
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(16, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"), nn.MaxPool2D(),
        nn.Conv2D(24, 3, padding=1), nn.Activation("relu"), nn.Dropout(0.5), nn.Dense(10),
    )
    net.initialize()
    if sys.argv[2] == "hybridized":
        net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"momentum": 0.9})
    images = mx.nd.ones((16, 3, 32, 32))

    def mark(elements):  # an array of a size that nothing else has
        mx.nd.waitall()
        mx.nd.zeros((elements,)).wait_to_read()
        mx.nd.waitall()

    for step in range(3):
        mark(12345)
        with autograd.record():
            logits = net(images)
        mark(12347)
        with autograd.record():
            loss = logits.square().sum()
        del logits
        loss.backward()
        trainer.step(16)
        del loss
    mx.nd.waitall()
    profiler.set_state("stop")
    profiler.dump()
"""


def small_convolutional_network():
    net = nn.HybridSequential()
    net.add(
        *(nn.Conv2D(16, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"), nn.MaxPool2D()),
        *(nn.Conv2D(24, 3, padding=1), nn.Activation("relu"), nn.Dropout(0.5), nn.Dense(10)),
    )
    return net


@pytest.mark.multiprocess
@pytest.mark.parametrize("mode", ["imperative", "hybridized"])
def test_mxnets_profiler_finds_the_activations_and_a_peak_above_the_total(mode, tmp_path):
    trace = tmp_path / "trace.json"
    command = [sys.executable, "-c", textwrap.dedent(STEP), str(trace), mode]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    events = json.loads(trace.read_text())["traceEvents"]
    counters = [e for e in events if e["ph"] == "C" and e["name"] == "Memory: cpu/0"]
    bytes_held = [e["args"][e["name"]] for e in sorted(counters, key=lambda e: e["ts"])]
    steps = list(zip(bytes_held, bytes_held[1:]))
    before = [one for one, other in steps if other - one == 4 * 12345][-1]
    after = [one for one, other in steps if other - one == 4 * 12347][-1]

    shape = (16, 3, 32, 32)
    estimate = memory_estimate(
        small_convolutional_network(),
        shape,
        optimizer_params={"momentum": 0.9},
        policies=["float32"],
    ).policies[0]
    batch = 4 * 16 * 3 * 32 * 32
    # Beside the activations there are the logits and BatchNorm's mean and variance. A hybridized
    # network may put an array into a place of a larger one, which its ReLU or Dropout left.
    small = 4 * (16 * 10 + 2 * 16)
    assert after - before >= estimate.activations - batch
    if mode == "imperative":
        assert after - before <= estimate.activations - batch + small
    # Everything is alive at once when the backward pass begins; gradients and workspaces are more.
    assert before >= estimate.total - estimate.activations + batch
    assert max(bytes_held) >= estimate.total


@pytest.mark.usefixtures("native_operators")
def test_rounding_operands_to_eight_bits_keeps_nothing_more_for_the_backward_pass():
    policies = ("emulated_bfloat16", "mixed_float8")
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3), nn.Conv2D(8, 3, activation="relu"), nn.Dense(CLASSES))
    estimate = memory_estimate(net, (BATCH, 3, 8, 8), policies=policies)
    assert not estimate.impossible
    between, scaled = (of(estimate, name) for name in policies)
    assert scaled.activations == between.activations > 0
    assert scaled.parameters == between.parameters
