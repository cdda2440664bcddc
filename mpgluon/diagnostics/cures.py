"""What would have saved a step that overflowed: changes that are tried on it, one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Optional

import numpy as np
from mxnet import gluon

from mpgluon.cast.block import NORMALIZATION_LAYERS
from mpgluon.diagnostics.overflow import FoundOverflow
from mpgluon.diagnostics.recorded_network import BlockCast, code_of, paths_of
from mpgluon.diagnostics.step_bench import StepBench
from mpgluon.errors import PrecisionError
from mpgluon.numerics.policy import Policy

__all__ = ["Cure", "try_cures"]

_AT_MOST_KEPT = 4  # layers that are tried in FP32, one after the other
_SMALLEST_SCALE = 1.0


@dataclass(frozen=True)
class Cure:
    """A change that was tried on the step.

    Attributes
    ----------
    name : str
    saves : bool
        Whether losses and gradients are finite with it.
    code : str
        How to write it.
    """

    name: str
    saves: bool
    code: str


def try_cures(bench: StepBench, found: Optional[FoundOverflow]) -> Iterator[Cure]:
    """Yield smaller loss scales, the layer in FP32, bfloat16 and FP32, each after a trial.

    Parameters
    ----------
    bench : StepBench
    found : FoundOverflow, optional
        Where the step overflowed; without it no layer is tried.
    """
    return _Cures(bench, found).tried()


class _Cures:
    """What would have saved a step, by trial."""

    def __init__(self, bench: StepBench, found: Optional[FoundOverflow]) -> None:
        self._bench, self._found = bench, found
        self._settings, self._scale = bench.step.settings, bench.step.loss_scale

    def tried(self) -> Iterator[Cure]:
        """Try each cure."""
        yield from self._smaller_scales()
        casts = self._settings.casts
        if not casts:
            return
        if self._found is not None:
            yield from self._layers_in_fp32(self._found)
        policies = {cast.policy.compute_dtype for cast in casts}
        if policies != {"bfloat16"}:
            # Emulated: the same result on every processor.
            bfloat16 = (BlockCast("", Policy.parse("emulated_bfloat16"), ()),)
            code = 'amp.autocast(net, "bfloat16"), amp.init_trainer(trainer, "none")'
            yield self._cure("bfloat16, no loss scale", bfloat16, 1.0, code)
        yield self._cure("all in FP32, no loss scale", (), 1.0, "no cast")

    def _smaller_scales(self) -> Iterator[Cure]:
        """Try half the loss scale, and if that is too large, find the largest that is not."""
        half = self._scale / 2
        saved = self._bench.is_saved(self._settings, half)
        code = "a dynamic loss scale does this for the next step"
        yield Cure(f"half the loss scale: {half:g}", saved, code)
        if saved or half <= _SMALLEST_SCALE:
            return
        if not self._bench.is_saved(self._settings, _SMALLEST_SCALE):
            yield Cure(f"any loss scale down to {_SMALLEST_SCALE:g}", False, "-")
            return
        good, bad = _SMALLEST_SCALE, half  # powers of two
        while bad > 2 * good:
            middle = good * 2.0 ** (round(np.log2(bad / good)) // 2)
            if self._bench.is_saved(self._settings, middle):
                good = middle
            else:
                bad = middle
        code = f"mpgluon.DynamicLossScale(init_scale={good:g})"
        yield Cure(f"the largest loss scale that fits: {good:g}", True, code)

    def _layers_in_fp32(self, found: FoundOverflow) -> Iterator[Cure]:
        """Try the layer in FP32; if what follows it overflows then, that too."""
        net, kept = self._bench.net, list[gluon.Block]()
        now: Optional[FoundOverflow] = found
        while now is not None and now.block not in [net, *kept] and len(kept) < _AT_MOST_KEPT:
            kept.append(now.block)
            paths = [paths_of(net)[block] for block in kept]
            casts = self._keeping(paths)
            name = ", ".join(code_of(net, path) for path in paths)
            yield (cure := self._cure(f"{name} in FP32", casts, self._scale, self._code(name)))
            if cure.saves:
                return
            now = self._bench.find(replace(self._settings, casts=casts), self._scale)

    def _keeping(self, paths: Sequence[str]) -> tuple[BlockCast, ...]:
        """Return the casts with more blocks kept in FP32."""
        return tuple(
            cast.keeping(tuple(_inside(cast.block, paths))) for cast in self._settings.casts
        )

    def _code(self, names: str) -> str:
        """Return the call of the cast with more blocks kept, beside those that were."""
        net, (root, policy, kept, operators, _) = self._bench.net, self._settings.casts[0]
        blocks = {path: block for block, path in paths_of(net).items()}
        before = [
            code_of(net, path)
            for path in kept
            if not isinstance(blocks[path], NORMALIZATION_LAYERS)
            and path.rpartition(".")[0] not in kept
        ]
        before += [repr(f"{path or net.name}:{operator}") for path, operator in operators]
        names = ", ".join([*before, names])
        if policy.param_dtype != "float32":
            names = f"(*mpgluon.NORMALIZATION_LAYERS, {names})"
            dtype = "" if policy.param_dtype == "float16" else f'"{policy.param_dtype}", '
            return f"mpgluon.cast_block({code_of(net, root)}, {dtype}keep_fp32={names})"
        dtype = f"mpgluon.{policy!r}" if policy.operand_scaling else f'"{policy.compute_dtype}"'
        return f"amp.autocast({code_of(net, root)}, {dtype}, keep_fp32=[{names}])"

    def _cure(self, name: str, casts: tuple[BlockCast, ...], loss_scale: float, code: str) -> Cure:
        try:
            saved = self._bench.is_saved(replace(self._settings, casts=casts), loss_scale)
        except PrecisionError as error:
            return Cure(name, False, f"refused: {error}")
        return Cure(name, saved, code)


def _inside(block: str, paths: Sequence[str]) -> list[str]:
    """Return the paths that lie in a block."""
    return [path for path in paths if f".{path}.".startswith(f".{block}." if block else ".")]
