"""The cases: who takes part, and that every contestant can be found and takes its options."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

from benchmarks.cases import CASES, DTYPES, PYTORCH_MODELS, CaseOptions
from benchmarks.contestant import Contestant
from benchmarks.memory import memory
from benchmarks.zoo import SMALL_ZOO, ZOO, zoo, zoo_small
from experiments import parity
from experiments.reader import ReaderSettings
from experiments.sentences import LENGTH

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


@pytest.mark.parametrize("make", [*CASES.values(), zoo, zoo_small, memory])
def test_every_contestant_can_be_found_and_takes_its_options(make):
    for case in make(EVERYBODY):
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


def test_the_zoo_has_a_training_step_of_each_network_at_its_own_size_in_float16():
    cases = zoo(EVERYBODY)
    assert [case.settings["model"] for case in cases] == list(ZOO)
    for case in cases:
        assert names(case) == ["Gluon float32", "mpgluon float16", "mpgluon autocast float16"]
        assert {one.options["image_size"] for one in case.contestants} == {
            case.settings["image_size"]
        }
    shapes = {
        c.settings["model"]: (c.settings["batch_size"], c.settings["image_size"]) for c in cases
    }
    unusual = {"inceptionv3": (8, 299)}
    unusual |= dict.fromkeys(["cifar_resnet20_v1", "cifar_resnet20_v2"], (32, 32))
    assert shapes == {**dict.fromkeys(ZOO, (8, 224)), **unusual}


def test_the_small_zoo_has_the_networks_sizes_and_batches_of_the_parity_runs():
    assert {one.name: one.image_size for one in parity.NETWORKS} == SMALL_ZOO
    for case in zoo_small(CaseOptions()):
        assert case.settings["image_size"] == SMALL_ZOO[case.settings["model"]]
        assert case.settings["batch_size"] == parity.COMMON["batch_size"]
        assert case.name == "zoo-small"


def test_networks_sizes_batches_and_formats_of_the_zoo_can_be_chosen():
    chosen = CaseOptions(
        models=["vgg16", "alexnet"], batch_sizes=(2, 4), image_size=64, dtypes=["bfloat16"]
    )
    for make in (zoo, zoo_small):
        cases = make(chosen)
        assert [(c.settings["model"], c.settings["batch_size"]) for c in cases] == [
            ("vgg16", 2),
            ("vgg16", 4),
            ("alexnet", 2),
            ("alexnet", 4),
        ]
        for case in cases:
            assert case.settings["image_size"] == 64
            assert names(case) == ["Gluon float32", "mpgluon bfloat16"]


def test_inference_in_float16_is_folded_too_and_bfloat16_predicts_without_pauses_too():
    for case in CASES["inference"](CaseOptions(peers=False)):
        options = {one.name: one.options for one in case.contestants}
        assert options["mpgluon float16, folded"]["folded"]
        in_a_row = {name for name, own in options.items() if own.get("calls", 1) > 1}
        assert in_a_row == {"mpgluon bfloat16, folded, in a row"}


def test_sequences_are_trained_in_float32_and_float16():
    lstm, gru, small = CASES["recurrent"](EVERYBODY)
    assert lstm.title == "training step, lstm, 2 x 256 units, 35 tokens, batch 25"
    assert lstm.settings["calls"] == 5
    assert gru.settings == {**lstm.settings, "kind": "gru"}
    settings = ReaderSettings()
    assert small.settings["width"] == settings.hidden
    assert small.settings["length"] == LENGTH
    assert {c.settings["batch_size"] for c in (lstm, gru, small)} == {settings.batch_size}
    interleaved, batch_dot = CASES["attention"](EVERYBODY)
    assert batch_dot.settings == {**interleaved.settings, "kind": "attention by batch_dot"}
    for case in (lstm, gru, small, interleaved, batch_dot):
        assert names(case) == ["Gluon float32", "mpgluon float16", "mpgluon autocast float16"]
    (one, two, *_) = CASES["attention"](CaseOptions(batch_sizes=[2, 4], dtypes=["bfloat16"]))
    assert [case.settings["batch_size"] for case in (one, two)] == [2, 4]
    assert names(one) == ["Gluon float32", "mpgluon bfloat16"]


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
