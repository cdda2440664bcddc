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

__all__ = ["CASES", "DTYPES", "PYTORCH_MODELS", "CaseOptions", "training"]

DTYPES = ("float32", "float16", "bfloat16")
# The networks that pytorch_peer.py has.
PYTORCH_MODELS = tuple(f"resnet{layers}_v1" for layers in (18, 34, 50, 101, 152))
_PYTORCH_PEER = str(Path(__file__).with_name("pytorch_peer.py"))


@dataclass(frozen=True)
class CaseOptions:
    """What a user chooses for all cases.

    Attributes
    ----------
    model : str
        A network of MXNet's or gluoncv's model zoo.
    batch_sizes : sequence of int or None
        A case for each; ``None`` is the default of a case: 8, for inference 1 and 32.
    image_size : int
        Pixels.
    device : str
        Such as ``"cpu"`` or ``"gpu:0"``.
    dtypes : sequence of str
        Formats besides the baseline.
    peers : bool
        Whether ``mxnet.contrib.amp`` and Gluon's ``DataLoader`` take part.
    torch_python : str or None
        An interpreter with PyTorch; ``None``: it does not take part.
    images : str or None
        A folder with one folder of images per class; ``None``: rendered images.
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


# The contestants of a case: name, library, format, and the other options in which they differ.
Variants = tuple[tuple[str, str, str, dict[str, Any]], ...]

_PYTORCH: Variants = tuple((f"PyTorch {dtype}", "pytorch", dtype, {}) for dtype in DTYPES)
_LAYERS: Variants = (
    ("Gluon float32", "gluon", "float32", {}),
    ("mpgluon float16", "mpgluon", "float16", {}),
    ("mpgluon bfloat16", "mpgluon", "bfloat16", {}),
    ("contrib.amp bfloat16", "contrib.amp", "bfloat16", {}),
    *_PYTORCH,
)
_STOCK, _NONE, _DYNAMIC = ({"loss_scale": scale} for scale in (None, "none", "dynamic"))
_TRAINING: Variants = (
    ("Gluon float32", "gluon", "float32", _STOCK),
    ("mpgluon float32", "mpgluon", "float32", _NONE),
    ("mpgluon float16", "mpgluon", "float16", _DYNAMIC),
    ("mpgluon autocast float16", "mpgluon", "float16", {**_DYNAMIC, "autocast": True}),
    ("mpgluon bfloat16", "mpgluon", "bfloat16", _NONE),
    ("mpgluon bfloat16, emulated", "mpgluon", "bfloat16", {**_NONE, "emulate": True}),
    # bfloat16 needs no loss scale, but contrib.amp's own way to prepare a Trainer always adds one.
    ("contrib.amp bfloat16", "contrib.amp", "bfloat16", _STOCK),
    ("contrib.amp bfloat16, scaled", "contrib.amp", "bfloat16", _DYNAMIC),
    *_PYTORCH,
)
_INFERENCE: Variants = (
    ("Gluon float32", "gluon", "float32", {}),
    ("mpgluon float32, folded", "mpgluon", "float32", {"folded": True}),
    ("mpgluon float16", "mpgluon", "float16", {}),
    ("mpgluon bfloat16", "mpgluon", "bfloat16", {}),
    ("mpgluon bfloat16, folded", "mpgluon", "bfloat16", {"folded": True}),
    ("contrib.amp bfloat16", "contrib.amp", "bfloat16", {}),
    # PyTorch's float16 takes most of a minute for 32 images, and would take the others' time.
    *(one for one in _PYTORCH if one[2] != "float16"),
)


def gemm(options: CaseOptions) -> list[Case]:
    """Return a dense layer of 1024 x 1024 on a batch of 1024."""
    common = {"kind": "dense", "batch_size": 1024, "size": 1024}
    title = "matrix product, 1024 x 1024 x 1024, forward and backward"
    return [_case("gemm", title, "layer", _LAYERS, options, common)]


def convolution(options: CaseOptions) -> list[Case]:
    """Return a convolution of 3 x 3 from 128 to 128 channels, as in ResNet-50's second stage."""
    size = max(1, options.image_size // 8)
    words = "convolution 3 x 3, 128 to 128 channels, forward and backward"
    cases = []
    for batch in options.batch_sizes or (8,):
        common = {"kind": "convolution", "batch_size": batch, "size": size}
        title = f"{words}, batch {batch}, {size} px"
        cases.append(_case("convolution", title, "layer", _LAYERS, options, common))
    return cases


def training(options: CaseOptions) -> list[Case]:
    """Return the training step of a network."""
    return [
        _case("training", f"training step, {words}", "training", _TRAINING, options, network)
        for words, network in _networks(options, (8,))
    ]


def inference(options: CaseOptions) -> list[Case]:
    """Return the predictions of a network."""
    return [
        _case("inference", f"inference, {words}", "inference", _INFERENCE, options, network)
        for words, network in _networks(options, (1, 32))
    ]


def loss_scaling(options: CaseOptions) -> list[Case]:
    """Return, for each format, a step of a stock Trainer and one with a dynamic loss scale.

    With float16, stock MXNet keeps the masters in the first and mpgluon in the second.
    """
    cases = []
    for words, network in _networks(options, (8,)):
        for dtype in options.dtypes:
            variants: Variants = (
                ("stock Trainer", "mpgluon", dtype, _STOCK),
                ("amp", "mpgluon", dtype, _DYNAMIC),
            )
            title = f"loss scaling, {dtype}, {words}"
            cases.append(_case("loss-scaling", title, "training", variants, options, network))
    return cases


def pipeline(options: CaseOptions) -> list[Case]:
    """Return a pass over JPEG files, from the files to batches."""
    several = f"{options.workers} worker{'s' * (options.workers != 1)}"
    variants = [
        (f"ImageLoader, {several}", "image_loader", options.workers),
        ("ImageLoader, no worker", "image_loader", 0),
    ]
    if options.peers:
        variants.append((f"DataLoader, {several}", "gluon_data_loader", options.workers))
    cases = []
    for batch in options.batch_sizes or (8,):
        common = {"batch_size": batch, "image_size": options.image_size}
        contestants = [
            Contestant(
                name,
                f"benchmarks.loading:{factory}",
                {"images": options.images, "workers": workers, **common},
                # With more, the workers of stock DataLoader compete: 13 times as slow.
                threads=1,
            )
            for name, factory, workers in variants
        ]
        title = f"JPEG files to batches, batch {batch}, {options.image_size} px"
        # The folder's name stays out of the record.
        images = "rendered" if options.images is None else "photographs"
        cases.append(Case("pipeline", title, contestants, {"images": images, **common}))
    return cases


CASES: dict[str, Callable[[CaseOptions], list[Case]]] = {
    "gemm": gemm,
    "convolution": convolution,
    "training": training,
    "inference": inference,
    "loss-scaling": loss_scaling,
    "pipeline": pipeline,
}


def _networks(options: CaseOptions, batch_sizes: Sequence[int]) -> list[tuple[str, dict[str, Any]]]:
    """Return a network for each batch size, in words and as options of a factory."""
    model, size = options.model, options.image_size
    return [
        (
            f"{model}, batch {batch}, {size} px",
            {"model": model, "batch_size": batch, "image_size": size},
        )
        for batch in options.batch_sizes or batch_sizes
    ]


def _case(
    name: str,
    title: str,
    factory: str,
    variants: Variants,
    options: CaseOptions,
    common: dict[str, Any],
) -> Case:
    """Return a case with the baseline and those of the other contestants that may take part."""
    contestants = []
    for number, (contestant, library, dtype, own) in enumerate(variants):
        if number and not _takes_part(library, dtype, options, common.get("model")):
            continue
        arguments = {"dtype": dtype, **own, **common}
        if library == "pytorch":
            assert options.torch_python is not None  # it would not take part
            place, python = f"{_PYTORCH_PEER}:{factory}", options.torch_python
            contestants.append(Contestant(contestant, place, arguments, python))
        else:
            arguments |= {"library": library, "device": options.device}
            place = f"benchmarks.workloads:{factory}"
            contestants.append(Contestant(contestant, place, arguments))
    return Case(name, title, contestants, {**common, "device": options.device})


def _takes_part(library: str, dtype: str, options: CaseOptions, model: Optional[str]) -> bool:
    if dtype not in options.dtypes:
        return False
    if library == "pytorch":
        has_model = model is None or model in PYTORCH_MODELS
        return options.torch_python is not None and options.device == "cpu" and has_model
    return options.peers or library == "mpgluon"
