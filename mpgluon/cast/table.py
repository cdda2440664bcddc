"""The table of operators: how each may compute in a network with a 16-bit compute format.

Pure data about MXNet's operators, by their names in ``F``. :mod:`mpgluon.cast.arithmetic` decides
how a rule is computed in a format and on a device.
"""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType
from typing import Any, Union

__all__ = [
    "Rule",
    "excluded_operands",
    "listed_operators",
    "may_be_16_bit",
    "one_name",
    "rule_of",
]


class Rule(Enum):
    """The formats that an operator's operands and result may have.

    As in NVIDIA's guide: matrix products profit from 16 bits, sums and exponentials need FP32,
    and everything between follows its operands.
    """

    COMPUTE = "operands and result in the compute format, sums inside in FP32"
    NORMALIZE = "computed in FP32, the result in the compute format"
    FLOAT32 = "computed in FP32, the result stays FP32"
    FOLLOW = "computed in the widest format of its operands, the result rounded to it once"
    MOVE = "no arithmetic: values and format pass through as they are"
    OTHER = "the operator decides its formats itself: casts, creation, control flow, queries"


_COMPUTE = """
    Convolution Deconvolution FullyConnected RNN dot batch_dot Correlation
    linalg_gemm linalg_gemm2 linalg.gemm linalg.gemm2
    contrib.DeformableConvolution contrib.ModulatedDeformableConvolution
    contrib.interleaved_matmul_selfatt_qk contrib.interleaved_matmul_selfatt_valatt
    contrib.interleaved_matmul_encdec_qk contrib.interleaved_matmul_encdec_valatt
"""

_NORMALIZE = """
    BatchNorm BatchNorm_v1 LayerNorm GroupNorm InstanceNorm contrib.SyncBatchNorm
    contrib.BatchNormWithReLU
"""

# Reductions, exponentials and their inverses, powers.
_FLOAT32 = """
    sum sum_axis nansum prod nanprod mean norm moments cumsum
    softmax log_softmax softmin SoftmaxActivation L2Normalization LRN
    exp expm1 log log10 log2 log1p square reciprocal rsqrt rcbrt gamma gammaln erfinv
    broadcast_power broadcast_hypot power tan sinh cosh arccos arcsin arccosh arcsinh arctanh
"""

# Losses, geometry in pixels, and whatever returns counts or positions (they can exceed 2048, above
# which float16 lacks integers).
_ALWAYS_FLOAT32 = """
    multi_sum_sq histogram
    Softmax SoftmaxOutput softmax_cross_entropy smooth_l1 SVMOutput MakeLoss make_loss
    LinearRegressionOutput LogisticRegressionOutput MAERegressionOutput
    CTCLoss ctc_loss contrib.CTCLoss contrib.ctc_loss
    argmax argmin argmax_channel argsort topk khatri_rao contrib.count_sketch contrib.hawkesll
    linalg.det linalg.gelqf linalg.inverse linalg.potrf linalg.potri linalg.slogdet
    linalg.sumlogdiag linalg.syevd linalg.syrk linalg.trmm linalg.trsm
    linalg_det linalg_gelqf linalg_inverse linalg_potrf linalg_potri linalg_slogdet
    linalg_sumlogdiag linalg_syrk linalg_trmm linalg_trsm
    contrib.MultiBoxPrior contrib.MultiBoxTarget contrib.MultiBoxDetection
    contrib.MultiProposal contrib.Proposal contrib.box_iou contrib.box_nms
    contrib.box_non_maximum_suppression contrib.box_encode contrib.box_decode
    contrib.bipartite_matching contrib.fft contrib.ifft contrib.allclose
"""

_MOVE = """
    Reshape reshape Flatten flatten transpose SwapAxis swapaxes moveaxis expand_dims squeeze
    slice slice_axis SliceChannel split split_v2 crop flip reverse identity BlockGrad
    stop_gradient depth_to_space space_to_depth diag zeros_like ones_like
    _internal._rnn_param_concat
"""

_OTHER = """
    Cast cast amp_cast amp_multicast cast_storage shape_array size_array one_hot Custom
    contrib.isfinite contrib.isinf contrib.isnan contrib.arange_like contrib.index_array
    contrib.getnnz contrib.foreach contrib.while_loop contrib.cond all_finite multi_all_finite
    array zeros ones full arange linspace eye empty load save waitall Variable var Group
"""

_RULES = MappingProxyType(
    {
        name: rule
        for rule, names in (
            (Rule.COMPUTE, _COMPUTE),
            (Rule.NORMALIZE, _NORMALIZE),
            (Rule.FLOAT32, _FLOAT32),
            (Rule.FLOAT32, _ALWAYS_FLOAT32),
            (Rule.MOVE, _MOVE),
            (Rule.OTHER, _OTHER),
        )
        for name in names.split()
    }
)

# BatchNorm's parameters and statistics are FP32 wherever its data is float16, and MXNet allows no
# cast between the operator and the statistics that it updates.
_BATCH_NORM: frozenset[Union[int, str]] = frozenset(
    {1, 2, 3, 4, "gamma", "beta", "moving_mean", "moving_var"}
)

_EXCLUDED: MappingProxyType[str, frozenset[Union[int, str]]] = MappingProxyType(
    {
        "BatchNorm": _BATCH_NORM,
        "BatchNorm_v1": _BATCH_NORM,
        "contrib.SyncBatchNorm": _BATCH_NORM,
        "contrib.BatchNormWithReLU": _BATCH_NORM,
        "Embedding": frozenset({0, "data"}),
        "contrib.SparseEmbedding": frozenset({0, "data"}),
        "take": frozenset({1, "indices"}),
        "batch_take": frozenset({1, "indices"}),
        "gather_nd": frozenset({1, "indices"}),
        "scatter_nd": frozenset({1, "indices"}),
        "pick": frozenset({1, "index"}),
        "choose_element_0index": frozenset({1, "rhs"}),
        "where": frozenset({0, "condition"}),
        "contrib.boolean_mask": frozenset({1, "index"}),
        "contrib.index_copy": frozenset({1, "index_vector"}),
        "SequenceMask": frozenset({1, "sequence_length"}),
        "SequenceLast": frozenset({1, "sequence_length"}),
        "SequenceReverse": frozenset({1, "sequence_length"}),
        "ROIPooling": frozenset({1, "rois"}),
        "contrib.ROIAlign": frozenset({1, "rois"}),
    }
)


def listed_operators() -> frozenset[str]:
    """Return the names of all operators about which the table says something."""
    return frozenset(_RULES) | frozenset(_EXCLUDED)


def rule_of(name: str) -> Rule:
    """Return the rule of an operator.

    Parameters
    ----------
    name : str
        Its name in ``F``, with its namespace: ``"Convolution"``,
        ``"contrib.SyncBatchNorm"``, ``"linalg.gemm2"``. Names in ``sparse`` are those of ``F``.
        Random generators (``random.…``) have no operands to follow.

    Returns
    -------
    Rule
        ``FOLLOW`` for operators that the table does not list.
    """
    return _RULES.get(name.removeprefix("sparse."), Rule.FOLLOW)


def may_be_16_bit(name: str) -> bool:
    """Whether the result of an operator that the table keeps in FP32 makes sense in 16 bits."""
    return one_name(name) in _FLOAT32.split()


def one_name(name: str) -> str:
    """Return one name for an operator's names that a cast cannot tell apart.

    ``x + y`` broadcasts arrays and does not broadcast symbols.
    """
    return name.removeprefix("sparse.").replace("elemwise_", "broadcast_")


def excluded_operands(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> frozenset[Union[int, str]]:
    """Return the operands of a call that the format does not concern.

    Indices, lengths, conditions, and BatchNorm's parameters: they neither decide the format of
    the result nor are ever converted.

    Parameters
    ----------
    name : str
        As for :func:`rule_of`.
    args, kwargs
        The arguments of the call.

    Returns
    -------
    frozenset of int and str
        Positions in ``args`` and keys of ``kwargs``.
    """
    if name == "RNN" and kwargs.get("use_sequence_length"):
        return frozenset({len(args) - 1, "sequence_length"})
    return _EXCLUDED.get(name.removeprefix("sparse."), frozenset())
