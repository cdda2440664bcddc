"""The native operators give the same bits as MXNet's."""

from dataclasses import replace

from mpgluon import (
    BFLOAT16,
    FLOAT4_E2M1,
    FLOAT6_E2M3,
    FLOAT6_E3M2,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    TFLOAT32,
    FloatFormat,
    kernels,
    round_to,
)

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd

pytestmark = pytest.mark.usefixtures("native_operators")


def every_float16_and_its_neighbours() -> np.ndarray:
    """Return all finite float16 numbers, the ties between them, and FP32 next to the ties."""
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    halves = np.sort(halves[np.isfinite(halves)]).astype(np.float32)
    ties = (halves[1:] + halves[:-1]) / 2
    beside = [np.nextafter(ties, np.float32(sign * np.inf)) for sign in (-1, 1)]
    return np.concatenate([halves, ties, *beside, [65519.996, 65520, 1e30, np.inf, -np.inf]])


def test_casts_round_every_number_and_every_tie_as_numpy_does():
    values = every_float16_and_its_neighbours()
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    narrow = kernels.invoke("_mpgluon_narrow_11_5", mx.nd.array(values))
    assert narrow.asnumpy().tobytes() == expected.tobytes()
    wide = kernels.invoke("_mpgluon_widen_11_5", narrow)
    assert wide.asnumpy().tobytes() == expected.astype(np.float32).tobytes()
    rounded = kernels.invoke("_mpgluon_plain_value_11_5", mx.nd.array(values))
    assert rounded.asnumpy().tobytes() == wide.asnumpy().tobytes()


def every_exponent_and_tie(fmt) -> np.ndarray:
    """Return a format's significands, ties and neighbours at each exponent of FP32."""
    steps = np.arange(2**fmt.significand_bits, 2 ** (fmt.significand_bits + 1))
    at_one = np.ldexp(steps.astype(np.float32), -fmt.significand_bits)  # every other one is a tie
    values = np.ldexp(at_one, np.arange(-149, 128)[:, None]).astype(np.float32).ravel().view("u4")
    positive = np.concatenate([values, values - 1, values + 1, [0, 0x7F7FFFFF, 0x7F800000]])
    positive = positive.astype("u4").view(np.float32)
    return np.concatenate([positive, -positive])


SMALL = (FLOAT8_E4M3, FLOAT8_E5M2, FLOAT6_E3M2, FLOAT6_E2M3, FLOAT4_E2M1)
SATURATING = [replace(fmt, name=f"{fmt}_sat", saturates=True) for fmt in (*SMALL[:2], BFLOAT16)]
OTHERS = [
    *(FloatFormat("e4m3", 4, 4), FloatFormat("e3m2", 3, 3)),
    FloatFormat("e7m9_finite", 10, 7, finite_only=True),
]


@pytest.mark.parametrize(
    "fmt", [*SMALL, *SATURATING, *OTHERS, TFLOAT32, BFLOAT16, FLOAT16], ids=str
)
def test_every_float32_exponent_and_every_tie_is_rounded_as_round_to_does(fmt):
    values = every_exponent_and_tie(fmt)
    expected = round_to(values, fmt)
    data = mx.nd.array(values)
    for operator in ("plain_value", "plain_both"):
        rounded = kernels.invoke(kernels.operator(operator, fmt), data)
        assert rounded.asnumpy().tobytes() == expected.tobytes()
    if fmt.significand_bits <= 8 or fmt == FLOAT16:  # these have codes of 16 bits
        codes = kernels.invoke(kernels.operator("narrow", fmt), data)
        wide = kernels.invoke(kernels.operator("widen", fmt), codes)
        assert wide.asnumpy().tobytes() == expected.tobytes()
    nan = kernels.invoke(kernels.operator("plain_value", fmt), mx.nd.array([np.nan, -np.nan]))
    assert np.isnan(nan.asnumpy()).all()


def test_float32_itself_is_a_format_to_which_nothing_is_rounded():
    values = np.random.RandomState(0).randint(0, 2**32, 2**16, dtype=np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    rounded = kernels.invoke(kernels.operator("plain_value", FLOAT32), mx.nd.array(values))
    assert rounded.asnumpy().tobytes() == values.tobytes()


def test_formats_with_the_same_widths_and_other_overflow_have_operators_of_their_own():
    formats = [FLOAT8_E4M3, FloatFormat("e4m3", 4, 4), SATURATING[0]]
    operators = {kernels.operator("plain_value", fmt) for fmt in formats}
    assert len(operators) == 3
    overflow = [
        kernels.invoke(kernels.operator("plain_value", fmt), mx.nd.array([1e9])).asscalar()
        for fmt in formats
    ]
    np.testing.assert_array_equal(overflow, np.float32([np.nan, np.inf, 448]))


@pytest.mark.parametrize(
    "fmt", [FloatFormat("x", 25, 8), FloatFormat("x", 8, 9), FloatFormat("x", 8, 8, True)], ids=repr
)
def test_a_format_that_fp32_cannot_hold_has_no_operators(fmt):
    with pytest.raises(ValueError, match="FP32, which cannot hold every x number; use a format"):
        kernels.operator("plain_value", fmt)


@pytest.mark.parametrize("fmt", [FLOAT16, BFLOAT16, FLOAT8_E4M3], ids=str)
@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize(
    ("operator", "forward", "backward"),
    [
        ("plain_value", True, False),
        ("plain_gradient", False, True),
        ("plain_both", True, True),
    ],
)
def test_roundings_round_values_gradients_or_both(operator, forward, backward, grad_req, fmt):
    operator = kernels.operator(operator, fmt)
    random = np.random.RandomState(0)
    values, gradient = random.standard_normal((2, 3, 37)).astype(np.float32)
    x = mx.nd.array(values)
    x.attach_grad(grad_req)
    x.grad[:] = 0.1
    with autograd.record():
        y = kernels.invoke(operator, x)
    y.backward(mx.nd.array(gradient))

    def rounded(array, really):
        return round_to(array, fmt) if really else array

    np.testing.assert_array_equal(y.asnumpy(), rounded(values, forward))
    before = np.float32(0.1 if grad_req == "add" else 0)
    np.testing.assert_array_equal(x.grad.asnumpy(), before + rounded(gradient, backward))


@pytest.mark.parametrize("size", [1, 15, 16, 17, 1000, 200_003])
def test_elements_that_are_not_their_rounded_master_are_counted(size):
    master = np.random.RandomState(0).standard_normal(size).astype(np.float32)
    weight = master.astype(np.float16)
    changed = np.unique(np.linspace(0, size - 1, 7).astype(int))

    def count(array):
        arrays = mx.nd.array(array, dtype="float16"), mx.nd.array(master)
        return kernels.invoke("_mpgluon_count_differences", *arrays).asscalar()

    assert count(weight) == 0
    weight[changed] += np.float16(0.5)
    assert count(weight) == len(changed)


def through_float16(symbol):
    return mx.sym.amp_cast(mx.sym.amp_cast(symbol, dtype="float16"), dtype="float32")


@pytest.mark.parametrize("channels", [5, 8, 16, 24])
@pytest.mark.parametrize("train", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("settings", [(1e-3, 0.9, 0, 0), (1e-5, 0.5, 1, 0), (1e-5, 0.9, 0, 1)])
@pytest.mark.parametrize("images", [4, 5])
def test_batch_normalization_has_the_rounded_bits_of_mxnets_on_plain_arrays(
    channels, train, settings, images
):
    options = dict(zip(("eps", "momentum", "fix_gamma", "use_global_stats"), settings))
    results = []
    for own in (False, True):
        data = mx.sym.identity(mx.sym.var("data"))
        data = data if own else through_float16(data)
        net = mx.sym.BatchNorm(data, name=kernels.node_name("norm|0", *settings), **options)
        net = mx.sym.identity(net) if own else through_float16(net)
        json = net.tojson(remove_amp_cast=False)
        for theirs, ours in (("_copy", "pack"), ("BatchNorm", "batch_norm"), ("_copy", "unpack")):
            if own:
                json = json.replace(f'"op": "{theirs}"', f'"op": "_mpgluon_{ours}_11_5"', 1)
        shape = (images, channels, 9, 7)
        executor = mx.sym.load_json(json).simple_bind(mx.cpu(), data=shape)
        random = np.random.RandomState(0)
        for array in (*executor.arg_arrays, *executor.aux_arrays):
            array[:] = random.uniform(0.5, 1.5, array.shape)
        gradient = mx.nd.array(random.standard_normal(shape).astype("float16"))
        for _ in range(2):
            executor.forward(is_train=train)
            if train:
                executor.backward(gradient)
        mx.nd.waitall()
        gradients = executor.grad_arrays if train else []
        results.append([*executor.outputs, *gradients, *executor.aux_arrays])
    for one, other in zip(*results):
        np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())


@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize("weight_dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("operator", "own_operator", "options", "weight_shape"),
    [
        ("Convolution", "_mpgluon_convolution_11_5", {"kernel": (3, 3)}, (32, 16, 3, 3)),
        ("FullyConnected", "_mpgluon_fully_connected_11_5", {}, (7, 16 * 81)),
    ],
)
def test_products_take_weights_in_codes_or_in_fp32_as_behind_casts(
    operator, own_operator, options, weight_shape, weight_dtype, grad_req
):
    random = np.random.RandomState(0)
    data, weight, former = (
        random.standard_normal(shape).astype("float32")
        for shape in ((4, 16, 9, 9), weight_shape, weight_shape)
    )
    units = {"num_filter" if "kernel" in options else "num_hidden": weight_shape[0]}
    to_codes, to_fp32 = ("pack", "unpack") if "kernel" in options else ("narrow", "widen")
    results = []
    for own in (False, True):
        image, kernel = mx.sym.var("data"), mx.sym.var("weight")
        if not own:
            image = through_float16(image)
            if weight_dtype == "float32":
                kernel = mx.sym.amp_cast(kernel, dtype="float16")
            kernel = mx.sym.amp_cast(kernel, dtype="float32")
        image = image if not own else mx.sym.identity(image)
        net = getattr(mx.sym, operator)(image, kernel, name="product", **options, **units)
        net = mx.sym.identity(net) if own else through_float16(net)
        json = net.tojson(remove_amp_cast=False)
        if own:
            json = json.replace('"op": "_copy"', f'"op": "_mpgluon_{to_codes}_11_5"', 1)
            json = json.replace('"op": "_copy"', f'"op": "_mpgluon_{to_fp32}_11_5"', 1)
            json = json.replace(f'"op": "{operator}"', f'"op": "{own_operator}"')
        arguments = {
            "data": mx.nd.array(data, dtype="float32"),
            "weight": mx.nd.array(weight, dtype=weight_dtype),
            "product_bias": mx.nd.arange(weight_shape[0], dtype="float32"),
        }
        gradients = {key: mx.nd.ones_like(array) for key, array in arguments.items()}
        gradients["weight"][:] = mx.nd.array(former, dtype=weight_dtype)
        executor = mx.sym.load_json(json).bind(
            mx.cpu(), arguments, args_grad=gradients, grad_req=grad_req
        )
        for _ in range(2):
            executor.forward(is_train=True)
            executor.backward(mx.nd.ones_like(executor.outputs[0]) * 0.37)
        results.append([*executor.outputs, *gradients.values()])
        assert gradients["weight"].dtype == np.dtype(weight_dtype)
    for one, other in zip(*results):
        np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())


@pytest.mark.parametrize("name", ["norm", "norm|0.001|0.9|0|0", "0" * 20, "|" * 9])
def test_a_node_without_its_settings_is_refused_before_it_computes(name):
    net = mx.sym.BatchNorm(mx.sym.var("data"), name=name)
    json = net.tojson().replace('"op": "BatchNorm"', '"op": "_mpgluon_batch_norm_11_5"')
    with pytest.raises(mx.MXNetError, match=r"_batch_norm_11_5 needs \d settings in the name"):
        mx.sym.load_json(json).infer_type(data="float16")
