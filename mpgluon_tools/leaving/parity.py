"""A port to PyTorch, compared with its network in MXNet layer by layer.

A file of :func:`mpgluon.deployment.record_layers` has the operands and results of each layer.
While the port computes, each of its layers is given the recorded operand, and its result is
replaced by the recorded one. So a difference belongs to one layer, or to the functions between two,
and does not add up. This module needs PyTorch and NumPy, and no MXNet.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Union

from mpgluon_tools.leaving.recorded_layers import KINDS, RecordedLayers, known_by
from mpgluon_tools.tables import Result, Table

import numpy as np

__all__ = ["Parity", "Part", "compare_port"]

_ROUNDING = 2.0**-24  # of FP32, relative
_BETWEEN = 256  # terms of the sums that pooling and other functions between two layers make
_LARGEST_RATIO = 3.0  # of the error in 16 bits to the one that rounding alone makes


@dataclass(frozen=True)
class Part:
    """A layer of the port, or its operand.

    Attributes
    ----------
    name : str
        The recorded layer's, or ``"result 0"``.
    follows : str
        The name of the layer before it, if the part is the operand of a layer or a result; empty
        for a layer itself.
    units : float
        The norm of the difference in FP32, in units of 2^-24 of the result's norm; ``inf`` where a
        shape differs or a value is not finite.
    limit : float
        The units that sums in another order explain.
    ratio : float or None
        The error in 16 bits, of the error that rounding parameters, operand and result makes.
    said : str
        The difference in words; empty if there is none.
    """

    name: str
    units: float
    limit: float
    ratio: Optional[float] = None
    said: str = ""
    follows: str = ""

    @property
    def is_right(self) -> bool:
        """Whether rounding explains the difference."""
        return not self.said


@dataclass(frozen=True)
class Parity(Result):
    """A comparison of a port with the recording of a network.

    Attributes
    ----------
    parts : sequence of Part
        In the order in which the port computes.
    dtype : str
        The format of the ratios.
    """

    parts: Sequence[Part]
    dtype: str

    @property
    def first(self) -> Optional[Part]:
        """The first part that differs, ``None`` if all compute the same."""
        return next((part for part in self.parts if not part.is_right), None)

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.first is None:
            return f"the same function: {len(self.parts)} parts, none of which differs"
        where = self.first.name
        if self.first.follows:
            where = f"between {self.first.follows} and {where}"
        return f"the first part that differs is {where}: {self.first.said}"

    def table(self) -> Table:
        """Return a row for each layer: its operand, its result, and its result in 16 bits."""
        headings = ("layer", "before it", "itself", "limit", f"{self.dtype} / rounding", "")
        rows, before = [], Part("", math.nan, 0)
        for part in self.parts:
            if part.follows:
                before = part
                if not part.name.startswith("result "):
                    continue
            units = ["-" if math.isnan(one.units) else f"{one.units:.3g}" for one in (before, part)]
            rows.append((
                part.name, units[0], "-" if part.follows else units[1], f"{part.limit:.0f}",
                "-" if part.ratio is None else f"{part.ratio:.2f}",
                "" if before.is_right and part.is_right else "differs",
            ))  # fmt: skip
            before = Part("", math.nan, 0)
        return Table(headings, rows)

    def __str__(self) -> str:
        return f"{self.verdict}\n\n{self.table()}"


def compare_port(
    port: Any, recording: Union[str, Path], *, dtype: Optional[str] = "float16"
) -> Parity:
    """Compare a port with a recording, in FP32 and in 16 bits.

    Layers are recognized by their parameters, whatever their names and however they lie in memory;
    those that are left by their kinds and order.

    Parameters
    ----------
    port : torch.nn.Module
        It takes the network's inputs. It is used in evaluation mode, and left as it was.
    recording : str or Path
        Of :func:`mpgluon.deployment.record_layers`.
    dtype : {"float16", "bfloat16", None}
        The format of 16 bits; ``None`` compares in FP32 alone.

    Raises
    ------
    ValueError
        If the file is not a recording of layers, or the port fails on the recorded inputs.
    """
    comparison = _Comparison(port, RecordedLayers.read(Path(recording)), dtype)
    return Parity(comparison.run(), dtype or "-")


class _Comparison:
    """Follows a port through its layers."""

    def __init__(self, port: Any, recorded: RecordedLayers, dtype: Optional[str]) -> None:
        self.port, self.recorded, self.dtype = port, recorded, dtype
        self.parts: list[Part] = []
        self._before, self._name = "the input", ""
        self._number: Optional[int] = None
        self._keys = {one: (kind, _known_by(one)) for one in port.modules() if (kind := _kind(one))}
        self._waiting: dict[Any, deque[int]] = {key: deque() for key in self._keys.values()}
        self._unknown: dict[str, deque[int]] = defaultdict(deque)  # by kind
        for number, layer in enumerate(recorded.layers):
            key = layer["operator"], layer["parameters"]
            self._waiting.get(key, self._unknown[key[0]]).append(number)
        self._swaps = any(getattr(one, "batch_first", False) for one in port.modules())
        self._changed = {key for key, numbers in self._waiting.items() if not numbers}

    def run(self) -> list[Part]:
        """Return the parts, in the order of the port."""
        import torch

        inputs = [torch.from_numpy(one) for one in self.recorded.numbered("input")]
        with _evaluating(self.port), torch.no_grad(), contextlib.ExitStack() as hooks:
            for one in self._keys:
                hooks.callback(one.register_forward_pre_hook(self._enter).remove)
                hooks.callback(one.register_forward_hook(self._leave).remove)
            results = self._computed(inputs)
        if results is None:
            return self.parts
        for numbers in (*self._waiting.values(), *self._unknown.values()):
            for number in numbers:
                name = self.recorded.layers[number]["name"]
                self._add(name, math.inf, 0, said="the port does not call it")
        expected = self.recorded.numbered("result")
        if len(results) != len(expected):
            self._add("the results", math.inf, 0, said=f"there are {len(results)} of them, and "
                      f"{len(expected)} in the recording")  # fmt: skip
        for place, (result, one) in enumerate(zip(results, expected)):
            self._compare(f"result {place}", result, one, _BETWEEN, follows=self._before)
        return self.parts

    def _computed(self, inputs: Sequence[Any]) -> Optional[Sequence[Any]]:
        """Return the port's results; ``None`` if it fails after a part that differs."""
        import torch

        try:
            results = self.port(*inputs)
            if not isinstance(results, (tuple, list, torch.Tensor)):
                raise TypeError(f"its result is of type {type(results).__name__}, not a tensor")
        except (RuntimeError, TypeError, IndexError, ValueError) as error:
            if not all(part.is_right for part in self.parts):
                return None
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"the port fails on the recorded inputs: {reason}") from error
        return results if isinstance(results, (tuple, list)) else [results]

    def _enter(self, module: Any, operands: Sequence[Any]) -> Any:
        """Compare a layer's operand, and give it the recorded one."""
        import torch

        key = self._keys[module]
        numbers = self._unknown[key[0]] if key in self._changed else self._waiting[key]
        if not operands:
            raise ValueError(
                f"{type(module).__name__} is called with keywords; give its operand first"
            )
        self._number = self._nearest(numbers, operands[0])
        if self._number is None:
            self._add(type(module).__name__, math.inf, 0, follows=self._before,
                      said="the port has one more than the recording")  # fmt: skip
            return None
        self._name = self.recorded.layers[self._number]["name"]
        expected = self.recorded.arrays[f"layer{self._number}.input"]
        given = self._compare(self._name, operands[0], expected, _BETWEEN, follows=self._before)
        dtype = torch.long if key[0] == "Embedding" else operands[0].dtype
        return (given.to(dtype), *operands[1:])

    def _nearest(self, numbers: deque[int], operand: Any) -> Optional[int]:
        """Take the number of the layer with the nearest operand, of those with equal parameters."""

        def distance(number: int) -> float:
            one = self.recorded.arrays[f"layer{number}.input"]
            if one.size != operand.numel():
                return math.inf
            return float((self._as(operand, one).double() - operand.double()).norm())

        if not numbers:
            return None
        found = min(numbers, key=distance) if len(numbers) > 1 else numbers[0]
        numbers.remove(found)
        return found

    def _leave(self, module: Any, operands: Sequence[Any], results: Any) -> Any:
        """Compare a layer's result, look at it in 16 bits and in training, and replace it."""
        if self._number is None:
            return None
        result = results[0] if isinstance(results, tuple) else results
        expected = self.recorded.arrays[f"layer{self._number}.output"]
        kind = self._keys[module][0]
        said, ratio = self._training(module, operands) if kind == "BatchNorm" else "", None
        if self.dtype is not None and kind != "Embedding":
            ratio = _ratio_in_16_bits(module, operands, result, self.dtype)
            steps = max(operands[0].shape[:2]) if kind == "RNN" else 1  # each rounds its state
            if ratio is not None and not ratio <= _LARGEST_RATIO * math.sqrt(steps):
                said = said or f"in {self.dtype} its error is {ratio:.1f} times the one of rounding"
        weight = next((one for one in module.parameters(recurse=False) if one.ndim > 1), None)
        terms = float(_BETWEEN if weight is None else max(_BETWEEN, weight[0].numel()))
        terms += (2 * _sensitivity(module, operands, result)) ** 2
        given = self._compare(self._name, result, expected, terms, ratio=ratio, said=said)
        self._before = self._name
        return (given, *results[1:]) if isinstance(results, tuple) else given

    def _as(self, result: Any, recorded: Any) -> Any:
        """Return a recorded array in the shape of the port's.

        MXNet's recurrent layers have the time first. If the port has layers with the batch first,
        the nearer of both orders is taken.
        """
        import torch

        expected = torch.from_numpy(np.ascontiguousarray(recorded))
        same = expected.reshape(result.shape)
        if not self._swaps or expected.ndim < 2 or expected.transpose(0, 1).shape != result.shape:
            return same
        swapped = expected.transpose(0, 1)
        nearer = (swapped - result).norm() < (same - result).norm()
        return swapped if nearer else same

    def _training(self, module: Any, operands: Sequence[Any]) -> str:
        """Return in words how a BatchNorm differs in training."""
        import torch

        options, x = self.recorded.layers[self._number or 0]["options"], operands[0].float()
        count = x.numel() / x.shape[1]
        if count < 2:  # which PyTorch refuses
            return ""
        trained = copy.deepcopy(module).train()
        trained.forward(x)
        if trained.running_mean is None:
            return "it keeps no running statistics"
        axes = [axis for axis in range(x.ndim) if axis != 1]
        squares = x.square().mean(axes)
        mean, unbiased = x.mean(axes), x.var(axes)
        kept = 1.0 if options.get("use_global_stats", False) else options.get("momentum", 0.9)
        for name, one, now, size in (
            ("mean", trained.running_mean, mean, squares.sqrt()),
            ("var", trained.running_var, unbiased, squares),
        ):
            was = torch.from_numpy(self.recorded.arrays[f"layer{self._number}.running_{name}"])
            expected = kept * was + (1 - kept) * now
            if ((one - expected).abs() > 1e-5 * (expected.abs() + size)).any():
                return f"a step of training makes another running {name}; see momentum"
        return ""

    def _compare(self, name: str, result: Any, expected: Any, terms: float, **more: Any) -> Any:
        """Add a part, and return the recorded array in the shape of the port's."""
        import torch

        is_result = name.startswith("result ")
        if result.numel() != expected.size or (is_result and result.shape != expected.shape):
            more["said"] = (
                f"the shape is {tuple(result.shape)}, and {tuple(expected.shape)} in the recording"
            )
            self._add(name, math.inf, 0, **more)
            return torch.from_numpy(expected)
        expected = self._as(result, expected)
        norm = float(expected.double().norm())
        error = float((result.double() - expected.double()).norm())
        units = error / (norm or 1.0) / _ROUNDING
        limit = 4 * math.sqrt(terms)
        if not units <= limit:
            kind = "operand" if more.get("follows") else "result"
            more["said"] = f"another {kind}, by {error / (norm or 1.0):.2g} of its norm"
        self._add(name, units, limit, **more)
        return expected

    def _add(self, name: str, units: float, limit: float, **more: Any) -> None:
        self.parts.append(Part(name, units, limit, **more))


def _kind(module: Any) -> str:
    """Return the operator of MXNet that a module of ``torch.nn`` stands for; empty for others."""
    names = {one.__name__.strip("_").rstrip("123d") for one in type(module).__mro__
             if one.__module__.startswith("torch.")}  # fmt: skip
    return next((operator for operator, kind in KINDS.items() if kind in names), "")


def _sensitivity(module: Any, operands: Sequence[Any], result: Any) -> float:
    """Return by how many units the result changes for each by which the operand does."""
    import torch

    operand, change = operands[0], 2.0**-12  # more than FP32's rounding, less than 1
    if not operand.is_floating_point():
        return 0.0
    signs = torch.sign(torch.sin(torch.arange(operand.numel()) * 1.7 + 1)).reshape(operand.shape)
    changed = _first(module.forward(operand * (1 + change * signs), *operands[1:]))
    return float((changed - result).norm()) / (float(result.norm()) or 1.0) / change


def _known_by(module: Any) -> str:
    """Return a hash of a module's parameters and running statistics."""
    arrays = [*module.parameters(recurse=False)]
    statistics = ("running_mean", "running_var")
    arrays += [one for name, one in module.named_buffers(recurse=False) if name in statistics]
    return known_by([one.detach().float().numpy() for one in arrays])


def _ratio_in_16_bits(
    module: Any, operands: Sequence[Any], result: Any, dtype: str
) -> Optional[float]:
    """Return a layer's error in 16 bits, of the one that rounding its numbers alone makes."""
    import torch

    fmt = getattr(torch, dtype)
    low = copy.deepcopy(module)
    rounded = [one.to(fmt) if one.is_floating_point() else one for one in operands[:1]]
    for one in low.parameters():
        one.data = one.data.to(fmt).to(one.dtype)
    rest = operands[1:]
    first = _first(low.forward(rounded[0].float(), *rest)).to(fmt).double()
    if not first.isfinite().all():  # beyond the format
        return None
    low, rest = low.to(fmt), _cast(rest, fmt)
    try:
        second = _first(low.forward(rounded[0], *rest)).double()
    except RuntimeError:  # this processor has no such operator in 16 bits
        return None
    error = [float((one - result.double()).norm()) for one in (first, second)]
    return error[1] / error[0] if error[0] > 0 else None


def _cast(values: Any, fmt: Any) -> Any:
    """Return the first states of a recurrent layer in another format."""
    return tuple(_cast(one, fmt) if isinstance(one, tuple) else one.to(fmt) for one in values)


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


@contextlib.contextmanager
def _evaluating(port: Any) -> Iterator[None]:
    """Evaluate for a while, and restore which modules were training."""
    were = [(one, one.training) for one in port.modules()]
    port.eval()
    try:
        yield
    finally:
        for one, training in were:
            one.training = training
