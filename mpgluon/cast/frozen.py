"""Frozen weights of layers whose biases are trained.

MXNet's dense layer computes the gradient of its bias together with its weight's; if the
weight has no gradient, the bias's is left as it is: whatever was in its memory. So such a weight
gets a gradient that nothing reads. Convolutions need none of this.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from mxnet import autograd, gluon

__all__ = ["attach_gradients", "remove_gradients"]


def attach_gradients(blocks: Iterable[gluon.Block]) -> list[gluon.Parameter]:
    """Attach a gradient to each frozen matrix of a block that has a trained parameter.

    The matrix stays frozen: its ``grad_req`` is ``"null"``, and no Trainer updates it.

    Parameters
    ----------
    blocks : iterable of Block
        About to compute; blocks inside them are not visited.

    Returns
    -------
    list of Parameter
        The frozen matrices that have values, of blocks with a trained parameter.
    """
    matrices = []
    for block in blocks:
        parameters = block._reg_params.values()
        if len(parameters) < 2 or all(parameter.grad_req == "null" for parameter in parameters):
            continue
        for parameter in filter(_is_frozen_matrix, parameters):
            matrices.append(parameter)
            for array in parameter._data:
                if array.grad is None:
                    with autograd.pause():
                        array.attach_grad()
    return matrices


def remove_gradients(block: gluon.Block) -> None:
    """Remove the gradients that :func:`attach_gradients` attached to a block's own parameters."""
    for parameter in filter(_is_frozen_matrix, block._reg_params.values()):
        if any(array.grad is not None for array in parameter._data):
            # As Gluon does when a parameter becomes frozen.
            parameter._data = [array.detach() for array in parameter._data]


def _is_frozen_matrix(parameter: gluon.Parameter) -> bool:
    return (
        parameter.grad_req == "null"
        and len(parameter.shape or ()) == 2
        and parameter._data is not None
        and parameter._stype == "default"
        and np.dtype(parameter.dtype).kind == "f"
    )
