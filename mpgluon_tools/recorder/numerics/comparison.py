"""Two recordings compared: the first step and tensor whose numbers differ, and by how much."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Union

from mpgluon.errors import CheckpointError
from mpgluon_tools.recorder.numerics.differences import (
    Difference,
    differ,
    difference_of,
    size_of,
    terms_of,
)
from mpgluon_tools.recorder.numerics.files import NumericsStep, Recording, TensorName, read_numerics
from mpgluon_tools.tables import Result, Table, counted

__all__ = ["NumericsComparison", "compare_numerics"]

_SETTINGS = ("loss_scale", "learning_rate", "rescale")
_MOVED = 1e-3  # of the norm, differs if numbers were moved
_TRAINED = ("gradient", "update", "master", "state")  # a frozen parameter has none of these
_PLACES = {
    "input": "before the forward pass",
    "label": "before the forward pass",
    "weight": "before the forward pass",
    "master": "before the forward pass",
    "state": "before the forward pass",
    "activation": "in the forward pass",
    "loss": "in the forward pass",
    "activation gradient": "in the backward pass",
    "gradient": "in the backward pass",
    "running statistic": "after the backward pass",
    "update": "in the update",
}


@dataclass(frozen=True)
class NumericsComparison(Result):
    """Where two recordings part.

    Attributes
    ----------
    step : int or None
        The first recorded step that differs; ``None`` if no step does.
    agrees_until : int or None
        The last recorded step before it.
    difference : Difference or None
        The first tensor that differs in this step, in the order of the step.
    sentence : str
        Where it is and what that means, in words. A cause is named only if the recordings prove it.
    differences : sequence of Difference
        All tensors that differ in this step.
    compared : int
        How many steps both have.
    settings : str
        A sentence with what else differs, such as the processor or the rounding of updates.
    """

    step: Optional[int]
    agrees_until: Optional[int]
    difference: Optional[Difference]
    sentence: str
    differences: Sequence[Difference]
    compared: int
    settings: str = ""

    def table(self, count: int = 20) -> Table:
        """Return the first tensors that differ, in the order of the step."""
        rows = [
            (str(d.id), d.block, d.formats[0], _figure(d.units), _figure(d.relative))
            for d in self.differences[:count]
        ]
        return Table(("tensor", "layer", "format", "units in the last place", "relative"), rows)

    def __str__(self) -> str:
        table = str(self.table()) if self.differences else ""
        return "\n\n".join(filter(None, [self.sentence, self.settings, table]))


def compare_numerics(
    first: Union[str, Path, Recording], second: Union[str, Path, Recording]
) -> NumericsComparison:
    """Find the first step and tensor at which two recordings of `NumericsRecorder` part.

    Steps that both have recorded are compared. Record both with ``every=1`` to know the step; with
    ``arrays`` to have all values of a tensor compared, and not 16.

    Raises
    ------
    CheckpointError
        If no step is recorded in both, or a file is damaged.
    """
    recordings = [
        one if isinstance(one, Recording) else read_numerics(one) for one in (first, second)
    ]
    a, b = recordings
    common = sorted(set(a.numbers) & set(b.numbers))
    if not common:
        raise CheckpointError(
            f"{a.folder} and {b.folder} have no recorded step in common: {_range(a)} and "
            f"{_range(b)}"
        )
    before: Optional[int] = None
    for number in common:
        found = _Steps(a.step(number), b.step(number), before)
        sentence = found.sentence()
        if sentence:
            differences = list(found.differences())
            first_one = differences[0] if differences else None
            settings = _settings(found.a.about, found.b.about)
            return NumericsComparison(
                number, before, first_one, sentence, differences, len(common), settings
            )
        before = number
    words = f"No difference in {len(common)} recorded steps, {common[0]} to {common[-1]}."
    return NumericsComparison(None, before, None, words, (), len(common))


def _settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Return a sentence about other differences of two recordings; empty if there are none."""
    found = list(_different_values(a, b))
    return f"The recordings also differ in: {'; '.join(found)}." if found else ""


def _different_values(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted(a.keys() & b.keys()):  # an older recording has fewer
        one, other = a[key], b[key]
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _different_values(one, other)
        elif one != other:
            yield f"{key.replace('_', ' ')} {one} and {other}"


@dataclass(frozen=True)
class _Steps:
    """The same step in both recordings, and the step before it that was equal."""

    a: NumericsStep
    b: NumericsStep
    before: Optional[int]

    def differences(self) -> Iterator[Difference]:
        return map(self._difference, filter(self._differs, self.a.tensors))

    def _difference(self, name: TensorName) -> Difference:
        terms, size = terms_of(self.a, name), size_of(self.a, name)
        return difference_of(self.a.tensors[name], self.b.tensors[name], terms, size)

    def sentence(self) -> str:
        """Return where the step differs and what that means; empty if it is the same."""
        networks = self._other_networks()
        if networks:
            return f"{self._when()}, {networks}"
        changed = [name for name in self.a.tensors if self._differs(name)]
        missing = min(
            filter(self._is_missing, {**self.a.tensors, **self.b.tensors}),
            key=lambda name: _TRAINED.index(name.kind),
            default=None,
        )
        settings = [s for s in _SETTINGS if self.a.line.get(s) != self.b.line.get(s)]
        first = changed[0] if changed else None
        kinds = ("input", "label", "weight", "master", "state")
        if settings and (first is None or first.kind not in kinds):
            words = ", ".join(
                f"{s} {self.a.line.get(s)} and {self.b.line.get(s)}" for s in settings
            )
            return f"{self._when()}, settings: {words.replace('_', ' ')}."
        if missing is not None and (first is None or first.kind not in kinds):
            return f"{self._when()}, {self._of_missing(missing)}."
        if first is None:
            return ""
        difference = self._difference(first)
        block = f" ({difference.block})" if difference.block else ""
        place = _PLACES[first.kind]
        meaning = self._meaning(first, difference)
        return f"{self._when()}, {place}: {first}{block}: {difference}. {meaning}"

    @property
    def _have_activations(self) -> bool:
        return bool(self.a.of("activation") and self.b.of("activation"))

    def _when(self) -> str:
        if self.before is None:
            return f"Step {self.a.number} (the first that both recorded)"
        if self.before < self.a.number - 1:
            return f"Step {self.a.number} (the recorded step before it, {self.before}, is equal)"
        return f"Step {self.a.number}"

    def _differs(self, name: TensorName) -> bool:
        other = self.b.tensors.get(name)
        return other is not None and differ(self.a.tensors[name], other)

    def _is_missing(self, name: TensorName) -> bool:
        alone = (name in self.a.tensors) != (name in self.b.tensors)
        return alone and name.kind in _TRAINED

    def _of_missing(self, name: TensorName) -> str:
        which = "first" if name in self.a.tensors else "second"
        if name.kind in ("gradient", "update"):
            parameter = f"{name.name} is frozen in the other (its grad_req is 'null'), or not used"
            return f"the {name} is in the {which} recording only: {parameter}"
        other = "second" if which == "first" else "first"
        what = "FP32 master" if name.kind == "master" else "optimizer's array (SGD's is a momentum)"
        return (
            f"the {what} of {name.name} is missing in the {other} recording: the optimizers "
            "differ, or it was lost where the run was continued"
        )

    def _other_networks(self) -> str:
        """Return that the layers are not the same ones, and which; empty if they are."""
        kinds = ("activation", "weight") if self._have_activations else ("weight",)
        a, b = ([t.id for t in step.of(*kinds)] for step in (self.a, self.b))
        if set(a) == set(b):
            return ""
        if {name[:2] for name in a} == {name[:2] for name in b}:
            calls = (max(name.call for name in names) + 1 for names in (a, b))
            return (
                f"the layers are called up to {next(calls)} and {next(calls)} times in a step, as "
                "on another number of devices, or of batches that accumulate."
            )
        only_a = [str(name) for name in a if name not in set(b)]
        only_b = [str(name) for name in b if name not in set(a)]
        words = [
            f"the {which} alone has {', '.join(names[:3])}{', …' * (len(names) > 3)}"
            for which, names in (("first", only_a), ("second", only_b))
            if names
        ]
        return f"the recordings are of different networks: {'; '.join(words)}."

    def _meaning(self, name: TensorName, difference: Difference) -> str:
        """Return the conclusion from the fact that this tensor is the first one that differs."""
        if difference.formats[0] != difference.formats[1]:
            return (
                "One of the two is cast otherwise: a cast, or a layer in FP32, was lost or added."
            )
        between = self.before is not None and self.before < self.a.number - 1
        last = " between the recorded steps: record each of these (every=1) to see where"
        if name.kind == "input":
            return (
                "The inputs are not the same ones, as with another order, augmentation, decoder or "
                "normalization."
            )
        if name.kind == "label":
            return "The labels are not the same ones, while the inputs are."
        if name.kind in ("weight", "master", "state"):
            return self._of_parameters(name, difference, last if between else "")
        if name.kind in ("loss", "gradient") and not self._have_activations:
            return (
                "The activations of this step were not recorded in both: record them "
                "(activations_every=1) to see the layer where this begins."
            )
        if name.kind in ("activation", "loss"):
            return self._of_forward(name, difference)
        if name.kind == "activation gradient":
            return (
                "The layers' results are equal, and what arrived behind this layer: the backward "
                f"pass of what takes its result differs.{_rounding(difference)}"
            )
        if name.kind == "gradient":
            return (
                "The layers' results and their gradients are equal: the backward pass of this "
                f"parameter's layer differs.{_rounding(difference)}"
            )
        if name.kind == "running statistic":
            return (
                "Gradients are equal, and so were the running statistics before the step: this "
                f"layer computes something else.{_rounding(difference)}"
            )
        return (
            "Gradients, weights and the optimizer's arrays are equal, so the optimizer computes "
            "something else."
        )

    def _of_parameters(self, name: TensorName, difference: Difference, between: str) -> str:
        what = {
            "weight": "Parameters",
            "master": "FP32 masters",
            "state": "The optimizer's arrays (such as the momentum)",
        }[name.kind]
        if between:
            return f"{what} parted{between}."
        same_norm = math.isclose(*difference.norms, rel_tol=1e-12)
        if self.before is None:
            began = "what was before it is not recorded in both"
            if self.a.number == 1:
                began = "the runs began, or were continued, with other ones"
        elif self._leaves(name):
            began = (
                f"step {self.before} left equal ones, so they were changed after it, as by loading "
                "a checkpoint, averaging, or code"
            )
        else:
            began = f"step {self.before} computed other ones, or they were changed after it"
        moved = (
            " The norm is the same, as of a transposed or reordered weight."
            if same_norm and name.kind == "weight" and difference.relative > _MOVED
            else ""
        )
        return f"{what} differ before the step: {began}.{moved}"

    def _leaves(self, name: TensorName) -> bool:
        """Whether a step records a parameter's value after it: as its update, or as it is."""
        left = {name._replace(kind=kind) for kind in ("update", "running statistic")}
        return name.kind != "state" and bool(left & self.a.tensors.keys() & self.b.tensors.keys())

    def _of_forward(self, name: TensorName, difference: Difference) -> str:
        if name.kind == "loss":
            return (
                "All layers' results are equal, so the loss is computed otherwise."
                f"{_rounding(difference)}"
            )
        equal = "Inputs and weights" if self.a.of("input") and self.b.of("input") else "Weights"
        first = f"{equal} are equal, and this is the first layer whose result differs"
        if difference.is_mask and "Dropout" in difference.block:
            return f"{first}, in values that one of the two drops: another random state."
        if "Dropout" in difference.block:
            return f"{first}, so it draws another mask, or computes something else."
        if equal == "Weights":
            return (
                f"{first}: on other inputs, which are not recorded, or it computes something else."
            )
        return f"{first}, so it computes something else.{_rounding(difference)}"


def _rounding(difference: Difference) -> str:
    """Return whether rounding can explain a difference; nothing if that is not known."""
    if difference.is_rounding is None and difference.terms:
        return (
            " Too few values are kept to say whether rounding can explain it: record all values, "
            "NumericsRecorder(..., arrays=(step, step))."
        )
    if not difference.terms:
        return ""
    sums = f"sums of {counted(difference.terms, 'number')} in another order differ"
    if difference.is_rounding:
        return (
            f" Rounding can explain it: {sums} as much, as with another processor, library or "
            "number of threads."
        )
    return f" Rounding alone does not explain it: {sums} by less."


def _range(recording: Recording) -> str:
    return f"steps {recording.numbers[0]} to {recording.numbers[-1]}"


def _figure(value: float) -> Any:
    return "-" if math.isnan(value) else f"{value:.3g}"
