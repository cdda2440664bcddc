"""The native operators give the same bits as MXNet's."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd

from mpgluon import BFLOAT16, FLOAT16, FloatFormat, native, round_to

pytestmark = pytest.mark.usefixtures("native_operators")


def every_float16_and_its_neighbours() -> np.ndarray:
    """Return all finite float16 numbers, the ties between them, and FP32 beside the ties."""
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    halves = np.sort(halves[np.isfinite(halves)]).astype(np.float32)
    ties = (halves[1:] + halves[:-1]) / 2
    beside = [np.nextafter(ties, np.float32(sign * np.inf)) for sign in (-1, 1)]
    return np.concatenate([halves, ties, *beside, [65519.996, 65520, 1e30, np.inf, -np.inf]])


def test_casts_round_every_number_and_every_tie_as_numpy_does():
    values = every_float16_and_its_neighbours()
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    narrow = native.invoke("_mpgluon_narrow_11_5", mx.nd.array(values))
    assert narrow.asnumpy().tobytes() == expected.tobytes()
    wide = native.invoke("_mpgluon_widen_11_5", narrow)
    assert wide.asnumpy().tobytes() == expected.astype(np.float32).tobytes()
    rounded = native.invoke("_mpgluon_round_value_11_5", mx.nd.array(values))
    assert rounded.asnumpy().tobytes() == wide.asnumpy().tobytes()


def every_bfloat16_and_its_neighbours() -> np.ndarray:
    """Return all finite bfloat16 numbers, the ties between them, and FP32 beside the ties."""
    numbers = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    numbers = np.sort(numbers[np.isfinite(numbers)])
    ties = ((numbers[1:].astype(np.float64) + numbers[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(ties, np.float32(sign * np.inf)) for sign in (-1, 1)]
    largest = np.finfo(np.float32).max
    return np.concatenate([numbers, ties, *beside, [largest, -largest, np.inf, -np.inf]])


@pytest.mark.parametrize("fmt", [FLOAT16, BFLOAT16, FloatFormat("e3m2", 3, 3)], ids=str)
def test_each_format_is_rounded_to_as_its_widths_say(fmt):
    values = np.concatenate(
        [every_float16_and_its_neighbours(), every_bfloat16_and_its_neighbours()]
    ).astype(np.float32)
    expected = round_to(values, fmt)
    data = mx.nd.array(values)
    for operator in ("round_value", "plain_both"):
        rounded = native.invoke(native.operator(operator, fmt), data)
        assert rounded.asnumpy().tobytes() == expected.tobytes()
    codes = native.invoke(native.operator("narrow", fmt), data)
    wide = native.invoke(native.operator("widen", fmt), codes)
    assert wide.asnumpy().tobytes() == expected.tobytes()
    nan = native.invoke(native.operator("round_value", fmt), mx.nd.array([np.nan, -np.nan]))
    assert np.isnan(nan.asnumpy()).all()


@pytest.mark.parametrize("fmt", [FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize(
    ("operator", "forward", "backward"),
    [
        ("round_value", True, False),
        ("round_gradient", False, True),
        ("round_both", True, True),
        ("plain_gradient", False, True),
        ("plain_both", True, True),
        ("plain", False, False),
    ],
)
def test_roundings_round_values_gradients_or_both(operator, forward, backward, grad_req, fmt):
    operator = "_mpgluon_plain" if operator == "plain" else native.operator(operator, fmt)
    random = np.random.RandomState(0)
    values, gradient = random.standard_normal((2, 3, 37)).astype(np.float32)
    x = mx.nd.array(values)
    x.attach_grad(grad_req)
    x.grad[:] = 0.1
    with autograd.record():
        y = native.invoke(operator, x)
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
        return native.invoke("_mpgluon_count_differences", *arrays).asscalar()

    assert count(weight) == 0
    weight[changed] += np.float16(0.5)
    assert count(weight) == len(changed)


def through_float16(symbol):
    return mx.sym.amp_cast(mx.sym.amp_cast(symbol, dtype="float16"), dtype="float32")


@pytest.mark.parametrize("channels", [5, 8, 16, 24])
@pytest.mark.parametrize("train", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("settings", [(1e-3, 0.9, 0, 0), (1e-5, 0.5, 1, 0), (1e-5, 0.9, 0, 1)])
@pytest.mark.parametrize("convolution", [True, False], ids=["blocked", "plain"])
@pytest.mark.parametrize("rounding", ["_mpgluon_round_value_11_5", "_mpgluon_pack_11_5"])
def test_batch_normalization_has_the_rounded_bits_of_mxnets_on_plain_arrays(
    channels, train, settings, convolution, rounding
):
    options = dict(zip(("eps", "momentum", "fix_gamma", "use_global_stats"), settings))
    results = []
    for own in (False, True):
        data = mx.sym.var("data")
        if convolution:  # oneDNN's layout; casts make it plain
            data = mx.sym.Convolution(data, kernel=(1, 1), num_filter=channels, no_bias=True)
        data = mx.sym.identity(data) if own else through_float16(data)
        net = mx.sym.BatchNorm(data, name=native.node_name("norm|0", *settings), **options)
        json = (net if own else through_float16(net)).tojson(remove_amp_cast=False)
        if own:
            json = json.replace('"op": "BatchNorm"', '"op": "_mpgluon_batch_norm_11_5"')
            json = json.replace('"op": "_copy"', f'"op": "{rounding}"')
        shape = (4, channels, 9, 7)
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
@pytest.mark.parametrize("rounds_gradient", [True, False])
@pytest.mark.parametrize(
    ("operator", "own_operator", "options", "weight_shape"),
    [
        (
            "Convolution",
            "_mpgluon_convolution_11_5",
            {"kernel": (3, 3), "num_filter": 32},
            (32, 16, 3, 3),
        ),
        ("FullyConnected", "_mpgluon_fully_connected_11_5", {"num_hidden": 7}, (7, 16 * 81)),
    ],
)
def test_products_take_float16_weights_as_a_cast_would_hand_them(
    operator, own_operator, options, weight_shape, rounds_gradient, grad_req
):
    random = np.random.RandomState(0)
    data, weight, former = (
        random.standard_normal(shape).astype("float16")
        for shape in ((4, 16, 9, 9), weight_shape, weight_shape)
    )
    results = []
    for own in (False, True):
        image, kernel = mx.sym.var("data"), mx.sym.var("weight")
        if not own and rounds_gradient:
            image = through_float16(image)
        wide = kernel if own else mx.sym.amp_cast(kernel, dtype="float32")
        name = native.node_name("product", rounds_gradient)
        net = getattr(mx.sym, operator)(image, wide, name=name, **options)
        json = net.tojson(remove_amp_cast=False)
        if own:
            json = json.replace(f'"op": "{operator}"', f'"op": "{own_operator}"')
        arguments = {
            "data": mx.nd.array(data, dtype="float32"),
            "weight": mx.nd.array(weight, dtype="float16"),
            f"{name}_bias": mx.nd.arange(weight_shape[0], dtype="float32"),
        }
        gradients = {key: mx.nd.ones_like(array) for key, array in arguments.items()}
        gradients["weight"][:] = mx.nd.array(former, dtype="float16")
        executor = mx.sym.load_json(json).bind(
            mx.cpu(), arguments, args_grad=gradients, grad_req=grad_req
        )
        for _ in range(2):
            executor.forward(is_train=True)
            executor.backward(mx.nd.ones_like(executor.outputs[0]) * 0.37)
        results.append([*executor.outputs, *gradients.values()])
        assert gradients["weight"].dtype == np.float16
    for one, other in zip(*results):
        np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())


@pytest.mark.parametrize("name", ["norm", "norm|0.001|0.9|0|0", "0" * 20, "|" * 9])
@pytest.mark.parametrize(
    ("operator", "own_operator", "options"),
    [
        ("BatchNorm", "_mpgluon_batch_norm_11_5", {}),
        ("FullyConnected", "_mpgluon_fully_connected_11_5", {"num_hidden": 7}),
    ],
)
def test_a_node_without_its_settings_is_refused_before_it_computes(
    operator, own_operator, options, name
):
    net = getattr(mx.sym, operator)(mx.sym.var("data"), name=name, **options)
    json = net.tojson().replace(f'"op": "{operator}"', f'"op": "{own_operator}"')
    with pytest.raises(mx.MXNetError, match=rf"{own_operator} needs \d settings in the name"):
        mx.sym.load_json(json).infer_type(data="float32")
