"""The table of operators: every name is real, every deviation from MXNet's lists is deliberate."""

import mpgluon
from mpgluon import BFLOAT16, FLOAT32, Policy, PrecisionError, amp, round_to
from mpgluon.cast.arithmetic import arithmetic_of
from mpgluon.cast.stand_in import namespace_of
from mpgluon.graph import operators
from mpgluon.graph.operators import Rule, excluded_operands, rule_of

import mxnet as mx
import numpy as np
import pytest
from helpers import BOTH
from mxnet import autograd, gluon
from mxnet.contrib.amp.lists import symbol_fp16
from mxnet.gluon import nn

F = namespace_of(mx.nd, arithmetic_of("float16", "cpu"))
FLOAT16_THROUGHOUT = Policy("float16", "float16", "float16")


def offered(name: str) -> bool:
    """Whether ``mx.nd`` or ``mx.sym`` has an operator of that (dotted) name."""
    for found in (mx.nd, mx.sym):
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not None:
            return True
    return False


def name_in_f(operator: str) -> str:
    """Return the name in ``F`` of an operator in MXNet's registry."""
    for prefix in ("contrib", "linalg", "sparse"):
        if operator.startswith(f"_{prefix}_"):
            return f"{prefix}.{operator[len(prefix) + 2 :]}"
    return operator


def float16_array(values):
    return mx.nd.array(values, dtype="float16")


def test_every_name_in_the_tables_is_an_operator_of_mxnet():
    registry = set(mx.operator.get_all_registered_operators())
    names = {name for name in operators.listed_operators() if not offered(name)}
    assert sorted(names - registry) == []


def test_every_name_in_a_graph_is_one_of_mxnets_registry():
    registry = set(mx.operator.get_all_registered_operators())
    unknown = operators._IN_GRAPH.keys() - registry  # comparisons: whether operands are broadcast
    assert {f"broadcast_{name}" for name in unknown} <= registry


def test_no_operator_is_listed_under_two_rules():
    lists = (
        *(operators._COMPUTE, operators._NORMALIZE, operators._FLOAT32, operators._MOVE),
        *(operators._OTHER, operators._NUMPY_COMPUTE, operators._NUMPY_FLOAT32),
        *(operators._NUMPY_FOLLOW, operators._NUMPY_MOVE, operators._NUMPY_OTHER),
    )
    names = [name for words in lists for name in words.split()]
    assert sorted(names) == sorted(set(names))


# Deliberate differences between this table and mxnet.contrib.amp's, with reasons.
_PRODUCTS = "a matrix product: 16-bit operands, FP32 sums"
_NORMS = "computed in FP32 as there, but its result goes on in 16 bits, as BatchNorm's does"
_MOVES = "moves values or sets zeros: nothing is rounded"
DELIBERATELY_DIFFERENT = {
    **dict.fromkeys(
        ["linalg.gemm", "linalg.gemm2", "linalg_gemm", "linalg_gemm2"], (Rule.COMPUTE, _PRODUCTS)
    ),
    "contrib.DeformableConvolution": (Rule.COMPUTE, _PRODUCTS),
    **dict.fromkeys(
        ["LayerNorm", "GroupNorm", "InstanceNorm", "contrib.SyncBatchNorm"],
        (Rule.NORMALIZE, _NORMS),
    ),
    **{
        f"linalg{dot}{verb}{what}": (Rule.FOLLOW, _MOVES)
        for dot in "._"
        for verb in ("make", "extract")
        for what in ("diag", "trian")
    },
    "Custom": (Rule.OTHER, "the user's own code decides"),
    "Convolution_v1": (Rule.FOLLOW, "deprecated; no layer of Gluon uses it"),
    "IdentityAttachKLSparseReg": (Rule.FOLLOW, "the identity going forward"),
    "contrib.DeformablePSROIPooling": (Rule.FOLLOW, "averages few values; FP32 inside on a CPU"),
}


@pytest.mark.parametrize(
    ("amp_list", "rule"), [("FP16_FUNCS", Rule.COMPUTE), ("FP32_FUNCS", Rule.FLOAT32)]
)
def test_the_rules_are_those_of_contrib_amp_except_where_they_differ_on_purpose(amp_list, rule):
    names = [name_in_f(operator) for operator in getattr(symbol_fp16, amp_list)]
    names = [name for name in names if offered(name)]
    assert len(names) >= {"FP16_FUNCS": 4, "FP32_FUNCS": 90}[amp_list]
    expected = {name: DELIBERATELY_DIFFERENT.get(name, (rule,))[0] for name in names}
    assert {name: rule_of(name) for name in names} == expected


def test_every_deliberate_difference_is_one():
    fp32 = {name_in_f(operator) for operator in symbol_fp16.FP32_FUNCS}
    assert set(DELIBERATELY_DIFFERENT) <= fp32
    assert Rule.FLOAT32 not in {rule for rule, _ in DELIBERATELY_DIFFERENT.values()}


def test_the_sparse_namespace_follows_the_same_rules():
    assert rule_of("sparse.dot") is Rule.COMPUTE
    assert rule_of("sparse.sum") is Rule.FLOAT32
    assert excluded_operands("sparse.where", (), {}) == excluded_operands("where", (), {})


def test_a_sum_of_ones_in_float16_passes_the_end_of_float16():
    ones = mx.nd.ones(70000, dtype="float16")
    totals = F.sum(ones), F.nansum(ones), F.sum_axis(ones), F.square(F.norm(ones))
    for total in (*totals, F.cumsum(ones)[-1]):
        assert total.dtype == np.float32
        # norm is the root of 70000 rounded; its square comes back to within two roundings.
        assert abs(total.asscalar() - 70000) <= 70000 * 4 * FLOAT32.unit_roundoff


# Operands that the format does not concern


@pytest.mark.parametrize("index", [2047, 2048, 2049, 4999])
def test_indices_are_not_rounded(index):
    # In float16, 2049 is 2048 and 4999 is 5000.
    rows = np.arange(5001, dtype=np.float32)[:, None] // 64
    table, position = float16_array(rows), mx.nd.array([index], dtype="float32")
    expected = rows[index, 0]
    flat = table.reshape((1, -1))
    marked = mx.nd.zeros((5001, 1), dtype="float16")
    marked[index] = 1
    assert F.Embedding(position, marked, input_dim=5001, output_dim=1).asscalar() == 1
    assert F.take(marked, position).asscalar() == 1
    assert F.take(table, position).asscalar() == expected
    assert F.pick(marked.reshape((1, -1)), position).asscalar() == 1
    assert F.batch_take(marked.reshape((1, -1)), position.astype("int32")).asscalar() == 1
    assert F.gather_nd(marked, position.reshape((1, 1))).asscalar() == 1
    assert F.pick(data=flat, index=position).asscalar() == expected


@pytest.mark.parametrize("length", [2049, 2051])
def test_sequence_lengths_are_not_rounded(length):
    data = mx.nd.ones((3000, 1), dtype="float16")
    lengths = mx.nd.array([length], dtype="float32")
    masked = F.SequenceMask(data, lengths, use_sequence_length=True)
    assert masked.dtype == np.float16
    assert masked.asnumpy().astype(np.float64).sum() == length
    by_name = F.SequenceMask(data, sequence_length=lengths, use_sequence_length=True)
    assert np.array_equal(by_name.asnumpy(), masked.asnumpy())
    steps = float16_array(np.arange(3000)[:, None] % 2000)
    last = F.SequenceLast(steps, lengths, use_sequence_length=True)
    assert last.asscalar() == (length - 1) % 2000


def test_a_condition_neither_decides_the_format_nor_is_converted():
    condition = mx.nd.array([1e-30, 0.0])  # in float16 both would be 0
    chosen = F.where(condition, float16_array([1, 1]), float16_array([2, 2]))
    assert chosen.dtype == np.float16
    assert chosen.asnumpy().tolist() == [1, 2]
    mixed = F.where(condition, float16_array([1, 1]), mx.nd.array([2, 2]))
    assert mixed.dtype == np.float32


# Normalization layers

LAYERS = {
    "BatchNorm": nn.BatchNorm,
    "SyncBatchNorm": lambda **kwargs: gluon.contrib.nn.SyncBatchNorm(num_devices=1, **kwargs),
    "LayerNorm": lambda in_channels: nn.LayerNorm(axis=1, in_channels=in_channels),
    "GroupNorm": lambda in_channels: nn.GroupNorm(num_groups=in_channels // 3),
    "InstanceNorm": nn.InstanceNorm,
}
EACH_LAYER = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
IMAGES = np.random.RandomState(3).uniform(-3, 5, (4, 6, 5, 5)).astype(np.float16)


def normalized(net, images):
    images.attach_grad()
    with autograd.record():
        result = net(images)
    result.backward(mx.nd.array(IMAGES / 4, dtype=result.dtype))
    return result


@BOTH
@EACH_LAYER
def test_a_normalization_layer_is_its_fp32_self_rounded_once(make, hybridize):
    results = []
    for cast in (False, True):
        net = make(in_channels=6)
        net.initialize()
        net(mx.nd.array(IMAGES, dtype="float32"))
        for seed, parameter in enumerate(net.collect_params().values()):
            values = np.random.RandomState(seed).uniform(0.5, 2, parameter.shape)
            parameter.set_data(mx.nd.array(values))
        if cast:
            mpgluon.cast_block(net, FLOAT16_THROUGHOUT)
        net.hybridize(hybridize)
        images = mx.nd.array(IMAGES, dtype="float16" if cast else "float32")
        result = normalized(net, images)
        parameters = net.collect_params().values()
        values = [p.data() for p in parameters]
        values += [p.grad() for p in parameters if p.grad_req != "null"]
        assert all(value.dtype == np.float32 for value in values)
        results.append([array.asnumpy() for array in (result, images.grad, *values)])
    plain, cast = results
    assert cast[0].dtype == cast[1].dtype == np.float16
    # The same FP32 operator on the same values: only the last rounding differs.
    assert np.array_equal(cast[0], plain[0].astype(np.float16))
    assert np.array_equal(cast[1], plain[1].astype(np.float16))
    for wide, parameter in zip(plain[2:], cast[2:]):  # running statistics among them
        assert np.array_equal(wide, parameter)


@pytest.mark.parametrize("name", ["BatchNorm", "SyncBatchNorm"])
def test_running_statistics_are_those_of_the_rounded_input_in_float64(name):
    net = LAYERS[name](in_channels=6, momentum=0.0)
    net.initialize()
    mpgluon.cast_block(net)
    normalized(net, mx.nd.array(IMAGES, dtype="float16"))
    values = IMAGES.astype(np.float64).transpose(1, 0, 2, 3).reshape(6, -1)
    n = values.shape[1]
    # A mean of n numbers errs by gamma_n of their mean magnitude; the squares behind a variance
    # by gamma_(n + 2) of theirs, whichever of the two textbook formulas is used.
    gamma = (n + 3) * FLOAT32.unit_roundoff / (1 - (n + 3) * FLOAT32.unit_roundoff)
    mean_error = np.abs(net.running_mean.data().asnumpy() - values.mean(axis=1))
    assert (mean_error <= gamma * np.abs(values).mean(axis=1)).all()
    variance = net.running_var.data().asnumpy()
    unbiased = values.var(axis=1) * n / (n - 1)
    error = np.minimum(np.abs(variance - values.var(axis=1)), np.abs(variance - unbiased))
    assert (error <= 4 * gamma * (values**2).mean(axis=1)).all()


@EACH_LAYER
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "emulated_bfloat16"])
def test_a_normalization_layer_in_bfloat16_computes_in_fp32(make, policy):
    results, policy = [], Policy.parse(policy)
    for cast in (False, True):
        net = make(in_channels=6)
        net.initialize()
        if cast:
            report = amp.autocast(net, policy)
        results.append(normalized(net, mx.nd.array(IMAGES)).asnumpy())
    in_fp32, cast = results
    assert np.array_equal(
        cast, in_fp32 if report.arithmetic == "native" else round_to(in_fp32, BFLOAT16)
    )


# What F offers besides operators


def test_what_f_does_not_offer_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_operator"):
        _ = F.no_such_operator


def test_stand_ins_are_made_once_and_keep_the_names_of_operators():
    assert namespace_of(mx.nd, arithmetic_of("float16", "cpu")) is F
    assert F.contrib is F.contrib
    assert F.FullyConnected is F.FullyConnected
    assert F.FullyConnected.__name__ == "FullyConnected"


def test_bfloat16_is_refused_on_a_gpu_with_advice():
    with pytest.raises(PrecisionError, match=r"no bfloat16 kernels for a GPU; use float16"):
        arithmetic_of("bfloat16", "gpu")


def test_a_gpu_computes_float16_natively_and_a_cpu_emulates_it():
    assert type(arithmetic_of("float16", "gpu")) is not type(arithmetic_of("float16", "cpu"))
    assert arithmetic_of("float16", "cpu_pinned") == arithmetic_of("float16", "cpu_pinned")


def test_a_recurrent_layer_with_sequence_lengths_leaves_them_alone():
    arrays = ("data", "parameters", "state", "cell", "lengths")
    assert 4 in excluded_operands("RNN", arrays, {"use_sequence_length": True})
    assert excluded_operands("RNN", arrays, {}) == frozenset()
