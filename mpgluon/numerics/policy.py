"""Policies: the formats of a network's parameters, computation and results.

A policy is a plain value. What it means for each operator is decided in :mod:`mpgluon.cast`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpgluon.numerics.tensor_core import ACCUMULATIONS

__all__ = ["Policy"]

_FORMATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Policy:
    """The formats of a network.

    Parameters
    ----------
    param_dtype : {"float32", "float16"}
        Format of the parameters, normalization layers apart: those stay FP32.
    compute_dtype : {"float32", "float16", "bfloat16"}
        Format of the operands and results of convolutions and matrix products.
    output_dtype : {"float32", "float16"}
        Format of what the network returns. FP32 is right for logits: the loss sums
        exponentials.
    emulate : bool
        Whether a CPU computes bfloat16 in FP32 arithmetic even where it has instructions for
        bfloat16: for equal results on all processors. float16 on a CPU is always computed so.
    accumulation : {"float32", "volta", "ampere", "hopper"}
        How a CPU sums the products of convolutions, dense layers, ``dot`` and ``batch_dot``: in
        FP32, or as the Tensor Cores of these GPUs do, which is several times slower and needs
        the native operators; see :mod:`mpgluon.numerics.tensor_core`.

    Raises
    ------
    ValueError
        If a format is unknown or cannot be used in that place (MXNet's bfloat16 exists inside
        a computation only), or if no Tensor Core of that kind computes in the format.

    Examples
    --------
    >>> Policy.parse("mixed_float16").param_dtype
    'float32'
    """

    param_dtype: str
    compute_dtype: str
    output_dtype: str
    emulate: bool = False
    accumulation: str = "float32"

    def __post_init__(self) -> None:
        for name in ("param_dtype", "compute_dtype", "output_dtype"):
            value = getattr(self, name)
            allowed = _FORMATS if name == "compute_dtype" else _FORMATS[:2]
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; received {value!r}")
        if not isinstance(self.emulate, bool):
            raise ValueError(f"emulate must be True or False, received {self.emulate!r}")
        if self.param_dtype == "float16" and self.compute_dtype != "float16":
            raise ValueError(
                f"float16 parameters with {self.compute_dtype} computation round the weights "
                "and gain nothing; use param_dtype='float32'"
            )
        kinds = ("float32", *ACCUMULATIONS)
        if self.accumulation not in kinds:
            raise ValueError(
                f"accumulation must be one of {', '.join(kinds)}; received {self.accumulation!r}"
            )
        have = ("float16",) if self.accumulation == "volta" else ("float16", "bfloat16")
        if self.accumulation != "float32" and self.compute_dtype not in have:
            raise ValueError(
                f"accumulation={self.accumulation!r} sums products of {' or '.join(have)} numbers "
                f"as a Tensor Core, received compute_dtype={self.compute_dtype!r}"
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
            processor; or ``params=…,compute=…,output=…,emulate=…,accumulation=…``, where what is
            left out is float32, and ``emulate`` false.

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
            or not set(chosen) <= {"params", "compute", "output", "accumulation"}
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
            accumulation=chosen.get("accumulation", "float32"),
        )


_NAMED = {
    "float32": Policy("float32", "float32", "float32"),
    "float16": Policy("float16", "float16", "float32"),
    "mixed_float16": Policy("float32", "float16", "float32"),
    "mixed_bfloat16": Policy("float32", "bfloat16", "float32"),
    "emulated_bfloat16": Policy("float32", "bfloat16", "float32", emulate=True),
}
