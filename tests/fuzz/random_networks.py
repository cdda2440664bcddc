"""Random programs: a network of any of Gluon's usual parts, from a seed."""

from __future__ import annotations

import re
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
    *("{0} / (F.abs({0}) + 1e-8)", "F.sqrt(F.square({0}) + 1e-8)", "{0} * 1e5 * 1e-5"),
    *("{0} * 1e-8 * 1e8", "F.where({0} > 1e-8, {0}, {0} * 0.3)"),
)
# Values of each dtype, and back to the network's floating numbers: what may be negative, or not.
_DTYPES = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool")
_OF_EACH_DTYPE = (
    *("F.clip({0}, -8, 8).astype(DTYPE)", "F.abs(F.clip({0}, -8, 8)).astype(DTYPE)"),
    *("F.broadcast_greater({0}, F.mean({0}, axis=1, keepdims=True)).astype(DTYPE)",),
    *("({0} > 0.1).astype(DTYPE)", "F.zeros_like({0}).astype(DTYPE)"),
)
_OF_FLOATS = (
    *("({0} * 1.5).astype(DTYPE)", "F.square({0}.astype(DTYPE))", "F.amp_cast({0}, dtype=DTYPE)"),
    *("F.softmax({0}, axis=-1, dtype=DTYPE)", "F.log_softmax({0}, axis=1, dtype=DTYPE)"),
    *("F.tanh({0}).astype('float16').astype(DTYPE)",),
)
_OF_NUMBERS = ("F.argsort({0}, axis=-1, dtype=DTYPE)",)
_OF_TWO = (
    *("{0} + {1}", "{0} - {1}", "F.tanh({0}) * {1}", "F.elemwise_add({0}, {1})"),
    *("{0} / (F.abs({1}) + 1)", "F.broadcast_add({0}, {1})", "F.broadcast_maximum({0}, {1})"),
    *("F.add_n({0}, {1}, {0})", "F.exp(-F.abs({0})) + {1}", "F.where({0} > {1}, {0}, {1})"),
    *("F.stack({0}, {1}, axis=1).mean(axis=1)", "F.broadcast_mul(F.sigmoid({0}), {1})"),
)
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

    def add(self, expression: str, takes, shape: Shape, dtype: str = "") -> int:
        number = len(self.values)
        shape = tuple(int(one) for one in shape)
        self.values[number] = Node(expression, tuple(takes), shape, dtype)
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
            if value.is_floating and (not dimensions or len(value.shape) == dimensions)
        ]
        if not found:
            return None
        return found[-1 - min(int(self.rng.geometric(0.45)) - 1, len(found) - 1)]

    def like(self, shape: Shape, *, integers: bool = False) -> list[int]:
        return [
            number
            for number, value in self.values.items()
            if value.shape == shape
            and value.is_floating != integers
            and not (integers and isinstance(value, Node))
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
        of_slopes = ("nn.PReLU()", f"nn.PReLU(in_channels={w.shape(x)[1]})")
        return w.apply(w.pick((*_LAYERS, *of_slopes)), x, w.shape(x))
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
        if value.is_floating
        and len(value.shape) == len(shape)
        and value.shape[:1] + value.shape[2:] == shape[:1] + shape[2:]
    ]
    takes = [x, *(w.pick(others) for _ in range(int(w.rng.integers(1, 3))))]
    channels = sum(w.shape(number)[1] for number in takes)
    if channels > 64:
        return None
    names = ", ".join(f"{{{k}}}" for k in range(len(takes)))
    join = w.pick(["concat", "Concat"])  # the second is hstack, vstack or dstack in mx.np
    return w.add(f"F.{join}({names}, dim=1)", takes, (shape[0], channels, *shape[2:]))


def _joined_alike(w: _Writer) -> int | None:
    """Two values of one shape behind each other on any axis, or on a new one."""
    x = w.any_value()
    shape = list(w.shape(x))
    takes, axis = [x, w.pick(w.like(w.shape(x)))], int(w.rng.integers(len(shape)))
    if w.chance(0.4) and len(shape) < 4:
        shape.insert(axis, 2)
        return w.add(f"F.stack({{0}}, {{1}}, axis={axis})", takes, shape)
    shape[axis] *= 2
    if shape[axis] > 64:
        return None
    join = w.pick(["concat", "Concat"]) if axis < 3 else "concat"
    return w.add(f"F.{join}({{0}}, {{1}}, dim={axis})", takes, shape)


def _sliced(w: _Writer) -> int | None:
    x = w.any_value()
    shape = w.shape(x)
    axis = int(w.rng.integers(shape[0] == BATCH, len(shape)))  # also of two joined batches
    if shape[axis] < 2:
        return None
    end = int(w.rng.integers(1, shape[axis]))
    if shape[axis] % 2 == 0 and w.chance(0.4):
        half = list(shape)
        half[axis] //= 2
        part, split = w.pick(["[0]", "[1]"]), w.pick(["split", "SliceChannel"])
        return w.add(f"F.{split}({{0}}, num_outputs=2, axis={axis}){part}", [x], half)
    if shape[axis] > 2 and w.chance(0.3):
        taken = [*shape[:axis], shape[axis] - 2, *shape[axis + 1 :]]
        return w.add(f"F.split_v2({{0}}, (1, {shape[axis] - 1}), axis={axis})[1]", [x], taken)
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


def _of_dtype(w: _Writer) -> int | None:
    """A value of some dtype in the middle, or, as a result only, at the end."""
    x, dtype = w.any_value(), w.pick(_DTYPES)
    shape = w.shape(x)
    kinds = [_OF_EACH_DTYPE[dtype[0] in "ub" :]] * 2
    kinds += [_OF_FLOATS] * 2 if dtype.startswith("float") else []
    kinds += [_OF_NUMBERS] if dtype not in ("bool", "int8", "float16") else []
    expression = w.pick(w.pick(kinds))
    if shape[-1] > 1 and w.chance(0.2) and dtype not in ("bool", "int8", "float16"):
        expression, shape = "F.topk({0}, k=2, axis=-1, dtype=DTYPE)", (*shape[:-1], 2)
    elif w.chance(0.2) and dtype != "bool":
        expression, shape = "F.one_hot(F.argmax({0}, axis=-1), 5, dtype=DTYPE)", (*shape[:-1], 5)
    elif w.chance(0.4) and dtype == "int64":
        expression, shape = "F.shape_array({0})", (len(shape),)
    expression = expression.replace("DTYPE", repr(dtype))
    if shape == (len(w.shape(x)),) or w.chance(0.25):
        return w.add(expression, [x], shape, dtype)
    expression += ".astype('float32')"
    # Alone, its zero gradient may end the process, in FP32 too.
    if not re.search("clip|square|softmax|[^d]cast|\\* 1.5", expression):
        more = "F.mean(F.tanh({0}), axis=-1, keepdims=True)"
        expression = f"F.broadcast_add({expression}, {more})"
    return w.add(expression, [x], shape)


def _created(w: _Writer) -> int | None:
    """A sum with an array of some dtype that the network makes."""
    x, dtype = w.any_value(), w.pick([one for one in _DTYPES if one != "bool"])
    shape = w.shape(x)
    ones = (1,) * (len(shape) - 1)
    made = w.pick(
        [
            f"F.zeros({(*ones, 1)}, dtype={dtype!r})",
            f"F.ones({(*ones, shape[-1])}, dtype={dtype!r})",
            f"F.reshape(F.arange({shape[-1]}, dtype={dtype!r}), {(*ones, -1)})",
        ]
    )
    if w.chance(0.25):
        size = f"F.reshape(F.size_array({{0}}), {(*ones, 1)}).astype('float32')"
        return w.add(f"F.broadcast_div({{0}} * 32, {size})", [x], shape)
    how = w.pick(["add", "mul"])
    return w.add(f"F.broadcast_{how}({{0}}, {made}.astype('float32') * 0.25)", [x], shape)


def _constant(w: _Writer) -> int | None:
    """An operator with a constant, whose values 16 bits hold or do not hold.

    A plain Block reads it as an FP32 array, also where it holds the numbers of an emulated format.
    """
    if w.is_plain:
        return None
    x = w.any_value()
    shape = w.shape(x)
    size, ones = shape[-1], (1,) * (len(shape) - 1)
    one = w.pick([0.5, 1.0, 0.1, 1e-8, 1e-3, 1e5, 3e4, 65504.0])
    table = w.pick([f"1e4 ** -np.linspace(0, 1, {size})", f"np.arange({size}) / 8 + 0.25"])
    value = w.pick([f"np.full({(*ones, 1)}, {one})", f"({table}).reshape({(*ones, size)})"])
    made = "self.params.get_constant('{}', np.float32({}))"  # mx.np would keep float64
    uses = ["F.broadcast_add({0}, C)", "F.broadcast_mul({0}, C)", "F.cos(F.broadcast_mul({0}, C))"]
    uses += ["F.broadcast_div({0}, F.broadcast_add(F.abs({0}), C))"]
    uses += ["F.broadcast_div(F.broadcast_mul({0}, C), C)"]
    use, result = w.pick(uses), shape
    if w.chance(0.2):
        units = w.pick(_CHANNELS)
        value = f"np.sin(np.arange({units * size}).reshape(({units}, {size}))) / {size}"
        use = f"F.FullyConnected({{0}}, C, num_hidden={units}, no_bias=True, flatten=False)"
        result = (*shape[:-1], units)
    elif w.chance(0.2) and len(shape) == 3:
        value = f"np.arange({shape[0]}) % {shape[1]} + 1"
        least = w.pick(["0", "-1e9", "-2"])
        use = f"F.SequenceMask({{0}}, C, use_sequence_length=True, value={least}, axis=1)"
        use = f"F.softmax({use}, axis=1)" if least == "-1e9" else use
    elif w.chance(0.6) and len(shape) == 3 and max(shape) <= 64:
        least = w.pick(["-np.inf", "-1e9", "-1e4"])
        value = f"np.triu(np.full((1, {shape[1]}, {shape[1]}), {least}), 1)"
        scores = "F.broadcast_add(F.batch_dot({0} * 0.1, {0}, transpose_b=True), C)"
        use = f"F.batch_dot(F.softmax({scores}), {{0}})"
    name = w.layer(made.format(f"layer{len(w.layers)}", value))
    return w.add(re.sub(r"\bC\b", f"self.{name}.data()", use), [x], result)


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
    _joined_alike: 2,
    _sliced: 3,
    _moved: 3,
    _product: 1,
    _of_dtype: 4,
    _created: 1,
    _constant: 4,
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
    trained = [name for name in list(w.layers)[:-1] if "get_constant" not in w.layers[name]]
    frozen = [name for name in trained if w.chance(0.25)] if w.chance(0.3) else []
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
