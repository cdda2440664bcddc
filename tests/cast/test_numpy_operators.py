"""Each operator of mx.np and mx.npx in a cast network: its rule, with one rounding, or a reason.

The oracle is the same expression of MXNet on FP32 arrays with the same values, rounded once if the
rule says so.
"""

from __future__ import annotations

import re

import mpgluon
from mpgluon import BFLOAT16, FLOAT16, kernels, round_to
from mpgluon.graph.operators import listed_operators, name_in_f

import mxnet as mx
import numpy as np
import pytest
from helpers import assert_same_bits
from mxnet import gluon
from mxnet.base import MXNetError, NotImplementedForSymbol
from mxnet.operator import get_all_registered_operators

pytestmark = [
    pytest.mark.usefixtures("numpy_interface"),
    pytest.mark.filterwarnings("ignore:The .* input to HybridBlock is not used"),
]

IN_16_BITS = """
np.dot(x, w)
np.dot(x, w[:, 0])
np.dot(x[0], y[0])
np.matmul(x, w)
x @ w
np.einsum("ij,jk->ik", x, w)
np.einsum("ij,ij->i", x, y)
np.tensordot(x, w, 1)
np.tensordot(x, y, ([0, 1], [0, 1]))
np.inner(x, y)
np.outer(x[0], y[0])
np.vdot(x, y)
npx.batch_dot(x.reshape(3, 1, 4), y.reshape(3, 4, 1))
npx.fully_connected(x, w.T, num_hidden=3, no_bias=True)
npx.convolution(image, kernel, no_bias=True, kernel=(2, 2), num_filter=1)
npx.deconvolution(image, kernel.reshape(3, 1, 2, 2), no_bias=True, kernel=(2, 2), num_filter=1)
npx.layer_norm(x, gamma, beta, axis=-1)
npx.batch_norm(x, gamma, beta, mean, variance, use_global_stats=True, fix_gamma=False)
np.add(x, y)
x + y
x + 0.3125
0.3125 + x
np.subtract(x, y)
x - y
1.25 - x
np.multiply(x, y)
x * 0.3125
np.divide(x, y)
np.true_divide(x, y)
x / 3
3 / y
np.mod(x, y)
np.remainder(x, y)
x % 0.75
2 % y
-x
abs(x)
np.abs(x)
np.absolute(x)
np.fabs(x)
np.negative(x)
np.maximum(x, y)
np.maximum(x, 0.1)
np.minimum(x, y)
np.minimum(x, 0.1)
np.sqrt(np.abs(x))
np.cbrt(x)
np.sin(x)
np.cos(x)
np.arctan(x)
np.tanh(x)
np.arctan2(x, y)
np.arctan2(x, 0.7)
np.copysign(x, y)
np.copysign(x, -1.0)
np.ldexp(x, 2.0)
np.degrees(x)
np.radians(x)
np.rint(x)
np.round(x, 1)
np.around(x, 1)
np.round_(x, 1)
np.ceil(x)
np.floor(x)
np.trunc(x)
np.fix(x)
np.sign(x)
np.clip(x, -0.3, 0.3)
np.nan_to_num(x)
np.diff(x)
np.ediff1d(x)
np.max(x, axis=1)
np.amax(x, axis=1)
x.max()
np.min(x)
np.amin(x, axis=0)
np.where(x > 0, x, y)
np.where(x > 0, x, 0.3)
np.where(x > 0, 0.3, y)
np.zeros_like(x) + x * 0.3125
np.ones_like(x) / 3
np.full_like(x, 0.3)
np.concatenate([x, y], axis=1)
np.append(x, y, axis=0)
np.stack([x, y])
np.vstack([x, y])
np.row_stack([x, y])
np.hstack([x, y])
np.dstack([x, y])
np.column_stack([x, y])
np.repeat(x, 2, axis=0)
np.tile(x, (2, 1))
np.broadcast_to(x, (2, 3, 4))
np.broadcast_arrays(x, y[0])[1]
np.pad(x, ((1, 1), (0, 2)))
np.insert(x[0], 1, 0.3)
np.sort(x, axis=1)
np.take(x, index, axis=1)
x[0]
x[1:, ::2]
x[:, None]
x.take(index, axis=0)
npx.pick(x, index, axis=1)
npx.gather_nd(x, index.reshape(1, 3))
npx.embedding(index, x, input_dim=3, output_dim=4)
npx.sequence_mask(x, length, use_sequence_length=True, value=0.0)
npx.relu(x)
npx.activation(x, act_type="relu")
npx.activation(x, act_type="softrelu")
npx.leaky_relu(x, act_type="leaky", slope=0.3)
npx.leaky_relu(x, act_type="gelu")
npx.sigmoid(x)
npx.erf(x)
npx.pooling(image, kernel=(2, 2), pool_type="max")
npx.pooling(image, kernel=(2, 2), pool_type="avg")
npx.roi_pooling(image, rois, pooled_size=(1, 1), spatial_scale=1.0)
npx.dropout(x, p=0.3)
npx.rnn(x.reshape(3, 1, 4), weights, state, state_size=2, num_layers=1, mode="rnn_tanh")
np.reshape(x, (4, 3))
x.reshape(-1)
npx.reshape(x, (-4,))
npx.reshape_like(x, w)
npx.batch_flatten(x)
np.ravel(x)
np.resize(x, (2, 6))
x.flatten()
np.transpose(x)
x.T
np.swapaxes(x, 0, 1)
np.moveaxis(x, 0, 1)
np.rollaxis(x, 1)
np.expand_dims(x, 0)
np.squeeze(x.reshape(1, 3, 4))
np.flip(x, 0)
np.flipud(x)
np.fliplr(x)
np.roll(x, 1)
np.rot90(x)
np.diag(x)
np.diagflat(x[0])
np.diagonal(x)
np.tril(x)
np.atleast_1d(x)
np.atleast_2d(x)
np.atleast_3d(x)
np.copy(x)
x.copy()
np.split(x, 2, axis=1)
np.array_split(x, 3, axis=1)
np.hsplit(x, 2)
np.vsplit(x, 3)
np.dsplit(x.reshape(1, 3, 4), 2)
npx.slice(x, (0, 1), (2, 3))
np.delete(x, 1, axis=1)
np.unique(x)
np.meshgrid(x[0], y[0])
"""

IN_FP32 = """
np.sum(x, axis=1)
x.sum()
np.mean(x, axis=0)
x.mean()
np.prod(x, axis=1)
np.product(x, axis=1)
np.cumsum(x, axis=1)
np.trace(x)
np.var(x)
np.std(x, axis=1)
np.average(x, axis=1)
np.average(x, axis=1, weights=y)
np.percentile(x, 30)
np.quantile(x, 0.3)
np.polyval(x[0], y[0])
np.exp(x)
np.expm1(x)
np.log(np.abs(x))
np.log10(np.abs(x))
np.log2(np.abs(x))
np.log1p(np.abs(x))
np.square(x)
np.reciprocal(x)
np.power(np.abs(x), y)
np.abs(x) ** 0.3
0.3 ** x
np.hypot(x, y)
np.tan(x)
np.sinh(x)
np.cosh(x)
np.arccos(x)
np.arcsin(x)
np.arcsinh(x)
np.arccosh(positive[0, :1])
np.arctanh(x)
np.linalg.norm(x)
np.linalg.norm(x, axis=1)
np.linalg.inv(square)
np.linalg.det(square)
np.linalg.slogdet(square)[1]
np.linalg.solve(square, w[:3])
np.linalg.cholesky(positive)
np.linalg.pinv(x)
np.linalg.svd(x)[1]
np.linalg.eigvals(positive)
np.linalg.eig(positive)[0]
np.linalg.eigvalsh(positive)
np.linalg.eigh(positive)[0]
np.linalg.tensorinv(positive, ind=1)
np.linalg.tensorsolve(positive, x[:, 0])
npx.softmax(x)
npx.softmax(x, rows, use_length=True, axis=1)
npx.log_softmax(x)
npx.smooth_l1(x)
npx.gamma(np.abs(x))
npx.gammaln(np.abs(x))
npx.erfinv(x * 0.5)
npx.topk(x, k=2, ret_typ="value")
"""

# Comparisons, positions, counts, questions and integers have no format of the network.
OF_NO_FORMAT = """
x > y
x >= 0.1
x < y
x <= y
x == y
x != y
np.equal(x, y)
np.not_equal(x, 0.1)
np.greater(x, y)
np.greater_equal(x, y)
np.less(x, y)
np.less_equal(x, 0.1)
np.logical_not(x)
np.isnan(x)
np.isinf(x)
np.isfinite(x)
np.isneginf(x)
np.isposinf(x)
np.all(x)
np.any(x)
np.argmax(x, axis=1)
np.argmin(x, axis=1)
np.argsort(x, axis=1)
npx.topk(x, k=2)
np.nonzero(x)
npx.nonzero(x)
np.flatnonzero(x)
np.bincount(index)
np.bitwise_and(index, 1)
np.bitwise_or(index, 1)
np.bitwise_xor(index, 1)
np.bitwise_not(index)
np.invert(index)
np.lcm(index, index)
npx.shape_array(x)
npx.one_hot(index, 4)
np.indices((2, 2))
np.histogram(x, 3, range=(-1, 1))[0]
"""

# MXNet has these for arrays only, or cannot make symbols of them, in FP32 too: the exceptions.
IMPERATIVE_ONLY = {
    "x @ w": TypeError, "abs(x)": AttributeError, "np.copysign(x, -1.0)": MXNetError,
    "x[:, None]": IndexError, "x.copy()": NotImplementedForSymbol,
    "np.delete(x, 1, axis=1)": MXNetError, "np.nonzero(x)": AttributeError,
    "np.flatnonzero(x)": AttributeError, "np.insert(x[0], 1, 0.3)": MXNetError,
    "np.indices((2, 2))": MXNetError, "np.histogram(x, 3, range=(-1, 1))[0]": MXNetError,
    "np.broadcast_arrays(x, y[0])[1]": AttributeError, "np.rollaxis(x, 1)": AttributeError,
    "np.meshgrid(x[0], y[0])": AttributeError,
}  # fmt: skip

# Their results have no dimensions, and oneDNN casts no such array to bfloat16.
WITHOUT_DIMENSIONS = """
np.dot(x[0], y[0])
np.tensordot(x, y, ([0, 1], [0, 1]))
np.vdot(x, y)
x.max()
np.min(x)
"""

WAYS = {"float16": FLOAT16, "emulated_bfloat16": BFLOAT16}
_RANDOM = np.random.RandomState(5)


def _in_8_bits(values):
    """Return numbers of both formats, whose products and sums need more bits than either has."""
    return round_to(np.asarray(values, np.float32), BFLOAT16)


def _uniform(*shape):
    return _in_8_bits(_RANDOM.uniform(-0.9, 0.9, shape))


_SQUARE = _uniform(3, 3) + 2 * np.eye(3, dtype=np.float32)
OPERANDS = {  # in 16 bits
    "x": _uniform(3, 4),
    "y": _uniform(3, 4),
    "w": _uniform(4, 3),
    "square": _in_8_bits(_SQUARE),
    "positive": _in_8_bits(_SQUARE + _SQUARE.T + 3 * np.eye(3)),
    "weights": _uniform(16),
    "state": np.zeros((1, 1, 2), np.float32),
}
OTHERS = {
    "gamma": np.float32([1, 2, 0.5, 1]), "beta": np.float32([0, 1, 0, 0]),
    "mean": np.float32([0, 0.1, 0, 0]), "variance": np.float32([1, 2, 1, 1]),
    "index": np.int32([0, 2, 1]), "length": np.int32([2, 1, 3, 2]), "rows": np.int32([2, 1, 3]),
    "rois": np.float32([[0, 0, 0, 1, 1]]),
}  # fmt: skip


class Expression(gluon.HybridBlock):
    """Computes an expression of operands that are in the compute format."""

    def __init__(self, text):
        super().__init__()
        self.code = compile(text, text, "eval")

    def hybrid_forward(self, F, *arrays):
        names = dict(zip([*OPERANDS, *OTHERS], arrays))
        for name in OPERANDS:  # a product with 1 rounds, to the same values
            shape = OPERANDS[name].shape
            flat = F.np.dot(names[name].reshape(-1, 1), F.npx.slice(names["gamma"], 0, 1))
            names[name] = flat.reshape(shape)
        names["image"] = names["x"].reshape(1, 3, 2, 2)
        names["kernel"] = names["y"].reshape(1, 3, 2, 2)
        spaces = {"np": mx.np, "npx": mx.npx} if F is mx.nd else {"np": F.np, "npx": F.npx}
        return eval(self.code, {**spaces, **names})


def compute(text, policy, hybridize):
    net = Expression(text)
    if policy is not None:
        mpgluon.cast_block(net, policy)
    net.hybridize(hybridize)
    values = {**OPERANDS, **OTHERS}.values()
    return flat(net(*(mx.np.array(value, dtype=value.dtype) for value in values)))


def flat(result):
    if isinstance(result, (list, tuple)):
        return [array for one in result for array in flat(one)]
    return [result.asnumpy()]


def lines(*groups):
    return [line for group in groups for line in group.strip().splitlines()]


ALL = lines(IN_16_BITS, IN_FP32, OF_NO_FORMAT)
EACH_POLICY = pytest.mark.parametrize(
    "policy", ["float16", pytest.param("emulated_bfloat16", marks=pytest.mark.slow)]
)


def assert_rounded_by_its_rule(text, policy, *, hybridize):
    if policy == "emulated_bfloat16" and not kernels.load() and text in lines(WITHOUT_DIMENSIONS):
        return  # without native operators MXNet casts to bfloat16, not without dimensions
    expected = compute(text, None, hybridize=False)
    if text in lines(IN_16_BITS):
        expected = [
            round_to(one, WAYS[policy]) if one.dtype == np.float32 else one for one in expected
        ]
    assert_same_bits(compute(text, policy, hybridize), expected)


@EACH_POLICY
def test_every_result_is_that_of_fp32_rounded_once_where_the_rule_says_so(policy):
    for text in ALL:
        assert_rounded_by_its_rule(text, policy, hybridize=False)


@pytest.mark.sampled(4)
@EACH_POLICY
@pytest.mark.parametrize("text", [text for text in ALL if text not in IMPERATIVE_ONLY])
def test_a_result_is_the_same_hybridized(text, policy):
    assert_rounded_by_its_rule(text, policy, hybridize=True)


@pytest.mark.parametrize("text", IMPERATIVE_ONLY)
def test_what_is_tested_imperatively_only_cannot_be_hybridized_in_plain_mxnet(text):
    with pytest.raises(IMPERATIVE_ONLY[text]):
        compute(text, None, hybridize=True)


# The functions of mx.np and mx.npx that no expression above contains, and why.
_LISTED = set(re.findall(r"npx?\.[a-z0-9_.]+", " ".join(lines(IN_16_BITS, IN_FP32, OF_NO_FORMAT))))
_MAKES = """
    arange array blackman empty eye full hamming hanning identity linspace logspace ones zeros
    tril_indices_from triu_indices_from min_scalar_type genfromtxt
    empty_like full_like ones_like zeros_like npx.arange_like
"""
_ABOUT = """
    ndim shape size result_type promote_types may_share_memory shares_memory set_printoptions
    npx.check_call npx.classproperty npx.cpu npx.cpu_pinned npx.current_context npx.gpu
    npx.get_cuda_compute_capability npx.gpu_memory_info npx.num_gpus npx.is_np_array
    npx.is_np_shape npx.load npx.save npx.set_np npx.reset_np npx.waitall npx.with_metaclass
"""
REASONS = {
    **dict.fromkeys(_MAKES.split(), "makes an array, in the format that its caller names"),
    **dict.fromkeys(_ABOUT.split(), "is not arithmetic"),
    **dict.fromkeys(
        [*mx.numpy.fallback.__all__, *(f"np.linalg.{n}" for n in mx.numpy.fallback_linalg.__all__)],
        "is NumPy's own, without a gradient: MXNet copies the array and computes with NumPy",
    ),
    **dict.fromkeys(["deg2rad", "rad2deg"], "fails in MXNet 1.9.1, in FP32 too"),
    **dict.fromkeys(["alltrue", "sometrue", "product"], "another name of all, any and prod"),
    **dict.fromkeys(
        ["diag_indices_from", "unravel_index"],
        "returns positions, of which MXNet's symbols make one array",
    ),
    "npx.cast": "converts: see test_numpy_interface.py",
    "npx.constraint_check": "raises an error, or returns true",
    "npx.multibox_detection": "geometry, under the names of mx.nd.contrib",
    "npx.multibox_prior": "geometry, under the names of mx.nd.contrib",
    "npx.multibox_target": "geometry, under the names of mx.nd.contrib",
}


def functions(module, prefix):
    for name in dir(module):
        member = getattr(module, name)
        if name[0] != "_" and callable(member) and not isinstance(member, type):
            yield f"{prefix}{name}"


def test_every_function_of_both_modules_is_in_an_expression_or_has_a_reason():
    modules = {"np.": mx.np, "npx.": mx.npx, "np.linalg.": mx.np.linalg}
    names = [name for prefix, module in modules.items() for name in functions(module, prefix)]
    known = _LISTED | {name if "." in name else f"np.{name}" for name in REASONS}
    assert [name for name in names if name not in known] == []


def test_every_operator_of_the_numpy_interface_has_a_rule():
    handles = map(kernels.handle_of, get_all_registered_operators())
    numpy_operators = {name for name in map(kernels.name_of, handles) if name.startswith("_np")}
    known = listed_operators() | {name for name in numpy_operators if name_in_f(name) != name}
    backward = {name for name in numpy_operators if "backward" in name}
    assert sorted(numpy_operators - known - backward) == []
