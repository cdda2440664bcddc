"""The configuration of a training run: one frozen value.

It is the command line, the header of the log and the header of the checkpoint. It opens no file
and creates no array: the existence of folders and devices is checked where they are used.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Optional

from mpgluon.formats.loss_scale import DynamicLossScale, LossScale, as_loss_scale
from mpgluon.formats.policy import Policy
from mpgluon.preparation import automatic_loss_scale

from recipes.options import check_options, document_options, option

__all__ = ["TrainingConfig"]


def _check_dtype(dtype: str) -> None:
    Policy.parse(_policy_name(dtype, amp=False))


def _policy_name(dtype: str, *, amp: bool) -> str:
    return f"mixed_{dtype}" if amp or dtype == "bfloat16" else dtype


# `free` options may differ between a run and its continuation without changing the computation.
# The product of images per step over batches, devices and processes must stay, which a config
# cannot know.
@document_options
@dataclass(frozen=True)
class TrainingConfig:
    """Everything that a run depends on, under the names of the command line.

    Raises
    ------
    ValueError
        If a value is outside its bounds, or two of them contradict each other.
    """

    dtype: str = option(
        "float32",
        "float16 is the cast network with FP32 master weights; bfloat16 is autocast; a policy is "
        "mixed_float16, emulated_bfloat16, mixed_float8 or like params=float32,compute=bfloat16",
        metavar="{float32,float16,bfloat16,POLICY}",
        check=_check_dtype,
    )
    update_rounding: Optional[str] = option(
        None,
        "train bfloat16 parameters (--dtype params=bfloat16,compute=bfloat16) without FP32 "
        "masters: updates are rounded to nearest, stochastically, or with Kahan's compensation",
        choices=("nearest", "stochastic", "kahan"),
    )
    amp: bool = option(False, "autocast for float16 too: FP32 parameters")
    loss_scale: str = option(
        "auto",
        "auto is dynamic for float16, and none where values have FP32's range; measured finds the "
        "scale without skipping a step; N is a power of two",
        metavar="{auto,dynamic,measured,none,N}",
    )
    growth_interval: Optional[int] = option(
        None,
        "finite steps before a dynamic scale grows (a tenth of the run, at most 2000)",
        within="[1, inf)",
        metavar="STEPS",
    )
    model: str = option(
        "resnet50_v2",
        "a name in MXNet's or gluoncv's model zoo, bn_inception, or efficientnet_lite0",
    )
    pretrained: Optional[str] = option(
        None,
        "start from a parameter file, or a state dict with torchvision's names (.safetensors, "
        ".pth); its head may have another number of classes",
        metavar="FILE",
    )
    dataset: str = option(
        "caltech101",
        "folder is your own images, a folder per category in --data-dir, or in its folders train "
        "and test; shapes is a rendered stand-in that needs no download; synthetic is noise from "
        "memory, to see how fast training is without reading images",
        choices=("caltech101", "folder", "shapes", "synthetic"),
    )
    classes: int = option(10, "classes of the stand-in (10 to 101) or of the noise")
    images_per_class: int = option(60, "images per class of the stand-in", within="[2, inf)")
    data_dir: str = option(
        "data", "where the images are, or are rendered to", metavar="DIR", free=True
    )
    output_dir: str = option(
        "runs/latest", "where results and checkpoints go", metavar="DIR", free=True
    )
    train_per_class: int = option(
        30,
        "training images per class, unless --data-dir has a folder for testing: train and test in "
        "it, or next to it one of its name and _test; the rest is for testing",
        within="[1, inf)",
    )
    test_per_class: Optional[int] = option(
        None,
        "test images per class, at most (all that are left); the protocol of the literature on "
        "Caltech 101 is 30 for training and up to 50 for testing",
        within="[1, inf)",
        metavar="N",
    )
    test_share: Optional[float] = option(
        None,
        "share of each class's images for testing, one or more; the rest is for training, "
        "--train-per-class at most; for classes of different sizes",
        within="(0, 1)",
        metavar="SHARE",
    )
    image_size: int = option(
        224, "side of the network's square input", within="[1, inf)", metavar="PIXELS"
    )
    # Touvron et al., "Fixing the train-test resolution discrepancy", 2019.
    test_image_size: Optional[int] = option(
        None,
        "side of the images that it is tested and used on (--image-size); often best a fifth or a "
        "quarter larger than in training, whose random crops enlarge what they show",
        within="[1, inf)",
        metavar="PIXELS",
    )
    min_crop_area: float = option(
        0.25, "smallest share of an image that a training crop covers", within="(0, 1]"
    )
    shifts: bool = option(
        False,
        "take whole images, in training shifted by up to an eighth of their sides, in place of "
        "random crops, and in testing of the centre, as is usual with CIFAR-10",
    )
    batch_size: int = option(32, "images per device and batch", within="[1, inf)", free=True)
    accumulate: int = option(
        1,
        "batches whose gradients add up to one step, with the memory of one batch",
        within="[1, inf)",
        metavar="N",
        free=True,
    )
    epochs: int = option(30, "passes over the training images", within="[1, inf)")
    warmup_epochs: int = option(
        2, "epochs in which the learning rate rises, all but the last at most", within="[0, inf)"
    )
    learning_rate: float = option(
        0.05, "the peak; a cosine schedule lowers it to zero", within="(0, inf)"
    )
    head_rate: float = option(
        1.0,
        "the learning rate of a new head, divided by the rate of the parameters that "
        "--pretrained sets; 10 is usual",
        within="(0, inf)",
        metavar="FACTOR",
    )
    # Goyal et al., "Accurate, Large Minibatch SGD", 2017, 2.1: the peak changes in proportion.
    reference_batch_size: Optional[int] = option(
        None,
        "the global batch that the learning rate is for; with another one the rate is scaled",
        within="[1, inf)",
        metavar="N",
    )
    momentum: float = option(0.9, "for optimizers that have a momentum", within="[0, 1)")
    weight_decay: float = option(1e-4, "L2 penalty", within="[0, inf)")
    optimizer: str = option("sgd", "the name of an optimizer of MXNet")
    # Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2016, section 7.
    label_smoothing: float = option(
        0.0,
        "share of a label's probability that all classes divide equally among them; 0.1 is usual",
        within="[0, 1)",
        metavar="SHARE",
    )
    ema: Optional[float] = option(
        None,
        "test and keep the average of the weights over about the last 1 / (1 - DECAY) steps, an "
        "exponential moving average; 0.99 suits a thousand steps",
        within="(0, 1)",
        metavar="DECAY",
    )
    devices: str = option(
        "cpu", "cpu; gpu:0,1; or gpu, which gives each of several processes its own", free=True
    )
    kvstore: str = option(
        "device",
        "what sums gradients: mpi joins the processes that mpirun starts",
        choices=("device", "mpi"),
        free=True,
    )
    timeout: float = option(
        300.0,
        "how long a process waits for the others before it ends them all",
        within="(0, inf)",
        metavar="SECONDS",
        free=True,
    )
    sync_batch_norm: bool = option(False, "BatchNorm over the devices of a process together")
    workers: int = option(2, "processes that decode images", within="[0, inf)", free=True)
    seed: int = option(0, "the seed of all random numbers", within="[0, 4294967295]")
    skip_unreadable: bool = option(
        False, "leave out images that cannot be decoded, and list them, instead of ending"
    )
    keep_checkpoints: int = option(
        2, "how many of the newest are kept", within="[1, inf)", free=True
    )
    record_overflows: int = option(
        0,
        "record the newest N steps that were skipped, or whose loss was not finite, in the folder "
        "overflows of --output-dir, for mpgluon replay",
        within="[0, inf)",
        metavar="N",
        free=True,
    )
    record_numerics: int = option(
        0,
        "record the numbers of every N-th step, layer by layer, in the folder numerics of "
        "--output-dir, for mpgluon numerics",
        within="[0, inf)",
        metavar="N",
        free=True,
    )
    tensorboard: bool = option(
        False, "write the history for TensorBoard too (pip install tensorboard)", free=True
    )

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("data_dir", "output_dir"):
            if not getattr(self, name):  # such as of a shell's variable that is not set
                raise ValueError(f"{name} must be a folder, received ''; . is the current one")
        if any("\udc80" <= character <= "\udcff" for character in self.output_dir):
            raise ValueError(
                "output_dir must be a name in UTF-8, since MXNet writes no other files; received "
                f"{self.output_dir!r}"
            )
        if self.amp and self.dtype not in ("float16", "bfloat16"):
            raise ValueError("amp computes in 16 bits: choose dtype float16 or bfloat16 with it")
        if self.update_rounding is not None and self.policy.param_dtype != "bfloat16":
            raise ValueError(
                "update_rounding is for bfloat16 parameters without masters: choose dtype "
                f"params=bfloat16,compute=bfloat16 with it, not {self.dtype!r}"
            )
        try:
            self.make_loss_scale(total_steps=1)
        except ValueError as error:
            raise ValueError(f"loss_scale: {error}") from error

    def without_effect(self) -> list[str]:
        """Return sentences about options that were set and change nothing in this run."""
        is_dynamic = isinstance(self.make_loss_scale(total_steps=1), DynamicLossScale)
        reasons = {
            "growth_interval": "" if is_dynamic else "this run has no dynamic loss scale",
            "head_rate": "" if self.pretrained else "it is for weights of --pretrained",
            "min_crop_area": "whole images are used, as --shifts says" if self.shifts else "",
        }
        if self.dataset in ("caltech101", "folder"):
            reasons["classes"] = reasons["images_per_class"] = "the images have their own"
        return [
            f"{one.name}={value} has no effect: {reasons[one.name]}"
            for one in fields(self)
            if reasons.get(one.name) and (value := getattr(self, one.name)) != one.default
        ]

    @property
    def policy(self) -> Policy:
        """The formats of the network's parameters, computation and result."""
        return Policy.parse(_policy_name(self.dtype, amp=self.amp))

    def make_loss_scale(self, total_steps: int) -> LossScale:
        """Return a new loss scale for a run of ``total_steps``."""
        kind = self.loss_scale
        if kind == "auto":
            kind = automatic_loss_scale(self.policy)
        if kind != "dynamic":
            return as_loss_scale(kind)
        interval = self.growth_interval
        if interval is None:
            interval = min(2000, max(10, total_steps // 10))
        return DynamicLossScale(growth_interval=interval)

    @property
    def image_dtype(self) -> str:
        """The format in which images are loaded: bfloat16 is rounded to by the network itself."""
        return "float16" if self.policy.compute_dtype == "float16" else "float32"

    @property
    def size_in_use(self) -> int:
        """The side of the images that the trained network is for, in pixels."""
        return self.image_size if self.test_image_size is None else self.test_image_size

    def peak_learning_rate(self, global_batch_size: int) -> float:
        """Return the learning rate after the warm-up, for so many images per step in total."""
        if self.reference_batch_size is None:
            return self.learning_rate
        return self.learning_rate * global_batch_size / self.reference_batch_size

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for a JSON file."""
        return asdict(self)

    def differences(self, other: dict[str, Any]) -> list[str]:
        """Return in words how a continuation's config differs in options that must be equal."""
        return [
            f"{field.name} was {before!r}, is {now!r}"
            for field in fields(self)
            if not field.metadata.get("free")
            # An option that a run's version did not have is one that changed nothing then.
            and (before := other.get(field.name, field.default))
            != (now := getattr(self, field.name))
        ]

    @property
    def output_path(self) -> Path:
        """The folder of this run's results."""
        return Path(self.output_dir)
