"""Mixed precision by hand, with FP32 master weights and gradients as parameters of their own.

::

    mpgluon.cast_block(net)
    model_params, master_params = prep_param_lists(net)
    trainer = gluon.Trainer(master_params, "sgd", {"learning_rate": 0.1})
    with autograd.record():
        loss = loss_fn(net(images), labels) * scale
    loss.backward()
    model_grads_to_master_grads(model_params, master_params)
    trainer.step(batch_size * scale)
    master_params_to_model_params(model_params, master_params)

The weights equal, bit for bit, the ones with ``multi_precision=True`` and :mod:`mpgluon.amp`, but
no step is skipped after an overflow. The names are from Apex's ``fp16_utils``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from mpgluon.base.blocks import arrays_of, blocks_of, set_value, shape_of
from mpgluon.cast.block import cast_block
from mpgluon.cast.fp32 import format_of, fp32_value, known
from mpgluon.cast.plan import BATCH_NORMS
from mpgluon.formats.float_format import FLOAT32
from mpgluon.kernels.dtypes import cast, round_array

import mxnet as mx
from mxnet import gluon

__all__ = [
    "BN_convert_float",
    "bn_to_float32",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
]

Net = TypeVar("Net", bound=gluon.Block)
Parameters = list[gluon.Parameter]


def prep_param_lists(net: gluon.Block) -> tuple[Parameters, Parameters]:
    """Return the trained parameters of a network, and an FP32 master of each.

    Parameters
    ----------
    net : gluon.Block
        With initialized parameters of any format; frozen ones (``grad_req="null"``) are left out.

    Returns
    -------
    model_params, master_params : list of gluon.Parameter
        In the same order. A master is on the same devices, has the FP32 value from before the
        cast where it is known, and can be given to a ``gluon.Trainer``.

    Raises
    ------
    ValueError
        If no parameter is trained.
    """
    model_params = [p for p in net.collect_params().values() if p.grad_req != "null"]
    if not model_params:
        raise ValueError(f"{net.name} has no parameter to train: all are frozen (grad_req='null')")
    return model_params, [_master_of(parameter) for parameter in model_params]


def _master_of(parameter: gluon.Parameter) -> gluon.Parameter:
    master = gluon.Parameter(
        f"{parameter.name}_master",
        shape=shape_of(parameter),
        dtype="float32",
        lr_mult=parameter.lr_mult,
        wd_mult=parameter.wd_mult,
    )
    master.initialize(mx.init.Zero(), ctx=parameter.list_ctx())
    value = fp32_value(parameter.list_data()[0], known(parameter), format_of(parameter))
    set_value(master, value)
    return master


def model_grads_to_master_grads(
    model_params: Sequence[gluon.Parameter], master_params: Sequence[gluon.Parameter]
) -> None:
    """Copy gradients into the masters' gradients, in FP32; exact. Does not wait.

    Where ``backward`` has not written a gradient since the last call, the master's stays stale,
    which ``trainer.step`` reports as usual.
    """
    for model, master in _pairs(model_params, master_params):
        arrays = zip(model.list_data(), model.list_grad(), master.list_data(), master.list_grad())
        for weight, gradient, master_weight, master_gradient in arrays:
            if weight._fresh_grad:
                dense = gradient.as_nd_ndarray().tostype("default")
                cast(dense, "float32").copyto(master_gradient.as_nd_ndarray())
                weight._fresh_grad, master_weight._fresh_grad = False, True


def master_params_to_model_params(
    model_params: Sequence[gluon.Parameter], master_params: Sequence[gluon.Parameter]
) -> None:
    """Round the masters into the parameters, to nearest even. Does not wait."""
    for model, master in _pairs(model_params, master_params):
        fmt = format_of(model)
        for weight, value in zip(arrays_of(model), arrays_of(master)):
            value.copyto(weight) if fmt == FLOAT32 else round_array(value, fmt, out=weight)


def _pairs(
    model_params: Sequence[gluon.Parameter], master_params: Sequence[gluon.Parameter]
) -> list[tuple[gluon.Parameter, gluon.Parameter]]:
    if [shape_of(p) for p in model_params] != [shape_of(p) for p in master_params]:
        raise ValueError(
            f"{len(model_params)} parameters and {len(master_params)} masters do not belong "
            "together; pass both lists as prep_param_lists returned them"
        )
    return list(zip(model_params, master_params))


def bn_to_float32(net: Net) -> Net:
    """Cast the parameters and statistics of every BatchNorm in a network to FP32, in place.

    MXNet's BatchNorm accepts no other format. ``net.cast`` and ``mpgluon.cast_block`` keep it FP32
    themselves; a loop that casts the parameters does not.

    Returns
    -------
    gluon.Block
        ``net``.
    """
    for block in blocks_of(net):
        if isinstance(block, BATCH_NORMS):
            block.cast("float32")
    return net


BN_convert_float = bn_to_float32  # Apex's name


def network_to_half(net: Net) -> Net:
    """Cast a network to float16 in place, BatchNorm kept in FP32: :func:`mpgluon.cast_block`.

    Returns
    -------
    gluon.Block
        ``net``, which takes FP32 or float16 input and returns FP32.

    Raises
    ------
    PrecisionError
        As for ``cast_block``.
    """
    cast_block(net)
    return net
