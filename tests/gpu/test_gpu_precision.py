"""Networks in float16 on a GPU: close to exact arithmetic, and to FP32 training."""

from mpgluon import FLOAT16, PrecisionError, amp
from mpgluon.cast.arithmetic import arithmetic_of
from mpgluon.cast.stand_in import namespace_of

import mxnet as mx
import numpy as np
import pytest
import test_arithmetic
import test_autocast
import test_networks
from mxnet.gluon import nn

pytestmark = pytest.mark.gpu
BOTH = pytest.mark.parametrize("hybridize", [False, True], ids=["imperative", "hybridized"])


@pytest.fixture
def _operators_of_the_gpu(monkeypatch):
    arithmetic = arithmetic_of("float16", "gpu")
    monkeypatch.setattr(test_arithmetic, "operators_of", lambda _: namespace_of(mx.nd, arithmetic))


def assert_within_theory(got: np.ndarray, oracle, operands, *, rounded_before_bias=False) -> None:
    """Compare with ``oracle(*operands)``, a sum of products of the operands in float64.

    As on the CPU, but that a Tensor Core truncates where it adds, so that u is 2**-23 (Fasi et
    al., "Numerical behavior of NVIDIA tensor cores", 2021, 3), and that MXNet's kernels for GPUs
    add a bias to results that are rounded to float16 already: one rounding more.
    """
    exact = oracle(*operands)
    magnitude = oracle(*(np.abs(operand) for operand in operands))
    terms = oracle(*(np.ones_like(operand) for operand in operands)) * 2.0**-23
    bound = terms / (1 - terms) * magnitude
    if rounded_before_bias:
        bound = bound + FLOAT16.unit_roundoff * (magnitude + bound) + FLOAT16.smallest_subnormal / 2
    bound = bound + FLOAT16.unit_roundoff * (np.abs(exact) + bound) + FLOAT16.smallest_subnormal / 2
    assert got.dtype == np.float16
    assert (np.abs(got.astype(np.float64) - exact) <= bound).all()


@pytest.mark.usefixtures("_operators_of_the_gpu")
@test_arithmetic.EACH_CASE
def test_products_and_their_gradients_are_exact_up_to_the_order_of_sums(case):
    def values(shape, seed):
        return test_arithmetic.random_values(shape, FLOAT16, seed)

    operands = [values(shape, seed) for seed, shape in enumerate(case.shapes)]
    result, head, gradients = test_arithmetic.run(
        case, operands, lambda shape: values(shape, 9), FLOAT16
    )
    has_bias = len(case.shapes) == 3
    assert_within_theory(result, case.oracle, operands, rounded_before_bias=has_bias)
    for gradient, oracle in zip(gradients, case.gradients):
        assert_within_theory(gradient, oracle, [head, *operands])


@pytest.mark.usefixtures("_operators_of_the_gpu")
def test_sums_go_on_where_a_float16_accumulator_would_stand_still():
    test_arithmetic.test_sums_go_on_where_a_16_bit_accumulator_would_stand_still(FLOAT16)


@BOTH
def test_autocast_rounds_where_weights_and_data_are_used_and_holds_fp32(hybridize):
    test_autocast.test_weights_and_data_are_rounded_where_they_are_used_and_nowhere_else(
        FLOAT16, hybridize
    )
    test_autocast.test_a_gradient_is_rounded_to_the_compute_format_and_held_in_fp32(FLOAT16)
    test_autocast.test_small_updates_are_not_lost_as_the_parameters_are_their_own_masters(FLOAT16)


@BOTH
def test_bfloat16_is_refused_with_advice(hybridize):
    net = nn.Dense(2, in_units=3)
    net.initialize()
    amp.autocast(net, "bfloat16")
    if hybridize:
        net.hybridize()
    with pytest.raises(PrecisionError, match=r"no bfloat16 kernels for a GPU; use float16"):
        net(mx.nd.ones((1, 3)))


@pytest.mark.parametrize("way", ["cast float16", "autocast float16"])
@pytest.mark.parametrize(
    "name", ["resnet18_v1", "vgg11_bn", "mobilenetv2_0.25", "mobilenetv3_small", "densenet121"]
)
def test_a_network_trains_close_to_fp32(name, way, monkeypatch):
    # cuDNN may take another algorithm for a graph, with sums in another order.
    monkeypatch.setattr(test_networks, "SAME_BITS_HYBRIDIZED", ())
    test_networks.check(name, way)
