"""Policies: the formats of a network's parameters, computation and results.

A policy is a plain value, read from text in one place, :meth:`Policy.parse`. Its meaning for each
operator is decided in :mod:`mpgluon.cast`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional, Union

from mpgluon.errors import did_you_mean
from mpgluon.formats.float_format import FLOAT8_E4M3, FLOAT8_E5M2, SMALL, TFLOAT32, format_named
from mpgluon.formats.scaling import ScaledOperands
from mpgluon.formats.tensor_core import TensorCoreSums

import numpy as np

__all__ = ["Policy", "as_policy"]

_ALLOWED = {
    "param_dtype": ("float32", "float16", "bfloat16"),
    "output_dtype": ("float32", "float16"),
    "emulate": (False, True),
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
        Format of the values in the network: ``"float32"``, ``"float16"``, ``"bfloat16"``, or on a
        CPU with native operators any that :mod:`mpgluon.formats.float_format` names.
    output_dtype : {"float32", "float16"}
        Format of the network's results. FP32 is right for logits: the loss sums
        exponentials.
    products : ScaledOperands or TensorCoreSums, optional
        How convolutions and matrix products differ: in operands of eight bits, or in sums as those
        of a Tensor Core. By default their operands have ``compute_dtype``, and sums are FP32.
    emulate : bool
        Whether a CPU computes bfloat16 in FP32 arithmetic even where it has instructions for
        bfloat16: for equal results on all processors. Other formats on a CPU are always computed
        so.

    Raises
    ------
    ValueError
        If a format is unknown or cannot be used in that place (MXNet has no bfloat16 results), if
        arguments contradict each other, or if no Tensor Core of that kind computes in the format.

    Examples
    --------
    >>> Policy.parse("mixed_float16").param_dtype
    'float32'
    """

    param_dtype: str
    compute_dtype: str
    output_dtype: str
    products: Union[ScaledOperands, TensorCoreSums, None] = None
    emulate: bool = False

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(map(str, allowed))}; "
                    f"received {getattr(self, name)!r}"
                )
        format_named(self.compute_dtype, "compute_dtype")
        if self.param_dtype not in ("float32", self.compute_dtype):
            raise ValueError(
                f"{self.param_dtype} parameters with {self.compute_dtype} computation round the "
                "weights and gain nothing; use param_dtype='float32', params=float32 in a text"
            )
        products = self.products
        if isinstance(products, TensorCoreSums) and self.compute_dtype not in products.formats:
            raise ValueError(
                f"accumulation={products.generation!r} sums products of "
                f"{' or '.join(products.formats)} numbers as a Tensor Core, received "
                f"compute_dtype={self.compute_dtype!r}"
            )
        is_16_bits = self.compute_dtype in ("float16", "bfloat16")
        if isinstance(products, ScaledOperands) and not is_16_bits:
            raise ValueError(
                "between products of 8 bits values are bfloat16 or float16, received "
                f"{self.compute_dtype!r}"
            )

    def __str__(self) -> str:
        """Return a text that :meth:`parse` takes."""
        for name, policy in _NAMED.items():
            if policy == self:
                return name
        fields = {
            "params": self.param_dtype,
            "compute": self.product_dtype,
            "output": self.output_dtype,
            "emulate": str(self.emulate).lower(),
        }
        scaled = self.scaled_operands
        if scaled is not None:
            fields |= {
                "gradient": scaled.gradient.name,
                "scaling": scaled.shared_by,
                "between": self.compute_dtype,
                "amax_history": str(scaled.amax_history),
            }
            if scaled.gradient == scaled.value:
                del fields["gradient"]
        fields["accumulation"] = self.accumulation
        return ",".join(f"{k}={v}" for k, v in fields.items() if v != _DEFAULTS[k])

    @property
    def scaled_operands(self) -> Optional[ScaledOperands]:
        """How products round their operands, ``None`` if values between them have that format."""
        return self.products if isinstance(self.products, ScaledOperands) else None

    @property
    def product_dtype(self) -> str:
        """The format of the operands of products: the values' own, or a smaller one."""
        scaled = self.scaled_operands
        return self.compute_dtype if scaled is None else scaled.value.name

    @property
    def accumulation(self) -> str:
        """How products are summed: ``"float32"``, or a generation of :class:`TensorCoreSums`."""
        return self.products.generation if isinstance(self.products, TensorCoreSums) else "float32"

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Return the policy of a name, or of a list such as ``"params=float32,compute=float16"``.

        Parameters
        ----------
        text : str
            ``"float32"``; ``"float16"`` or ``"bfloat16"``, the cast network (16-bit parameters,
            FP32 normalization); ``"mixed_float16"`` or ``"mixed_bfloat16"`` (FP32 parameters,
            16-bit computation); ``"emulated_bfloat16"``, the latter with the same results on every
            processor; ``"mixed_float8"`` (FP32 parameters, products of float8_e4m3, gradients
            float8_e5m2, a scale per operand, bfloat16 between products); or a list of

            - ``params``, ``compute``, ``output``: formats, float32 where left out;
            - ``emulate``: ``true`` or ``false``;
            - ``between``, with ``gradient``, ``scaling`` and ``amax_history``:
              :class:`ScaledOperands` of the format ``compute``, and the format between products;
            - ``accumulation``: the generation of :class:`TensorCoreSums`.

        Raises
        ------
        ValueError
            If the text is none of these.
        """
        if text in _NAMED:
            return _NAMED[text]
        parts = [part.partition("=") for part in text.split(",")]
        entries = {key.strip(): value.strip() for key, _, value in parts}
        fields = {**_DEFAULTS, **entries}
        if len(entries) < len(parts) or fields.keys() != _DEFAULTS.keys():
            raise _not_a_policy(text)
        if fields["emulate"] not in _FLAGS:
            raise ValueError(f"emulate must be true or false; received {fields['emulate']!r}")
        compute, between, scaling = fields["compute"], fields["between"], fields["scaling"]
        steps: Any = fields["amax_history"]
        steps = int(steps) if steps.isdecimal() else steps
        products: Union[ScaledOperands, TensorCoreSums, None] = None
        if between:
            value = format_named(compute, "compute")
            gradient = format_named(fields["gradient"] or compute, "gradient")
            products = ScaledOperands(value, gradient, scaling, steps)
        elif fields["gradient"] or (scaling, steps) != ("none", 0):
            raise ValueError(
                "gradient, scaling and amax_history say how products round their operands where "
                "other values have another format; name that too: between=bfloat16"
            )
        if fields["accumulation"] != "float32":
            if products is not None:
                raise ValueError("accumulation sums products of 16 bits; leave it or between out")
            products = TensorCoreSums(fields["accumulation"])
        emulate = _FLAGS[fields["emulate"]]
        return cls(fields["params"], between or compute, fields["output"], products, emulate)


_FLAGS = {"true": True, "false": False}
_DEFAULTS = {
    **{"params": "float32", "compute": "float32", "output": "float32", "emulate": "false"},
    **{"gradient": "", "scaling": "none", "between": "", "amax_history": "0"},
    **{"accumulation": "float32"},
}
_NAMED = {
    "float32": Policy("float32", "float32", "float32"),
    "float16": Policy("float16", "float16", "float32"),
    "bfloat16": Policy("bfloat16", "bfloat16", "float32"),
    "mixed_float16": Policy("float32", "float16", "float32"),
    "mixed_bfloat16": Policy("float32", "bfloat16", "float32"),
    "emulated_bfloat16": Policy("float32", "bfloat16", "float32", emulate=True),
    "mixed_float8": Policy(
        *("float32", "bfloat16", "float32"), ScaledOperands(FLOAT8_E4M3, FLOAT8_E5M2, "tensor")
    ),
}


_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def _not_a_policy(text: str) -> ValueError:
    parts = f"parts are {', '.join(_DEFAULTS)}"
    if "=" in text:
        keys = [part.partition("=")[0].strip() for part in text.split(",")]
        unknown = next((key for key in keys if key not in _DEFAULTS), None)
        what = f"which is not a policy: {parts}"
        if unknown is not None:
            what += f", there is no {unknown!r}{did_you_mean(unknown, _DEFAULTS, count=1)}"
    elif text in _SHORT or any(text == fmt.name for fmt in (TFLOAT32, *SMALL)):
        what = f"a format; did you mean {_SHORT.get(text, f'compute={text}')!r}?"
    else:
        what = "which names no policy"
        what += did_you_mean(text.lower().strip(), (*_NAMED, *_SHORT), count=2)
    return ValueError(
        f"received {text!r}, {what}{'' if what.endswith('?') else '.'} "
        f'A policy is one of {", ".join(_NAMED)}, or like "params=float32,compute=float16"'
    )


def as_policy(dtype: Any, *, keeps_parameters: bool = False) -> Policy:
    """Return the policy that an argument ``dtype`` stands for.

    Every policy means the same to each function that takes one. Only the name of a format leaves
    open the format of the parameters, and the function says it.

    Parameters
    ----------
    dtype : str, NumPy dtype or Policy
        What :meth:`Policy.parse` takes, ``"fp16"``, ``"bf16"``, or ``np.float16``.
    keeps_parameters : bool
        Whether the name of a format leaves the parameters in FP32: ``"float16"`` is then
        ``"mixed_float16"``.

    Raises
    ------
    TypeError, ValueError
        If it is of another kind, or not a policy.
    """
    if isinstance(dtype, np.dtype) or (isinstance(dtype, type) and issubclass(dtype, np.generic)):
        dtype = np.dtype(dtype).name
    if not isinstance(dtype, (str, Policy)):
        raise TypeError(f'dtype must be text such as "float16" or a Policy, received {dtype!r}')
    dtype = _SHORT.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if keeps_parameters and dtype in ("float16", "bfloat16"):
        dtype = f"mixed_{dtype}"
    return Policy.parse(dtype) if isinstance(dtype, str) else dtype
