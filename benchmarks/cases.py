"""The cases: what is timed, and which contestants take part. Data; nothing is run here.

The first contestant of a case is its baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Optional

from benchmarks.contestant import Contestant
from benchmarks.race import Case

__all__ = [
    "CASES",
    "DTYPES",
    "PYTORCH_MODELS",
    "Settings",
    "convolution",
    "gemm",
    "inference",
    "loss_scaling",
    "pipeline",
    "training",
]

DTYPES = ("float32", "float16", "bfloat16")
_HERE = "benchmarks"
_PYTORCH_PEER = str(Path(__file__).with_name("pytorch_peer.py"))
# The networks that it has.
PYTORCH_MODELS = tuple(f"resnet{layers}_v1" for layers in (18, 34, 50, 101, 152))


@dataclass(frozen=True)
class Settings:
    """What the cases are to be.

    Attributes
    ----------
    model : str
        A network of MXNet's or gluoncv's model zoo.
    batch_sizes : sequence of int or None
        A case for each; ``None`` is the usual for a case: 8, for inference 1 and 32.
    image_size : int
        Pixels.
    device : str
        Such as ``"cpu"`` or ``"gpu:0"``.
    dtypes : sequence of str
        Formats besides the baseline.
    peers : bool
        Whether ``mxnet.contrib.amp`` and Gluon's ``DataLoader`` take part.
    torch_python : str or None
        The interpreter in which PyTorch is; ``None``: it does not take part.
    images : str or None
        A folder with one folder of images per class; ``None`` is a rendered stand-in.
    workers : int
        Processes that decode images.
    """

    model: str = "resnet50_v1"
    batch_sizes: Optional[Sequence[int]] = None
    image_size: int = 224
    device: str = "cpu"
    dtypes: Sequence[str] = DTYPES
    peers: bool = True
    torch_python: Optional[str] = None
    images: Optional[str] = None
    workers: int = 2


# The contestants of a case: a name, and the options in which they differ.
Variants = tuple[tuple[str, dict[str, Any]], ...]

_PYTORCH: Variants = tuple(
    (f"PyTorch {dtype}", {"library": "pytorch", "dtype": dtype}) for dtype in DTYPES
)
_LAYERS: Variants = (
    ("Gluon float32", {"library": "gluon", "dtype": "float32"}),
    ("mpgluon float16", {"library": "mpgluon", "dtype": "float16"}),
    ("mpgluon bfloat16", {"library": "mpgluon", "dtype": "bfloat16"}),
    ("contrib.amp bfloat16", {"library": "contrib.amp", "dtype": "bfloat16"}),
    *_PYTORCH,
)
_TRAINING: Variants = (
    ("Gluon float32", {"library": "gluon", "dtype": "float32", "loss_scale": None}),
    ("mpgluon float32", {"library": "mpgluon", "dtype": "float32", "loss_scale": "none"}),
    ("mpgluon float16", {"library": "mpgluon", "dtype": "float16", "loss_scale": "dynamic"}),
    (
        "mpgluon autocast float16",
        {"library": "mpgluon", "dtype": "float16", "loss_scale": "dynamic", "autocast": True},
    ),
    ("mpgluon bfloat16", {"library": "mpgluon", "dtype": "bfloat16", "loss_scale": "none"}),
    (
        "mpgluon bfloat16, emulated",
        {"library": "mpgluon", "dtype": "bfloat16", "loss_scale": "none", "emulate": True},
    ),
    # bfloat16 needs no loss scale, but its own way to prepare a Trainer always brings one.
    ("contrib.amp bfloat16", {"library": "contrib.amp", "dtype": "bfloat16", "loss_scale": None}),
    (
        "contrib.amp bfloat16, scaled",
        {"library": "contrib.amp", "dtype": "bfloat16", "loss_scale": "dynamic"},
    ),
    *_PYTORCH,
)
_INFERENCE: Variants = (
    ("Gluon float32", {"library": "gluon", "dtype": "float32"}),
    ("mpgluon float32, folded", {"library": "mpgluon", "dtype": "float32", "folded": True}),
    ("mpgluon float16", {"library": "mpgluon", "dtype": "float16"}),
    ("mpgluon bfloat16", {"library": "mpgluon", "dtype": "bfloat16"}),
    ("mpgluon bfloat16, folded", {"library": "mpgluon", "dtype": "bfloat16", "folded": True}),
    ("contrib.amp bfloat16", {"library": "contrib.amp", "dtype": "bfloat16"}),
    # Its float16 takes most of a minute for 32 images, and would take the others' time.
    *(one for one in _PYTORCH if one[1]["dtype"] != "float16"),
)


def gemm(settings: Settings) -> list[Case]:
    """Return a dense layer of 1024 x 1024 on a batch of 1024."""
    common = {"kind": "dense", "batch_size": 1024, "size": 1024}
    title = "matrix product, 1024 x 1024 x 1024, forward and backward"
    return [_case("gemm", title, "layer", _LAYERS, settings, common)]


def convolution(settings: Settings) -> list[Case]:
    """Return a convolution of 3 x 3 from 128 to 128 channels, as in ResNet-50's second stage."""
    size = max(1, settings.image_size // 8)
    of = "convolution 3 x 3, 128 to 128 channels, forward and backward"
    return [
        _case(
            "convolution",
            f"{of}, batch {batch}, {size} px",
            "layer",
            _LAYERS,
            settings,
            {"kind": "convolution", "batch_size": batch, "size": size},
        )
        for batch in settings.batch_sizes or (8,)
    ]


def training(settings: Settings) -> list[Case]:
    """Return the training step of a network."""
    return [
        _case("training", f"training step, {_words(one)}", "training", _TRAINING, settings, one)
        for one in _networks(settings, (8,))
    ]


def inference(settings: Settings) -> list[Case]:
    """Return the predictions of a network."""
    return [
        _case("inference", f"inference, {_words(one)}", "inference", _INFERENCE, settings, one)
        for one in _networks(settings, (1, 32))
    ]


def loss_scaling(settings: Settings) -> list[Case]:
    """Return, for each format, a step of a stock Trainer and one with a dynamic loss scale.

    With float16, stock MXNet keeps the masters in the first and mpgluon in the second.
    """
    cases = []
    for one in _networks(settings, (8,)):
        for dtype in settings.dtypes:
            variants: Variants = (
                ("stock Trainer", {"library": "mpgluon", "dtype": dtype, "loss_scale": None}),
                ("amp", {"library": "mpgluon", "dtype": dtype, "loss_scale": "dynamic"}),
            )
            title = f"loss scaling, {dtype}, {_words(one)}"
            cases.append(_case("loss-scaling", title, "training", variants, settings, one))
    return cases


def pipeline(settings: Settings) -> list[Case]:
    """Return a pass over JPEG files, from the files to batches."""
    several = f"{settings.workers} worker{'s' * (settings.workers != 1)}"
    variants = [
        (f"ImageLoader, {several}", "image_loader", settings.workers),
        ("ImageLoader, no worker", "image_loader", 0),
    ]
    if settings.peers:
        variants.append((f"DataLoader, {several}", "gluon_data_loader", settings.workers))
    cases = []
    for batch in settings.batch_sizes or (8,):
        common = {"batch_size": batch, "image_size": settings.image_size}
        contestants = [
            Contestant(
                name,
                f"{_HERE}.loading:{factory}",
                {"images": settings.images, "workers": workers, **common},
                # With more, stock DataLoader's workers get in each other's way: 13 times as slow.
                threads=1,
            )
            for name, factory, workers in variants
        ]
        title = f"JPEG files to batches, batch {batch}, {settings.image_size} px"
        # A folder's name stays out of the record.
        images = "rendered" if settings.images is None else "photographs"
        cases.append(Case("pipeline", title, contestants, {"images": images, **common}))
    return cases


CASES: dict[str, Callable[[Settings], list[Case]]] = {
    "gemm": gemm,
    "convolution": convolution,
    "training": training,
    "inference": inference,
    "loss-scaling": loss_scaling,
    "pipeline": pipeline,
}


def _networks(settings: Settings, batch_sizes: Sequence[int]) -> list[dict[str, Any]]:
    return [
        {"model": settings.model, "batch_size": batch, "image_size": settings.image_size}
        for batch in settings.batch_sizes or batch_sizes
    ]


def _words(network: dict[str, Any]) -> str:
    return f"{network['model']}, batch {network['batch_size']}, {network['image_size']} px"


def _case(
    name: str,
    title: str,
    factory: str,
    variants: Variants,
    settings: Settings,
    common: dict[str, Any],
) -> Case:
    """Return a case with those contestants that the settings ask for."""
    baseline, *others = variants
    wanted = [one for one in others if _takes_part(one[1], settings, common.get("model"))]
    contestants = [
        _contestant(contestant, factory, {**options, **common}, settings)
        for contestant, options in (baseline, *wanted)
    ]
    return Case(name, title, contestants, {**common, "device": settings.device})


def _takes_part(options: dict[str, Any], settings: Settings, model: Optional[str]) -> bool:
    if options["dtype"] not in settings.dtypes:
        return False
    if options["library"] == "pytorch":
        has_it = model is None or model in PYTORCH_MODELS
        return settings.torch_python is not None and settings.device == "cpu" and has_it
    return settings.peers or options["library"] == "mpgluon"


def _contestant(name: str, factory: str, options: dict[str, Any], settings: Settings) -> Contestant:
    if options["library"] != "pytorch":
        options = {**options, "device": settings.device}
        return Contestant(name, f"{_HERE}.workloads:{factory}", options)
    assert settings.torch_python is not None  # it would not take part
    options = {option: value for option, value in options.items() if option != "library"}
    return Contestant(name, f"{_PYTORCH_PEER}:{factory}", options, settings.torch_python)
