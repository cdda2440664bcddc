"""Status flags of a network's layers, as IEEE 754 has them for a processor.

Rounding to a narrow format is where an overflow happens, and on a CPU every such rounding is done
by a native operator. It raises a flag of the layer that it computes for, which stays until it is
taken: *overflow*, a finite FP32 result became infinite, and *invalid*, a NaN out of operands
without NaN. Results that became zero can be counted too.

Not watched are a GPU's kernels, MXNet's own operators where there are no native ones, oneDNN's
bfloat16 products, and in imperative runs a NaN, powers and quotients of a number and a float16
array, and the sum of a value's float16 gradients. Passes outside of training raise nothing.

References
----------
IEEE 754-2019, 7.2, 7.4 and 7.5.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Callable, ClassVar, NamedTuple, Optional
from weakref import WeakSet

from mpgluon import kernels

import mxnet as mx
from mxnet import gluon

__all__ = [
    "NO_FLAGS",
    "LayerFlags",
    "Layers",
    "StepFlags",
    "at_layer",
    "joined",
    "layer_option",
    "muted",
    "muted_run",
    "of_processes",
]


class Raised(NamedTuple):
    """Flags of one layer, pass and device.

    Attributes
    ----------
    overflow : bool
        Whether rounding made a finite number infinite; in a format without infinities, the NaN or
        the largest number that it has instead.
    invalid : bool
        Whether an operator made a NaN of operands without NaN.
    underflow : int
        The number of results other than zero that became zero; 0 unless they are counted.
    """

    overflow: bool = False
    invalid: bool = False
    underflow: int = 0

    def __str__(self) -> str:
        words = [name for name in ("overflow", "invalid") if getattr(self, name)]
        words += [f"{self.underflow:,} results to zero"] * bool(self.underflow)
        return ", ".join(words)


@dataclass(frozen=True)
class LayerFlags:
    """The flags that a layer raised during a step.

    Attributes
    ----------
    layer, kind : str
        Name and class of the block.
    device : str
        Such as ``"cpu(0)"``.
    forward, backward : Raised
    rank : int or None
        Rank of its process, after a step that several processes skipped together.
    """

    layer: str
    kind: str
    device: str
    forward: Raised
    backward: Raised
    rank: Optional[int] = None

    def __str__(self) -> str:
        raised = (f"{name}: {getattr(self, name)}" for name in ("forward", "backward"))
        words = "; ".join(text for text in raised if not text.endswith(": "))
        rank = "" if self.rank is None else f", rank {self.rank}"
        return f"{self.layer} ({self.kind}, {self.device}{rank}) {words}"


@dataclass(frozen=True)
class StepFlags:
    """The layers that raised flags during a step, in the order in which they finish forward passes.

    Attributes
    ----------
    layers : tuple of LayerFlags
    usual : frozenset of str
        The layers that overflow in the forward pass of good steps too: where an infinity is
        intended, such as a mask of -1e9 before a softmax.
    unnoted : str
        Why none was raised, if no layer raised a flag and the step was skipped nevertheless.
    largest : float or None
        The largest magnitude that the backward pass rounded to float16, the loss scale included;
        ``None`` unless a :class:`~mpgluon.MeasuredLossScale` asks for it.
    """

    layers: tuple[LayerFlags, ...] = ()
    usual: frozenset[str] = frozenset()
    unnoted: str = ""
    largest: Optional[float] = None

    def __bool__(self) -> bool:
        return bool(self.layers)

    def __iter__(self) -> Iterator[LayerFlags]:
        return iter(self.layers)

    def __str__(self) -> str:
        if not self.layers:
            skipped = f"; the step was skipped nevertheless: {self.unnoted}"
            return f"no layer raised a flag{skipped if self.unnoted else ''}"
        return "\n".join(map(str, self.layers))

    def first(self, direction: str) -> Optional[LayerFlags]:
        """Return the layer where an overflow that matters began; ``None`` if no flag shows one.

        Results that became zero do not count, nor does, in a good step, an overflow.

        Parameters
        ----------
        direction : {"forward", "backward"}
            A pass. Of a forward pass, the first layer that overflowed and does not in good steps,
            else the first one that made a NaN; of a backward pass, the last layer of the network
            that did either.
        """
        if direction == "backward":
            return next((f for f in reversed(self.layers) if any(f.backward[:2])), None)
        overflowed = (f for f in self.layers if f.forward.overflow and f.layer not in self.usual)
        made_nan = (f for f in self.layers if f.forward.invalid)
        return next(overflowed, None) or next(made_nan, None)


NO_FLAGS = StepFlags()


def joined(flags: Sequence[StepFlags]) -> StepFlags:
    """Return the flags of several networks as one value."""
    layers = tuple(layer for one in flags for layer in one.layers)
    unnoted = "" if layers else next((one.unnoted for one in flags if one.unnoted), "")
    return StepFlags(layers, frozenset().union(*(one.usual for one in flags)), unnoted)


def of_processes(flags: Sequence[StepFlags]) -> StepFlags:
    """Return the flags of several processes, by rank, as one value; one process's own unchanged."""
    if len(flags) == 1:
        return flags[0]
    return joined(
        [
            replace(one, layers=tuple(replace(layer, rank=rank) for layer in one.layers))
            for rank, one in enumerate(flags)
        ]
    )


_here = threading.local()  # its ``slot``: of the layer that this thread computes; its ``run``


@contextmanager
def muted() -> Iterator[None]:
    """Mute the flags of this thread's passes through networks: they are of no step."""
    before = muted_run()
    _here.run = object()
    try:
        yield
    finally:
        _here.run = before


def muted_run() -> Optional[object]:
    """Return an object that identifies the current block of `muted`; ``None`` outside of one."""
    return vars(_here).get("run")


@contextmanager
def at_layer(slot: Optional[int]) -> Iterator[None]:
    """Make arrays that this thread rounds raise the flags of a layer, until the block ends."""
    before = vars(_here).get("slot")
    _here.slot = slot if muted_run() is None else None
    try:
        yield
    finally:
        _here.slot = before


def layer_option() -> dict[str, int]:
    """Return the option that lets an operator on arrays raise the flags of the layer at work."""
    slot = vars(_here).get("slot")
    return {} if slot is None else {kernels.LAYER: slot}


class Layers:
    """The layers of a cast network that raise flags.

    Attributes
    ----------
    counts_underflow : bool
        Whether results that become zero are counted.
    measures : bool
        Whether the largest number of backward passes is measured. :meth:`note` sets both.
    """

    _unused: ClassVar[list[int]] = []
    _made: ClassVar[int] = 0

    def __init__(self) -> None:
        self._slots: dict[gluon.Block, int] = {}
        self._order: dict[gluon.Block, None] = {}  # as they finished their first forward passes
        self.counts_underflow = self.measures = False
        self._usual: frozenset[str] = frozenset()
        self._ran_imperatively = False  # since the latest step

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, whose layers have flags of their own."""
        kept = ("counts_underflow", "measures", "_usual")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy."""
        vars(self).update(state, _slots={}, _order={}, _ran_imperatively=False)

    def slot_of(self, block: gluon.Block) -> Optional[int]:
        """Return the number by which native operators know a layer; ``None`` without those."""
        if block not in self._slots and kernels.available():
            slot = self._new_slot()
            if slot is None:
                return None
            self._slots[block] = slot
            weakref.finalize(self, self._unused.append, slot)
            kernels.note_more(slot, underflow=self.counts_underflow, largest=self.measures)
        return self._slots.get(block)

    @classmethod
    def _new_slot(cls) -> Optional[int]:
        if cls._unused:
            slot = cls._unused.pop()
            for device in range(kernels.FLAG_DEVICES):
                kernels.take_flags([slot], device)
                kernels.take_largest([slot], device)
            return slot
        if cls._made == kernels.FLAG_SLOTS:
            return None
        cls._made += 1
        return cls._made - 1

    def finished(self, block: gluon.Block, *, imperatively: bool) -> None:
        """Record that a block has finished a forward pass."""
        if muted_run() is None:
            self._order[block] = None
            vars(_here).setdefault("ran", WeakSet()).add(self)
            self._ran_imperatively |= imperatively

    def slot_by_name(self, blocks: Iterable[gluon.Block]) -> Callable[[str], Optional[int]]:
        """Return a function from the name of a graph's node to the slot of the block that made it.

        Gluon puts the name of the innermost block in front.
        """
        prefixes = sorted(((b.prefix, b) for b in blocks), key=lambda one: -len(one[0]))

        def slot(name: str) -> Optional[int]:
            owner = next((block for prefix, block in prefixes if name.startswith(prefix)), None)
            return None if owner is None else self.slot_of(owner)

        return slot

    @staticmethod
    def of_this_thread() -> list[Layers]:
        """Return the layers of each network that this thread has run, except within `muted`."""
        return list(vars(_here).get("ran", ()))

    def note(
        self, *, counts_underflow: Optional[bool] = None, measures: Optional[bool] = None
    ) -> None:
        """Count results that become zero, measure the largest number, or no longer."""
        before = self.counts_underflow, self.measures
        if counts_underflow is not None:
            self.counts_underflow = counts_underflow
        if measures is not None:
            self.measures = measures
        if before != (self.counts_underflow, self.measures):
            for slot in self._slots.values():
                kernels.note_more(slot, underflow=self.counts_underflow, largest=self.measures)

    def take_largest(
        self,
        devices: Iterable[mx.Context],
        parameters: Optional[Collection[gluon.Parameter]] = None,
    ) -> Optional[float]:
        """Return the largest number that backward passes rounded to float16, and clear it.

        It is the number of the layers that have some of these parameters, or of all layers;
        ``None`` if it is not measured, as on a GPU. The devices must be idle.
        """
        on_cpu = [device.device_id for device in devices if device.device_type == "cpu"]
        if not (self.measures and self._slots and on_cpu):
            return None
        slots = [
            slot
            for block, slot in self._slots.items()
            if parameters is None or any(p in parameters for p in block._reg_params.values())
        ]
        return max(kernels.take_largest(slots, device) for device in on_cpu)

    def flags_of_step(self, devices: Sequence[mx.Context], *, good: bool) -> StepFlags:
        """Return the flags of a step that was good or skipped, and clear them.

        The devices must be idle.
        """
        layers = self._take(devices)
        if good:
            self._usual = frozenset(f.layer for f in layers if f.forward.overflow)
        unnoted = "" if good or layers else self._unnoted(devices)
        self._ran_imperatively = False
        return StepFlags(layers, self._usual, unnoted)

    def _unnoted(self, devices: Sequence[mx.Context]) -> str:
        """Return the reason why a skipped step raised no flag, and what to do."""
        if any(device.device_type != "cpu" for device in devices):
            why = "a GPU's operators raise none"
        elif not kernels.available():
            why = "only native operators raise them, and `mpgluon doctor` says why there are none"
        elif self._ran_imperatively:
            why = "the network ran imperatively, without net.hybridize(), where a NaN is not noted"
        else:
            why = "the loss, the input, or an operator that rounds nothing was not finite"
        return f"{why}; mpgluon.diagnostics.OverflowLocator(net, trainer) finds the layer"

    def _take(self, devices: Iterable[mx.Context]) -> tuple[LayerFlags, ...]:
        """Return the layers that raised flags, and clear these."""
        blocks = [block for block in self._order if block in self._slots]
        slots = [self._slots[block] for block in blocks]
        layers = []
        for device in devices:
            if not slots or device.device_type != "cpu":
                continue
            flags = kernels.take_flags(slots, device.device_id)
            for block, (forward, backward) in zip(blocks, flags):
                if any(forward) or any(backward):
                    passes = [Raised(bool(r & 1), bool(r & 2), n) for r, n in (forward, backward)]
                    of_layer = block.name, type(block).__name__, str(device)
                    layers.append(LayerFlags(*of_layer, passes[0], passes[1]))
        return tuple(layers)
