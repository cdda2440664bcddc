"""How the sums of products are made: in FP32, or as the Tensor Cores of a generation of GPUs do.

A Tensor Core multiplies 16-bit numbers exactly, and adds a few products and the sum so far at a
time. It shifts them to the largest exponent among them and cuts each off after so many fraction
bits, adds what is left exactly, and cuts the result off to an FP32 number. A longer sum is a chain:
its terms are taken in their order, so many at a time, whatever the length of an instruction. Sums
in FP32, the default here, are rounded to nearest instead, in the order of the CPU's library.

References
----------
Xie, Wang, Yang, Yang, "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores",
arXiv 2511.10909, 2025, and its package ``mmasim``, with which the native operators are compared bit
for bit. They are not compared with a GPU.
"""

__all__ = ["ACCUMULATIONS"]

ACCUMULATIONS = {
    "volta": (4, 23),  # V100; float16 only
    "ampere": (8, 24),  # A100, RTX 30; Turing and Ada add in the same way
    "hopper": (16, 25),  # H100, H200; Blackwell too
}
"""How many products are added at a time, and how many fraction bits are kept of each; the keys are
what a policy's ``accumulation`` may be, besides ``"float32"``."""
