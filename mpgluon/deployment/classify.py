"""Classifying a photograph, given as bytes, with a network in FP32 and in 16 bits.

The bytes may be untrusted: the size of the image is checked before it is decoded. The server is
``scripts/serve.py``.
"""

from __future__ import annotations

import io
import statistics
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import gluon
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError

from mpgluon.data.augment import centre_crop, normalized_levels
from mpgluon.data.images import MAX_IMAGE_PIXELS
from mpgluon.deployment.inference import inference_network
from mpgluon.errors import DataError

__all__ = ["Classifier", "Guess", "NotAPhotographError", "Prediction", "read_photograph"]

# Few formats, since untrusted bytes reach each decoder; one of Pillow's others (EPS) starts a
# program.
_FORMATS = ("JPEG", "PNG", "WEBP")
_GUESSES = 5
_CALLS = 5


class NotAPhotographError(DataError):
    """Bytes are not an image in one of the known formats."""


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
    latency_ms : float
        From the pixels to the logits of this photograph, batch of 1, milliseconds: the median of
        five calls, in turn with those of the network in the other format.
    guesses : tuple of Guess
        At most five, likeliest first. Empty if a logit is not finite, as after an overflow in a
        float16 network.
    """

    dtype: str
    latency_ms: float
    guesses: tuple[Guess, ...]


class Classifier:
    """A network in FP32 and in 16 bits, which may be called from several threads.

    Calls wait for each other, since MXNet is not thread-safe; so at most one photograph is in
    memory decoded.

    Parameters
    ----------
    net : gluon.HybridBlock
        With values; see :func:`mpgluon.deployment.inference_network`. It is not changed.
    classes : sequence of str
        The categories, in the order of the logits.
    image_size : int
        Side of the network's input in pixels.
    dtype : {"bfloat16", "float16"}
        The 16-bit format.

    Raises
    ------
    ValueError
        If there are not as many ``classes`` as logits, or ``dtype`` is another.
    """

    def __init__(
        self,
        net: gluon.HybridBlock,
        classes: Sequence[str],
        *,
        image_size: int,
        dtype: str = "bfloat16",
    ) -> None:
        if dtype not in ("bfloat16", "float16"):
            raise ValueError(f"dtype must be bfloat16 or float16, received {dtype!r}")
        self.classes = tuple(classes)
        self.image_size = image_size
        self.dtype = dtype
        self._levels = normalized_levels()
        self._lock = threading.Lock()
        self._networks = {name: inference_network(net, name) for name in ("float32", dtype)}
        # The first call of a hybridized network traces it, which no photograph should wait for.
        for network in self._networks.values():
            (logits,) = network(mx.nd.zeros((1, 3, image_size, image_size))).asnumpy()
            if len(logits) != len(self.classes):
                raise ValueError(
                    f"the network has {len(logits)} logits, but classes names {len(self.classes)}"
                )

    def __call__(self, photograph: bytes) -> tuple[Prediction, Prediction]:
        """Return the predictions of the FP32 and the 16-bit network, in this order.

        Raises
        ------
        NotAPhotographError, DataError
            As :func:`read_photograph` does.
        """
        with self._lock:
            pixels = read_photograph(photograph, self.image_size)
            channels = [values[pixels[..., i]] for i, values in enumerate(self._levels)]
            images = mx.nd.array(np.stack(channels)[np.newaxis], dtype="float32")
            images.wait_to_read()
            times_ms: dict[str, list[float]] = {dtype: [] for dtype in self._networks}
            logits = {}
            for _ in range(_CALLS):
                for dtype, network in self._networks.items():
                    start = time.perf_counter()
                    (logits[dtype],) = network(images).asnumpy()
                    times_ms[dtype].append(1000 * (time.perf_counter() - start))
        one, other = (
            Prediction(dtype, statistics.median(times_ms[dtype]), self._guesses(logits[dtype]))
            for dtype in self._networks
        )
        return one, other

    def _guesses(self, logits: npt.NDArray[np.float32]) -> tuple[Guess, ...]:
        if not np.isfinite(logits).all():
            return ()
        weights = np.exp(logits.astype(np.float64) - logits.max())
        probabilities = weights / weights.sum()
        likeliest = (-probabilities).argsort(kind="stable")[:_GUESSES]
        return tuple(Guess(self.classes[i], float(probabilities[i])) for i in likeliest)


def read_photograph(data: bytes, size: int) -> npt.NDArray[np.uint8]:
    """Return the central square of a JPEG, PNG or WebP file, rotated by its EXIF orientation.

    Not thread-safe, since a warning is made an error meanwhile.

    Parameters
    ----------
    data : bytes
        The whole file.
    size : int
        The square's side in pixels.

    Returns
    -------
    ndarray, shape (size, size, 3), uint8
        As from :func:`mpgluon.data.eval_loader`, if the file is stored upright.

    Raises
    ------
    NotAPhotographError
        If the bytes are no such file.
    DataError
        If the file is damaged or truncated, or its header names more than ``MAX_IMAGE_PIXELS``
        (32 million) pixels; then nothing is decoded.
    """
    try:
        with warnings.catch_warnings():
            # For an image above its own limit, Pillow only warns.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
        with image:
            pixels = image.width * image.height
            if pixels > MAX_IMAGE_PIXELS:
                raise Image.DecompressionBombError(f"{pixels:,} pixels")
            ImageFile.LOAD_TRUNCATED_IMAGES = False  # importing gluoncv sets it
            # Rotation decodes the whole image; an upright one may be decoded at a reduced size.
            if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
                ImageOps.exif_transpose(image, in_place=True)
            return centre_crop(image, size)
    except MemoryError:
        raise
    except UnidentifiedImageError as error:
        raise NotAPhotographError(
            f"cannot read this image: formats are {', '.join(_FORMATS)}"
        ) from error
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise DataError(
            f"the image has more than {MAX_IMAGE_PIXELS // 10**6} million pixels; give a smaller "
            "copy of it"
        ) from error
    # From a damaged file Pillow's decoders raise nearly anything: OSError, SyntaxError, ValueError,
    # struct.error, IndexError, ...
    except Exception as error:
        raise DataError(f"the image is damaged or cut short: {error}") from error
