"""Sounds that stand for spoken digits: vowels that glide into one another, as log-mel frames.

A digit is one vowel that becomes another: three tones at the vowels' formants, pulsed with the
pitch of the voice. Digits 5 to 9 are 0 to 4 backwards, so that the order in time decides. Voices
differ in pitch, size and speed, and every recording has noise.

References
----------
Peterson, Barney, "Control Methods Used in a Study of the Vowels", Journal of the Acoustical Society
of America 24, 1952, table II: the formants of men.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BANDS",
    "FRAMES",
    "MOST_DIGITS",
    "SIGNAL_TO_NOISE",
    "draw_strings",
    "encode",
    "frames_of",
    "record",
]

MOST_DIGITS = 5
_LEAST_DIGITS = 2
_RATE = 8000  # samples a second
_WINDOW, _HOP = 256, 160  # samples: 32 ms every 20
_SAMPLES = 12800
FRAMES = 1 + (_SAMPLES - _WINDOW) // _HOP
BANDS = 20
_FLOOR = 1e-3  # of the energies, below every noise here
_VOWELS = np.array([
    [270, 2290, 3010],  # heed
    [530, 1840, 2480],  # head
    [730, 1090, 2440],  # hod
    [570, 840, 2410],  # hawed
    [300, 870, 2240],  # who'd
], dtype=float)  # fmt: skip
_LOUDNESS = np.array([1.0, 0.5, 0.25])
_EDGE = 0.02  # seconds in which a digit becomes loud and quiet again
_LONGEST_PAUSE = 0.06  # seconds before a digit
SIGNAL_TO_NOISE = (-3, 12)  # decibels


def draw_strings(training: int, test: int, *, seed: int) -> tuple[list[str], list[str]]:
    """Return strings of two to five digits for training and for testing, all different."""
    rng = np.random.default_rng(seed)
    drawn: dict[str, None] = {}  # keeps its order
    while len(drawn) < training + test:
        length = rng.integers(_LEAST_DIGITS, MOST_DIGITS + 1)
        drawn.setdefault("".join(map(str, rng.integers(10, size=length))))
    # The short ones are soon used up: mix them.
    mixed = [str(one) for one in rng.permutation(list(drawn))]
    return mixed[:training], mixed[training:]


def record(digits: str, rng: np.random.Generator) -> NDArray[Any]:
    """Return a recording of a voice that says digits, shape (samples,)."""
    pitch, size, seconds = rng.uniform(90, 250), rng.uniform(0.9, 1.12), rng.uniform(0.11, 0.2)
    spoken: list[NDArray[Any]] = []
    for digit in map(int, digits):
        pause = np.zeros(round(rng.uniform(0, _LONGEST_PAUSE) * _RATE))
        spoken += [pause, _say(digit, pitch, size, seconds * rng.uniform(0.85, 1.15), rng)]
    said = np.concatenate(spoken)
    noise = np.sqrt(np.mean(said**2)) * 10 ** (-rng.uniform(*SIGNAL_TO_NOISE) / 20)
    sound: NDArray[Any] = noise * rng.standard_normal(_SAMPLES)
    first = rng.integers(_SAMPLES - len(said) + 1)
    sound[first : first + len(said)] += said
    return sound


def _say(
    digit: int, pitch: float, size: float, seconds: float, rng: np.random.Generator
) -> NDArray[Any]:
    first, last = _VOWELS[digit % 5], _VOWELS[(digit + 1) % 5]
    if digit >= 5:
        first, last = last, first
    time = np.arange(round(seconds * _RATE)) / _RATE
    way = (1 - np.cos(np.pi * time / seconds)) / 2
    formants = size * (first + np.outer(way, last - first)) * rng.uniform(0.95, 1.05, 3)
    tones = np.sin(2 * np.pi * np.cumsum(formants, axis=0) / _RATE) @ _LOUDNESS
    pulses = 1 + np.cos(2 * np.pi * pitch * rng.uniform(0.9, 1.1) * time)
    sound: NDArray[Any] = tones * pulses * np.minimum(1, np.minimum(time, time[::-1]) / _EDGE)
    return sound


def frames_of(sound: NDArray[Any]) -> NDArray[Any]:
    """Return the logarithms of a recording's energies, shape (FRAMES, BANDS), float32."""
    windows = np.lib.stride_tricks.sliding_window_view(sound, _WINDOW)[::_HOP]
    energies = np.abs(np.fft.rfft(windows * np.hanning(_WINDOW))) ** 2
    frames: NDArray[Any] = np.log(energies @ _mel_filters() + _FLOOR)
    return frames.astype(np.float32)


def _mel_filters() -> NDArray[Any]:
    """Return triangles of equal width in mel, shape (frequencies, BANDS)."""
    mel = 2595 * np.log10(1 + np.fft.rfftfreq(_WINDOW, 1 / _RATE) / 700)
    centres = np.linspace(0, mel[-1], BANDS + 2)[1:-1]
    away: NDArray[Any] = np.abs(mel[:, np.newaxis] - centres) / (centres[1] - centres[0])
    return np.maximum(0, 1 - away)


def encode(strings: Sequence[str]) -> NDArray[np.int32]:
    """Return digits as labels, shape (N, MOST_DIGITS); -1 follows the last."""
    labels = np.full((len(strings), MOST_DIGITS), -1, dtype=np.int32)
    for row, digits in zip(labels, strings):
        row[: len(digits)] = [int(one) for one in digits]
    return labels
