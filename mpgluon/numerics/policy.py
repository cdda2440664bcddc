"""Policies: the formats of a network's parameters, computation and results.

A policy is a plain value. What it means for each operator is decided in :mod:`mpgluon.cast`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Policy"]

_FORMATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Policy:
    """The formats of a network.

    Parameters
    ----------
    param_dtype : {"float32", "float16", "bfloat16"}
        Format of the parameters, normalization layers apart: those stay FP32. bfloat16 parameters
        are FP32 arrays of bfloat16's numbers.
    compute_dtype : {"float32", "float16", "bfloat16"}
        Format of the operands and results of convolutions and matrix products.
    output_dtype : {"float32", "float16"}
        Format of what the network returns. FP32 is right for logits: the loss sums
        exponentials.
    emulate : bool
        Whether a CPU computes bfloat16 in FP32 arithmetic even where it has instructions for
        bfloat16: for equal results on all processors. float16 on a CPU is always computed so.

    Raises
    ------
    ValueError
        If a format is unknown or cannot be used in that place (MXNet has no bfloat16 results).

    Examples
    --------
    >>> Policy.parse("mixed_float16").param_dtype
    'float32'
    """

    param_dtype: str
    compute_dtype: str
    output_dtype: str
    emulate: bool = False

    def __post_init__(self) -> None:
        for name in ("param_dtype", "compute_dtype", "output_dtype"):
            value = getattr(self, name)
            allowed = _FORMATS[:2] if name == "output_dtype" else _FORMATS
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; received {value!r}")
        if not isinstance(self.emulate, bool):
            raise ValueError(f"emulate must be True or False, received {self.emulate!r}")
        if self.param_dtype not in ("float32", self.compute_dtype):
            raise ValueError(
                f"{self.param_dtype} parameters with {self.compute_dtype} computation round the "
                "weights and gain nothing; use param_dtype='float32'"
            )

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Return the policy of a name, or of a list such as ``"params=float32,compute=float16"``.

        Parameters
        ----------
        text : str
            ``"float32"``; ``"float16"``, the cast network (float16 parameters, FP32
            normalization); ``"mixed_float16"`` or ``"mixed_bfloat16"`` (FP32 parameters, 16-bit
            computation); ``"emulated_bfloat16"``, the latter with the same results on every
            processor; or ``params=…,compute=…,output=…,emulate=…``, where what is left out is
            float32, and ``emulate`` false.

        Raises
        ------
        ValueError
            If the text is none of these.
        """
        if text in _NAMED:
            return _NAMED[text]
        parts = [part.partition("=") for part in text.split(",")] if "=" in text else []
        chosen = {key.strip(): value.strip() for key, _, value in parts}
        emulate = chosen.pop("emulate", "false")
        if (
            not parts
            or len(chosen) + ("emulate" in text) != len(parts)
            or not set(chosen) <= {"params", "compute", "output"}
            or emulate not in ("true", "false")
        ):
            raise ValueError(
                f"a policy is one of {', '.join(_NAMED)}, or like "
                f'"params=float32,compute=float16,output=float32,emulate=false"; received {text!r}'
            )
        return cls(
            param_dtype=chosen.get("params", "float32"),
            compute_dtype=chosen.get("compute", "float32"),
            output_dtype=chosen.get("output", "float32"),
            emulate=emulate == "true",
        )


_NAMED = {
    "float32": Policy("float32", "float32", "float32"),
    "float16": Policy("float16", "float16", "float32"),
    "mixed_float16": Policy("float32", "float16", "float32"),
    "mixed_bfloat16": Policy("float32", "bfloat16", "float32"),
    "emulated_bfloat16": Policy("float32", "bfloat16", "float32", emulate=True),
}
