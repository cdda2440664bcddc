"""Data sets from file to batch: Caltech 101, the rendered "shapes", splits and loaders.

Everything listed here works without MXNet. The loaders need it and are imported by name:
``from recipes.data.loaders import train_loader, eval_loader``.
"""

from __future__ import annotations

from recipes.data.caltech101 import CALTECH101, download_caltech101, find_tree
from recipes.data.images import ImageFolder, list_images, read_image
from recipes.data.shapes import render_shapes
from recipes.data.splits import stratified_split

__all__ = [
    "CALTECH101",
    "ImageFolder",
    "download_caltech101",
    "find_tree",
    "list_images",
    "read_image",
    "render_shapes",
    "stratified_split",
]
