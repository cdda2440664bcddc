"""Render "shapes", a data set for machines without photographs.

JPEG files in the layout of Caltech 101. A class is a shape and a fill pattern; place, size,
rotation, colour, background and clutter are random. The first ten classes are plain shapes, each
with its own hue, and easy to learn.
"""

from __future__ import annotations

import colorsys
import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Union

from mpgluon.base.files import disk_error, exclusive, temporary_folder
from mpgluon.errors import DataError

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from tqdm import tqdm

from recipes.data.draws import Purpose, generator
from recipes.options import at_least

_logger = logging.getLogger(__name__)

STAMP_NAME = "shapes.json"
MIN_CLASSES, MAX_CLASSES = 10, 101
# Part of the stamp: increase it when the same parameters give other pixels.
_RENDERER_VERSION = 1

_GRAYSCALE_SHARE = 0.05
_SUPERSAMPLING = 3
_HUE_JITTER = 0.03
_CONTRAST = 0.35  # the least difference in luminance between the shape and the background
_OFF_CENTRE = 0.15  # of the short side, at most
_JPEG_QUALITY = 90

Point = tuple[float, float]


# Outlines in a square from -1 to 1, y down: polygons, of which every second one is a hole.


def _polygon(corners: int, *, inner: float = 1.0, turn: float = -90.0) -> list[Point]:
    """Return a regular polygon; ``inner`` below 1 pulls every second corner in: a star."""
    points = []
    for corner in range(corners):
        radius = inner if corner % 2 else 1.0
        angle = math.radians(turn + 360.0 * corner / corners)
        points.append((radius * math.cos(angle), radius * math.sin(angle)))
    return points


def _crescent() -> list[Point]:
    bow = [math.radians(angle) for angle in range(50, 311, 5)]
    outer = [(math.cos(a) + 0.2, math.sin(a)) for a in bow]
    tip_x, tip_y = outer[-1]
    centre_x = tip_x + 0.12
    radius = math.hypot(tip_x - centre_x, tip_y)
    start = math.atan2(tip_y, tip_x - centre_x) % (2 * math.pi)
    stop = 2 * math.pi - start
    inner = [start + (stop - start) * step / 40 for step in range(41)]
    return outer + [(centre_x + radius * math.cos(a), radius * math.sin(a)) for a in inner]


def _heart() -> list[Point]:
    points = []
    for step in range(72):
        t = 2 * math.pi * step / 72
        x = 16 * math.sin(t) ** 3
        y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        points.append((x / 17, -(y + 2.5) / 17))
    return points


_CROSS = [
    (-0.34, -1.0), (0.34, -1.0), (0.34, -0.34), (1.0, -0.34), (1.0, 0.34), (0.34, 0.34),
    (0.34, 1.0), (-0.34, 1.0), (-0.34, 0.34), (-1.0, 0.34), (-1.0, -0.34), (-0.34, -0.34),
]  # fmt: skip
_ARROW = [
    (-1.0, -0.28), (0.1, -0.28), (0.1, -0.8), (1.0, 0.0), (0.1, 0.8), (0.1, 0.28), (-1.0, 0.28),
]  # fmt: skip
_ELL = [(-0.75, -1.0), (-0.05, -1.0), (-0.05, 0.35), (0.8, 0.35), (0.8, 1.0), (-0.75, 1.0)]

_DISC = _polygon(72)
_OUTLINES: dict[str, list[list[Point]]] = {
    "disc": [_DISC],
    "square": [[(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)]],
    "triangle": [_polygon(3)],
    "star": [_polygon(10, inner=0.42)],
    "ring": [_DISC, [(0.55 * x, 0.55 * y) for x, y in _DISC]],
    "cross": [_CROSS],
    "crescent": [_crescent()],
    "hexagon": [_polygon(6, turn=0.0)],
    "arrow": [_ARROW],
    "heart": [_heart()],
    "diamond": [[(0.0, -1.0), (0.6, 0.0), (0.0, 1.0), (-0.6, 0.0)]],
    "semicircle": [[(x, y + 0.5) for x, y in _DISC if y <= 1e-9]],
    "ell": [_ELL],
}

# The region of the second colour, over the same square turned with the shape.
Grid = NDArray[np.float64]
_PATTERNS: dict[str, Callable[[Grid, Grid], NDArray[np.bool_]]] = {
    "": lambda x, _: np.zeros(x.shape, dtype=np.bool_),
    "striped": lambda x, _: np.sin(x * 4 * math.pi) > 0,
    "banded": lambda _, y: np.sin(y * 4 * math.pi) > 0,
    "checkered": lambda x, y: np.sin(x * 3 * math.pi) * np.sin(y * 3 * math.pi) > 0,
    "dotted": lambda x, y: np.cos(x * 5 * math.pi) + np.cos(y * 5 * math.pi) > 0.6,
    "halved": lambda x, _: x > 0,
    "cored": lambda x, y: np.hypot(x, y) < 0.68,
    "diagonal": lambda x, y: np.sin((x + y) * 3 * math.pi) > 0,
}

_CLASSES = tuple(
    (f"{pattern}_{shape}" if pattern else shape, shape, pattern)
    for pattern in _PATTERNS
    for shape in _OUTLINES
)[:MAX_CLASSES]


def class_names(classes: int = 10) -> tuple[str, ...]:
    """Return the names of the first ``classes`` classes.

    Raises
    ------
    ValueError
        If ``classes`` is not from 10 to 101.
    """
    if not MIN_CLASSES <= classes <= MAX_CLASSES:
        raise ValueError(f"classes must be from {MIN_CLASSES} to {MAX_CLASSES}, received {classes}")
    return tuple(name for name, _, _ in _CLASSES[:classes])


def render_shapes(
    folder: Union[str, Path],
    *,
    classes: int = 10,
    images_per_class: int = 60,
    seed: int = 0,
    progress: bool = False,
) -> Path:
    """Render the data set into a folder of ``folder``, unless it is there already.

    The folder's name contains the parameters; it is renamed when it is complete, and simultaneous
    calls take turns. The pixels of an image depend only on the seed, its class and its number.

    Parameters
    ----------
    folder : str or Path
        The parent of the data set's folder; made if missing.
    classes : int, optional
        From 10 to 101.
    images_per_class : int, optional
        At least 1.
    seed : int, optional
        At least 0.
    progress : bool, optional
        Whether to show a progress bar on the standard error stream.

    Returns
    -------
    Path
        ``folder/shapes-<classes>x<images_per_class>-seed<seed>``, with one folder per class of
        ``image_0001.jpg`` and so on, and the parameters in ``shapes.json``.

    Raises
    ------
    ValueError
        If an argument is out of its range.
    DataError
        If a folder of that name holds something else, or the disk is full or not writable.
    """
    names = class_names(classes)
    at_least(1, images_per_class=images_per_class)
    at_least(0, seed=seed)
    stamp = {
        "dataset": "shapes",
        "renderer_version": _RENDERER_VERSION,
        "classes": classes,
        "images_per_class": images_per_class,
        "seed": seed,
    }
    target = Path(folder) / f"shapes-{classes}x{images_per_class}-seed{seed}"
    try:
        with exclusive(Path(folder) / ".shapes.lock"):
            if target.exists():
                _check_stamp(target, stamp)
                return target
            with temporary_folder(target.with_name(f".{target.name}.rendering")) as staging:
                _render_all(staging, names, images_per_class, seed, progress=progress)
                (staging / STAMP_NAME).write_text(json.dumps(stamp, indent=2) + "\n")
                os.rename(staging, target)
    except OSError as error:
        raise disk_error(error, target, "run the same command again") from error
    _logger.info("shapes: rendered %d classes in %s", classes, target)
    return target


def _render_all(
    folder: Path, names: tuple[str, ...], images_per_class: int, seed: int, *, progress: bool
) -> None:
    total = len(names) * images_per_class
    with tqdm(total=total, desc="shapes", unit="image", disable=None if progress else True) as bar:
        for class_index, name in enumerate(names):
            (folder / name).mkdir(parents=True)
            for index in range(images_per_class):
                image = render_image(class_index, index, seed=seed)
                image.save(folder / name / f"image_{index + 1:04d}.jpg", quality=_JPEG_QUALITY)
                bar.update()


def _check_stamp(target: Path, stamp: dict[str, Any]) -> None:
    try:
        found = json.loads((target / STAMP_NAME).read_text())
    except (OSError, ValueError):
        found = None
    if found != stamp:
        raise DataError(
            f"{target} does not hold the expected shapes: its {STAMP_NAME} says {found} instead "
            f"of {stamp}; delete that folder, or choose another one"
        )


def render_image(class_index: int, index: int, *, seed: int = 0) -> Image.Image:
    """Render an image, in mode RGB, or L for about 5 % of them.

    ``class_index`` is a position in `class_names`, ``index`` the image's number in its class, from
    0. JPEG changes the pixels once more.
    """
    rng = generator(Purpose.SHAPES, seed, class_index, index)
    _, shape, pattern = _CLASSES[class_index]
    width, height = _random_size(rng)
    fill, second, background = _random_colours(rng, list(_OUTLINES).index(shape))

    canvas = Image.new("RGB", (width, height), background)
    _draw_clutter(canvas, rng, background)
    scale = 0.5 * min(width, height) * rng.uniform(0.65, 0.85)
    turn = math.radians(rng.uniform(-20.0, 20.0))
    # Near the middle, as in the photographs, so that a centre crop contains most of it.
    reach = _OFF_CENTRE * min(width, height)
    centre = (
        width / 2 + rng.uniform(-1, 1) * min(reach, width / 2 - scale),
        height / 2 + rng.uniform(-1, 1) * min(reach, height / 2 - scale),
    )
    coverage = _coverage(_OUTLINES[shape], (width, height), centre, scale, turn)
    x, y = _shape_coordinates((width, height), centre, scale, turn)
    colours = np.where(_PATTERNS[pattern](x, y)[..., None], second, fill)

    pixels = np.asarray(canvas, dtype=np.float64)
    pixels = pixels + coverage[..., None] * (colours - pixels)
    light = rng.uniform(-12.0, 12.0, size=2) @ np.stack([x, y]).reshape(2, -1)
    pixels = pixels + np.clip(light.reshape(height, width, 1), -25.0, 25.0)
    pixels = pixels + rng.uniform(2.0, 6.0) * rng.standard_normal((height, width, 1))
    image = Image.fromarray(np.clip(np.rint(pixels), 0, 255).astype(np.uint8))
    return image.convert("L") if rng.random() < _GRAYSCALE_SHARE else image


def _random_size(rng: np.random.Generator) -> tuple[int, int]:
    """Return width and height: around 300 x 200, one in four upright."""
    short = int(rng.integers(160, 241))
    long = round(short * rng.uniform(1.0, 1.8))
    return (short, long) if rng.random() < 0.25 else (long, short)


def _random_colours(
    rng: np.random.Generator, shape_index: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the fill, a second fill for patterns, and a background far from both in luminance."""
    hue = (0.1 * shape_index + (0.05 if shape_index >= 10 else 0.0)) % 1.0
    hue = (hue + rng.uniform(-_HUE_JITTER, _HUE_JITTER)) % 1.0
    fill = colorsys.hsv_to_rgb(hue, rng.uniform(0.75, 1.0), rng.uniform(0.7, 1.0))
    luminance = 0.299 * fill[0] + 0.587 * fill[1] + 0.114 * fill[2]
    if luminance > 0.5:
        gray = rng.uniform(0.05, luminance - _CONTRAST)
        second = [0.45 * channel + 0.55 for channel in fill]
    else:
        gray = rng.uniform(luminance + _CONTRAST, 0.95)
        second = [0.4 * channel for channel in fill]
    tint = rng.uniform(-0.04, 0.04, size=3)
    return _to_bytes(fill), _to_bytes(second), _to_bytes(gray + tint)


def _to_bytes(colour: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in np.clip(np.rint(np.asarray(colour) * 255), 0, 255))


def _draw_clutter(
    canvas: Image.Image, rng: np.random.Generator, background: tuple[int, ...]
) -> None:
    """Draw a few lines and blobs, grayish and near the background's brightness."""
    draw = ImageDraw.Draw(canvas)
    width, height = canvas.size
    for _ in range(int(rng.integers(4, 11))):
        near = np.asarray(background) + rng.uniform(-38, 38) + rng.uniform(-14, 14, size=3)
        colour = _to_bytes(near / 255)
        x, y = rng.uniform(0, width), rng.uniform(0, height)
        reach = rng.uniform(0.05, 0.2) * min(width, height)
        end_x, end_y = x + rng.uniform(0.3, 1) * reach, y + rng.uniform(0.3, 1) * reach
        kind = int(rng.integers(3))
        if kind == 0:
            far = (rng.uniform(0, width), rng.uniform(0, height))
            draw.line([(x, y), far], fill=colour, width=int(rng.integers(1, 5)))
        elif kind == 1:
            draw.ellipse([x, y, end_x, end_y], fill=colour)
        else:
            draw.rectangle([x, y, end_x, end_y], fill=colour)


def _coverage(
    outline: list[list[Point]], size: tuple[int, int], centre: Point, scale: float, turn: float
) -> NDArray[np.float64]:
    """Return each pixel's share inside the outline, shape (height, width), in [0, 1]."""
    width, height = size
    mask = Image.new("L", (width * _SUPERSAMPLING, height * _SUPERSAMPLING), 0)
    draw = ImageDraw.Draw(mask)
    cos, sin = math.cos(turn), math.sin(turn)
    for index, polygon in enumerate(outline):
        points = [
            (
                _SUPERSAMPLING * (centre[0] + scale * (cos * x - sin * y)),
                _SUPERSAMPLING * (centre[1] + scale * (sin * x + cos * y)),
            )
            for x, y in polygon
        ]
        draw.polygon(points, fill=0 if index % 2 else 255)
    return np.asarray(mask.reduce(_SUPERSAMPLING), dtype=np.float64) / 255


def _shape_coordinates(
    size: tuple[int, int], centre: Point, scale: float, turn: float
) -> tuple[Grid, Grid]:
    """Return each pixel's place in the shape's square, two arrays of shape (height, width)."""
    width, height = size
    across = (np.arange(width) + 0.5 - centre[0]) / scale
    down = (np.arange(height)[:, None] + 0.5 - centre[1]) / scale
    cos, sin = math.cos(turn), math.sin(turn)
    return cos * across + sin * down, cos * down - sin * across
