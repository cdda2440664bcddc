"""How the sums of products are made: in FP32, or as the Tensor Cores of a generation of GPUs do.

A Tensor Core multiplies 16-bit numbers exactly, and adds a few products and the sum so far at a
time. It shifts them to the largest exponent among them and cuts each off after so many fraction
bits, adds the shortened terms exactly, and cuts the sum off to an FP32 number. A longer sum is a
chain: its terms are taken in their order, so many at a time, whatever the length of an instruction.
Sums in FP32, the default here, are rounded to nearest instead, in the order of the CPU's library.

References
----------
Xie, Wang, Yang, Yang, "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores",
arXiv 2511.10909, 2025, and its package ``mmasim``, with which the native operators are compared bit
for bit. The ones for ``hopper`` have the bits of an H100, too (docs/gpu.md).
"""

from dataclasses import dataclass

__all__ = ["ACCUMULATIONS", "TensorCoreSums"]

ACCUMULATIONS = {
    "volta": (4, 23),  # V100; float16 only
    "ampere": (8, 24),  # A100, RTX 30; Turing and Ada add in the same way
    "hopper": (16, 25),  # H100, H200; Blackwell too
}
"""How many products are added at a time, and how many fraction bits are kept of each, for each
generation of :class:`TensorCoreSums`."""


@dataclass(frozen=True)
class TensorCoreSums:
    """Products of 16-bit numbers that a CPU sums as a Tensor Core does, several times slower.

    It governs convolutions, dense layers, ``dot`` and ``batch_dot``; needs the native operators.

    Parameters
    ----------
    generation : {"volta", "ampere", "hopper"}

    Raises
    ------
    ValueError
        If the generation is unknown.
    """

    generation: str

    def __post_init__(self) -> None:
        if self.generation not in ACCUMULATIONS:
            raise ValueError(
                f"accumulation must be one of float32, {', '.join(ACCUMULATIONS)}; "
                f"received {self.generation!r}"
            )

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats whose products it sums."""
        return ("float16",) if self.generation == "volta" else ("float16", "bfloat16")
