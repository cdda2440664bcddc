"""The blocks of a network and their names, and the values and devices of its parameters."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, TypeVar

import mxnet as mx
import numpy.typing as npt
from mxnet import gluon

__all__ = [
    "NamedBlocks",
    "arrays_of",
    "blocks_of",
    "device_ids",
    "device_type_of",
    "empty",
    "empty_gradient",
    "fitting",
    "forget_symbol",
    "interface",
    "is_mxnets_own",
    "is_numpy",
    "living_blocks",
    "put_into_numpy",
    "replace_value",
    "require_values",
    "set_value",
    "shape_of",
]


_Kind = TypeVar("_Kind", bound=gluon.Block)


def living_blocks(kind: type[_Kind]) -> list[_Kind]:
    """Return all blocks of a kind that the program still uses, of any network.

    MXNet keeps no list of blocks, and nothing leads to one from a parameter or from a recorded
    graph. So the garbage collector is asked for the objects that refer to these classes. (It could
    list all objects, but then a tuple that another thread is making fails there: SystemError.)
    """
    classes: list[type] = [kind]
    for one in classes:  # which grows
        classes += one.__subclasses__()
    return [one for one in gc.get_referrers(*set(classes)) if isinstance(one, kind)]


def blocks_of(net: gluon.Block) -> Iterator[gluon.Block]:
    """Yield ``net`` and every block in it once, parents first."""
    seen: set[gluon.Block] = set()
    waiting = [net]
    while waiting:
        block = waiting.pop()
        if block not in seen:
            seen.add(block)
            yield block
            waiting.extend(reversed(list(block._children.values())))


class NamedBlocks:
    """The blocks of a network, found once, with all names that an argument may have for them.

    Parameters
    ----------
    net : gluon.Block

    Attributes
    ----------
    blocks : list of Block
        Each once, parents first.
    """

    def __init__(self, net: gluon.Block) -> None:
        self.net, self.blocks = net, list(blocks_of(net))

    @cached_property
    def by_name(self) -> dict[str, set[gluon.Block]]:
        """The blocks by their names, which several may share, and by their places."""
        by_name = defaultdict(set)
        for block in self.blocks:
            by_name[block.name].add(block)

        def walk(block: gluon.Block, place: str) -> None:
            if place:
                by_name[place].add(block)
            for name, child in block._children.items():
                walk(child, f"{place}.{name}" if place else name)

        walk(self.net, "")
        return dict(by_name)

    def among(self, blocks: Set[gluon.Block]) -> dict[str, set[gluon.Block]]:
        """Return :attr:`by_name` of some of the blocks."""
        chosen = {name: named & blocks for name, named in self.by_name.items()}
        return {name: named for name, named in chosen.items() if named}


def fitting(named: Mapping[str, set[gluon.Block]], text: str) -> set[gluon.Block]:
    """Return the blocks with a name or place, or with one that fits a pattern: ``"*.head.*"``."""
    if text in named or not any(sign in text for sign in "*?["):
        return named.get(text, set())
    return {block for name in named if fnmatchcase(name, text) for block in named[name]}


def device_type_of(net: gluon.Block) -> str:
    """Return the kind of device that a network's parameters are on, or will be."""
    for parameter in net.collect_params().values():
        if parameter._data is not None:
            return str(parameter.list_ctx()[0].device_type)
    return str(mx.current_context().device_type)


def arrays_of(parameter: gluon.Parameter) -> list[mx.nd.NDArray]:
    """Return a parameter's value on each device, as arrays of ``mx.nd`` in either interface.

    They share the memory of the parameter's own. Raises as ``parameter.list_data`` does.
    """
    return [array.as_nd_ndarray() for array in parameter.list_data()]


def shape_of(parameter: gluon.Parameter) -> tuple[int, ...]:
    """Return a parameter's shape, of an imported graph too; () if nothing of it is known.

    Gluon loads values into a SymbolBlock and leaves the ``shape`` of its parameters ``None``.
    """
    if parameter.shape is None and parameter._data is not None:
        return tuple(arrays_of(parameter)[0].shape)
    return tuple(parameter.shape or ())


def forget_symbol(parameter: gluon.Parameter) -> None:
    """Remove a parameter's symbol, which keeps the dtype of the time when it was made."""
    parameter._var = None
    if isinstance(parameter.init, mx.init.Constant):
        # The first symbol has replaced its array by a list, and the next would fail on that.
        parameter.init._kwargs["value"] = parameter.init.value


def set_value(parameter: gluon.Parameter, value: mx.nd.NDArray) -> None:
    """Write an array of ``mx.nd`` to a parameter, which may be one of MXNet's NumPy interface."""
    with_numpy = mx.util.is_np_array() if parameter._data is None else is_numpy(parameter)
    parameter.set_data(value.as_np_ndarray() if with_numpy else value)


def replace_value(parameter: gluon.Parameter, value: mx.nd.NDArray, dtype: npt.DTypeLike) -> None:
    """Give a parameter another value, an array of ``mx.nd``, in that array's dtype.

    It stays on its devices and in its interface, of which MXNet makes no bfloat16 arrays in mx.np.
    """
    devices, in_numpy = parameter.list_ctx(), is_numpy(parameter)
    parameter._data = parameter._grad = None
    parameter._dtype = dtype
    with mx.util.np_array(active=False):
        parameter.initialize(mx.init.Zero(), ctx=devices, force_reinit=True)
        parameter.set_data(value)
    if in_numpy:
        put_into_numpy(parameter)


def put_into_numpy(parameter: gluon.Parameter) -> None:
    """Make the values of a parameter arrays of MXNet's NumPy interface, without a copy."""
    parameter._data = [array.as_np_ndarray() for array in parameter._data]
    parameter._grad = [array.as_np_ndarray() for array in parameter._grad or ()] or None


def empty_gradient(parameter: gluon.Parameter) -> None:
    """Set a parameter's gradient to zero on each device, in either interface."""
    for gradient in parameter.list_grad():  # MXNet's own zero_grad is for mx.nd only
        empty(gradient)


def empty(array: mx.nd.NDArray) -> None:
    """Set an array to zero, in either interface, of any storage."""
    array = array.as_nd_ndarray()
    mx.nd.zeros_like(array, out=array)


def is_mxnets_own(code: Any) -> bool:
    """Whether a class or function is MXNet's own; one that was made from a text has no module."""
    return str(code.__module__).startswith("mxnet.")


def is_numpy(parameter: gluon.Parameter) -> bool:
    """Whether a parameter has values that are arrays of MXNet's NumPy interface."""
    return any(isinstance(array, mx.np.ndarray) for array in parameter._data or ())


@contextmanager
def interface(*, in_numpy: bool) -> Iterator[None]:
    """Switch MXNet's NumPy interface on or off inside the block, in this thread."""
    arrays = mx.util.np_array
    # MXNet allows its shapes to be switched off only while its arrays are.
    with arrays(active=False), mx.util.np_shape(active=in_numpy), arrays(active=in_numpy):
        yield


def device_ids(net: gluon.Block) -> list[int]:
    """Return the numbers of a network's devices."""
    devices = [p.list_ctx() for p in net.collect_params().values() if p._data is not None]
    return [context.device_id for context in devices[0]] if devices else [0]


def require_values(net: gluon.Block, *, with_shapes: bool = True) -> None:
    """Raise ValueError if a parameter has no values.

    Parameters
    ----------
    net : gluon.Block
    with_shapes : bool
        Whether values that wait for the shapes of the first call are missing too.
    """
    empty = [
        name
        for name, parameter in net.collect_params().items()
        if parameter._data is None and (with_shapes or not parameter._deferred_init)
    ]
    if empty:
        raise ValueError(
            f"no values yet: {', '.join(empty[:3])}{', …' if len(empty) > 3 else ''}; initialize "
            "the network (net.initialize()) or load parameters"
            f"{', and call it once on an input' if with_shapes else ''}"
        )
