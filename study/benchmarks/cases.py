"""The timed cases and their contestants. Data; nothing is run here.

The first contestant of a case is its baseline.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Optional

from study.benchmarks.contestant import Contestant
from study.benchmarks.race import Case

__all__ = [
    "CASES",
    "DTYPES",
    "CaseOptions",
    "beside_pytorch",
    "training",
    "training_in_formats",
]

DTYPES = ("float32", "float16", "bfloat16")
_PEERS = {
    library: str(Path(__file__).with_name(f"{name}_peer.py"))
    for library, name in (
        ("pytorch", "pytorch"),
        ("onnxruntime", "onnx"),
        ("openvino", "onnx"),
    )
}
_IN_A_ROW = 5  # calls in a run, for work that a pause before each call slows


@dataclass(frozen=True)
class CaseOptions:
    """Options of all cases, chosen by a user.

    Attributes
    ----------
    model : str
        A network of MXNet's or gluoncv's model zoo.
    models : sequence of str or None
        Networks of the zoo's cases; ``None``: a list of each.
    batch_sizes : sequence of int or None
        A case for each; ``None`` is the default of a case: 8, for inference 1 and 8.
    image_size : int or None
        Pixels; ``None`` is the default of a case: 224, in the zoo's cases the network's own.
    device : str
        Such as ``"cpu"`` or ``"gpu:0"``.
    dtypes : sequence of str or None
        Formats besides the baseline; ``None`` is the default of a case: all; float32 and float16 in
        the cases of the zoo, of memory and of sequences.
    peers : bool
        Whether ``mxnet.contrib.amp`` and Gluon's ``DataLoader`` take part.
    torch_python, openvino_python : str or None
        An interpreter with PyTorch or OpenVINO; ``None``: it does not take part.
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
    openvino_python: Optional[str] = None
    images: Optional[str] = None
    workers: int = 2
    memory_limit_mib: Optional[float] = None

    @property
    def pixels(self) -> int:
        """The image size where a case has no other default."""
        return self.image_size or 224

    def python_of(self, library: str) -> Optional[str]:
        """Return the interpreter of a peer."""
        return {
            "pytorch": self.torch_python,
            "openvino": self.openvino_python,
            "onnxruntime": sys.executable if self.peers else None,
        }[library]


# The contestants of a case: name, library, format, and the other options in which they differ.
Variants = tuple[tuple[str, str, str, dict[str, Any]], ...]

_PYTORCH: Variants = tuple((f"PyTorch {dtype}", "pytorch", dtype, {}) for dtype in DTYPES)
# float16 takes PyTorch twenty to a hundred times as long on a CPU: single layers show it.
_PYTORCH_SEQUENCES = tuple(one for one in _PYTORCH if one[2] != "float16")
_WRITER = {"writer": sys.executable}  # of the network's graph
_PYTORCH_NETWORKS: Variants = tuple((*one[:3], _WRITER) for one in _PYTORCH_SEQUENCES)
_COMPILED: Variants = tuple(
    (f"PyTorch {dtype}, compiled", "pytorch", dtype, {"compiled": True, **_WRITER})
    for dtype in ("float32", "bfloat16")
)
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
_SIMULATED = {
    "mixed_float8": "mixed_float8",
    "mixed_float8, MX": "params=float32,compute=float8_e4m3,"
    "gradient=float8_e5m2,between=bfloat16,scaling=mx",
    "float16 as Ampere adds": "params=float32,compute=float16,accumulation=ampere",
}
_TRAINING: Variants = (
    _FORMATS[0],
    ("mpgluon float32", "mpgluon", "float32", _NONE),
    *_FORMATS[1:],
    ("mpgluon bfloat16, emulated", "mpgluon", "bfloat16", {**_NONE, "emulate": True}),
    # bfloat16 needs no loss scale, but contrib.amp's own way to prepare a Trainer always adds one.
    ("contrib.amp bfloat16", "contrib.amp", "bfloat16", _STOCK),
    ("contrib.amp bfloat16, scaled", "contrib.amp", "bfloat16", _DYNAMIC),
    *_PYTORCH_NETWORKS,
    *_COMPILED,
)
_PREDICTING: Variants = (
    ("Gluon float32", "gluon", "float32", {}),
    ("mpgluon float32, folded", "mpgluon", "float32", {"folded": True}),
    ("mpgluon float16", "mpgluon", "float16", {}),
    ("mpgluon float16, folded", "mpgluon", "float16", {"folded": True}),
    ("mpgluon bfloat16", "mpgluon", "bfloat16", {}),
    ("mpgluon bfloat16, folded", "mpgluon", "bfloat16", {"folded": True}),
)
_INFERENCE: Variants = (
    *_PREDICTING,
    ("contrib.amp bfloat16", "contrib.amp", "bfloat16", {}),
    *_PYTORCH_NETWORKS,
    *_COMPILED,
    *(
        (f"{name} {dtype}", library, dtype, {"engine": library, **_WRITER})
        for name, library, dtype in (
            ("onnxruntime", "onnxruntime", "float32"),
            ("OpenVINO", "openvino", "float32"),
            ("OpenVINO", "openvino", "bfloat16"),
        )
    ),
)


def _named(variants: Variants, *names: str) -> Variants:
    return tuple(one for one in variants if one[0] in names)


# By the factory, where PyTorch's native bfloat16 is the measure.
_BESIDE_PYTORCH: dict[str, Variants] = {
    "training": _named(
        _TRAINING,
        "Gluon float32",
        "mpgluon float32",
        "mpgluon float16",
        "mpgluon bfloat16",
        "PyTorch bfloat16",
        "PyTorch bfloat16, compiled",
    ),
    "inference": _named(
        _INFERENCE,
        "Gluon float32",
        "mpgluon float32, folded",
        "mpgluon bfloat16, folded",
        "PyTorch bfloat16, compiled",
    ),
}


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
    """Return the predictions of a network: of one image in a loop and after pauses, and of eight.

    Between runs the others compute, which fills the caches.
    """
    cases = []
    for words, network in _networks(options, (1, 8)):
        if network["batch_size"] == 1:
            pauses = "inference after pauses"
            cases.append(
                _case(pauses, f"{pauses}, {words}", "inference", _PREDICTING, options, network)
            )
            network["calls"] = _IN_A_ROW
            words += ", in a loop"
        title = f"inference, {words}"
        cases.append(_case("inference", title, "inference", _INFERENCE, options, network))
    return cases


def beside_pytorch(name: str, factory: str, options: CaseOptions) -> list[Case]:
    """Return a training step, or for ``"inference"`` a prediction, in our formats and PyTorch's."""
    return [
        _case(name, f"{factory}, {words}", factory, _BESIDE_PYTORCH[factory], options, network)
        for words, network in _networks(options, (8,))
    ]


def training_in_formats(
    name: str, words: str, options: CaseOptions, batch_sizes: Sequence[int]
) -> list[Case]:
    """Return a training step in float32 and in the 16-bit formats for each batch size."""
    options = replace(options, dtypes=options.dtypes or DTYPES[:2])
    return [
        _case(name, f"{words}, {network}", "training", _FORMATS, options, common)
        for network, common in _networks(options, batch_sizes)
    ]


def recurrent(options: CaseOptions) -> list[Case]:
    """Return the training step of LSTMs and a GRU; the last has the size of docs/results.md's."""
    sizes = {"layers": 2, "width": 256, "length": 35}
    networks = [{"kind": kind, **sizes} for kind in ("lstm", "gru")]
    networks.append({"kind": "lstm", "layers": 1, "width": 64, "length": 21})
    return _sequences("recurrent", networks, 25, options, (*_FORMATS, *_PYTORCH_SEQUENCES))


def attention(options: CaseOptions) -> list[Case]:
    """Return the training step of transformer encoders of 8 heads, with two kinds of attention."""
    sizes = {"layers": 2, "width": 256, "length": 64}
    kinds = ("attention", "attention by batch_dot")
    networks = [{"kind": kind, **sizes} for kind in kinds]
    return _sequences("attention", networks, 16, options, _FORMATS)


def _sequences(
    name: str,
    networks: Sequence[dict[str, Any]],
    batch_size: int,
    options: CaseOptions,
    variants: Variants,
) -> list[Case]:
    """Return a case for each network of :mod:`study.benchmarks.sequences` and each batch size."""
    options = replace(options, dtypes=options.dtypes or DTYPES[:2])
    cases = []
    for network in networks:
        words = "{kind}, {layers} x {width} units, {length} tokens".format_map(network)
        for batch in options.batch_sizes or (batch_size,):
            # A step takes milliseconds, and longer after a pause.
            common = {**network, "batch_size": batch, "calls": _IN_A_ROW}
            title = f"training step, {words}, batch {batch}"
            cases.append(_case(name, title, "sequence_training", variants, options, common))
    return cases


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


def interfaces(options: CaseOptions) -> list[Case]:
    """Return, for each format, the step of a network of ``mx.nd`` and of the same of ``mx.np``."""
    cases = []
    for words, network in _networks(options, (8,)):
        for dtype in options.dtypes or DTYPES:
            library, scale = ("gluon", _STOCK) if dtype == "float32" else ("mpgluon", _NONE)
            variants: Variants = (
                ("mx.nd", library, dtype, scale),
                ("mx.np", library, dtype, {**scale, "in_numpy": True}),
            )
            title = f"interfaces, {dtype}, {words}"
            cases.append(_case("interfaces", title, "training", variants, options, network))
    return cases


def simulated(options: CaseOptions) -> list[Case]:
    """Return the training step in formats that no hardware here computes."""
    variants: Variants = (
        ("Gluon float32", "gluon", "float32", _STOCK),
        *(
            (f"mpgluon {name}", "mpgluon", "float32", {**_NONE, "policy": policy})
            for name, policy in _SIMULATED.items()
        ),
    )
    options = replace(options, image_size=options.image_size or 64)
    return [
        _case("simulated", f"simulated formats, {words}", "training", variants, options, network)
        for words, network in _networks(options, (8,))
    ]


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
                f"study.benchmarks.loading:{factory}",
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
    "recurrent": recurrent,
    "attention": attention,
    "loss-scaling": loss_scaling,
    "interfaces": interfaces,
    "simulated": simulated,
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
    """Return a case with the baseline and the other contestants that may take part."""
    contestants = []
    for number, (contestant, library, dtype, own) in enumerate(variants):
        if number and not _takes_part(library, dtype, options):
            continue
        arguments = {"dtype": dtype, **own, **common}
        if library in _PEERS:
            python = options.python_of(library)
            assert python is not None  # it would not take part
            place = f"{_PEERS[library]}:{factory}"
            contestants.append(Contestant(contestant, place, arguments, python))
        else:
            arguments |= {"library": library, "device": options.device}
            place = f"study.benchmarks.workloads:{factory}"
            contestants.append(Contestant(contestant, place, arguments))
    return Case(name, title, contestants, {**common, "device": options.device})


def _takes_part(library: str, dtype: str, options: CaseOptions) -> bool:
    if dtype not in (options.dtypes or DTYPES):
        return False
    if library in _PEERS:
        return options.python_of(library) is not None and options.device == "cpu"
    return options.peers or library == "mpgluon"
