"""Classifying a photograph, given as bytes, with a network in FP32 and in 16-bit formats."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional, Union

from mpgluon.base.blocks import interface
from mpgluon.cast.arithmetic import arithmetic_of
from mpgluon.cast.numpy_arrays import in_current_interface
from mpgluon.errors import PrecisionError
from mpgluon_tools.deployment.inference import inference_network
from mpgluon_tools.onnx.metadata import IMAGENET_MEAN, IMAGENET_STD, ServingMetadata
from mpgluon_tools.serving.photographs import normalized_levels, read_photograph

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import gluon

__all__ = ["Classifier", "Guess", "PhotographClassifier", "Prediction"]

_GUESSES = 5
_WARM_UP = 5  # calls: the first traces the network, others may bring weights into new layouts
_CALLS = 5  # for each photograph, in a row: a network finds its weights in the caches then
_REMEMBERED = 25  # calls, so that a time is one of five photographs


@dataclass(frozen=True)
class Guess:
    """A category and its probability in [0, 1]."""

    category: str
    probability: float


@dataclass(frozen=True)
class Prediction:
    """The prediction of the network in one format.

    Attributes
    ----------
    dtype : str
        ``"float32"``, ``"float16"`` or ``"bfloat16"``.
    arithmetic : {"native", "emulated"}
        Whether the processor multiplies in this format. If not, FP32 arrays hold its numbers: the
        probabilities are as on a processor that does, the time is not.
    latency_ms : float
        Milliseconds of the network's forward pass on one image, from its pixels to its logits:
        the median of the latest calls, five for each photograph.
    calls : int
        The number of these calls, at most 25.
    guesses : tuple of Guess
        At most five, likeliest first. Empty if a logit is not finite, as after an overflow in a
        float16 network.
    others : tuple of Guess
        This network's answers for the categories that are guesses in other formats only.
    """

    dtype: str
    arithmetic: str
    latency_ms: float
    calls: int
    guesses: tuple[Guess, ...]
    others: tuple[Guess, ...]


class Classifier:
    """A network in FP32 and in 16-bit formats, which may be called from several threads.

    Calls wait for each other, since MXNet is not thread-safe; so at most one photograph is in
    memory decoded. Each network has predicted an image of noise a few times when this returns.

    Parameters
    ----------
    net : gluon.HybridBlock
        With values; see :func:`mpgluon.deployment.inference_network`. It is not changed.
    classes : sequence of str
        The categories, in the order of the logits.
    image_size : int
        Side of the network's input in pixels.
    dtype : {"bfloat16", "float16"} or sequence of these
        The 16-bit formats.
    centre_crop, mean, std
        As in :class:`~mpgluon_tools.onnx.ServingMetadata`.

    Attributes
    ----------
    arithmetic : dict from str to str
        ``"native"`` or ``"emulated"`` for each format, FP32 first.
    metadata : ServingMetadata
        The input and the categories.

    Raises
    ------
    ValueError
        If there are not as many ``classes`` as logits, or ``dtype`` is another, or
        ``ServingMetadata`` refuses a value.
    """

    def __init__(
        self,
        net: gluon.HybridBlock,
        classes: Sequence[str],
        *,
        image_size: int,
        dtype: Union[str, Sequence[str]] = "bfloat16",
        centre_crop: float = ServingMetadata.centre_crop,
        mean: tuple[float, float, float] = IMAGENET_MEAN,
        std: tuple[float, float, float] = IMAGENET_STD,
    ) -> None:
        dtypes = (dtype,) if isinstance(dtype, str) else tuple(dtype)
        if not dtypes or not {"bfloat16", "float16"}.issuperset(dtypes):
            raise ValueError(f"dtype must be bfloat16 or float16, or both; received {dtype!r}")
        self.classes = tuple(classes)
        self.image_size = image_size
        self.metadata = ServingMetadata("", image_size, self.classes, centre_crop, mean, std)
        self.arithmetic = {
            "float32": "native",
            **{name: arithmetic_of(name, "cpu").kind for name in dtypes},
        }
        self._levels = normalized_levels(mean, std)
        self._lock, self._in_numpy = threading.Lock(), mx.util.is_np_array()
        self._networks = {name: inference_network(net, name) for name in self.arithmetic}
        self._times_ms: dict[str, deque[float]] = {}
        noise = np.random.RandomState(0).randint(0, 256, (image_size, image_size, 3))
        images = _images(noise.astype(np.uint8), self._levels)
        for name in self._networks:
            logits = self._logits(name, images, _WARM_UP)
            if len(logits) != len(self.classes):
                raise ValueError(
                    f"the network has {len(logits)} logits, but classes names {len(self.classes)}"
                )
        self._times_ms = {}

    def __call__(self, photograph: bytes) -> tuple[Prediction, ...]:
        """Return the predictions of the FP32 network and then of each 16-bit one.

        Raises
        ------
        NotAPhotographError, DataError
            As :func:`read_photograph` does.
        """
        with self._lock, interface(in_numpy=self._in_numpy):  # which each thread has for itself
            share = self.metadata.centre_crop
            pixels = read_photograph(photograph, self.image_size, share)
            images = _images(pixels, self._levels)
            logits = {name: self._logits(name, images, _CALLS) for name in self._networks}
            times_ms = {name: tuple(times) for name, times in self._times_ms.items()}
        probabilities = {name: _probabilities(found) for name, found in logits.items()}
        likeliest = {
            name: [] if found is None else list((-found).argsort(kind="stable")[:_GUESSES])
            for name, found in probabilities.items()
        }
        shown = dict.fromkeys(category for found in likeliest.values() for category in found)
        return tuple(
            Prediction(
                name,
                self.arithmetic[name],
                statistics.median(times_ms[name]),
                len(times_ms[name]),
                self._guesses(found, likeliest[name]),
                self._guesses(found, [one for one in shown if one not in likeliest[name]]),
            )
            for name, found in probabilities.items()
        )

    def _logits(self, name: str, images: mx.nd.NDArray, calls: int) -> npt.NDArray[np.float32]:
        """Return the logits of the network in one format, and remember the times of its calls."""
        times_ms = self._times_ms.setdefault(name, deque(maxlen=_REMEMBERED))
        logits: npt.NDArray[np.float32]
        for _ in range(calls):
            start = time.perf_counter()
            (logits,) = self._networks[name](images).asnumpy()
            times_ms.append(1000 * (time.perf_counter() - start))
        return logits

    def _guesses(
        self, probabilities: Optional[npt.NDArray[np.float64]], categories: Iterable[int]
    ) -> tuple[Guess, ...]:
        if probabilities is None:
            return ()
        return tuple(Guess(self.classes[i], float(probabilities[i])) for i in categories)


class PhotographClassifier:
    """A network in one format that names photographs; it may be called from several threads.

    Parameters
    ----------
    net : gluon.HybridBlock
        With values; see :func:`mpgluon.deployment.inference_network`. It is not changed.
    metadata : ServingMetadata
        The input and the categories, which it must have.
    dtype : {"float32", "float16", "bfloat16"}

    Attributes
    ----------
    classes : tuple of str
        The categories.
    metadata : ServingMetadata
    """

    def __init__(
        self, net: gluon.HybridBlock, metadata: ServingMetadata, dtype: str = "float32"
    ) -> None:
        self.metadata, self.classes = metadata, metadata.classes or ()
        self._network, self._dtype = inference_network(net, dtype), dtype
        self._levels = normalized_levels(metadata.mean, metadata.std)
        self._lock, self._in_numpy = threading.Lock(), mx.util.is_np_array()

    def __call__(self, photograph: Union[str, Path, bytes]) -> list[tuple[str, float]]:
        """Return every category with its probability in [0, 1], likeliest first.

        Parameters
        ----------
        photograph : str or Path, or bytes
            A file in a format that Pillow reads; or the bytes of a JPEG, PNG or WebP file, which
            may be untrusted.

        Raises
        ------
        DataError
            If it is not such a file, or is damaged, or has more than 32 million pixels.
        OSError
            If the file cannot be read.
        PrecisionError
            If a logit is not finite, as after an overflow in float16.
        """
        is_bytes = isinstance(photograph, bytes)
        data = photograph if isinstance(photograph, bytes) else Path(photograph).read_bytes()
        with self._lock, interface(in_numpy=self._in_numpy):  # which each thread has for itself
            size, share = self.metadata.image_size, self.metadata.centre_crop
            pixels = read_photograph(data, size, share, any_format=not is_bytes)
            (logits,) = self._network(_images(pixels, self._levels)).asnumpy()
        probabilities = _probabilities(logits)
        if probabilities is None:
            raise PrecisionError(
                f"a logit of the network is not finite in {self._dtype}; "
                'try dtype="float32", and look for the layer with mpgluon diagnose'
            )
        order = (-probabilities).argsort(kind="stable")
        return [(self.classes[i], float(probabilities[i])) for i in order]


def _images(pixels: npt.NDArray[np.uint8], levels: npt.NDArray[np.float32]) -> mx.nd.NDArray:
    """Return a network's input for one image: shape (1, 3, size, size), FP32."""
    channels = [values[pixels[..., i]] for i, values in enumerate(levels)]
    images = mx.nd.array(np.stack(channels)[np.newaxis], dtype="float32")
    images.wait_to_read()
    return in_current_interface(images)


def _probabilities(logits: npt.NDArray[np.float32]) -> Optional[npt.NDArray[np.float64]]:
    """Return the softmax of logits, or ``None`` if one is not finite."""
    if not np.isfinite(logits).all():
        return None
    weights = np.exp(logits.astype(np.float64) - logits.max())
    probabilities: npt.NDArray[np.float64] = weights / weights.sum()
    return probabilities
