"""Changes that could have saved a step that overflowed, tried on it one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Optional

from mpgluon.cast.block import NORMALIZATION_LAYERS
from mpgluon.cast.forward import forward_of
from mpgluon.errors import MpgluonError
from mpgluon.formats.loss_scale import DynamicLossScale
from mpgluon.formats.policy import Policy
from mpgluon.graph.operators import Rule, one_name, rule_of
from mpgluon_tools.diagnostics.overflow import FoundOverflow
from mpgluon_tools.diagnostics.scales import loss_scale_code
from mpgluon_tools.recorder.steps.recorded_network import BlockCast, code_of, lies_in, paths_of
from mpgluon_tools.recorder.steps.step_bench import Casts, StepBench

import mxnet as mx
import numpy as np
from mxnet import gluon

__all__ = ["Cure", "Cures"]

_TRIALS = 4  # of operators or layers in FP32, one after the other
_SMALLEST_SCALE = 2.0**-24
_ERRORS = (mx.MXNetError, MpgluonError)  # that a step can raise
_DTYPES = {
    "mixed_float16": '"float16"',
    "mixed_bfloat16": '"bfloat16"',
    "params=bfloat16,compute=bfloat16": '"bfloat16"',
}


@dataclass(frozen=True)
class Cure:
    """A change that was tried on the step.

    Attributes
    ----------
    name : str
    saves : bool
        Whether losses and gradients are finite with it.
    code : str
        How to write it; ``"-"`` if it saves nothing.
    error : str
        Why the step could not run with it; empty if it ran.
    """

    name: str
    saves: bool
    code: str
    error: str = ""


class Cures:
    """Changes that are tried on a recorded step, one by one.

    Iterating over them tries smaller loss scales, FP32 in places, and other formats. In FP32 are
    first the operator that overflowed, then its layer, at last the network.

    Parameters
    ----------
    bench : StepBench
        After a run with the recorded settings.
    overflow : FoundOverflow, optional
        Where the step overflowed; without it no operator and no layer is tried.
    """

    def __init__(self, bench: StepBench, overflow: Optional[FoundOverflow]) -> None:
        self._bench, self._overflow = bench, overflow
        self._casts, self._scale = bench.step.settings.casts, bench.step.loss_scale

    def __iter__(self) -> Iterator[Cure]:
        yield from self._smaller_scales()
        if not self._casts:
            return
        yield from self._operators_in_fp32()
        yield from self._layers_in_fp32()
        policies = {cast.policy.product_dtype for cast in self._casts}
        if policies != {"bfloat16"}:
            # Emulated: the same result on every processor.
            bfloat16 = (BlockCast("", Policy.parse("emulated_bfloat16"), ()),)
            code = 'amp.autocast(net, "bfloat16"), amp.init_trainer(trainer, "none")'
            yield self._cure("bfloat16, no loss scale", bfloat16, 1.0, code)
        yield self._cure("all in FP32, no loss scale", (), 1.0, "no cast")

    def _smaller_scales(self) -> Iterator[Cure]:
        """Try half the loss scale, and if that is too large, find the largest that is not."""
        half = self._scale / 2
        cure = self._scaled(half, "half the loss scale")
        if cure.saves and half >= DynamicLossScale().min_scale:
            cure = replace(cure, code=f"{cure.code}  # a dynamic one does so by itself")
        yield cure
        if cure.saves or cure.error or half <= _SMALLEST_SCALE:
            return
        good, bad = _SMALLEST_SCALE, half  # powers of two
        cure = self._scaled(good)
        if not cure.saves:
            yield replace(cure, name=f"any loss scale down to 2^{round(np.log2(good))}")
            return
        while bad > 2 * good:
            middle = good * 2.0 ** (round(np.log2(bad / good)) // 2)
            trial = self._scaled(middle)
            if trial.saves:
                good, cure = middle, trial
            else:
                bad = middle
        yield cure

    def _scaled(self, loss_scale: float, name: str = "the largest loss scale that fits") -> Cure:
        code = f"amp.init_trainer(trainer, {loss_scale_code(loss_scale)})"
        return self._cure(f"{name}: {loss_scale:g}", self._casts, loss_scale, code)

    def _operators_in_fp32(self) -> Iterator[Cure]:
        """Try the operator in FP32; if another overflows then, that too."""
        now, operators = self._overflow, list[tuple[str, str]]()
        while now is not None and _may_be_fp32(now) and len(operators) < _TRIALS:
            operators.append((paths_of(self._bench.net)[now.block], one_name(now.operator)))
            casts = tuple(cast.keeping(operators=operators) for cast in self._casts)
            names = [f"{name} of {code_of(self._bench.net, path)}" for path, name in operators]
            yield (cure := self._cure(f"{', '.join(names)} in FP32", casts, self._scale))
            now = None if cure.saves or cure.error else self._find(casts)

    def _layers_in_fp32(self) -> Iterator[Cure]:
        """Try the layer in FP32; if what follows it overflows then, that too.

        Where a gradient overflowed between two layers, they are tried together: it is in FP32 only
        if both are.
        """
        net, kept = self._bench.net, list[str]()
        now, before = self._overflow, self._casts
        for _ in range(_TRIALS):
            for layer in () if now is None else (now.block, now.after):
                path = "" if layer is None else paths_of(net)[layer]
                if path and not any(lies_in(path, block) for block in kept):
                    kept.append(path)
            casts = tuple(cast.keeping(kept) for cast in self._casts)
            if casts == before:
                return
            names = ", ".join(code_of(net, path) for path in kept)
            yield (cure := self._cure(f"{names} in FP32", casts, self._scale))
            now, before = None if cure.saves or cure.error else self._find(casts), casts

    def _find(self, casts: Casts) -> Optional[FoundOverflow]:
        """Return the overflow under these casts; None if there is none or it cannot be located."""
        try:
            return self._bench.find(casts, self._scale)
        except _ERRORS:
            _discard_errors()
            return None

    def _cure(self, name: str, casts: Casts, loss_scale: float, code: str = "") -> Cure:
        """Try a change; by default its code is the code of the casts that it changes."""
        try:
            saved = self._bench.is_saved(casts, loss_scale)
        except _ERRORS as error:  # such as of an operator that does not have the format
            _discard_errors()
            return Cure(name, False, "-", error=str(error).strip().splitlines()[-1])
        if not saved:
            return Cure(name, False, "-")
        changed = [_code_of_cast(self._bench.net, c) for c in casts if c not in self._casts]
        return Cure(name, True, code or "; ".join(changed))


def _discard_errors() -> None:
    """Wait for operators queued after one that failed; later trials would get its error."""
    with suppress(mx.MXNetError):
        mx.nd.waitall()


def _may_be_fp32(overflow: FoundOverflow) -> bool:
    """Whether a rule for the operator in the block, as the network is cast now, could help."""
    forward = forward_of(overflow.block)
    return (
        bool(overflow.operator)
        and forward is not None
        and forward.plan.is_governed
        and not forward.kept
        and rule_of(overflow.operator) not in (Rule.MOVE, Rule.OTHER)
        and forward.plan.rules.get(one_name(overflow.operator)) is not Rule.FLOAT32
    )


def _code_of_cast(net: gluon.Block, cast: BlockCast) -> str:
    """Return the call that makes a cast that the network has now."""
    is_cast_block = cast.policy.param_dtype != "float32"
    blocks = {path: block for block, path in paths_of(net).items() if lies_in(path, cast.block)}
    norms = {path for path, block in blocks.items() if isinstance(block, NORMALIZATION_LAYERS)}
    default = []
    if not is_cast_block:
        left_out = norms  # autocast computes them in FP32 in any case
    elif norms <= set(cast.kept):
        left_out, default = norms, ["*mpgluon.NORMALIZATION_LAYERS"]
    else:
        left_out = set()
    entries = [
        *default,
        *(
            code_of(net, path)
            for path in cast.kept
            if path not in left_out and path.rpartition(".")[0] not in cast.kept
        ),
        *_operator_texts(net, cast, cast.operators_fp32),
    ]
    arguments = [code_of(net, cast.block)]
    dtype = _DTYPES.get(str(cast.policy), f'mpgluon.Policy.parse("{cast.policy}")')
    if str(cast.policy) != "float16":
        arguments.append(dtype)
    if entries != default:
        opening, closing = "()" if default else "[]"
        arguments.append(f"keep_fp32={opening}{', '.join(entries)}{closing}")
    if cast.operators_16:
        texts = _operator_texts(net, cast, cast.operators_16)
        arguments.append(f"compute_16=[{', '.join(texts)}]")
    return f"{'mpgluon.cast_block' if is_cast_block else 'amp.autocast'}({', '.join(arguments)})"


def _operator_texts(
    net: gluon.Block, cast: BlockCast, named: tuple[tuple[str, str], ...]
) -> list[str]:
    """Return operators as ``keep_fp32`` takes them, as text in Python."""
    governed = {
        path
        for block, path in paths_of(net).items()
        if lies_in(path, cast.block)
        and (forward := forward_of(block)) is not None
        and forward.plan.is_governed
        and not forward.kept
    }
    texts = []
    for operator in dict.fromkeys(operator for _, operator in named):
        paths = [path for path, other in named if other == operator]
        if len(paths) > 1 and governed <= set(paths):  # it was named without a block
            texts.append(f'"{operator}"')
            continue
        places = [path.removeprefix(cast.block).lstrip(".") for path in paths]
        texts += [
            f'"{place}:{operator}"' if place else f'f"{{{code_of(net, path)}.name}}:{operator}"'
            for path, place in zip(paths, places)
        ]
    return texts
