"""Random programs: a network of any of Gluon's usual parts, from a seed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fuzz.numpy_interface import ABSENT
from fuzz.programs import Input, Node, Program, Shape

__all__ = ["OPERATORS", "random_program"]

BATCH = 4
_CHANNELS = (1, 2, 3, 4, 8, 16, 17, 32)
_ELEMENTWISE = (
    *("F.relu({0})", "F.sigmoid({0})", "F.tanh({0})", "F.exp(F.tanh({0}))", "F.softsign({0})"),
    *("F.LeakyReLU({0}, act_type='elu')", "F.LeakyReLU({0}, act_type='gelu')"),
    *("F.Activation({0}, act_type='softrelu')", "F.clip({0}, -1, 1)", "F.sqrt(F.abs({0}) + 0.5)"),
    *("{0} * 0.75", "{0} / 3", "1.5 - {0}", "{0} + 0.1", "-{0}", "F.square(F.tanh({0}))"),
    *("F.BlockGrad({0}) * {0}", "F.identity({0})", "F.log(F.abs({0}) + 1)", "abs({0})"),
    *("F.softmax({0}, axis=-1)", "F.log_softmax({0}, axis=1)", "F.L2Normalization({0})"),
    *("{0} ** 2 * 0.25", "F.zeros_like({0}) + {0}", "F.arctan({0})", "F.cast({0}, 'float32')"),
    *("F.where({0} > 0, {0}, {0} * 0.25)", "F.smooth_l1({0}, scalar=1.0)", "{0}.tanh()"),
    *("F.flip({0}, axis=1)", "F.cumsum(F.tanh({0}), axis=1)", "F.maximum({0}, 0.25)"),
)
_OF_TWO = (
    *("{0} + {1}", "{0} - {1}", "F.tanh({0}) * {1}", "F.elemwise_add({0}, {1})"),
    *("{0} / (F.abs({1}) + 1)", "F.broadcast_add({0}, {1})", "F.broadcast_maximum({0}, {1})"),
    *("F.add_n({0}, {1}, {0})", "F.exp(-F.abs({0})) + {1}", "F.where({0} > {1}, {0}, {1})"),
    *("F.stack({0}, {1}, axis=1).mean(axis=1)", "F.broadcast_mul(F.sigmoid({0}), {1})"),
)
# No PReLU: in a hybridized network MXNet's own gradient of its slope is wrong, in FP32 too.
_LAYERS = ("nn.LeakyReLU(0.1)", "nn.ELU()", "nn.SELU()", "nn.GELU()", "nn.Swish()")


class _Writer:
    """A program that is being written."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.seed = seed
        self.interface = "np" if seed % 3 == 2 else "nd"
        self.is_plain = self.chance(0.15)
        self.values: dict[int, Input | Node] = {}
        self.layers: dict[str, str] = {}
        self.uses: dict[str, tuple[str, Shape, Shape]] = {}  # of a layer: how, from, to

    def pick(self, options):
        if self.interface == "np":
            options = [one for one in options if not any(word in str(one) for word in ABSENT)]
        return options[int(self.rng.integers(len(options)))]

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def shape(self, number: int) -> Shape:
        return self.values[number].shape

    def add(self, expression: str, takes, shape: Shape) -> int:
        number = len(self.values)
        self.values[number] = Node(expression, tuple(takes), tuple(int(one) for one in shape))
        return number

    def add_input(self, shape: Shape, below: int = 0) -> int:
        number = len(self.values)
        self.values[number] = Input(shape, below)
        return number

    def layer(self, made: str) -> str:
        name = f"layer{len(self.layers)}"
        self.layers[name] = made
        return name

    def apply(self, made: str, takes: int, shape: Shape) -> int:
        """Add a layer and its call."""
        name = self.layer(made)
        use = f"self.{name}({{0}})"
        self.uses[name] = (use, self.shape(takes), tuple(shape))
        return self.add(use, [takes], shape)

    def any_value(self, dimensions: int = 0) -> int | None:
        """Return a value, rather a late one, of so many dimensions."""
        found = [
            number
            for number, value in self.values.items()
            if not getattr(value, "below", 0) and (not dimensions or len(value.shape) == dimensions)
        ]
        if not found:
            return None
        return found[-1 - min(int(self.rng.geometric(0.45)) - 1, len(found) - 1)]

    def like(self, shape: Shape, *, integers: bool = False) -> list[int]:
        return [
            number
            for number, value in self.values.items()
            if value.shape == shape and bool(getattr(value, "below", 0)) == integers
        ]


def _convolution(w: _Writer) -> int | None:
    x = w.any_value(4)
    if x is None:
        return None
    n, c, h, width = w.shape(x)
    kernel, stride, pad = w.pick([(1, 1, 0), (3, 1, 1), (3, 2, 1), (2, 1, 0), (1, 2, 0), (3, 1, 0)])
    size = [(one + 2 * pad - kernel) // stride + 1 for one in (h, width)]
    if min(h, width) + 2 * pad < kernel or min(size) < 1:
        return None
    channels, groups = w.pick(_CHANNELS), 1
    if w.chance(0.25):
        channels = groups = c
    bias = w.chance(0.5)
    made = (
        f"nn.Conv2D({channels}, {kernel}, strides={stride}, padding={pad}, groups={groups}, "
        f"use_bias={bias}, in_channels={c})"
    )
    return w.apply(made, x, (n, channels, *size))


def _transposed_convolution(w: _Writer) -> int | None:
    x = w.any_value(4)
    if x is None or max(w.shape(x)[2:]) > 5:
        return None
    n, c, h, width = w.shape(x)
    channels = w.pick(_CHANNELS)
    made = f"nn.Conv2DTranspose({channels}, 2, strides=2, in_channels={c})"
    return w.apply(made, x, (n, channels, 2 * h, 2 * width))


def _convolution_of_sequences(w: _Writer) -> int | None:
    x = w.any_value(3)
    if x is None or w.shape(x)[2] < 3:
        return None
    n, c, t = w.shape(x)
    channels = w.pick(_CHANNELS)
    made = f"nn.Conv1D({channels}, 3, padding=1, in_channels={c})"
    return w.apply(made, x, (n, channels, t))


def _dense(w: _Writer) -> int | None:
    x = w.any_value()
    if x is None:
        return None
    shape, units = w.shape(x), w.pick(_CHANNELS)
    flatten = w.chance(0.5)
    size = int(np.prod(shape[1:])) if flatten else shape[-1]
    activation = w.pick(["None", "None", "'relu'", "'tanh'"])
    made = (
        f"nn.Dense({units}, flatten={flatten}, use_bias={w.chance(0.7)}, "
        f"activation={activation}, in_units={size})"
    )
    return w.apply(made, x, (shape[0], units) if flatten else (*shape[:-1], units))


def _norm(w: _Writer) -> int | None:
    x = w.any_value()
    shape = w.shape(x)
    c = shape[1]
    kinds = [f"nn.BatchNorm(in_channels={c})", f"nn.LayerNorm(in_channels={shape[-1]})"]
    kinds.append(f"nn.BatchNorm(scale=False, momentum=0.5, in_channels={c})")
    if len(shape) == 4:
        kinds += [
            f"nn.InstanceNorm(in_channels={c})",
            f"nn.GroupNorm(num_groups={1 if c % 2 else 2})",
            f"nn.BatchNormReLU(in_channels={c})",
            f"nn.BatchNorm(center=False, in_channels={c})",
            f"nn.BatchNorm(use_global_stats=True, in_channels={c})",
            f"nn.LayerNorm(axis=1, in_channels={c})",
        ]
    return w.apply(w.pick(kinds), x, shape)


def _pooling(w: _Writer) -> int | None:
    x = w.any_value(4)
    if x is None or min(w.shape(x)[2:]) < 2:
        return None
    n, c, h, width = w.shape(x)
    kernel, stride = w.pick([(2, 2), (2, 1)])
    size = [(one - kernel) // stride + 1 for one in (h, width)]
    kinds = [
        (f"nn.MaxPool2D({kernel}, {stride})", size),
        (f"nn.AvgPool2D({kernel}, {stride})", size),
        ("nn.AvgPool2D(2, 1, padding=1, count_include_pad=False)", [h + 1, width + 1]),
        ("nn.MaxPool2D(3, 1, padding=1)", [h, width]),
        ("nn.GlobalAvgPool2D()", [1, 1]),
        ("nn.GlobalMaxPool2D()", [1, 1]),
    ]
    made, size = w.pick(kinds)
    return w.apply(made, x, (n, c, *size))


def _elementwise(w: _Writer) -> int | None:
    x = w.any_value()
    if w.chance(0.2):
        return w.apply(w.pick(_LAYERS), x, w.shape(x))
    return w.add(w.pick(_ELEMENTWISE), [x], w.shape(x))


def _of_two(w: _Writer) -> int | None:
    x = w.any_value()
    return w.add(w.pick(_OF_TWO), [x, w.pick(w.like(w.shape(x)))], w.shape(x))


def _many_uses(w: _Writer) -> int | None:
    """Several uses of one value, whose gradients MXNet adds."""
    x = w.any_value()
    parts = [w.pick(_ELEMENTWISE) for _ in range(int(w.rng.integers(3, 7)))]
    return w.add(" + ".join(f"({part})" for part in parts), [x], w.shape(x))


def _scaled_by_channel(w: _Writer) -> int | None:
    x = w.any_value(4)
    if x is None:
        return None
    expression = w.pick(
        [
            "F.broadcast_mul({0}, F.sigmoid(F.mean({0}, axis=(2, 3), keepdims=True)))",
            "F.broadcast_sub({0}, F.max({0}, axis=1, keepdims=True))",
            "F.broadcast_div({0}, F.norm({0}, axis=1, keepdims=True) + 1)",
        ]
    )
    return w.add(expression, [x], w.shape(x))


def _joined(w: _Writer) -> int | None:
    x = w.any_value()
    shape = w.shape(x)
    others = [
        number
        for number, value in w.values.items()
        if not getattr(value, "below", 0)
        and len(value.shape) == len(shape)
        and value.shape[:1] + value.shape[2:] == shape[:1] + shape[2:]
    ]
    takes = [x, *(w.pick(others) for _ in range(int(w.rng.integers(1, 3))))]
    channels = sum(w.shape(number)[1] for number in takes)
    if channels > 64:
        return None
    names = ", ".join(f"{{{k}}}" for k in range(len(takes)))
    return w.add(f"F.concat({names}, dim=1)", takes, (shape[0], channels, *shape[2:]))


def _sliced(w: _Writer) -> int | None:
    x = w.any_value()
    shape = w.shape(x)
    axis = int(w.rng.integers(1, len(shape)))
    if shape[axis] < 2:
        return None
    end = int(w.rng.integers(1, shape[axis]))
    if shape[axis] % 2 == 0 and w.chance(0.4):
        half = list(shape)
        half[axis] //= 2
        part = w.pick(["[0]", "[1]"])
        return w.add(f"F.split({{0}}, num_outputs=2, axis={axis}){part}", [x], half)
    if axis == len(shape) - 1 and w.chance(0.3):
        return w.add(
            f"F.slice_like({{0}}, {{0}}.slice_axis(axis={axis}, begin=0, end={end}))",
            [x],
            (*shape[:-1], end),
        )
    taken = list(shape)
    taken[axis] = end
    return w.add(f"{{0}}.slice_axis(axis={axis}, begin=0, end={end})", [x], taken)


def _moved(w: _Writer) -> int | None:
    x = w.any_value()
    shape = w.shape(x)
    rest = int(np.prod(shape[1:]))
    if len(shape) == 2:
        return w.add("F.expand_dims({0}, axis=2)", [x], (*shape, 1))
    order = [0, *(int(one) for one in 1 + w.rng.permutation(len(shape) - 1))]
    choice = int(w.rng.integers(5))
    if choice == 0:
        return w.add("F.flatten({0})", [x], (shape[0], rest))
    if choice == 1:
        return w.add(f"{{0}}.transpose({tuple(order)})", [x], [shape[k] for k in order])
    if choice == 2 and len(shape) == 4:
        return w.add("{0}.reshape((0, 0, -1))", [x], (*shape[:2], shape[2] * shape[3]))
    if choice == 3 and len(shape) == 3:
        return w.add("F.expand_dims({0}, axis=3)", [x], (*shape, 1))
    axis = len(shape) - 1
    return w.add(
        w.pick(
            [f"F.mean({{0}}, axis={axis})", f"{{0}}.sum(axis={axis})", f"F.max({{0}}, axis={axis})"]
        ),
        [x],
        shape[:-1],
    )


def _product(w: _Writer) -> int | None:
    """Attention of a sequence to itself, without parameters."""
    x = w.any_value(3)
    if x is None or max(w.shape(x)) > 64:
        return None
    n, t, c = w.shape(x)
    expression = w.pick(
        [
            "F.batch_dot(F.softmax(F.batch_dot({0}, {0}, transpose_b=True)), {0})",
            "F.batch_dot(F.batch_dot({0} * 0.1, {0}, transpose_b=True), {0})",
        ]
    )
    return w.add(expression, [x], (n, t, c))


def _recurrent(w: _Writer) -> int | None:
    x = w.any_value(3)
    if x is None or w.shape(x)[1] > 8 or (w.interface == "np" and not w.is_plain):
        return None
    n, t, c = w.shape(x)
    units = w.pick((2, 4, 8))
    kind = w.pick(["LSTM", "GRU", "RNN"])
    if w.chance(0.4) or w.interface == "np":
        made = f"rnn.{kind}({units}, layout='NTC', input_size={c})"
        return w.apply(made, x, (n, t, units))
    name = w.layer(f"rnn.{kind}Cell({units}, input_size={c})")
    use = f"self.{name}.unroll({t}, {{0}}, layout='NTC', merge_outputs=True)[0]"
    if w.chance(0.6):  # without this, MXNet's own array, whose sums with FP32 are refused
        use = f"F.identity({use})"
    return w.add(use, [x], (n, t, units))


def _embedding(w: _Writer) -> int | None:
    found = [number for number in w.values if getattr(w.values[number], "below", 0)]
    if not found:
        return None
    x = w.pick(found)
    units = w.pick((3, 4, 8))
    made = f"nn.Embedding({w.values[x].below}, {units})"
    return w.apply(made, x, (*w.shape(x), units))


def _residual(w: _Writer) -> int | None:
    x = w.any_value()
    shape = w.shape(x)
    if len(shape) == 4:
        c = shape[1]
        made = w.pick(
            [
                f"Residual(nn.Conv2D({c}, 3, padding=1, in_channels={c}))",
                f"Residual(sequence(nn.BatchNorm(in_channels={c}), nn.Activation('relu'), "
                f"nn.Conv2D({c}, 1, in_channels={c})))",
            ]
        )
    else:
        c = shape[-1]
        made = w.pick(
            [
                f"Residual(nn.Dense({c}, flatten=False, in_units={c}))",
                f"sequence(nn.Dense({c}, flatten=False, in_units={c}), nn.HybridLambda('tanh'))",
                "nn.HybridLambda(lambda F, x: F.relu(x) - 0.1 * x)",
            ]
        )
    return w.apply(made, x, shape)


def _used_again(w: _Writer) -> int | None:
    """A layer once more, on another value of the same shape, or its parameters in a new layer."""
    if not w.uses:
        return None
    name = w.pick(list(w.uses))
    use, shape, result = w.uses[name]
    x = w.pick(w.like(shape, integers=w.layers[name].startswith("nn.Embedding")))
    made = w.layers[name]
    if made.startswith(("nn.Dense", "nn.Conv2D(", "nn.Embedding")) and w.chance(0.5):
        if "params=" not in made:
            made = f"{made[:-1]}, params=self.{name}.params)"
        use = f"self.{w.layer(made)}({{0}})"
    return w.add(use, [x], result)


OPERATORS: dict[Callable[[_Writer], int | None], int] = {
    _convolution: 5,
    _transposed_convolution: 1,
    _convolution_of_sequences: 1,
    _dense: 4,
    _norm: 3,
    _pooling: 2,
    _elementwise: 6,
    _of_two: 5,
    _many_uses: 2,
    _scaled_by_channel: 1,
    _joined: 3,
    _sliced: 2,
    _moved: 3,
    _product: 1,
    _recurrent: 2,
    _embedding: 2,
    _residual: 2,
    _used_again: 2,
}
"""Functions that add a line to a program, with weights; each returns ``None`` if no value fits."""

_LOSSES = (
    "out * head",
    "(out - head) ** 2",
    "mx.nd.log(1 + mx.nd.exp(out.clip(-20, 20)))",
    "gluon.loss.HuberLoss()(out, head)",
    "gluon.loss.L1Loss()(out, head)",
    "mx.nd.smooth_l1(out - head, scalar=1.0)",
)
_OF_LOGITS = (
    "gluon.loss.SoftmaxCELoss()(out, mx.nd.arange(out.shape[0]) % out.shape[1])",
    "gluon.loss.KLDivLoss(from_logits=False)(out, head.softmax())",
    "gluon.loss.SigmoidBCELoss()(out, head > 0)",
)


def random_program(seed: int) -> Program:
    """Return the program of a seed: 3 to 18 lines and up to three inputs and outputs.

    Every third is of the NumPy interface.
    """
    w = _Writer(seed)
    side = int(w.rng.integers(3, 9))
    kinds = [
        ((BATCH, w.pick(_CHANNELS), side, side), 0),
        ((BATCH, w.pick(_CHANNELS)), 0),
        ((BATCH, int(w.rng.integers(2, 6)), w.pick(_CHANNELS)), 0),
        ((BATCH, int(w.rng.integers(2, 6))), 7),
    ]
    chosen = [kinds[k] for k in sorted(w.rng.permutation(4)[: int(w.rng.integers(1, 4))])]
    if all(below for _, below in chosen):
        chosen.append(kinds[0])
    for shape, below in chosen:
        w.add_input(shape, below)
    makers, weights = list(OPERATORS), np.array(list(OPERATORS.values()), float)
    wanted = len(w.values) + int(w.rng.integers(3, 19))
    while len(w.values) < wanted:
        makers[int(w.rng.choice(len(makers), p=weights / weights.sum()))](w)
    _dense(w)  # so that there are parameters
    nodes = {number: value for number, value in w.values.items() if isinstance(value, Node)}
    taken = {number for node in nodes.values() for number in node.takes}
    unused = [number for number in nodes if number not in taken]
    outputs = [int(one) for one in w.rng.permutation(unused)[: int(w.rng.integers(1, 4))]]
    if unused[-1] not in outputs:
        outputs[0] = unused[-1]
    if w.chance(0.2):
        outputs = list(dict.fromkeys([*outputs, w.pick(list(nodes))]))
    losses = [
        w.pick(_OF_LOGITS)
        if len(w.shape(number)) == 2 and w.shape(number)[1] > 1 and w.chance(0.6)
        else w.pick(_LOSSES)
        for number in outputs
    ]
    frozen = [name for name in list(w.layers)[:-1] if w.chance(0.25)] if w.chance(0.3) else []
    program = Program(
        seed=seed,
        values=w.values,
        layers=w.layers,
        outputs=tuple(outputs),
        losses=tuple(losses),
        frozen=tuple(frozen),
        adds=w.chance(0.2),
        optimizer=w.pick(["sgd", "sgd", "adam"]),
        wrapper=w.pick(["", "", "", "Called", "Halved"]),
        packing=w.pick(["tuple", "tuple", "nested"]),
        interface=w.interface,
        is_plain=w.is_plain,
    )
    return program.without_dead_code()
