"""The cases: what is timed, and which contestants take part. Data; nothing is run here.

The first contestant of a case is its baseline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Optional

from benchmarks.contestant import Contestant
from benchmarks.race import Case

__all__ = [
    "CASES",
    "DTYPES",
    "PYTORCH_MODELS",
    "SMALL_ZOO",
    "ZOO",
    "CaseOptions",
    "memory",
    "training",
    "zoo",
    "zoo_small",
]

DTYPES = ("float32", "float16", "bfloat16")
# The networks that pytorch_peer.py has.
PYTORCH_MODELS = tuple(f"resnet{layers}_v1" for layers in (18, 34, 50, 101, 152))
_PYTORCH_PEER = str(Path(__file__).with_name("pytorch_peer.py"))
# Networks of both model zoos: one or two of each family that the test suite trains.
ZOO = (
    "alexnet", "vgg11_bn", "vgg16", "googlenet", "inceptionv3", "densenet121", "squeezenet1.0",
    "mobilenet1.0", "mobilenetv2_1.0", "mobilenetv3_small", "mobilenetv3_large", "resnet18_v1",
    "resnet50_v1", "resnet50_v2", "resnet50_v1d", "se_resnext50_32x4d", "cifar_resnet20_v1",
    "cifar_resnet20_v2",
)  # fmt: skip
# The networks of docs/results.md with the image size that they are trained at there, in pixels.
SMALL_ZOO = {
    "alexnet": 64,
    "vgg16_bn": 32,
    "googlenet": 64,
    "inceptionv3": 75,
    "mobilenet1.0": 96,
    "resnet50_v2": 64,
}


@dataclass(frozen=True)
class CaseOptions:
    """What a user chooses for all cases.

    Attributes
    ----------
    model : str
        A network of MXNet's or gluoncv's model zoo.
    models : sequence of str or None
        Networks of the zoo's cases; ``None``: all of `ZOO`, or of `SMALL_ZOO`.
    batch_sizes : sequence of int or None
        A case for each; ``None`` is the default of a case: 8, for inference 1 and 32.
    image_size : int or None
        Pixels; ``None`` is the default of a case: 224, in the zoo's cases that of a network.
    device : str
        Such as ``"cpu"`` or ``"gpu:0"``.
    dtypes : sequence of str or None
        Formats besides the baseline; ``None`` is the default of a case: all, in those of the
        zoo and of memory float32 and float16.
    peers : bool
        Whether ``mxnet.contrib.amp`` and Gluon's ``DataLoader`` take part.
    torch_python : str or None
        An interpreter with PyTorch; ``None``: it does not take part.
    images : str or None
        A folder with one folder of images per class; ``None``: rendered images.
    workers : int
        Processes that decode images.
    memory_limit_mib : float or None
        For which the case memory finds the largest batch, in MiB.
    """

    model: str = "resnet50_v1"
    models: Optional[Sequence[str]] = None
    batch_sizes: Optional[Sequence[int]] = None
    image_size: Optional[int] = None
    device: str = "cpu"
    dtypes: Optional[Sequence[str]] = None
    peers: bool = True
    torch_python: Optional[str] = None
    images: Optional[str] = None
    workers: int = 2
    memory_limit_mib: Optional[float] = None

    @property
    def pixels(self) -> int:
        """The image size where a case has no other default."""
        return self.image_size or 224


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
_FORMATS: Variants = (
    ("Gluon float32", "gluon", "float32", _STOCK),
    ("mpgluon float16", "mpgluon", "float16", _DYNAMIC),
    ("mpgluon autocast float16", "mpgluon", "float16", {**_DYNAMIC, "autocast": True}),
    ("mpgluon bfloat16", "mpgluon", "bfloat16", _NONE),
)
_TRAINING: Variants = (
    _FORMATS[0],
    ("mpgluon float32", "mpgluon", "float32", _NONE),
    *_FORMATS[1:],
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
    size = max(1, options.pixels // 8)
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


def zoo(options: CaseOptions) -> list[Case]:
    """Return the training step of each network of a list, in float32 and float16."""
    sizes = {name: options.image_size or _own_size(name) for name in options.models or ZOO}
    return _zoo("zoo", sizes, 8, options)


def zoo_small(options: CaseOptions) -> list[Case]:
    """Return the same for small images, in the batches of 20 of docs/results.md."""
    names = options.models or SMALL_ZOO
    sizes = {name: options.image_size or SMALL_ZOO.get(name, 64) for name in names}
    return _zoo("zoo-small", sizes, 20, options)


def _own_size(model: str) -> int:
    """Return the image size that a network was designed for."""
    return 32 if model.startswith("cifar") else 299 if model.startswith("inception") else 224


def _zoo(name: str, sizes: Mapping[str, int], batch_size: int, options: CaseOptions) -> list[Case]:
    """Return a case for each network and batch size; networks for CIFAR take batches of 32."""
    cases = []
    for model, size in sizes.items():
        default = 32 if model.startswith("cifar") else batch_size
        alone = replace(options, model=model, image_size=size)
        cases += _in_all_formats(name, "training step", alone, (default,))
    return cases


def memory(options: CaseOptions) -> list[Case]:
    """Return the training step of a network with batches of several sizes, for its peak memory.

    Raises
    ------
    ValueError
        If the device is not a CPU: the memory of a GPU is not that of the process.
    """
    if options.device != "cpu":
        raise ValueError(f"memory is measured on the CPU only, received --device {options.device}")
    cases = _in_all_formats("memory", "peak memory of a training step", options, (8, 16, 32))
    limit = {"memory_limit_mib": options.memory_limit_mib}
    return [replace(case, settings={**case.settings, **limit}) for case in cases]


def _in_all_formats(
    name: str, words: str, options: CaseOptions, batch_sizes: Sequence[int]
) -> list[Case]:
    """Return a training step in float32 and in the 16-bit formats for each batch size."""
    options = replace(options, dtypes=options.dtypes or DTYPES[:2])
    return [
        _case(name, f"{words}, {network}", "training", _FORMATS, options, common)
        for network, common in _networks(options, batch_sizes)
    ]


def loss_scaling(options: CaseOptions) -> list[Case]:
    """Return, for each format, a step of a stock Trainer and one with a dynamic loss scale.

    With float16, stock MXNet keeps the masters in the first and mpgluon in the second.
    """
    cases = []
    for words, network in _networks(options, (8,)):
        for dtype in options.dtypes or DTYPES:
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
        common = {"batch_size": batch, "image_size": options.pixels}
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
        title = f"JPEG files to batches, batch {batch}, {options.pixels} px"
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
    model, size = options.model, options.pixels
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
    if dtype not in (options.dtypes or DTYPES):
        return False
    if library == "pytorch":
        has_model = model is None or model in PYTORCH_MODELS
        return options.torch_python is not None and options.device == "cpu" and has_model
    return options.peers or library == "mpgluon"
