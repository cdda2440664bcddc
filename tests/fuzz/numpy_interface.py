"""Expressions of ``mx.nd``, written for MXNet's NumPy interface with the same operators.

Works on the text of :mod:`fuzz.random_networks`, not on any Python. Operators that the interface
lacks stay ``mx.nd``'s, between ``as_nd_ndarray()`` and ``as_np_ndarray()``.
"""

from __future__ import annotations

import re

__all__ = ["ABSENT", "in_numpy"]

ABSENT = ("InstanceNorm", "GroupNorm", "HuberLoss", "KLDivLoss", "Cell(", "BatchNormReLU")
"""Parts of Gluon that fail with arrays of ``mx.np``; the last one leaves its ReLU out."""

_SAME_NAME = "abs arange arctan argmax array clip cos cumsum exp expand_dims flip log max maximum"
_SAME_NAME += " mean ones reshape sqrt square tanh where zeros zeros_like"
_SAME_NAME_IN_NPX = "batch_dot log_softmax one_hot relu sigmoid smooth_l1 softmax topk"
_NAMES = {
    **{name: f"np.{name}" for name in _SAME_NAME.split()},
    **{name: f"npx.{name}" for name in _SAME_NAME_IN_NPX.split()},
    "Activation": "npx.activation",
    "FullyConnected": "npx.fully_connected",
    "LeakyReLU": "npx.leaky_relu",
    "SequenceMask": "npx.sequence_mask",
    "broadcast_add": "np.add",
    "broadcast_div": "np.divide",
    "broadcast_greater": "np.greater",
    "broadcast_maximum": "np.maximum",
    "broadcast_mul": "np.multiply",
    "broadcast_sub": "np.subtract",
    "elemwise_add": "np.add",
    "flatten": "npx.batch_flatten",
    "norm": "np.linalg.norm",
}
_OTHER_ARGUMENTS = (
    (r"F\.concat\(([\w, ]+), dim=", r"F.np.concatenate([\1], axis="),
    *(
        (rf"F\.Concat\(([\w, ]+), dim={k}\)", rf"F.np.{letter}stack([\1])")
        for k, letter in enumerate("vhd")
    ),
    *(
        (rf"F\.SliceChannel\((\w+), num_outputs=2, axis={k}\)", rf"F.np.{letter}split(\1, 2)")
        for k, letter in enumerate("vhd")
    ),
    (r"F\.SliceChannel\((\w+), num_outputs=2, ", r"F.np.split(\1, 2, "),
    (r"F\.split_v2\(", r"F.np.split("),
    (r"F\.stack\(([\w, ]+), axis=", r"F.np.stack([\1], axis="),
    (r"F\.split\((\w+), num_outputs=2, ", r"F.np.split(\1, 2, "),
    (r"F\.cast\((\w+), ", r"F.npx.cast(\1, dtype="),
    (r"(?<![.\w])abs\(", "F.np.abs("),
    (r"(\w+)\.tanh\(\)", r"F.np.tanh(\1)"),
    (r"'tanh'\)(?=\))", "lambda F, x: F.np.tanh(x))"),
    (r"(\w+)\.reshape\(\(0, 0, -1\)\)", r"F.npx.reshape(\1, (-2, -2, -1))"),
    (
        r"F\.slice_like\((\w+), (\w+)\.(.*)\)$",
        r"F.slice_like(\1.as_nd_ndarray(), \2.as_nd_ndarray().\3).as_np_ndarray()",
    ),
    (
        r"F\.(L2Normalization|BlockGrad|identity|softsign|amp_cast|argsort|shape_array|size_array)"
        r"\((\w+)((?:, [\w=-]+'?\w*'?)*)\)",
        r"F.\1(\2.as_nd_ndarray()\3).as_np_ndarray()",
    ),
    (
        r"F\.add_n\((\w+), (\w+), (\w+)\)",
        r"F.add_n(*(one.as_nd_ndarray() for one in (\1, \2, \3))).as_np_ndarray()",
    ),
)


def in_numpy(text: str) -> str:
    """Return an expression of values, a layer, a loss or a helper, for arrays of ``mx.np``."""
    for pattern, replacement in _OTHER_ARGUMENTS:
        text = re.sub(pattern, replacement, text)
    text = re.sub(r"(?<!\))\.slice_axis\(axis=(\d), begin=(\d+), end=(\d+)\)", _part, text)
    return re.sub(r"\b(F|mx)\.(?:(?<=mx\.)nd\.)?(\w+)\b", _renamed, text)


def _part(found: re.Match[str]) -> str:
    axis, begin, end = map(int, found.groups())
    return f"[{':, ' * axis}{begin}:{end}]"


def _renamed(found: re.Match[str]) -> str:
    namespace, name = found.groups()
    return f"{namespace}.{_NAMES[name]}" if name in _NAMES else found.group()
