"""The networks of both model zoos as cases: a training step in float32 and in float16.

A case for each network; :func:`study.benchmarks.report.networks_table` has all of them. The
same networks also compete with PyTorch in native bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from study.benchmarks.cases import CaseOptions, beside_pytorch, training_in_formats
from study.benchmarks.race import Case

__all__ = ["SMALL_ZOO", "ZOO", "networks", "networks_predicting", "zoo", "zoo_small"]

# Networks of both model zoos: one or two of each family that the test suite trains.
ZOO = (
    "alexnet", "vgg11_bn", "vgg16", "googlenet", "inceptionv3", "densenet121", "squeezenet1.0",
    "mobilenet1.0", "mobilenetv2_1.0", "mobilenetv3_small", "mobilenetv3_large", "resnet18_v1",
    "resnet50_v1", "resnet50_v2", "resnet50_v1d", "se_resnext50_32x4d", "cifar_resnet20_v1",
    "cifar_resnet20_v2",
)  # fmt: skip
_BESIDE_PYTORCH = (*ZOO, "resnext50_32x4d", "efficientnet_lite0")
_PREDICTING = ("mobilenetv2_1.0", "efficientnet_lite0", "resnet18_v1", "resnet50_v1", "densenet121")
# The first networks of docs/results.md, with the image size at which they are trained, in pixels.
SMALL_ZOO = {
    "alexnet": 64,
    "vgg16_bn": 32,
    "googlenet": 64,
    "inceptionv3": 75,
    "mobilenet1.0": 96,
    "resnet50_v2": 64,
}


def zoo(options: CaseOptions) -> list[Case]:
    """Return the training step of each network of a list, in float32 and float16."""
    sizes = {name: options.image_size or _own_size(name) for name in options.models or ZOO}
    return _zoo("zoo", sizes, 8, options)


def zoo_small(options: CaseOptions) -> list[Case]:
    """Return the same for small images, in the batches of 20 of docs/results.md."""
    names = options.models or SMALL_ZOO
    sizes = {name: options.image_size or SMALL_ZOO.get(name, 64) for name in names}
    return _zoo("zoo-small", sizes, 20, options)


def networks(options: CaseOptions) -> list[Case]:
    """Return the training step of each network of a list, PyTorch's in bfloat16 among them.

    The batch and the images of ``efficientnet_lite0`` are the recipe's.
    """
    return _beside("networks", "training", _BESIDE_PYTORCH, (32, 160), options)


def networks_predicting(options: CaseOptions) -> list[Case]:
    """Return a prediction of eight images by each network, compiled PyTorch's among them."""
    return _beside("networks-predicting", "inference", _PREDICTING, (8, 192), options)


def _beside(
    name: str,
    factory: str,
    models: Sequence[str],
    of_efficientnet: tuple[int, int],
    options: CaseOptions,
) -> list[Case]:
    cases = []
    for model in options.models or models:
        batch, size = _batch_size(model, 8), _own_size(model)
        if model == "efficientnet_lite0":
            batch, size = of_efficientnet
        alone = replace(
            options,
            model=model,
            image_size=options.image_size or size,
            batch_sizes=options.batch_sizes or [batch],
        )
        cases += beside_pytorch(name, factory, alone)
    return cases


def _own_size(model: str) -> int:
    """Return the image size that a network was designed for."""
    return 32 if model.startswith("cifar") else 299 if model.startswith("inception") else 224


def _batch_size(model: str, of_others: int) -> int:
    """Return the default of a network: 32 for one of CIFAR."""
    return 32 if model.startswith("cifar") else of_others


def _zoo(name: str, sizes: Mapping[str, int], batch_size: int, options: CaseOptions) -> list[Case]:
    """Return a case for each network and batch size."""
    cases = []
    for model, size in sizes.items():
        alone = replace(options, model=model, image_size=size)
        batches = (_batch_size(model, batch_size),)
        cases += training_in_formats(name, "training step", alone, batches)
    return cases
