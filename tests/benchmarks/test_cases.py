"""The cases: who takes part, and that every contestant can be found and takes its options."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

from benchmarks.cases import CASES, DTYPES, PYTORCH_MODELS, CaseOptions
from benchmarks.contestant import Contestant

EVERYBODY = CaseOptions(torch_python="/some/python")


def names(case) -> list[str]:
    return [one.name for one in case.contestants]


def arguments_of(contestant: Contestant) -> tuple[set[str], set[str]]:
    """Return the factory's arguments, and those of them that have no default."""
    source, _, function = contestant.factory.rpartition(":")
    if not source.endswith(".py"):
        parameters = inspect.signature(
            getattr(importlib.import_module(source), function)
        ).parameters
        required = {n for n, p in parameters.items() if p.default is inspect.Parameter.empty}
        return set(parameters), required
    # PyTorch's cannot be imported here.
    for node in ast.parse(Path(source).read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            found = {argument.arg for argument in node.args.kwonlyargs}
            return found, found
    raise AssertionError(f"{source} has no {function}")


@pytest.mark.parametrize("name", CASES)
def test_every_contestant_can_be_found_and_takes_its_options(name):
    for case in CASES[name](EVERYBODY):
        assert len(set(names(case))) == len(case.contestants) >= 2
        for contestant in case.contestants:
            known, required = arguments_of(contestant)
            assert required <= set(contestant.options) <= known, contestant


def test_a_training_step_is_compared_with_plain_gluon_in_all_formats_and_with_peers():
    (case,) = CASES["training"](EVERYBODY)
    assert names(case) == [
        "Gluon float32",
        "mpgluon float32",
        "mpgluon float16",
        "mpgluon autocast float16",
        "mpgluon bfloat16",
        "mpgluon bfloat16, emulated",
        "contrib.amp bfloat16",
        "contrib.amp bfloat16, scaled",
        "PyTorch float32",
        "PyTorch float16",
        "PyTorch bfloat16",
    ]
    assert case.title == "training step, resnet50_v1, batch 8, 224 px"
    assert case.contestants[-1].python == "/some/python"


@pytest.mark.parametrize("name", ["gemm", "convolution", "training", "inference"])
def test_formats_and_peers_can_be_left_out_but_the_baseline_stays(name):
    for case in CASES[name](CaseOptions(dtypes=["bfloat16"], peers=False)):
        assert names(case)[0] == "Gluon float32"
        assert {one.split(",")[0] for one in names(case)[1:]} == {"mpgluon bfloat16"}


def test_pytorch_takes_part_where_it_has_the_same_network_on_the_same_device():
    def takes_part(name, **settings):
        cases = CASES[name](CaseOptions(**{"torch_python": "/some/python", **settings}))
        return any(one.startswith("PyTorch") for case in cases for one in names(case))

    assert all(takes_part("training", model=model) for model in PYTORCH_MODELS)
    assert takes_part("gemm", model="vgg16")
    assert not takes_part("training", model="vgg16")
    assert not takes_part("training", device="gpu:0")
    assert not takes_part("training", torch_python=None)


def test_batch_sizes_image_size_model_and_device_reach_every_contestant_of_a_network():
    settings = CaseOptions("vgg16", batch_sizes=(2, 3), image_size=32, device="gpu:0")
    for name in ("training", "inference", "loss-scaling"):
        cases = CASES[name](settings)
        assert {case.settings["batch_size"] for case in cases} == {2, 3}
        for case in cases:
            for one in case.contestants:
                assert one.options["model"] == "vgg16"
                assert one.options["batch_size"] == case.settings["batch_size"]
                assert one.options["image_size"] == 32
                assert one.options["device"] == "gpu:0"


def test_inference_is_of_one_image_and_of_many():
    assert [case.settings["batch_size"] for case in CASES["inference"](CaseOptions())] == [1, 32]


def test_loss_scaling_compares_each_format_with_itself():
    for case, dtype in zip(CASES["loss-scaling"](CaseOptions()), DTYPES):
        assert dtype in case.title
        stock, amp = case.contestants
        assert (stock.name, amp.name) == ("stock Trainer", "amp")
        assert {**stock.options, "loss_scale": "dynamic"} == amp.options
        assert stock.options["loss_scale"] is None
        assert stock.options["dtype"] == dtype


def test_loaders_get_their_workers_and_one_thread_and_the_folder_stays_out_of_the_record():
    settings = CaseOptions(workers=3, images="/home/somebody/images", batch_sizes=(16,))
    (case,) = CASES["pipeline"](settings)
    assert names(case) == [
        "ImageLoader, 3 workers",
        "ImageLoader, no worker",
        "DataLoader, 3 workers",
    ]
    assert [one.options["workers"] for one in case.contestants] == [3, 0, 3]
    assert {one.threads for one in case.contestants} == {1}
    assert {one.options["images"] for one in case.contestants} == {"/home/somebody/images"}
    assert case.settings == {"images": "photographs", "batch_size": 16, "image_size": 224}
