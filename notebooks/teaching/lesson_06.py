"""Lesson 06: sounds of four pitches, a network that listens, its training, and the exercises."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Optional, Union

import mpgluon
from mpgluon import amp, diagnostics
from mpgluon.cast import fp32
from mpgluon.diagnostics import Batch, locate_overflow
from mpgluon_tools.recorder.numerics.files import Recording, read_numerics

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.ndarray import NDArray

from teaching.exercises import Verdict, exercise, number_of

__all__ = [
    "ColleaguesEnergy",
    "accuracy_of",
    "loss_fn",
    "make_net",
    "make_sounds",
    "make_trainer",
    "record_with_a_fault",
    "train",
]

loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()

_STEPS = 60  # of the trainings in the exercises
_RECORDED = 20  # steps of the recordings
_FAULTY_LAYER = 2  # its place in the network; the fault of exercise 06.4
_FAULTY_STEP = 13


def make_sounds(count: int, seed: int) -> tuple[NDArray, NDArray]:
    """Return sounds of whole numbers, as audio files hold them, and which of four pitches each has.

    Their shapes are (count, 1, 256), FP32, and (count,), int32.
    """
    random = np.random.default_rng(seed)
    pitches = random.integers(0, 4, count)
    phases = np.array([0.03, 0.06, 0.12, 0.24])[pitches, None] * np.arange(256)
    tones = np.sin(2 * np.pi * (phases + random.uniform(0, 1, (count, 1))))
    tones += 0.3 * random.standard_normal((count, 256))  # noise
    loudness = 2.0 ** random.uniform(5, 14, (count, 1))
    sounds = np.clip(np.round(tones * loudness), -32768, 32767)
    return mx.nd.array(sounds[:, None]), mx.nd.array(pitches, dtype="int32")


def make_net(energy: Callable[..., gluon.HybridBlock]) -> gluon.nn.HybridSequential:
    """Return the same FP32 network each time; its second layer is ``energy(prefix="energy_")``."""
    mx.random.seed(1)
    net = nn.HybridSequential(prefix="")
    net.add(nn.Conv1D(16, 16, strides=4, in_channels=1, use_bias=False, prefix="filters_"))
    net.add(energy(prefix="energy_"))
    net.add(nn.Dense(32, in_units=16, activation="tanh", prefix="hidden_"))
    net.add(nn.Dense(4, in_units=32, prefix="output_"))
    net.initialize(mx.init.Xavier())
    return net


def make_trainer(net: gluon.Block, loss_scale: Any, **options: Any) -> gluon.Trainer:
    """Return a Trainer with master weights; ``options`` go to ``amp.init_trainer``."""
    settings = {"learning_rate": 0.01, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "adam", settings)
    amp.init_trainer(trainer, loss_scale, **options)
    return trainer


def train(
    net: gluon.Block,
    trainer: gluon.Trainer,
    steps: int,
    history: list[dict[str, Any]],
    divisor: float = 1,
) -> None:
    """Train with sounds that are divided by a number; append what each step did to ``history``."""
    for step in range(steps):
        sounds, pitches = make_sounds(32, seed=step)
        scale = amp.loss_scale(trainer)
        with autograd.record():
            loss = loss_fn(net(sounds / divisor), pitches)
            with amp.scale_loss(loss, trainer) as scaled_loss:
                autograd.backward(scaled_loss)
        event = {"step": step + 1, "loss": float(loss.mean().asscalar()), "loss_scale": scale}
        history.append({**event, "skipped": True})
        trainer.step(len(pitches))
        history[-1]["skipped"] = amp.step_was_skipped(trainer)


def accuracy_of(net: gluon.Block, divisor: float = 1) -> float:
    """Return the share of right answers for 400 new sounds, divided by a number."""
    sounds, pitches = make_sounds(400, seed=10_000)
    found = net(sounds / divisor).asnumpy().argmax(axis=1)
    return float(np.mean(found == pitches.asnumpy()))


class ColleaguesEnergy(nn.HybridBlock):
    """The logarithm of the mean of squares over time, as a colleague has written it."""

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803 - Gluon's name
        """Return a number for each filter."""
        return F.log(F.mean(F.broadcast_mul(x, x), axis=2) + 1e-5)


def record_with_a_fault(
    energy: Callable[..., gluon.HybridBlock], folder: Union[str, Path]
) -> Recording:
    """Train the cured network for 20 steps with a hidden fault; return the recording."""
    return _record(energy, folder, _lose_masters)


def _record(
    energy: Callable[..., gluon.HybridBlock],
    folder: Union[str, Path],
    before_step: Callable[[gluon.Block, int], None] = lambda *_: None,
    whole: int = 1,
) -> Recording:
    """Train the cured network for 20 steps and record them, as the lesson does."""
    net = make_net(energy)
    mpgluon.cast_block(net, keep_fp32=(*mpgluon.NORMALIZATION_LAYERS, net[1]))
    trainer = make_trainer(net, 1024)
    arrays = (whole, whole)  # the step that is recorded with all values
    recorder = diagnostics.NumericsRecorder(net, trainer, folder, every=1, arrays=arrays)
    for step in range(1, _RECORDED + 1):
        before_step(net, step)
        sounds, pitches = make_sounds(32, seed=step - 1)
        with recorder.step(sounds, pitches) as recorded:
            with autograd.record():
                recorded.loss = loss_fn(net(sounds), pitches)
                with amp.scale_loss(recorded.loss, trainer) as scaled_loss:
                    autograd.backward(scaled_loss)
            trainer.step(len(pitches))
    return read_numerics(folder)


def _lose_masters(net: gluon.Block, step: int) -> None:
    """Round a layer's masters to FP16, as a checkpoint without them would."""
    if step == _FAULTY_STEP:
        for parameter in net[_FAULTY_LAYER].collect_params().values():
            master = fp32.known(parameter)
            assert master is not None  # the Trainer has made it in step 1
            master[:] = master.astype("float16").astype("float32")


class _Energy(nn.HybridBlock):
    """The logarithm of the mean of squares over time, or a function that is tried in its place."""

    def __init__(self, function: Optional[Callable[[Any, Any], Any]] = None, **names: Any) -> None:
        super().__init__(**names)
        self._function = function

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803 - Gluon's name
        if self._function is not None:
            return self._function(F, x)
        return F.log(F.mean(F.broadcast_mul(x, x), axis=2) + 1)


def _first_batch() -> Batch:
    return Batch(*make_sounds(32, seed=0), loss_fn)


def _words_of(found: Any) -> str:
    return f"{found.direction}, {found.what} in {found.block} is not finite"


@exercise("06.1")
def energy_without_overflow(answer: Any) -> Verdict:
    if not callable(answer):
        raise TypeError(f"the answer is a function of F and x, received {answer!r}")
    sounds, _ = make_sounds(32, seed=0)
    net = make_net(lambda **names: _Energy(answer, **names))
    expected = make_net(_Energy)[:2](sounds)
    found = net[:2](sounds)
    if found.shape != expected.shape:
        return Verdict(False, f"It returns the shape {found.shape}, and not {expected.shape}.")
    difference = float((found - expected).abs().max().asscalar())
    if not difference < 0.1:
        return Verdict(
            False,
            f"In FP32 already its result is another: up to {difference:.3g} away from the "
            "logarithm of the mean of squares + 1.",
        )
    mpgluon.cast_block(net)
    overflow = locate_overflow(net, _first_batch())
    if overflow is not None:
        return Verdict(False, f"Cast to FP16, it breaks: {_words_of(overflow)}.")
    trainer = make_trainer(net, "dynamic")
    train(net, trainer, _STEPS, [])
    accuracy = accuracy_of(net)
    return Verdict(
        accuracy > 0.9,
        f"In FP16, {amp.skipped_steps(trainer)} of {_STEPS} steps are skipped until the loss scale "
        f"has found its place, and the accuracy is {accuracy:.0%}.",
    )


@exercise("06.2")
def divisor_of_the_sounds(answer: Any) -> Verdict:
    divisor = number_of(answer, "a power of two")
    if divisor <= 0 or math.frexp(divisor)[0] != 0.5:
        return Verdict(False, f"{divisor:g} is not a power of two.")
    skipped, accuracy = _trained_with(divisor)
    found = f"Divided by {divisor:g}, {skipped} of {_STEPS} steps are skipped"
    if skipped:
        return Verdict(False, f"{found}, and the accuracy is {accuracy:.0%}.")
    skipped_with_half, _ = _trained_with(divisor / 2)
    if not skipped_with_half:
        return Verdict(False, f"{found}. But divided by {divisor / 2:g}, none is skipped either.")
    return Verdict(
        True,
        f"{found}, and the accuracy is {accuracy:.0%}. Divided by {divisor / 2:g}, "
        f"they are {skipped_with_half}.",
    )


def _trained_with(divisor: float) -> tuple[int, float]:
    """Train in FP16 with divided sounds; return how many steps were skipped, and the accuracy."""
    net = make_net(_Energy)
    mpgluon.cast_block(net)
    trainer = make_trainer(net, mpgluon.DynamicLossScale(init_scale=2.0**8))
    train(net, trainer, _STEPS, [], divisor)
    return amp.skipped_steps(trainer), accuracy_of(net, divisor)


@exercise("06.3")
def largest_loss_scale(answer: Any) -> Verdict:
    scale = number_of(answer, "a power of two")
    if scale <= 0 or math.frexp(scale)[0] != 0.5:
        return Verdict(False, f"{scale:g} is not a power of two.")
    net, batch = make_net(_Energy), _first_batch()
    mpgluon.cast_block(net, keep_fp32=(*mpgluon.NORMALIZATION_LAYERS, net[1]))
    found = locate_overflow(net, batch, loss_scale=scale)
    if found is not None:
        return Verdict(False, f"At a scale of {scale:g}, {_words_of(found)}: the step is skipped.")
    found = locate_overflow(net, batch, loss_scale=2 * scale)
    if found is None:
        return Verdict(
            False, f"At a scale of {scale:g} all is finite, but at {2 * scale:g} it is so too."
        )
    return Verdict(
        True, f"At a scale of {scale:g} all is finite. At {2 * scale:g}, {_words_of(found)}."
    )


@exercise("06.4")
def layer_of_the_fault(answer: Any) -> Verdict:
    if not isinstance(answer, str):
        raise TypeError(f'the answer is the name of a layer, such as "energy", received {answer!r}')
    names = [layer.name for layer in make_net(_Energy)]
    if answer not in names:
        return Verdict(False, f"{answer!r} is not one of the layers {', '.join(names)}.")
    with TemporaryDirectory() as folder:
        good = _record(_Energy, Path(folder) / "good")
        faulty = _record(_Energy, Path(folder) / "faulty", _lose_masters, whole=_FAULTY_STEP)
        parted = _parted(good, faulty, len(names))
        step = good.step(_FAULTY_STEP), faulty.step(_FAULTY_STEP)
    place, first = names.index(answer), min(parted)
    if parted[place] != first:
        return Verdict(
            False,
            f"The weights and masters of {answer} differ from step {parted[place]} on, those of "
            f"another layer from step {first} on."
            if parted[place] < math.inf
            else f"{answer} has no weights, and is the same code in both runs.",
        )
    masters = [
        tensor.array
        for tensor in step[1].of("master")
        if tensor.id.name.startswith(f"{place}.") and tensor.array is not None
    ]
    are_fp16 = all((array == array.astype(np.float16)).all() for array in masters)
    assert masters
    assert are_fp16
    losses = [f"{one.line['loss']:.4f}" for one in step]
    return Verdict(
        True,
        f"Before step {first} all FP32 masters of {answer} became FP16 numbers, as if they came "
        f"from a checkpoint that holds only the 16-bit weights. Those weights stayed the same, and "
        f"so did the loss of step {first}: {losses[0]} and {losses[1]}. But its update began at "
        "other masters.",
    )


def _parted(first: Recording, second: Recording, layers: int) -> list[float]:
    """Return the first step in which each layer's weights or masters differ; infinity if none."""
    steps = [math.inf] * layers
    for number in reversed(first.numbers):
        other = second.step(number).tensors
        for tensor in first.step(number).of("weight", "master"):
            if tensor.checksum != other[tensor.id].checksum:
                steps[int(tensor.id.name.partition(".")[0])] = number
    return steps
