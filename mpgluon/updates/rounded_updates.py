"""Updates of 16-bit weights without masters: three ways to round them.

MXNet's optimizer updates the FP32 array that holds a bfloat16 weight, and the result is rounded.
To nearest, an update below half a unit in the weight's last place is lost, each time. Stochastic
rounding keeps it in the mean. Kahan's compensation keeps the rounding error in the same format, and
the next update begins with it. float16 weights are none of this module's: MXNet updates float16
arrays itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Optional

from mpgluon.cast.fp32 import format_of
from mpgluon.errors import TrainerStateError
from mpgluon.formats.float_format import FLOAT16, FLOAT32
from mpgluon.formats.loss_scale import whole_number
from mpgluon.kernels.dtypes import round_array, round_stochastically
from mpgluon.updates import gluon_trainer
from mpgluon.updates.updater import Updates

import mxnet as mx
from mxnet import gluon
from mxnet.ndarray import NDArray

__all__ = ["NEAREST", "RoundedUpdates", "UpdateRounding", "check_rounding", "grid_weights",
           "rounding_of", "validated_rounding"]  # fmt: skip

_WAYS = ("nearest", "stochastic", "kahan")


@dataclass(frozen=True)
class UpdateRounding:
    """How updates are rounded, and what stochastic rounding has counted so far.

    Attributes
    ----------
    way : {"nearest", "stochastic", "kahan"}
    seed : int
        Seed of stochastic rounding.
    steps : int
        The number of updates so far; a skipped step is none.
    """

    way: str = "nearest"
    seed: int = 0
    steps: int = 0

    def __post_init__(self) -> None:
        if self.way not in _WAYS:
            raise ValueError(f"update_rounding is one of {', '.join(_WAYS)}; received {self.way!r}")
        object.__setattr__(self, "seed", whole_number("rounding_seed", self.seed, least=0))


NEAREST = UpdateRounding()


def grid_weights(parameters: Sequence[gluon.Parameter]) -> list[gluon.Parameter]:
    """Return the trained parameters that are FP32 arrays of another format's numbers."""
    trained = [parameter for parameter in parameters if parameter.grad_req != "null"]
    return [p for p in trained if format_of(p) not in (FLOAT16, FLOAT32)]


def check_rounding(trainer: gluon.Trainer, rounding: UpdateRounding) -> None:
    """Refuse to round otherwise than to nearest where there is nothing to round.

    Raises
    ------
    ValueError
        If the Trainer has no bfloat16 weights, or masters.
    """
    if rounding.way == NEAREST.way or rounding_of(trainer) is not None:
        return
    why = (
        "the optimizer has multi_precision=True and updates FP32 masters"
        if gluon_trainer.optimizer_of(trainer).multi_precision
        else "this Trainer trains none; cast the network before, with "
        'mpgluon.cast_block(net, "bfloat16")'
    )
    raise ValueError(
        f"update_rounding={rounding.way!r} is for bfloat16 weights without masters, and {why}"
    )


class RoundedUpdates(Updates):
    """Applies an optimizer on one device, and rounds its results for bfloat16 weights.

    Parameters
    ----------
    former : Updater
        The updater to replace; its states are taken over.
    parameters : sequence of gluon.Parameter
        The Trainer's parameters, by index.

    Attributes
    ----------
    rounding : UpdateRounding
    numbers : dict from a parameter's index to int
        Part of the random key of each array: its index, unless a checkpoint has another number.
    extra : dict from a parameter's index to NDArray
        Compensations: what rounding has cut off and the weight still lacks. FP32 arrays of the
        weight's format.

    References
    ----------
    Zamirai et al., "Revisiting BFloat16 training", 2020, 3; Kahan, "Further remarks on reducing
    truncation errors", 1965.
    """

    extra_name = "compensation"

    def __init__(self, former: mx.optimizer.Updater, parameters: Sequence[gluon.Parameter]) -> None:
        super().__init__(former, parameters)
        self.rounding = NEAREST
        self.numbers = {index: index for index in range(len(parameters))}

    def __call__(
        self, index: Sequence[int], grad: Sequence[NDArray], weight: Sequence[NDArray]
    ) -> None:
        """Update weights and round them; neither waits nor changes a gradient."""
        formats = {i: format_of(self._parameters[i]) for i in index}
        pairs = [
            (i, w.as_nd_ndarray())
            for i, w in zip(index, weight)
            if formats[i] not in (FLOAT16, FLOAT32)
        ]
        self.rounding = replace(self.rounding, steps=self.rounding.steps + 1)
        if self.rounding.way == "kahan":
            for i, w in pairs:
                self._compensate(i, w)
        super().__call__(index, grad, weight)
        if self.rounding.way == "stochastic":
            for fmt in {formats[i] for i, _ in pairs}:
                group = [(i, w) for i, w in pairs if formats[i] == fmt]
                key = (self.rounding.seed, self.rounding.steps)
                keys = [(*key, self.numbers[i]) for i, _ in group]
                round_stochastically([w for _, w in group], fmt, keys)
            return
        for i, w in pairs:
            exact = w.copy() if self.rounding.way == "kahan" else w
            round_array(w, formats[i], out=w)
            if exact is not w:
                exact -= w
                self.extra[i] = round_array(exact, formats[i], out=exact)

    def _compensate(self, index: int, weight: NDArray) -> None:
        """Add the compensation to a weight, before the update, which begins with the sum.

        A weight that half of the compensation changes was written since, and is left as it is.
        """
        if index not in self.extra:
            return
        fmt = format_of(self._parameters[index])
        lacks = self.extra.pop(index).as_in_context(weight.ctx)
        nearby = lacks / 2  # each new array costs more time than the arithmetic
        nearby += weight
        round_array(nearby, fmt, out=nearby)
        is_its_own = mx.nd.broadcast_equal(nearby, weight, out=nearby)
        lacks += weight
        mx.nd.where(is_its_own, lacks, weight, out=weight)

    def get_states(self, dump_optimizer: bool = False) -> bytes:
        """Return the states for ``trainer.save_states``."""
        if self.extra:
            raise TrainerStateError(
                "trainer.save_states has no place for what Kahan's compensation keeps; save with "
                "mpgluon.save_checkpoint"
            )
        content: bytes = super().get_states(dump_optimizer)
        return content

    def export_rounding(self, names: dict[int, str]) -> dict[str, Any]:
        """Return the state of the rounding for a checkpoint, without the compensations."""
        return {**asdict(self.rounding), "numbers": {names[i]: n for i, n in self.numbers.items()}}


def rounding_of(trainer: gluon.Trainer) -> Optional[UpdateRounding]:
    """Return how updates of bfloat16 weights are rounded; ``None`` with masters, or no weights."""
    masters = gluon_trainer.optimizer_of(trainer).multi_precision
    if masters or not grid_weights(gluon_trainer.parameters_of(trainer)):
        return None
    updater = gluon_trainer.updaters_of(trainer)[0]
    return updater.rounding if isinstance(updater, RoundedUpdates) else NEAREST


def validated_rounding(
    trainer: gluon.Trainer, of_file: Optional[dict[str, Any]], indices: dict[str, int]
) -> tuple[Optional[UpdateRounding], dict[int, int]]:
    """Return how updates are rounded after loading, and the numbers of the arrays.

    Unless both the file and the Trainer round updates, the Trainer keeps its own way.
    """
    now = rounding_of(trainer)
    if of_file is None or now is None:
        return now, {}
    numbers = {indices[name]: n for name, n in of_file["numbers"].items() if name in indices}
    rounding = UpdateRounding(of_file["way"], of_file["seed"], of_file["steps"])
    if (rounding.way, rounding.seed) != (now.way, now.seed):
        raise ValueError(
            f"its updates were rounded with update_rounding={rounding.way!r}, "
            f"rounding_seed={rounding.seed}, and this Trainer's with {now.way!r}, {now.seed}; call "
            "amp.init_trainer as before saving"
        )
    return rounding, numbers
