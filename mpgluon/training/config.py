"""The configuration of a training run: one frozen value.

It is the command line, the header of the log and the header of the checkpoint. It opens no file
and creates no array; what it cannot know (whether a folder exists) is checked where it is used.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Optional

from mpgluon.numerics.loss_scale import DynamicLossScale, LossScale, as_loss_scale
from mpgluon.numerics.policy import Policy

__all__ = ["TrainingConfig"]

# What may differ between a run and its continuation without changing what is computed. Of the
# batch, the product over devices and processes must stay: `TrainingConfig.differences` looks at it.
_FREE_TO_CHANGE = frozenset(
    {
        "data_dir",
        "output_dir",
        "workers",
        "keep_checkpoints",
        "tensorboard",
        "batch_size",
        "devices",
        "kvstore",
        "timeout",
    }
)


@dataclass(frozen=True)
class TrainingConfig:
    """Everything that a run depends on.

    Attributes
    ----------
    dtype : str
        ``"float32"``; ``"float16"``, the cast network with ``multi_precision``; ``"bfloat16"``,
        which is autocast; or any other policy that :meth:`mpgluon.Policy.parse` takes.
    amp : bool
        Autocast for float16 too: FP32 parameters.
    loss_scale : str
        ``"dynamic"``, ``"none"``, a power of two, or ``"auto"``: dynamic for float16, else none.
    growth_interval : int, optional
        Finite steps before a dynamic scale grows; by default a tenth of the run, at most 2000.
    model : str
        A name in MXNet's or gluoncv's model zoo.
    pretrained : str, optional
        A parameter file to start from; its head may have another number of classes.
    dataset : {"caltech101", "shapes"}
        ``"shapes"`` is the rendered stand-in.
    classes, images_per_class : int
        Size of the stand-in; Caltech 101 has what its tree holds.
    data_dir, output_dir : str
        Where the images are, and where results go.
    train_per_class : int
        Training images per class; the rest is for testing.
    image_size : int
        Side of the square that the network sees, in pixels.
    min_crop_area : float
        The least share of an image that a training crop covers, in (0, 1].
    batch_size : int
        Images per device and step.
    epochs, warmup_epochs : int
        Passes over the training images, and how many of them the learning rate climbs for; a
        single epoch has no warm-up.
    learning_rate : float
        Its peak; the schedule is a cosine down to zero.
    reference_batch_size : int, optional
        The global batch, over all devices and processes, that ``learning_rate`` is meant for:
        with another one the peak changes in proportion (Goyal et al., "Accurate, Large Minibatch
        SGD", 2017, 2.1). By default the peak is ``learning_rate``, whatever the batch.
    momentum, weight_decay : float
        Momentum is passed to optimizers that have one.
    optimizer : str
        A name in MXNet's registry.
    devices : str
        ``"cpu"``, ``"gpu:0,1"``, ... Of several processes on a machine, each takes one GPU with
        ``"gpu"``.
    kvstore : {"device", "mpi"}
        What sums gradients: MXNet over the devices of one process, or MPI over processes too.
    timeout : float
        Seconds for which a process waits for the others before the job ends.
    sync_batch_norm : bool
        Let BatchNorm use the statistics of the batch over all devices of a process, in FP32.
    workers : int
        Processes that decode images.
    seed : int
        Of the split, the initial weights, the order, the crops and dropout.
    skip_unreadable : bool
        Leave out images that cannot be decoded, and say which, instead of ending.
    keep_checkpoints : int
        How many of the newest checkpoints stay on disk.
    tensorboard : bool
        Write the history for TensorBoard too, which has to be installed.
    """

    dtype: str = "float32"
    amp: bool = False
    loss_scale: str = "auto"
    growth_interval: Optional[int] = None
    model: str = "resnet50_v2"
    pretrained: Optional[str] = None
    dataset: str = "caltech101"
    classes: int = 10
    images_per_class: int = 60
    data_dir: str = "data"
    output_dir: str = "runs/latest"
    train_per_class: int = 30
    image_size: int = 224
    min_crop_area: float = 0.25
    batch_size: int = 32
    epochs: int = 30
    warmup_epochs: int = 2
    learning_rate: float = 0.05
    reference_batch_size: Optional[int] = None
    momentum: float = 0.9
    weight_decay: float = 1e-4
    optimizer: str = "sgd"
    devices: str = "cpu"
    kvstore: str = "device"
    timeout: float = 300.0
    sync_batch_norm: bool = False
    workers: int = 2
    seed: int = 0
    skip_unreadable: bool = False
    keep_checkpoints: int = 2
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (
            ("dataset", ("caltech101", "shapes")),
            ("kvstore", ("device", "mpi")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(allowed)}; received {getattr(self, name)!r}"
                )
        for name, least in (
            ("images_per_class", 2),
            ("train_per_class", 1),
            ("image_size", 1),
            ("batch_size", 1),
            ("epochs", 1),
            ("warmup_epochs", 0),
            ("workers", 0),
            ("seed", 0),
            ("keep_checkpoints", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, received {getattr(self, name)}")
        if not 0 < self.min_crop_area <= 1:
            raise ValueError(f"min_crop_area must be in (0, 1], received {self.min_crop_area}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive, received {self.learning_rate}")
        if self.reference_batch_size is not None and self.reference_batch_size < 1:
            raise ValueError(
                f"reference_batch_size must be at least 1, received {self.reference_batch_size}"
            )
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"timeout must be positive, received {self.timeout}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), received {self.momentum}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be at least 0, received {self.weight_decay}")
        if self.warmup_epochs >= self.epochs and self.epochs > 1:
            raise ValueError(
                f"warmup_epochs ({self.warmup_epochs}) must be fewer than epochs ({self.epochs})"
            )
        if self.amp and self.dtype not in ("float16", "bfloat16"):
            raise ValueError("amp computes in 16 bits: choose dtype float16 or bfloat16 with it")
        try:
            Policy.parse(self.policy_name)
        except ValueError as error:
            raise ValueError(
                f"dtype is float32, float16 or bfloat16, or a policy: {error}"
            ) from None
        self.make_loss_scale(total_steps=1)  # says what is wrong with loss_scale

    @property
    def policy(self) -> Policy:
        """What the network's parameters, computation and result are."""
        return Policy.parse(self.policy_name)

    @property
    def policy_name(self) -> str:
        """The policy as :meth:`mpgluon.Policy.parse` takes it."""
        return f"mixed_{self.dtype}" if self.amp or self.dtype == "bfloat16" else self.dtype

    def make_loss_scale(self, total_steps: int) -> LossScale:
        """Return a new loss scale for a run of so many steps."""
        kind = self.loss_scale
        if kind == "auto":
            kind = "dynamic" if self.policy.compute_dtype == "float16" else "none"
        if kind != "dynamic":
            return as_loss_scale(kind)
        interval = self.growth_interval
        if interval is None:
            interval = min(2000, max(10, total_steps // 10))
        return DynamicLossScale(growth_interval=interval)

    def peak_learning_rate(self, global_batch_size: int) -> float:
        """Return the learning rate after the warm-up, for so many images per step in all."""
        if self.reference_batch_size is None:
            return self.learning_rate
        return self.learning_rate * global_batch_size / self.reference_batch_size

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for a JSON file."""
        return asdict(self)

    def differences(self, other: dict[str, Any]) -> list[str]:
        """Return in words how a continuation's config differs in what the run depends on."""
        names = [field.name for field in fields(self) if field.name not in _FREE_TO_CHANGE]
        return [
            f"{name} was {other.get(name)!r}, is {getattr(self, name)!r}"
            for name in names
            if other.get(name) != getattr(self, name)
        ]

    @property
    def output_path(self) -> Path:
        """The folder of this run's results."""
        return Path(self.output_dir)
