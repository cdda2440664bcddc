"""Whether a network can be trained in 16 bits, in words, and the lines that do it.

Nothing here is a rule of thumb about layers: the verdict is computed from one batch's gradients,
from the error of the result, and from a trial with the layers that it names in FP32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

from mpgluon.cast.block import blocks_of
from mpgluon_tools.diagnostics.compare import Suggestion
from mpgluon_tools.diagnostics.exponents import EMPTY, ExponentHistogram, exponent_histogram
from mpgluon_tools.diagnostics.observe import Batch, observed_batch
from mpgluon_tools.diagnostics.ranges import RangeReport
from mpgluon_tools.diagnostics.reference import in_fp32, inner_blocks, input_errors, sixteen_bits
from mpgluon_tools.diagnostics.scales import (
    LOST_LIMIT,
    LossScales,
    loss_scale_code,
    owners_of,
    share_text,
)
from mpgluon_tools.recorder.steps.recorded_network import code_of, paths_of

from mxnet import gluon
from mxnet.gluon import nn

__all__ = [
    "AMPLIFIED",
    "FEWEST_GRADIENTS",
    "FEWEST_NORMALIZED",
    "HEADROOM",
    "Verdict",
    "judge",
    "path_of",
]

HEADROOM = 2.0
"""The factor by which gradients of other batches may be larger without an overflow.

A dynamic loss scale backs off by 2 when a step overflows: this begins one such step lower, instead
of with a skipped step at the first batch whose gradients are larger.
"""

FEWEST_GRADIENTS = round(1 / LOST_LIMIT)
"""The fewest nonzero gradients that a share is computed from: one of fewer is above the limit."""

FEWEST_NORMALIZED = 64
"""The fewest numbers per channel of a BatchNorm at which a large error is held against the format.

The variance of n normal numbers has a relative standard error of sqrt(2 / (n - 1)), a sixth here.
With fewer, some channels are divided by a variance that is small by chance, which multiplies
rounding errors in a way that training with a proper batch does not.
"""


AMPLIFIED = 8.0
"""How many times the error that rounding the inputs alone makes is allowed for the whole network.

A network with random weights multiplies any small change of its images, in FP32 too: that is no
fault of a format. Errors of 64 roundings, of the same size and independent, add up to 8 of one.
"""


@dataclass(frozen=True)
class Verdict:
    """Whether a network can be trained in a 16-bit format.

    Attributes
    ----------
    answer : {"safe", "not safe", "unknown"}
    sentence : str
        The answer and its conditions, in one line; names of layers between backticks.
    reasons : sequence of str
        Measurements, and their limits.
    keep_fp32 : sequence of gluon.Block
        The layers to keep in FP32 in addition to normalization layers.
    lines : str
        Python to paste, empty unless the answer is ``"safe"``. It uses ``net``, ``loss_fn``,
        ``inputs``, ``labels`` and ``batch_size``.
    """

    answer: str
    sentence: str
    reasons: Sequence[str] = ()
    keep_fp32: Sequence[gluon.Block] = ()
    lines: str = ""


def judge(
    net: gluon.Block,
    batch: Batch,
    report: RangeReport,
    scales: LossScales,
    suggestion: Suggestion,
    *,
    dtype: str = "float16",
) -> Verdict:
    """Return the verdict on training an FP32 network in 16 bits.

    ``report`` was measured on this batch, ``scales`` were made of it, and ``suggestion`` is for
    their loss scale. The network runs twice more if a layer loses gradients, and three times if its
    result has a large error.
    """
    unknown = _unknown(report, scales)
    if unknown:
        return Verdict("unknown", f"No verdict on {dtype}: {unknown}")
    few = _fewest_normalized(net, report)
    if suggestion.error_after > suggestion.limit and few is not None:
        return Verdict(
            "unknown",
            f"No verdict on {dtype}: the relative error of the result is "
            f"{suggestion.error_after:.2g}, but `{few[0].name}` normalizes over {few[1]} numbers "
            f"per channel, fewer than {FEWEST_NORMALIZED}, which multiplies rounding errors. Take "
            "a larger batch or larger images",
        )
    alone = 0.0
    if math.inf > suggestion.error_after > suggestion.limit:
        again, alone = input_errors(net, batch, dtype)
        if AMPLIFIED * again > suggestion.limit:
            return Verdict(
                "unknown",
                f"No verdict on {dtype}: the network draws random numbers, so that its FP32 result "
                f"on the same batch changes by {again:.2g}. Draw none while it is diagnosed "
                "(dropout is left out already)",
            )
    is_exact = suggestion.error_after <= max(suggestion.limit, AMPLIFIED * alone)
    losing = _losing(scales)
    for block in inner_blocks(suggestion.blocks):
        losing.pop(block, None)
    keep = [*suggestion.blocks, *losing]
    after = _zeros_made(net, batch, keep, dtype, scales.scale) if losing else {}
    still = [block for block in losing if after.get(block, 0.0) > LOST_LIMIT]
    reasons = list(_reasons(suggestion, scales, batch, dtype, alone if is_exact else 0.0))
    if not is_exact or still:
        causes = []
        if not is_exact:
            causes.append(
                f"the relative error of its result stays at {suggestion.error_after:.2g}, above "
                f"{suggestion.limit:.2g}; {suggestion.remains}"
            )
        causes += [
            f"`{block.name}` loses {share_text(after[block])} of its gradients at that loss scale "
            "even in FP32, since they arrive as zeros"
            for block in still
        ]
        others = "bfloat16, which has the range of FP32, or " if dtype == "float16" else ""
        return Verdict(
            "not safe",
            f"{dtype} is not safe for this network as it is: {'; '.join(causes)}. Use {others}FP32",
            reasons,
        )
    scale = f"loss scale 2^{scales.power}" if dtype == "float16" else "no loss scale is needed"
    conditions = _conditions(suggestion, losing)
    kept = [block for block in blocks_of(net) if block in keep]
    return Verdict(
        "safe",
        "; ".join([f"{dtype} is safe for this network", scale, *conditions]),
        reasons,
        kept,
        _lines(net, kept, dtype, scales.scale, several=isinstance(batch.inputs, tuple)),
    )


def _unknown(report: RangeReport, scales: LossScales) -> str:
    """Return why the measurements support no verdict; empty if they do."""
    broken = report.broken_gradients()
    if broken:
        return (
            f"in FP32 the gradient of `{broken[0]}` is not finite already ({len(broken)} of "
            f"{len(report.gradients())} gradients). diagnostics.locate_overflow tells where that "
            "begins"
        )
    nonzero = sum(int(one.exponents.counts.sum()) for one in scales.gradients)
    if nonzero < FEWEST_GRADIENTS:
        return (
            f"the batch has {nonzero} nonzero gradients, and a share of {LOST_LIMIT:.0%} needs "
            f"{FEWEST_GRADIENTS}. Take a larger batch, or weights at which the loss is not flat"
        ).replace("%", " %")
    return ""


def _fewest_normalized(net: gluon.Block, report: RangeReport) -> Optional[tuple[gluon.Block, int]]:
    """Return the BatchNorm with the fewest numbers per channel, if these are too few."""
    norms = {block.name: block for block in blocks_of(net) if isinstance(block, nn.BatchNorm)}
    counts = [
        (array.exponents.total // norms[array.name].gamma.shape[0], array.name)
        for array in report.arrays
        if array.kind == "output" and array.name in norms
    ]
    count, name = min(counts, default=(FEWEST_NORMALIZED, ""))
    return (norms[name], count) if count < FEWEST_NORMALIZED else None


def _losing(scales: LossScales) -> dict[gluon.Block, float]:
    """Return the layers that lose too many gradients of their parameters, and the shares."""
    return {
        one.block: shares["lost"]
        for one, shares in zip(scales.gradients, scales.shares(scales.scale))
        if one.what == "parameters"
        and shares["lost"] > LOST_LIMIT
        and one.exponents.counts.sum() >= FEWEST_GRADIENTS
    }


def _zeros_made(
    net: gluon.Block, batch: Batch, kept: Sequence[gluon.Block], dtype: str, scale: float
) -> dict[gluon.Block, float]:
    """Run the network in 16 bits with some blocks in FP32; return what still becomes zero.

    These are shares of the nonzero FP32 gradients of a block's own parameters.
    """
    with sixteen_bits(net, batch, dtype) as forwards:
        with in_fp32(forwards):
            reference = _gradients(net, batch, scale)
        with in_fp32(forwards, kept):
            rounded = _gradients(net, batch, scale)
    made = {}
    for block, before in reference.items():
        nonzero = before.total - before.zeros
        made[block] = (rounded[block].zeros - before.zeros) / nonzero if nonzero else 0.0
    return made


def _gradients(
    net: gluon.Block, batch: Batch, scale: float
) -> dict[gluon.Block, ExponentHistogram]:
    owners = owners_of(net)
    histograms: dict[gluon.Block, ExponentHistogram] = {}
    gradients = observed_batch(net, batch, lambda _: None, loss_scale=scale)
    for parameter, gradient in gradients.items():
        block = owners[parameter.name]
        histograms[block] = histograms.get(block, EMPTY) + exponent_histogram([gradient])
    return histograms


def _conditions(suggestion: Suggestion, losing: Mapping[gluon.Block, float]) -> Iterator[str]:
    """Yield the layers that the safe verdict keeps in FP32, and why."""
    if suggestion.blocks:
        names = ", ".join(f"`{block.name}`" for block in suggestion.blocks)
        yield (
            f"keep {names} in FP32: the result's error falls from "
            f"{suggestion.error_before:.2g} to {suggestion.error_after:.2g}"
        )
    for block, share in losing.items():
        yield f"keep `{block.name}` in FP32: {share_text(share)} of its gradients underflow"


def _reasons(
    suggestion: Suggestion, scales: LossScales, batch: Batch, dtype: str, amplified: float
) -> Iterator[str]:
    """Yield the measurements; ``amplified`` is the error of rounded inputs alone if it counts."""
    yield (
        f"The relative error of the network's result in {dtype} is {suggestion.error_before:.2g} "
        f"(32 roundings, {suggestion.limit:.2g}, are allowed)."
    )
    if amplified:
        yield (
            f"The error that is left, {suggestion.error_after:.2g}, does not count against the "
            f"format: rounding nothing but the inputs changes the result by {amplified:.2g} "
            f"already, and up to {AMPLIFIED:g} times as much is allowed. Networks with random "
            "weights multiply any small change so."
        )
    limit = f"{LOST_LIMIT:.0%}".replace("%", " %")
    fits = (
        f"At 2^{scales.power} the largest gradient fits with a factor of {HEADROOM:g} to spare"
        if dtype == "float16"
        else f"{dtype} has the exponents of float32, so gradients fit without a loss scale"
    )
    yield f"{fits}; a layer may lose {limit} of its parameters' nonzero gradients to underflow."
    yield (
        f"Measured on one batch of {len(batch.arguments[0])}, with these weights. Gradients differ "
        "from batch to batch, change in training, and are larger for a larger batch: a dynamic "
        "loss scale follows them. Repeat this on a checkpoint."
    )


def _lines(
    net: gluon.Block, keep: Sequence[gluon.Block], dtype: str, scale: float, *, several: bool
) -> str:
    """Return Python that casts, keeps and trains as the verdict says."""
    entries = "".join(f"    {path_of(net, block)},  # {block.name}\n" for block in keep)
    kept = f"keep_fp32 = [\n{entries}]\n" if keep else ""
    forward = f"    loss = loss_fn(net({'*' if several else ''}inputs), labels)\n"
    if dtype != "float16":
        option = ", keep_fp32=keep_fp32" if keep else ""
        return (
            "from mxnet import autograd, gluon\n"
            "from mpgluon import amp\n\n"
            "# Before training; with your optimizer and its options.\n"
            f'{kept}amp.autocast(net, "{dtype}"{option})\n'
            'trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})\n\n'
            "# In each step.\n"
            f"with autograd.record():\n{forward}    loss.backward()\n"
            "trainer.step(batch_size)\n"
        )
    option = ", keep_fp32=(*mpgluon.NORMALIZATION_LAYERS, *keep_fp32)" if keep else ""
    return (
        "import mpgluon\n"
        "from mxnet import autograd, gluon\n"
        "from mpgluon import amp\n\n"
        "# Before training; with your optimizer and its options, and multi_precision.\n"
        f"{kept}mpgluon.cast_block(net{option})\n"
        'options = {"learning_rate": 0.1, "multi_precision": True}\n'
        'trainer = gluon.Trainer(net.collect_params(), "sgd", options)\n'
        f"loss_scale = {loss_scale_code(scale)}\n"
        "amp.init_trainer(trainer, loss_scale)\n\n"
        "# In each step.\n"
        f"with autograd.record():\n{forward}"
        "    with amp.scale_loss(loss, trainer) as scaled_loss:\n"
        "        autograd.backward(scaled_loss)\n"
        "trainer.step(batch_size)\n"
    )


def path_of(net: gluon.Block, block: gluon.Block) -> str:
    """Return the Python expression that finds a block from its network.

    Names of blocks count the networks that a process made before; an expression does not.
    """
    return code_of(net, paths_of(net)[block])
