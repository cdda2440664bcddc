"""The images of a run: its data set, and the split into training and test images."""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np
from numpy.typing import NDArray

from recipes.data import ImageFolder, caltech101, find_tree, images, render_shapes, stratified_split
from recipes.data.loaders import ImageLoader, eval_loader, train_loader
from recipes.data.own_images import list_own_images, summary
from recipes.data.splits import some_of_each_class
from recipes.data.synthetic import SyntheticLoader
from recipes.training.config import TrainingConfig

__all__ = ["Dataset", "Loader", "open_dataset", "split_for_testing"]

Loader = Union[ImageLoader, SyntheticLoader]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dataset:
    """A named folder of images, and the positions of its training and test images."""

    name: str
    folder: ImageFolder
    train_indices: tuple[int, ...]
    test_indices: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return name, class names and numbers of images, for a JSON file."""
        return {
            "name": self.name,
            "classes": list(self.folder.classes),
            "train_images": len(self.train_indices),
            "test_images": len(self.test_indices),
        }

    def identity(self) -> dict[str, Any]:
        """Return the classes and images that must be the same when a run is resumed."""
        root, paths = self.folder.root, self.folder.paths
        names = [os.fsencode(os.path.relpath(path, root)) for path in paths]
        labels = self.folder.labels.astype("<i4").tobytes()
        digest = hashlib.sha256(b"\0".join([*names, labels])).hexdigest()
        return {
            "classes": list(self.folder.classes),
            "images": len(self.folder.labels),
            "sha256": digest,
        }

    def differences(self, before: dict[str, Any]) -> list[str]:
        """Return how the classes or the images of an earlier :meth:`identity` differ, in words."""
        now = self.identity()
        if now["classes"] != before["classes"]:
            words = [", ".join(one["classes"][:5]) for one in (before, now)]
            counts = [len(one["classes"]) for one in (before, now)]
            return [f"the {counts[0]} classes were {words[0]}, are {counts[1]}: {words[1]}"]
        if now["sha256"] != before["sha256"]:
            return [
                f"images were added, removed or renamed ({before['images']} then, {now['images']} "
                "now), so that others would be left for testing"
            ]
        return []

    def loaders(
        self, config: TrainingConfig, devices: int, *, rank: int = 0, world_size: int = 1
    ) -> tuple[Loader, Loader]:
        """Return the training and the test loader, with images in the compute format.

        A batch of the training loader has a process's images for one step, even if the network
        computes them in several batches. Each of several processes has its own share of every step
        and of the test images.

        Raises
        ------
        ValueError
            If there are fewer training images than a step needs.
        """
        batch_size = config.batch_size * devices
        needed = batch_size * config.accumulate * world_size
        if len(self.train_indices) < needed:
            raise ValueError(
                f"a step needs {needed} training images, and there are {len(self.train_indices)}: "
                f"batch_size={config.batch_size}, accumulate={config.accumulate}, devices in all: "
                f"{devices * world_size}; choose accumulate or batch_size smaller, or more images"
            )
        image_sizes = config.image_size, config.size_in_use
        if config.dataset == "synthetic":
            sizes = batch_size * config.accumulate, batch_size
            train, test = (
                SyntheticLoader(
                    len(indices) // (size * world_size),
                    batch_size=size,
                    image_size=image_size,
                    classes=len(self.folder.classes),
                    dtype=config.image_dtype,
                    seed=config.seed + rank,
                )
                for indices, size, image_size in zip(
                    (self.train_indices, self.test_indices), sizes, image_sizes
                )
            )
            return train, test
        common: dict[str, Any] = {
            "dtype": config.image_dtype,
            "num_workers": config.workers,
            "on_unreadable": "skip" if config.skip_unreadable else "error",
            "rank": rank,
            "world_size": world_size,
        }
        training = train_loader(
            self.folder,
            self.train_indices,
            seed=config.seed,
            image_size=image_sizes[0],
            scale=(config.min_crop_area, 1.0),
            shifts=config.shifts,
            batch_size=batch_size * config.accumulate,
            **common,
        )
        testing = eval_loader(
            self.folder,
            self.test_indices,
            image_size=image_sizes[1],
            whole=config.shifts,
            batch_size=batch_size,
            **common,
        )
        return training, testing


def open_dataset(config: TrainingConfig, *, progress: bool = False) -> Dataset:
    """Find the photographs that the config names, or render the stand-in; split them for testing.

    Photographs with a folder of their own for testing, which `list_own_images` finds, are not
    split.

    Raises
    ------
    DataError
        If the photographs are not in ``config.data_dir``; they are never replaced by the stand-in.
    ValueError
        If a class has too few images for ``config.train_per_class``.
    """
    is_test = None
    if config.dataset == "synthetic":
        folder = _noise(config)
        _logger.info("one batch of noise again and again: speeds mean something, accuracies do not")
    elif config.dataset == "shapes":
        tree = render_shapes(
            config.data_dir,
            classes=config.classes,
            images_per_class=config.images_per_class,
            seed=config.seed,
            progress=progress,
        )
        folder = images.list_images(tree)
    elif config.dataset == "folder":
        folder, is_test = list_own_images(config.data_dir)
        _logger.info(summary(folder))
    else:
        tree = find_tree(config.data_dir)
        folder, is_test = list_own_images(tree, exclude=(caltech101.BACKGROUND,), nested=False)
    return split_for_testing(config, folder, is_test)


def split_for_testing(
    config: TrainingConfig, folder: ImageFolder, is_test: Optional[NDArray[np.bool_]] = None
) -> Dataset:
    """Return images with the positions of those for training and for testing.

    Parameters
    ----------
    config : TrainingConfig
    folder, is_test
        As `list_own_images` returns them.

    Raises
    ------
    ValueError
        If a class has too few images for the config.
    """
    if is_test is not None:
        return _as_the_folders_say(config, folder, is_test)
    train, test = stratified_split(
        folder.labels,
        config.train_per_class,
        seed=config.seed,
        test_per_class=config.test_per_class,
        test_share=config.test_share,
        class_names=folder.classes,
    )
    return Dataset(config.dataset, folder, tuple(train.tolist()), tuple(test.tolist()))


def _as_the_folders_say(
    config: TrainingConfig, folder: ImageFolder, is_test: NDArray[np.bool_]
) -> Dataset:
    """Return images in folders of their own for training and for testing."""
    for name in ("train_per_class", "test_share"):
        if getattr(config, name) != getattr(TrainingConfig, name):
            _logger.warning(
                "%s=%s has no effect: there is a folder for testing, and all images of the other "
                "one are for training",
                name,
                getattr(config, name),
            )
    train, test = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    if config.test_per_class is not None:
        some = some_of_each_class(folder.labels[test], config.test_per_class, seed=config.seed)
        test = test[some]
    return Dataset(config.dataset, folder, tuple(train.tolist()), tuple(test.tolist()))


def _noise(config: TrainingConfig) -> images.ImageFolder:
    """Return classes and labels without files: as many images as the stand-in would have."""
    labels = np.repeat(np.arange(config.classes, dtype=np.int32), config.images_per_class)
    names = tuple(f"class {number}" for number in range(config.classes))
    return images.ImageFolder(Path("synthetic"), names, (Path("noise"),) * len(labels), labels)
