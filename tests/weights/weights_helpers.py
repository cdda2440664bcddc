"""MXNet's operators for the networks written by hand, and how far right results may be apart."""

from mpgluon import FloatFormat, round_to

import mxnet as mx
import numpy as np
from torchvision_by_hand import EPSILON, run


class MxnetOperators:
    """The few operators that the networks need, on NDArrays."""

    array = staticmethod(lambda values: mx.nd.array(values, dtype="float32"))
    numpy = staticmethod(lambda values: values.asnumpy())

    @staticmethod
    def conv(x, weight, bias=None, *, stride=1, groups=1, pad=None):
        parameters = (weight,) if bias is None else (weight, bias)
        pads = tuple(size // 2 if pad is None else pad for size in weight.shape[2:])
        options = {"kernel": weight.shape[2:], "stride": (stride, stride), "pad": pads}
        options |= {"num_filter": len(weight), "num_group": groups, "no_bias": bias is None}
        return mx.nd.Convolution(x, *parameters, **options)

    @staticmethod
    def pad(x, before, after):
        width = (0, 0, 0, 0, before, after, before, after)
        return mx.nd.pad(x, mode="constant", pad_width=width, constant_value=0)

    @staticmethod
    def norm(x, weight, bias, mean, var, *, epsilon=EPSILON):
        gain = (weight / (var + epsilon).sqrt()).reshape((1, -1, 1, 1))
        return x * gain + (bias.reshape((1, -1, 1, 1)) - mean.reshape((1, -1, 1, 1)) * gain)

    @staticmethod
    def max_pool(x, size, stride, pad):
        options = {"kernel": (size, size), "stride": (stride, stride), "pad": (pad, pad)}
        return mx.nd.Pooling(x, pool_type="max", **options)

    @staticmethod
    def dense(x, weight, bias):
        return mx.nd.dot(x, weight, transpose_b=True) + bias

    relu = staticmethod(mx.nd.relu)
    relu6 = staticmethod(lambda x: x.clip(0, 6))
    mean = staticmethod(lambda x: x.mean(axis=(2, 3)))
    flat = staticmethod(mx.nd.Flatten)


def distance(one, other):
    return float(np.linalg.norm(one.astype(np.float64) - other))


def tolerance(network, state, pixels):
    """Return how far two right FP32 computations of the same network can be apart.

    It is four times the effect of rounding every weight to 18 bits on the logits. That perturbs
    each product by 2**-18 at random; adding K products in FP32, in whatever order, perturbs a sum
    no more than sqrt(K / 2) * 2**-24 does each product, which is less for K up to 2 * 64**2 (4,608
    is the longest sum of a convolution here, and a dense layer's is added in many parts). Four,
    because two computations are compared, and each rounds in BatchNorm too.
    """
    eighteen = FloatFormat("18 bits", significand_bits=18, exponent_bits=8)
    rounded = {n: round_to(v, eighteen) if v.ndim > 1 else v for n, v in state.items()}
    reference = run(MxnetOperators, network, state, pixels)
    return 4 * distance(run(MxnetOperators, network, rounded, pixels), reference)
