"""Policies: the formats of a network's parameters, computation and results.

A policy is a plain value. What it means for each operator is decided in :mod:`mpgluon.cast`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Optional

from mpgluon.formats.float_format import format_named
from mpgluon.formats.scaling import SHARED_BY, Scaling
from mpgluon.formats.tensor_core import ACCUMULATIONS

__all__ = ["Policy"]

_ALLOWED = {
    "param_dtype": ("float32", "float16", "bfloat16"),
    "output_dtype": ("float32", "float16"),
    "scaling": tuple(SHARED_BY),
    "accumulation": ("float32", *ACCUMULATIONS),
    "between_dtype": (None, "bfloat16", "float16"),
}


@dataclass(frozen=True)
class Policy:
    """The formats of a network.

    Parameters
    ----------
    param_dtype : {"float32", "float16", "bfloat16"}
        Format of the parameters, normalization layers apart: those stay FP32. bfloat16 parameters
        are FP32 arrays of bfloat16's numbers.
    compute_dtype : str
        Format of the operands and results of convolutions and matrix products: ``"float32"``,
        ``"float16"``, ``"bfloat16"``, or on a CPU with native operators any that
        :mod:`mpgluon.formats.float_format` names.
    output_dtype : {"float32", "float16"}
        Format of what the network returns. FP32 is right for logits: the loss sums
        exponentials.
    emulate : bool
        Whether a CPU computes bfloat16 in FP32 arithmetic even where it has instructions for
        bfloat16: for equal results on all processors. Other formats on a CPU are always computed
        so.
    gradient_dtype : str, optional
        With ``between_dtype``: the format of 8 bits or fewer to which a product rounds the gradient
        that arrives in the backward pass. ``compute_dtype`` if left out.
    scaling : {"none", "tensor", "mx"}
        With ``between_dtype``: which values are multiplied by one power of two before they are
        rounded: those of an operand, by its largest one, or each block of 32 along the dimension
        that the product sums over.
    between_dtype : {"bfloat16", "float16"}, optional
        Format of all values between products. With it, ``compute_dtype`` (of 8 bits or fewer) is
        that of the operands of convolutions and dense layers alone: their products are summed in
        FP32 and rounded to this format. The first and the last of these layers of a network, and
        all other operators, compute in it.
    amax_history : int
        With ``scaling="tensor"``: from the largest values of how many earlier steps the scale of an
        operand follows ("delayed scaling": what is larger saturates); 0: from its own ("current").
    accumulation : {"float32", "volta", "ampere", "hopper"}
        How a CPU sums the products of convolutions, dense layers, ``dot`` and ``batch_dot``: in
        FP32, or as the Tensor Cores of these GPUs do, which is several times slower and needs
        the native operators; see :mod:`mpgluon.formats.tensor_core`.

    Raises
    ------
    ValueError
        If a format is unknown or cannot be used in that place (MXNet has no bfloat16 results), if
        fields contradict each other, or if no Tensor Core of that kind computes in the format.

    Examples
    --------
    >>> Policy.parse("mixed_float16").param_dtype
    'float32'
    """

    param_dtype: str
    compute_dtype: str
    output_dtype: str
    emulate: bool = False
    gradient_dtype: Optional[str] = None
    scaling: str = "none"
    between_dtype: Optional[str] = None
    accumulation: str = "float32"
    amax_history: int = 0

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            value = getattr(self, name)
            if value not in allowed:
                listed = ", ".join(filter(None, allowed))
                raise ValueError(f"{name} must be one of {listed}; received {value!r}")
        for name in ("compute_dtype", "gradient_dtype"):
            fmt = format_named(getattr(self, name) or self.compute_dtype, name)
            is_small = fmt.exponent_bits + fmt.significand_bits <= 8 and fmt.exponent_bits <= 5
            if self.between_dtype is not None and not is_small:
                raise ValueError(
                    f"between_dtype={self.between_dtype!r} is for operands of 8 bits or fewer, "
                    f"such as compute_dtype='float8_e4m3'; received {name}={fmt.name!r}"
                )
        if not isinstance(self.emulate, bool):
            raise ValueError(f"emulate must be True or False, received {self.emulate!r}")
        if self.param_dtype not in ("float32", self.compute_dtype):
            raise ValueError(
                f"{self.param_dtype} parameters with {self.compute_dtype} computation round the "
                "weights and gain nothing; use param_dtype='float32'"
            )
        if self.between_dtype is None and (self.gradient_dtype or self.scaling != "none"):
            raise ValueError(
                "gradient_dtype and scaling say how products round their operands where other "
                "values have another format; name that too: between_dtype='bfloat16'"
            )
        steps = self.amax_history
        if type(steps) is not int or steps < 0 or (steps and self.scaling != "tensor"):
            raise ValueError(
                "amax_history is a number of steps from which the scale of scaling='tensor' "
                f"follows, or 0; received {steps!r} with scaling={self.scaling!r}"
            )
        have = ("float16",) if self.accumulation == "volta" else ("float16", "bfloat16")
        if self.accumulation != "float32" and self.compute_dtype not in have:
            raise ValueError(
                f"accumulation={self.accumulation!r} sums products of {' or '.join(have)} numbers "
                f"as a Tensor Core, received compute_dtype={self.compute_dtype!r}"
            )

    def __str__(self) -> str:
        """Return a text that :meth:`parse` takes."""
        named = [name for name, policy in _NAMED.items() if policy == self]
        all_fields = ((key, getattr(self, field)) for key, field in _FIELDS.items())
        given = (f"{k}={v}".lower() for k, v in all_fields if v not in (None, 0, "none", "float32"))
        return named[0] if named else ",".join(given)

    @property
    def values_dtype(self) -> str:
        """The format of values between products."""
        return self.between_dtype or self.compute_dtype

    @property
    def operand_scaling(self) -> Optional[Scaling]:
        """How products round their operands, ``None`` if values between them have that format."""
        if self.between_dtype is None:
            return None
        value, gradient = self.compute_dtype, self.gradient_dtype or self.compute_dtype
        formats = format_named(value), format_named(gradient)
        return Scaling(*formats, self.scaling, self.amax_history)

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Return the policy of a name, or of a list such as ``"params=float32,compute=float16"``.

        Parameters
        ----------
        text : str
            ``"float32"``; ``"float16"``, the cast network (float16 parameters, FP32
            normalization); ``"mixed_float16"`` or ``"mixed_bfloat16"`` (FP32 parameters, 16-bit
            computation); ``"emulated_bfloat16"``, the latter with the same results on every
            processor; ``"mixed_float8"`` (FP32 parameters, products of float8_e4m3, gradients
            float8_e5m2, a scale per operand, bfloat16 between products); or
            ``params=…,compute=…,output=…,emulate=…,gradient=…,scaling=…,between=…,accumulation=…,
            amax_history=…``, where what is left out has a :class:`Policy`'s default, or is float32.

        Raises
        ------
        ValueError
            If the text is none of these.
        """
        if text in _NAMED:
            return _NAMED[text]
        parts = [part.partition("=") for part in text.split(",")]
        chosen = {_FIELDS.get(key.strip(), ""): value.strip() for key, _, value in parts}
        emulate = chosen.pop("emulate", "false")
        if "" in chosen or len(chosen) + ("emulate" in text) != len(parts) or emulate not in _FLAGS:
            raise ValueError(
                f"a policy is one of {', '.join(_NAMED)}, or like "
                f'"params=float32,compute=float16,output=float32,emulate=false", with '
                f"{', '.join(_FIELDS)}; received {text!r}"
            )
        names = ("param_dtype", "compute_dtype", "output_dtype")
        made: dict[str, Any] = {**dict.fromkeys(names, "float32"), **chosen}
        if (steps := made.get("amax_history", "")).isdecimal():
            made["amax_history"] = int(steps)
        return cls(**{**made, "emulate": _FLAGS[emulate]})


_FLAGS = {"true": True, "false": False}
_FIELDS = {field.name.removesuffix("_dtype"): field.name for field in fields(Policy)}
_FIELDS["params"] = _FIELDS.pop("param")
_NAMED = {
    "float32": Policy("float32", "float32", "float32"),
    "float16": Policy("float16", "float16", "float32"),
    "mixed_float16": Policy("float32", "float16", "float32"),
    "mixed_bfloat16": Policy("float32", "bfloat16", "float32"),
    "emulated_bfloat16": Policy("float32", "bfloat16", "float32", emulate=True),
    "mixed_float8": Policy(
        *("float32", "float8_e4m3", "float32"),
        gradient_dtype="float8_e5m2",
        scaling="tensor",
        between_dtype="bfloat16",
    ),
}
