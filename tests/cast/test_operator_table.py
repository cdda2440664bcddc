"""Each row of the table of operators: a result is FP32's, rounded exactly where the rule says so.

The oracle is MXNet on FP32 arrays with the same values. The rules stand here a second time, so that
a row that is moved to another rule fails.
"""

from __future__ import annotations

import re

from mpgluon import BFLOAT16, FLOAT16, round_to
from mpgluon.cast.arithmetic import arithmetic_of
from mpgluon.cast.arrays import format_of, mark
from mpgluon.cast.stand_in import namespace_of
from mpgluon.graph.operators import listed_operators

import mxnet as mx
import numpy as np
import pytest

# Operands and result in the compute format, FP32 sums.
PRODUCTS = """
F.Convolution(image, kernel, no_bias=True, kernel=(2, 2), num_filter=1)
F.Deconvolution(image, kernel2, no_bias=True, kernel=(2, 2), num_filter=1)
F.FullyConnected(x, y, no_bias=True, num_hidden=3)
F.RNN(sequence, weights, state, state_size=2, num_layers=1, mode="rnn_tanh")
F.dot(x, w)
F.batch_dot(sequence, sequence, transpose_a=True)
F.Correlation(image, image, kernel_size=1, max_displacement=1, pad_size=1)
F.linalg_gemm(x, w, square)
F.linalg.gemm(x, w, square)
F.linalg_gemm2(x, w)
F.linalg.gemm2(x, w)
F.contrib.DeformableConvolution(
    image, offset, kernel, no_bias=True, kernel=(2, 2), num_filter=1)
F.contrib.ModulatedDeformableConvolution(
    image, offset, mask, kernel, no_bias=True, kernel=(2, 2), num_filter=1)
F.contrib.interleaved_matmul_selfatt_qk(heads, heads=2)
F.contrib.interleaved_matmul_selfatt_valatt(heads, attention, heads=2)
F.contrib.interleaved_matmul_encdec_qk(sequence, pairs, heads=2)
F.contrib.interleaved_matmul_encdec_valatt(pairs, attention, heads=2)
"""

# Computed in FP32, the result in the compute format.
NORMALIZATIONS = """
F.BatchNorm(image, two, two, beta, two, fix_gamma=False)
F.contrib.SyncBatchNorm(image, two, two, beta, two, key="table")
F.contrib.BatchNormWithReLU(image, two, two, beta, two, fix_gamma=False)
F.LayerNorm(x, four, four)
F.GroupNorm(image, two, two, num_groups=2)
F.InstanceNorm(image, two, two)
"""

IN_FP32 = """
F.sum(x, axis=1)
F.sum_axis(x, axis=1)
F.nansum(x)
F.prod(x)
F.nanprod(x)
F.mean(x)
F.norm(x)
F.moments(x, axes=(0,))
F.cumsum(x, axis=1)
F.softmax(x)
F.log_softmax(x)
F.softmin(x)
F.SoftmaxActivation(x)
F.L2Normalization(x)
F.LRN(image, nsize=3)
F.exp(x)
F.expm1(x)
F.log(positive)
F.log10(positive)
F.log2(positive)
F.log1p(positive)
F.square(x)
F.reciprocal(x)
F.rsqrt(positive)
F.rcbrt(positive)
F.gamma(positive)
F.gammaln(positive)
F.erfinv(x)
F.broadcast_power(positive, square)
F.power(positive, square)
F.broadcast_hypot(x, y)
F.tan(x)
F.sinh(x)
F.cosh(x)
F.arccos(x)
F.arcsin(x)
F.arccosh(large)
F.arcsinh(x)
F.arctanh(x)
F.multi_sum_sq(x, y, num_arrays=2)
F.Pooling(image, pool_type="sum", kernel=(2, 2))
F.Pooling(image, pool_type="lp", p_value=1, kernel=(2, 2))
F.histogram(x, bins=3, range=(-1, 1))
F.Softmax(x, places)
F.SoftmaxOutput(x, places)
F.softmax_cross_entropy(x, places)
F.smooth_l1(x)
F.SVMOutput(x, places)
F.MakeLoss(x)
F.make_loss(x)
F.LinearRegressionOutput(x, y)
F.LogisticRegressionOutput(x, y)
F.MAERegressionOutput(x, y)
F.CTCLoss(sequence, one_place)
F.ctc_loss(sequence, one_place)
F.contrib.CTCLoss(sequence, one_place)
F.contrib.ctc_loss(sequence, one_place)
F.argmax(x, axis=1)
F.argmin(x, axis=1)
F.argmax_channel(x)
F.argsort(x)
F.topk(x, k=2, ret_typ="both")
F.khatri_rao(x, y)
F.contrib.hawkesll(x, row[0], row[0], x, positive, integers33, places, places)
F.linalg.det(square)
F.linalg_det(square)
F.linalg.gelqf(x)
F.linalg_gelqf(x)
F.linalg.inverse(square)
F.linalg_inverse(square)
F.linalg.potrf(positive)
F.linalg_potrf(positive)
F.linalg.potri(positive)
F.linalg_potri(positive)
F.linalg.slogdet(square)
F.linalg_slogdet(square)
F.linalg.sumlogdiag(positive)
F.linalg_sumlogdiag(positive)
F.linalg.syevd(positive)
F.linalg.syrk(x)
F.linalg_syrk(x)
F.linalg.trmm(positive, x)
F.linalg_trmm(positive, x)
F.linalg.trsm(positive, x)
F.linalg_trsm(positive, x)
F.contrib.MultiBoxPrior(image, sizes=(0.3,))
F.contrib.MultiBoxTarget(boxes, objects, classes)
F.contrib.MultiBoxDetection(classes, flat_boxes, boxes)
F.contrib.Proposal(
    image, shifts, size, scales=(1,), ratios=(1,), feature_stride=1,
    rpn_pre_nms_top_n=4, rpn_post_nms_top_n=2, rpn_min_size=0)
F.contrib.MultiProposal(
    image, shifts, size, scales=(1,), ratios=(1,), feature_stride=1,
    rpn_pre_nms_top_n=4, rpn_post_nms_top_n=2, rpn_min_size=0)
F.contrib.box_iou(boxes, boxes)
F.contrib.box_nms(found)
F.contrib.box_non_maximum_suppression(found)
F.contrib.box_encode(ones, zeros, boxes, boxes, row[0], row[0])
F.contrib.box_decode(shifted, boxes)
F.contrib.bipartite_matching(x, threshold=0.1)
F.contrib.allclose(x, y)
F.contrib.arange_like(x, axis=1)
F.GridGenerator(affine, transform_type="affine", target_shape=(2, 2))
"""

# In the widest format of their operands, except those that the format does not concern.
FOLLOWING = """
F.Embedding(labels, x, input_dim=3, output_dim=4)
F.contrib.SparseEmbedding(labels, x, input_dim=3, output_dim=4)
F.take(x, labels)
F.batch_take(x, integers)
F.gather_nd(x, labels13)
F.scatter_nd(x, labels13, shape=(3, 4))
F.pick(x, labels)
F.choose_element_0index(x, labels)
F.contrib.boolean_mask(x, labels)
F.contrib.index_copy(x, integers, y)
F.where(condition, x, y)
F.broadcast_like(row, condition)
F.reshape_like(x, twelve)
F.slice_like(x, two_rows, axes=(0,))
F.SequenceMask(sequence, two[:1], use_sequence_length=True)
F.SequenceLast(sequence, two[:1], use_sequence_length=True)
F.SequenceReverse(sequence, two[:1], use_sequence_length=True)
F.ROIPooling(image, rois, pooled_size=(1, 1), spatial_scale=1.0)
F.contrib.ROIAlign(image, rois, pooled_size=(1, 1), spatial_scale=1.0)
F.Reshape(x, shape=(4, 3))
F.reshape(x, shape=(4, 3))
F.Flatten(image)
F.flatten(image)
F.transpose(x)
F.SwapAxis(x, dim1=0, dim2=1)
F.swapaxes(x, dim1=0, dim2=1)
F.moveaxis(x, 0, 1)
F.expand_dims(x, axis=0)
F.squeeze(sequence)
F.slice(x, begin=(0, 1), end=(2, 3))
F.slice_axis(x, axis=1, begin=1, end=3)
F.SliceChannel(x, num_outputs=2)
F.split(x, num_outputs=2)
F.split_v2(x, 2, axis=1)
F.crop(x, begin=(0, 1), end=(2, 3))
F.flip(x, axis=0)
F.reverse(x, axis=0)
F.identity(x)
F.BlockGrad(x)
F.stop_gradient(x)
F.depth_to_space(deep, block_size=2)
F.space_to_depth(image, block_size=2)
F.diag(x)
F.zeros_like(x)
F.ones_like(x)
F._internal._rnn_param_concat(weights, weights, dim=0)
"""

# Decide their formats themselves.
OF_THEIR_OWN = """
F.Cast(x, dtype="float16")
F.cast(x, dtype="int32")
F.amp_cast(x, dtype="float32")
F.cast_storage(x, "default")
F.shape_array(x)
F.size_array(x)
F.one_hot(labels, depth=3)
F.contrib.isfinite(x)
F.contrib.isinf(x)
F.contrib.isnan(x)
F.contrib.index_array(x)
F.all_finite(x)
F.multi_all_finite(x, y, num_arrays=2)
F.zeros(3)
F.ones(3)
F.full(3, 0.3)
F.arange(3)
F.linspace(0, 1, 3)
F.eye(3)
F.array([0.3])
"""

NOT_CALLED = {
    **dict.fromkeys(["contrib.fft", "contrib.ifft", "contrib.count_sketch"], "has no CPU kernel"),
    **dict.fromkeys(
        ["contrib.foreach", "contrib.while_loop", "contrib.cond"], "calls functions: test_loops.py"
    ),
    **dict.fromkeys(["empty", "load", "save", "waitall"], "has no result to compare"),
    **dict.fromkeys(["Variable", "var", "Group"], "exists for symbols only"),
    "Custom": "runs code of the user's: test_block.py",
    "contrib.getnnz": "takes sparse arrays only",
    "amp_multicast": "oneDNN has none for float16",
    "BatchNorm_v1": "MXNet's function of arrays lacks its last two operands",
}

_RANDOM = np.random.RandomState(5)


def uniform(*shape):
    return _RANDOM.uniform(-0.9, 0.9, shape)


_SQUARE = uniform(3, 3) + 2 * np.eye(3)
_CORNERS = _RANDOM.uniform(0, 0.5, (1, 3, 2))
IN_FORMAT = {
    **{"x": uniform(3, 4), "y": uniform(3, 4), "w": uniform(4, 3), "row": uniform(1, 4)},
    **{"square": _SQUARE, "positive": _SQUARE @ _SQUARE.T + 0.3, "large": 1 + uniform(3) ** 2},
    **{"image": uniform(1, 2, 4, 4), "kernel": uniform(1, 2, 2, 2), "deep": uniform(1, 4, 2, 2)},
    **{"kernel2": uniform(2, 1, 2, 2), "offset": uniform(1, 8, 3, 3), "mask": uniform(1, 4, 3, 3)},
    **{"sequence": uniform(3, 1, 4), "weights": uniform(16), "state": uniform(1, 1, 2)},
    **{"heads": uniform(3, 1, 12), "pairs": uniform(3, 1, 8), "attention": uniform(2, 3, 3)},
    **{"boxes": np.concatenate([_CORNERS, _CORNERS + 0.3], axis=2), "classes": uniform(1, 2, 3)},
    **{"flat_boxes": uniform(1, 12), "shifted": uniform(1, 3, 4), "shifts": uniform(1, 4, 4, 4)},
    **{"found": np.concatenate([uniform(1, 3, 2), _CORNERS, _CORNERS + 0.3], axis=2)},
    **{"affine": uniform(1, 6), "places": [0, 2, 1], "one_place": [[1]], "size": [[4, 4, 1]]},
    **{"objects": [[[0, 0.1, 0.1, 0.4, 0.4]]], "ones": [[1, 1, 1]], "zeros": [[0, 0, 0]]},
}
OTHERS = {
    **{"two": [1.25, 2], "beta": [0.3, 1], "four": [1, 2, 0.5, 1], "labels": [0, 2, 1]},
    **{"labels13": [[0, 2, 1]], "twelve": [0] * 12, "rois": [[0, 0, 0, 1, 1]]},
    **{"two_rows": [0, 0], "condition": [[1, 0, 1e-30, 1]] * 3},
}
INTEGERS = {"integers": [0, 2, 1], "integers33": [[0, 1, 2]] * 3}


def lines(group):
    return re.sub(r"\n +", " ", group).strip().splitlines()


def outcome(line, F, values):
    """Return the values and the format of each result."""
    others = {name: mx.nd.array(one) for name, one in OTHERS.items()}
    integers = {name: mx.nd.array(one, dtype="int32") for name, one in INTEGERS.items()}
    result = eval(line, {"F": F, **values, **others, **integers})
    results = result if isinstance(result, (list, tuple)) else [result]
    return [(one.asnumpy(), format_of(one)) for one in results]


def failures(group, fmt, operands, *, rounds_operands=False, rounds_result=False, as_is=False):
    """Return the calls whose values or formats differ from FP32 results, rounded.

    With ``as_is``, those that differ from MXNet's own on the same arrays.
    """
    F = namespace_of(mx.nd, arithmetic_of(fmt.name, "cpu", emulate=True))
    name = "float16" if fmt == FLOAT16 else fmt
    rounded = {key: round_to(np.float32(value), fmt) for key, value in IN_FORMAT.items()}
    values = plain = {key: mx.nd.array(value) for key, value in IN_FORMAT.items()}
    if operands == "16 bits":
        dtype = "float16" if fmt == FLOAT16 else "float32"
        values = {key: mark(mx.nd.array(v, dtype=dtype), name) for key, v in rounded.items()}
    if rounds_operands or operands == "16 bits":
        dtype = values["x"].dtype if as_is else "float32"
        plain = {key: mx.nd.array(v, dtype=dtype) for key, v in rounded.items()}
    wrong = {}
    for line in lines(group):
        expected = outcome(line, mx.nd, plain)
        if rounds_result:
            expected = [(round_to(value, fmt), name) for value, _ in expected]
        found = outcome(line, F, values)
        same = [
            np.array_equal(one, other, equal_nan=True) and a == b
            for (one, a), (other, b) in zip(found, expected)
        ]
        if not same or not all(same) or len(found) != len(expected):
            wrong[line] = found, expected
    return wrong


EACH_FORMAT = pytest.mark.parametrize("fmt", [FLOAT16, BFLOAT16], ids=str)
EACH_KIND = pytest.mark.parametrize("operands", ["16 bits", "FP32"])


@EACH_FORMAT
@EACH_KIND
def test_a_product_rounds_its_operands_and_its_result(fmt, operands):
    assert not failures(PRODUCTS, fmt, operands, rounds_operands=True, rounds_result=True)


@EACH_FORMAT
@EACH_KIND
def test_a_normalization_rounds_its_result_only(fmt, operands):
    assert not failures(NORMALIZATIONS, fmt, operands, rounds_result=True)


@EACH_FORMAT
@EACH_KIND
def test_what_needs_fp32_is_not_rounded(fmt, operands):
    assert not failures(IN_FP32, fmt, operands)


@EACH_FORMAT
@EACH_KIND
def test_what_follows_its_operands_is_rounded_if_they_have_16_bits(fmt, operands):
    assert not failures(FOLLOWING, fmt, operands, rounds_result=operands == "16 bits")


@EACH_FORMAT
@EACH_KIND
def test_what_decides_its_formats_itself_is_not_changed(fmt, operands):
    assert not failures(OF_THEIR_OWN, fmt, operands, as_is=True)


def test_every_row_is_called_or_has_a_reason():
    calls = PRODUCTS + NORMALIZATIONS + IN_FP32 + FOLLOWING + OF_THEIR_OWN
    called = set(re.findall(r"^F\.([\w.]+)\(", calls, re.MULTILINE))
    rows = {name for name in listed_operators() if not name.startswith("_np")}
    assert rows - called == NOT_CALLED.keys()
