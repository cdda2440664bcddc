"""The metadata of a served network: its categories, and how a photograph becomes its input.

They are text in the file, so that a server needs neither mpgluon nor MXNet.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Optional

from mpgluon.errors import DataError

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "ServingMetadata"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""The means of red, green and blue in [0, 1] with which the model zoos' networks were trained."""
IMAGENET_STD = (0.229, 0.224, 0.225)
"""The standard deviations that go with the means."""

_FIXED = {"layout": "NCHW", "channels": "RGB", "pixel_range": [0, 1], "output": "logits"}


@dataclass(frozen=True)
class ServingMetadata:
    """The input and the categories of a served network.

    The central square of an image is resized to ``image_size`` by ``image_size`` pixels; red, green
    and blue in [0, 1] are normalized as ``(pixel - mean) / std``. The defaults are as in
    mpgluon's training and evaluation.

    Attributes
    ----------
    network : str
        A name, for people.
    image_size : int
        Side of the input in pixels.
    classes : tuple of str, optional
        Names of the categories in the order of the logits.
    centre_crop : float
        The side of the square as a share of the image's shorter side, in (0, 1].
    mean, std : (float, float, float)
        Per channel, of pixels in [0, 1].
    """

    network: str
    image_size: int
    classes: Optional[tuple[str, ...]] = None
    centre_crop: float = 224 / 256
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

    def __post_init__(self) -> None:
        if not isinstance(self.image_size, int) or self.image_size < 1:
            raise ValueError(
                f"image_size must be at least 1 pixel, an int, received {self.image_size!r}"
            )
        if isinstance(self.classes, str):
            raise TypeError(
                f"classes must be a sequence of names, received the text {self.classes!r}"
            )
        if not 0 < self.centre_crop <= 1:
            raise ValueError(f"centre_crop must be in (0, 1], received {self.centre_crop}")
        finite = all(map(math.isfinite, (*self.mean, *self.std)))
        if len(self.mean) != 3 or len(self.std) != 3 or not finite or min(self.std) <= 0:
            raise ValueError(
                "mean and std must have a number for each of red, green and blue, all positive in "
                f"std; received {self.mean} and {self.std}"
            )

    @property
    def preprocessing(self) -> str:
        """A sentence: how a photograph becomes the input."""
        mean, std = (", ".join(f"{one:.4g}" for one in three) for three in (self.mean, self.std))
        square = f"the central square of {self.centre_crop:.4g} of the shorter side"
        return f"Pixels from 0 to 1, minus {mean}, divided by {std}; {square}."

    def to_strings(self) -> dict[str, str]:
        """Return keys and values in JSON, as in a file's metadata."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return {name: json.dumps(value) for name, value in {**values, **_FIXED}.items()}

    @classmethod
    def from_strings(cls, strings: Mapping[str, str]) -> ServingMetadata:
        """Return the metadata of :meth:`to_strings`; other keys are ignored.

        Raises
        ------
        DataError
            If a value is missing or wrong.
        """
        names = [field.name for field in fields(cls) if field.name in strings]
        try:
            return cls(**{name: _frozen(json.loads(strings[name])) for name in names})
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the file lacks the metadata of a served network ({error}); was it written by "
                "mpgluon's export_onnx?"
            ) from error


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
