"""Networks that compute with mx.np: refused before anything is changed, or restored."""

from __future__ import annotations

import mpgluon
from mpgluon import PrecisionError, amp

import mxnet as mx
import numpy as np
import pytest
from helpers import BOTH, EACH_WAY, WAYS, in_sequence
from mxnet import gluon
from mxnet.gluon import nn

VALUES = np.random.RandomState(0).standard_normal((2, 4)).astype(np.float32)


class CallsNumPy(gluon.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.np.tanh(x.as_np_ndarray()).as_nd_ndarray()


class CallsExtension(gluon.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.npx.relu(x.as_np_ndarray()).as_nd_ndarray()


@mx.util.use_np
class Decorated(gluon.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.relu(x)


class OwnArrays(gluon.HybridBlock):
    """An ordinary block that calls NumPy itself, for settings."""

    def hybrid_forward(self, F, x):
        return F.relu(x) * float(np.sqrt(2))


def in_a_function(F, x):
    return F.np.tanh(x.as_np_ndarray()).as_nd_ndarray()


class CallsItInAFunction(gluon.HybridBlock):
    def hybrid_forward(self, F, x):
        return in_a_function(F, x)


def network(kind):
    mx.random.seed(0)
    net = in_sequence(nn.Dense(4), kind(), nn.Dense(3))
    net.initialize(mx.init.Uniform(1))
    return net


def state(net):
    return {
        place: (np.dtype(p.dtype).name, p.data().asnumpy().tobytes(), sorted(vars(p)))
        for place, p in net._collect_params_with_prefix().items()
    }, [sorted(vars(block)) for block in (net, *net)]


@EACH_WAY
def test_a_block_that_is_decorated_for_the_numpy_interface_is_refused_at_the_cast(way):
    net = network(Decorated)
    for parameter in net.collect_params().values():
        parameter.shape = (*(parameter.shape[:1]), *(4,) * (len(parameter.shape) - 1))
    for parameter in net.collect_params().values():
        parameter._finish_deferred_init()
    before = state(net)
    with pytest.raises(PrecisionError, match="use_np:") as caught:
        WAYS[way](net)
    assert f"{net[1].name} (Decorated)" in str(caught.value)
    assert "Nothing was changed" in str(caught.value)
    assert state(net) == before


@EACH_WAY
def test_a_network_made_or_cast_under_set_np_is_refused_at_the_cast(way):
    with mx.util.np_array(active=True):
        net = network(nn.Flatten)
        net(mx.np.array(VALUES))
        with pytest.raises(PrecisionError, match=r"mx\.np arrays|set_np"):
            WAYS[way](net)
        expected = net(mx.np.array(VALUES)).asnumpy()
    with pytest.raises(PrecisionError, match=r"has parameters that are mx\.np arrays"):
        WAYS[way](net)
    with mx.util.np_array(active=True):
        assert np.array_equal(net(mx.np.array(VALUES)).asnumpy(), expected)
        later = nn.Dense(3)
        later.initialize()
        with pytest.raises(PrecisionError, match="set_np"):
            WAYS[way](later)
        assert "hybrid_forward" not in vars(later)


@pytest.mark.parametrize("kind", [CallsNumPy, CallsExtension, Decorated])
def test_a_kept_block_may_call_it(kind):
    net = network(kind)
    report = amp.autocast(net, "float16", keep_fp32=(net[1],))
    assert net[1].name in report.kept_fp32
    if kind is not Decorated:
        assert net(mx.nd.array(VALUES)).dtype == np.float32


@EACH_WAY
@BOTH
@pytest.mark.parametrize("kind", [CallsNumPy, CallsExtension, CallsItInAFunction])
def test_a_network_that_calls_it_is_restored_before_the_error(kind, way, hybridize):
    net, again = network(kind), network(kind)
    for one in (net, again):
        mx.random.seed(0)
        one(mx.nd.array(VALUES))
    before = state(again)
    WAYS[way](net)
    net.hybridize(hybridize)
    with pytest.raises(PrecisionError, match=r"received a call of F\.npx?, .*keep_fp32"):
        net(mx.nd.array(VALUES))
    net.hybridize(False)
    assert state(net)[0] == before[0]
    assert all("hybrid_forward" not in vars(block) for block in (net, *net))
    expected = again(mx.nd.array(VALUES)).asnumpy()
    assert np.array_equal(net(mx.nd.array(VALUES)).asnumpy(), expected)


def test_a_trained_network_keeps_its_cast_when_it_first_asks_later():
    class Later(gluon.HybridBlock):
        wants = False

        def hybrid_forward(self, F, x):
            return in_a_function(F, x) if self.wants else F.tanh(x)

    net = network(Later)
    mpgluon.cast_block(net)
    net(mx.nd.array(VALUES))
    net[1].wants = True
    with pytest.raises(PrecisionError, match=r"received a call of F\.np"):
        net(mx.nd.array(VALUES))
    assert net[0].weight.dtype == "float16"


@EACH_WAY
def test_calls_of_numpy_itself_are_accepted(way):
    net = network(OwnArrays)
    WAYS[way](net)
    assert net(mx.nd.array(VALUES)).dtype == np.float32
