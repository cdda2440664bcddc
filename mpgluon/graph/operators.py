"""The table of operators: the facts about each operator of MXNet that a cast needs.

Pure data, by the names in ``F``: the rule by which an operator computes in a network with a 16-bit
compute format, its operands that are never cast, its name in a graph, its native operator.
:mod:`mpgluon.cast.arithmetic` decides how a rule is computed in a format and on a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import cache, lru_cache
from numbers import Real
from types import MappingProxyType
from typing import Any, NamedTuple, Optional, Union

from mpgluon.formats.float_format import FloatFormat

__all__ = [
    "PACKED",
    "PLAIN",
    "Kernel",
    "Operator",
    "Rule",
    "dtype_in_numpy",
    "excluded_operands",
    "facts_in_graph",
    "listed_operators",
    "lost_numbers",
    "may_be_16_bit",
    "name_in_f",
    "one_name",
    "operators_with",
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
    contrib.bipartite_matching contrib.fft contrib.ifft contrib.allclose contrib.arange_like
    GridGenerator
"""

_MOVE = """
    Reshape reshape Flatten flatten transpose SwapAxis swapaxes moveaxis expand_dims squeeze
    slice slice_axis SliceChannel split split_v2 crop flip reverse identity BlockGrad
    stop_gradient depth_to_space space_to_depth diag zeros_like ones_like
    _internal._rnn_param_concat
"""

_OTHER = """
    Cast cast amp_cast amp_multicast cast_storage shape_array size_array one_hot Custom
    contrib.isfinite contrib.isinf contrib.isnan contrib.index_array
    contrib.getnnz contrib.foreach contrib.while_loop contrib.cond all_finite multi_all_finite
    array zeros ones full arange linspace eye empty load save waitall Variable var Group
"""

# Operators of the NumPy interface only, by their names in a graph; the rest are in _AS_IN_F below.
_NUMPY_COMPUTE = """
    _np_dot _npi_matmul _npi_einsum _npi_tensordot _npi_tensordot_int_axes
"""
_NUMPY_FLOAT32 = """
    _np_trace _npi_var _npi_std _npi_average _npi_percentile _npi_polyval
    _npi_powerd _npi_rpower_scalar
    _npi_cholesky _npi_eig _npi_eigh _npi_eigvals _npi_eigvalsh _npi_pinv _npi_pinv_scalar_rcond
    _npi_solve _npi_svd _npi_tensorinv _npi_tensorsolve _npi_bincount
"""
_NUMPY_FOLLOW = """
    _npi_copysign _npi_copysign_scalar _npi_rcopysign_scalar _npi_arctan2 _npi_arctan2_scalar
    _npi_rarctan2_scalar _npi_ldexp _npi_ldexp_scalar _npi_rldexp_scalar _npi_around _npi_diff
    _npi_ediff1d _npi_insert_scalar _npi_insert_slice _npi_insert_tensor _npi_nan_to_num
    _npi_where_lscalar _npi_where_rscalar _npi_pad
    _npi_boolean_mask_assign_scalar _npi_boolean_mask_assign_tensor
    _npi_vstack _npi_hstack _npi_dstack _npi_column_stack _npi_full_like
"""
_NUMPY_MOVE = """
    _np_roll _np_diagflat _np_diagonal _np_atleast_1d _np_atleast_2d _np_atleast_3d _np_moveaxis
    _npi_rot90 _npi_tril _npi_hsplit _npi_dsplit _npi_delete _npi_unique
"""
# Creation, random numbers, questions whose answer is not a number of the network, integers.
_NUMPY_OTHER = """
    _np_all _np_any _npx_nonzero _npx_constraint_check _npi_share_memory
    _npi_isfinite _npi_isinf _npi_isnan _npi_isneginf _npi_isposinf
    _npi_bitwise_and _npi_bitwise_and_scalar _npi_bitwise_not _npi_bitwise_or
    _npi_bitwise_or_scalar _npi_bitwise_xor _npi_bitwise_xor_scalar _npi_lcm _npi_lcm_scalar
    _npi_arange _npi_blackman _npi_hamming _npi_hanning _npi_eye _npi_identity _npi_indices
    _npi_diag_indices_from _npi_logspace _npi_ones _npi_zeros _npi_where_scalar2
    _npi_bernoulli _npi_choice _npi_exponential _npi_gamma _npi_gumbel _npi_logistic
    _npi_multinomial _npi_normal _npi_normal_n _npi_pareto _npi_rayleigh _npi_uniform
    _npi_uniform_n _npi_weibull
"""

_RULES = {
    name: rule
    for rule, names in (
        (Rule.COMPUTE, _COMPUTE),
        (Rule.NORMALIZE, _NORMALIZE),
        (Rule.FLOAT32, _FLOAT32),
        (Rule.FLOAT32, _ALWAYS_FLOAT32),
        (Rule.MOVE, _MOVE),
        (Rule.OTHER, _OTHER),
        (Rule.COMPUTE, _NUMPY_COMPUTE),
        (Rule.FLOAT32, _NUMPY_FLOAT32),
        (Rule.FOLLOW, _NUMPY_FOLLOW),
        (Rule.MOVE, _NUMPY_MOVE),
        (Rule.OTHER, _NUMPY_OTHER),
    )
    for name in names.split()
}

PLAIN, PACKED = "plain", "packed"
"""Layouts of 16-bit codes: as in MXNet's arrays, and channels in blocks, as oneDNN computes."""

Operands = frozenset[Union[int, str]]


class Kernel(NamedTuple):
    """The native operator in the place of one of MXNet's in a graph."""

    name: str
    """Its name in :func:`mpgluon.kernels.operator`."""

    held: Optional[str] = None
    """The layout of the codes that it takes and returns; ``None``: its operands' layout."""

    operands: Optional[int] = None
    """How many operands, from the first on, may be codes; ``None``: all."""


class Operator(NamedTuple):
    """The facts about an operator."""

    in_graph: str
    """Its name in a graph."""

    not_cast: Operands = frozenset()
    """Positions and names of operands that neither decide the result's format nor are ever cast."""

    numbers: Operands = frozenset({"scalar"})
    """Positions and names of numbers that are operands like any other."""

    moves: bool = False
    """Whether its results consist of elements of its operands, unchanged."""

    has_gradient: bool = True
    """Whether operands receive gradients from it, also where one is a number or is broadcast."""

    own_gradient: str = ""
    """If the gradient does not depend, or not only, on the incoming one (measured): ``grad_scale``,
    the option that multiplies it, or what to use instead of the operator."""

    kernel: Optional[Kernel] = None
    onnx: str = ""
    """The operator of ONNX that does the same on the same operands, without further options."""


def _operands(position: int, *names: str) -> dict[str, Any]:
    return {"not_cast": frozenset({position, *names})}


def _numbers(*operands: Union[int, str]) -> dict[str, Any]:
    return {"numbers": frozenset(operands)}


# BatchNorm's parameters and statistics are FP32 wherever its data is float16, and MXNet allows no
# cast between the operator and the statistics that it updates.
_PARAMETERS = frozenset({1, 2, 3, 4, "gamma", "beta", "moving_mean", "moving_var"})
_MOVES = {"moves": True}
_NO_GRADIENT = {"has_gradient": False}
_SEND_ZEROS = """
    topk argmax_channel shape_array size_array isfinite isinf isnan arange_like index_array
    MultiBoxPrior MultiBoxTarget MultiBoxDetection Proposal MultiProposal
    uniform_like normal_like exponential_like gamma_like poisson_like negative_binomial_like
    generalized_negative_binomial_like
"""
_ON_COPIES = """
    clip elemwise_mul _mul_scalar _div_scalar _plus_scalar _minus_scalar _rminus_scalar
"""

# Further facts, by the name in ``F``, or in a graph for what only a graph has.
_FACTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Convolution", {"kernel": Kernel("convolution", PACKED, operands=2)}),
    ("FullyConnected", {"kernel": Kernel("fully_connected", PLAIN, operands=2)}),
    ("BatchNorm", {"kernel": Kernel("batch_norm", PACKED, operands=1), "not_cast": _PARAMETERS}),
    ("BatchNorm_v1 contrib.SyncBatchNorm contrib.BatchNormWithReLU", {"not_cast": _PARAMETERS}),
    ("Activation", {"kernel": Kernel("relu")}),
    ("Pad pad", {"kernel": Kernel("pad", PACKED)}),
    ("elemwise_add", {"kernel": Kernel("add"), "onnx": "Add"}),
    *((name, {"kernel": Kernel(f"on_copies_{name}")}) for name in _ON_COPIES.split()),
    ("elemwise_mul broadcast_mul", {"onnx": "Mul"}),
    ("broadcast_add", {"onnx": "Add"}),
    ("elemwise_sub broadcast_sub", {"onnx": "Sub"}),
    ("elemwise_div broadcast_div", {"onnx": "Div"}),
    ("add_n", {"onnx": "Sum"}),
    ("_maximum broadcast_maximum", {"onnx": "Max"}),
    ("_minimum broadcast_minimum", {"onnx": "Min"}),
    ("_power broadcast_power", {"onnx": "Pow"}),
    *((name, {"onnx": name.capitalize()}) for name in ("erf", "sin", "cos", "tan", "sign")),
    *((name, {"onnx": name.capitalize()}) for name in ("floor", "ceil")),
    *((name, {"onnx": name.capitalize()}) for name in ("abs", "exp", "log", "reciprocal", "sqrt")),
    ("negative", {"onnx": "Neg"}),
    ("relu", {"onnx": "Relu"}),
    ("sigmoid", {"onnx": "Sigmoid"}),
    ("tanh", {"onnx": "Tanh"}),
    ("Reshape Flatten transpose SwapAxis expand_dims squeeze slice slice_axis", _MOVES),
    ("SliceChannel reverse stack depth_to_space space_to_depth diag BlockGrad", _MOVES),
    ("_internal._rnn_param_concat", _MOVES),
    ("split_v2", {**_MOVES, "in_graph": "_split_v2"}),
    ("identity", {**_MOVES, "in_graph": "_copy"}),
    ("concat", {**_MOVES, "in_graph": "Concat"}),
    ("BlockGrad zeros_like ones_like round rint ceil floor trunc fix one_hot", _NO_GRADIENT),
    ("_npi_around _npi_full_like _npi_isfinite _npi_isinf _npi_isnan", _NO_GRADIENT),
    ("_npi_isneginf _npi_isposinf", _NO_GRADIENT),
    ("equal not_equal greater greater_equal lesser lesser_equal", _NO_GRADIENT),
    ("logical_and logical_or logical_xor logical_not argmax argmin argsort", _NO_GRADIENT),
    ("Embedding contrib.SparseEmbedding", _operands(0, "data")),
    ("take batch_take gather_nd scatter_nd", _operands(1, "indices")),
    ("pick contrib.boolean_mask", _operands(1, "index")),
    ("choose_element_0index", _operands(1, "rhs")),
    ("where _npi_where_lscalar _npi_where_rscalar", _operands(0, "condition")),
    ("_npi_boolean_mask_assign_scalar _npi_boolean_mask_assign_tensor", _operands(1, "mask")),
    ("contrib.index_copy", _operands(1, "index_vector")),
    ("broadcast_like reshape_like", _operands(1, "rhs")),
    ("slice_like", _operands(1, "shape_like")),
    ("SequenceMask SequenceLast SequenceReverse", _operands(1, "sequence_length")),
    ("ROIPooling contrib.ROIAlign", _operands(1, "rois")),
    ("clip", _numbers(1, 2, "a_min", "a_max")),
    ("SequenceMask _npi_boolean_mask_assign_scalar", _numbers(3, "value")),
    ("full", {**_numbers("value"), "in_graph": "_full"}),
    ("one_hot", _numbers("on_value", "off_value")),
    ("Pad pad _npi_pad", _numbers(3, "constant_value")),
    ("_npi_full_like", _numbers("fill_value")),
    ("_npi_insert_scalar", _numbers("val")),
    ("_npi_nan_to_num", _numbers("nan", "posinf", "neginf")),
    ("SoftmaxOutput Softmax", {"own_gradient": "grad_scale"}),
    ("LinearRegressionOutput LogisticRegressionOutput", {"own_gradient": "grad_scale"}),
    ("MAERegressionOutput", {"own_gradient": "grad_scale"}),
    ("MakeLoss make_loss", {"own_gradient": "leave it out: what it is given is the loss"}),
    (
        "SVMOutput",
        {"own_gradient": "use gluon.loss.HingeLoss or gluon.loss.SquaredHingeLoss"},
    ),
    (
        "IdentityAttachKLSparseReg",
        {"own_gradient": "add its penalty to the loss: gluon.loss.KLDivLoss"},
    ),
)


def _name_in_graph(name: str) -> str:
    namespace, _, last = name.rpartition(".")
    return f"_{namespace}_{last}" if namespace in ("contrib", "linalg") else last


def _collected() -> Mapping[str, Operator]:
    facts: dict[str, dict[str, Any]] = {}
    for names, more in _FACTS:
        for name in names.split():
            facts.setdefault(name, {"in_graph": _name_in_graph(name)}).update(more)
    return MappingProxyType({name: Operator(**one) for name, one in facts.items()})


_OPERATORS = _collected()
_IN_GRAPH = MappingProxyType({one.in_graph: one for one in _OPERATORS.values()})


# Operators with a number (``x * 3``), and ones of the NumPy interface, that follow the rule of one
# in ``F``. The latter share its facts too, except for native operators, which have other options.
_AS_IN_F = """
    _plus_scalar:broadcast_add _minus_scalar:broadcast_sub _rminus_scalar:broadcast_sub
    _mul_scalar:broadcast_mul _div_scalar:broadcast_div _rdiv_scalar:broadcast_div
    _mod_scalar:broadcast_mod _rmod_scalar:broadcast_mod
    _power_scalar:broadcast_power _rpower_scalar:broadcast_power
    _npi_absolute:abs _npi_add:broadcast_add _npi_add_scalar:broadcast_add
    _npi_subtract:broadcast_sub _npi_subtract_scalar:broadcast_sub
    _npi_rsubtract_scalar:broadcast_sub _npi_multiply:broadcast_mul
    _npi_multiply_scalar:broadcast_mul _npi_true_divide:broadcast_div
    _npi_true_divide_scalar:broadcast_div _npi_rtrue_divide_scalar:broadcast_div
    _npi_mod:broadcast_mod _npi_mod_scalar:broadcast_mod _npi_rmod_scalar:broadcast_mod
    _npi_power:broadcast_power _npi_power_scalar:broadcast_power _npi_hypot:broadcast_hypot
    _npi_equal:broadcast_equal _npi_equal_scalar:broadcast_equal
    _npi_not_equal:broadcast_not_equal _npi_not_equal_scalar:broadcast_not_equal
    _npi_greater:broadcast_greater _npi_greater_scalar:broadcast_greater
    _npi_greater_equal:broadcast_greater_equal _npi_greater_equal_scalar:broadcast_greater_equal
    _npi_less:broadcast_lesser _npi_less_scalar:broadcast_lesser
    _npi_less_equal:broadcast_lesser_equal _npi_less_equal_scalar:broadcast_lesser_equal
    _npi_logical_not:logical_not
    _np_copy:identity _np_cumsum:cumsum _np_diag:diag _np_max:max _np_min:min _np_prod:prod
    _np_reshape:Reshape _npx_reshape:Reshape _np_squeeze:squeeze _np_sum:sum
    _np_transpose:transpose _npi_flip:reverse _npi_stack:stack _npi_concatenate:concat
    _npi_broadcast_to:broadcast_to _npi_where:where _npi_mean:mean _npi_norm:norm
    _npi_argmax:argmax _npi_argmin:argmin
    _npi_arccos:arccos _npi_arccosh:arccosh _npi_arcsin:arcsin _npi_arcsinh:arcsinh
    _npi_arctan:arctan _npi_arctanh:arctanh _npi_cbrt:cbrt _npi_ceil:ceil _npi_cos:cos
    _npi_cosh:cosh _npi_degrees:degrees _npi_exp:exp _npi_expm1:expm1 _npi_fix:fix
    _npi_floor:floor _npi_log:log _npi_log10:log10 _npi_log1p:log1p _npi_log2:log2
    _npi_negative:negative _npi_radians:radians _npi_reciprocal:reciprocal _npi_rint:rint
    _npi_sign:sign _npi_sin:sin _npi_sinh:sinh _npi_sqrt:sqrt _npi_square:square _npi_tan:tan
    _npi_tanh:tanh _npi_trunc:trunc _npx_relu:relu _npx_sigmoid:sigmoid
"""
_NAMES_IN_F = MappingProxyType({
    **{one.in_graph: name for name, one in _OPERATORS.items()},
    **dict(pair.split(":") for pair in _AS_IN_F.split()),
})  # fmt: skip


def name_in_f(name: str) -> str:
    """Return the name in ``F``, for the table, of the operator that has a name in a graph."""
    known = _NAMES_IN_F.get(name)
    if known is not None:
        return known
    for namespace in ("contrib", "linalg"):
        if name.startswith(f"_{namespace}_"):
            return f"{namespace}.{name.removeprefix(f'_{namespace}_')}"
    return name


_DTYPES_IN_NUMPY = {
    "bool": """
        broadcast_equal broadcast_not_equal broadcast_greater broadcast_greater_equal
        broadcast_lesser broadcast_lesser_equal logical_not _np_all _np_any _npi_isfinite
        _npi_isinf _npi_isnan _npi_isneginf _npi_isposinf
    """,
    "int64": "argmax argmin shape_array _npx_nonzero _npi_bincount _npi_diag_indices_from",
}
_DTYPE_IN_NUMPY = {
    name: dtype for dtype, names in _DTYPES_IN_NUMPY.items() for name in names.split()
}


def dtype_in_numpy(name: str) -> Optional[str]:
    """Return the dtype of an operator's results in the NumPy interface; ``None`` if it varies.

    ``name`` is that in ``F``.
    """
    return _DTYPE_IN_NUMPY.get(name)


def facts_in_graph(name: str) -> Operator:
    """Return the facts about the operator that has a name in a graph."""
    facts = _IN_GRAPH.get(name)
    if facts is None and name.startswith("_np"):
        facts = _OPERATORS.get(name_in_f(name))
        facts = facts and facts._replace(in_graph=name, kernel=None, onnx="")
    return facts or Operator(name)


def operators_with(fact: str) -> Mapping[str, Any]:
    """Return a fact of the operators that have it, by their names in a graph.

    Parameters
    ----------
    fact : str
        A field of :class:`Operator`; operators have it if it is not the default.
    """
    default = Operator._field_defaults[fact]
    facts = {name: getattr(one, fact) for name, one in _IN_GRAPH.items()}
    return MappingProxyType({name: value for name, value in facts.items() if value != default})


def listed_operators() -> frozenset[str]:
    """Return the names of all operators that have a rule, or operands that are not cast."""
    return frozenset(_RULES) | {name for name, one in _OPERATORS.items() if one.not_cast}


def rule_of(name: str, options: Optional[Mapping[str, Any]] = None) -> Rule:
    """Return the rule of an operator.

    Parameters
    ----------
    name : str
        Its name in ``F``, with its namespace: ``"Convolution"``,
        ``"contrib.SyncBatchNorm"``, ``"linalg.gemm2"``. Names in ``sparse`` are as in ``F``.
        Random generators (``random.…``) have no operands to follow.
    options : mapping, optional
        Its options, of which the ``pool_type`` of a pooling matters: some are sums.

    Returns
    -------
    Rule
        ``FOLLOW`` for operators that the table does not list.
    """
    if options and options.get("pool_type") in ("sum", "lp"):
        return Rule.FLOAT32
    return _RULES.get(name.removeprefix("sparse."), Rule.FOLLOW)


def may_be_16_bit(name: str) -> bool:
    """Whether the result of an operator that the table keeps in FP32 makes sense in 16 bits."""
    return one_name(name) in _FLOAT32.split()


def one_name(name: str) -> str:
    """Return one name for an operator's names that a cast cannot tell apart.

    ``x + y`` broadcasts arrays and does not broadcast symbols.
    """
    return name.removeprefix("sparse.").replace("elemwise_", "broadcast_")


@cache
def sends_zeros(name: str) -> bool:
    """Whether the operands of an operator receive zeros for gradients.

    ``name`` is that in ``F`` or in a graph. True also of ``topk``, whose values have gradients.
    """
    name = (
        name.rpartition(".")[2].removeprefix("_contrib").removeprefix("_random").removeprefix("_")
    )
    name = name.removeprefix("broadcast_").removesuffix("_scalar")
    facts = _OPERATORS.get(name) or _OPERATORS.get(f"_{name}")
    return name in _SEND_ZEROS.split() or (facts is not None and not facts.has_gradient)


# Functions of F and operators of Python, each of whose operands may be a number.
_WITH_NUMBERS = """
    add subtract multiply divide true_divide modulo maximum minimum
    equal not_equal greater greater_equal lesser lesser_equal
    elemwise_add broadcast_add broadcast_sub broadcast_mul broadcast_div broadcast_mod
    broadcast_equal
"""
_OPERANDS = frozenset({0, 1, "lhs", "rhs", "scalar"})


def lost_numbers(fmt: FloatFormat, name: str, options: Mapping[Any, Any]) -> list[float]:
    """Return the numbers among an operator's operands that a format turns into 0 or infinity.

    An operator that has any is computed in FP32, with an FP32 result, whatever its operands.

    Parameters
    ----------
    fmt : FloatFormat
        The format of the operands that are arrays.
    name : str
        The operator's name in ``F`` or in a graph.
    options : mapping
        Its arguments, by position or name.
    """
    facts = _OPERATORS.get(name) or facts_in_graph(name)
    names = _OPERANDS if name in _WITH_NUMBERS.split() else facts.numbers
    operands = [options[key] for key in names if key in options]
    numbers = [float(one) for one in operands if isinstance(one, Real)]
    return [number for number in numbers if _loses(fmt, number)]


@lru_cache(maxsize=4096)
def _loses(fmt: FloatFormat, number: float) -> bool:
    return bool(fmt.loses(number))


def excluded_operands(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operands:
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
    facts = _OPERATORS.get(name.removeprefix("sparse."))
    return facts.not_cast if facts else frozenset()
