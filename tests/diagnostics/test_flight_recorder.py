"""Steps that overflow by construction are recorded, and run again with the same bits."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import mpgluon
from mpgluon import CheckpointError, DynamicLossScale, Policy, StaticLossScale, amp
from mpgluon.base.archive import read_archive, write_archive
from mpgluon.base.processor import computing_threads, recorded_threads
from mpgluon.diagnostics import FlightRecorder, replay
from mpgluon_tools import commands
from mpgluon_tools.recorder.steps.recorded_network import NetworkSettings
from mpgluon_tools.recorder.steps.recorded_step import RECORDED_STEP, GradientMark, read_step

import mxnet as mx
import numpy as np
import pytest
from diagnostics_helpers import WAYS
from helpers import STATIC, assert_same_bits, gradients_of, in_sequence, parameters_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mxnet import autograd, gluon
from mxnet.gluon import nn
from recorded_networks import LARGE, make_line, make_net, mean_loss, outputs_alone

HERE = Path(__file__).parent
NETWORK = "recorded_networks:make_net"
ONE, TWO = [mx.cpu()], [mx.cpu(0), mx.cpu(1)]


class Training:
    """A run of the small network; ``blow_up`` makes its fourth layer overflow from then on."""

    def __init__(
        self,
        folder=None,
        *,
        way="float16",
        flags=STATIC,
        devices=ONE,
        scale=None,
        grad_req="write",
        net=None,
        loss="SoftmaxCrossEntropyLoss",
        **options,
    ):
        mx.random.seed(1)
        np.random.seed(1)
        self.net = make_net() if net is None else net
        self.net.collect_params().reset_ctx(devices)
        for parameter in self.net.collect_params().values():
            parameter.grad_req = grad_req if parameter.grad_req != "null" else "null"
        WAYS[way](self.net)
        if flags is not None:
            self.net.hybridize(**flags)
        self.trainer = gluon.Trainer(
            self.net.collect_params(),
            "sgd",
            {"learning_rate": 0.01, "momentum": 0.9, "multi_precision": True},
        )
        amp.init_trainer(self.trainer, DynamicLossScale(2.0**10) if scale is None else scale)
        self.devices, self.folder = devices, folder
        self.recorder = None
        if folder is not None:
            options = {"network": NETWORK, **options}
            self.recorder = FlightRecorder(self.net, self.trainer, folder, loss=loss, **options)
        self.loss_fn = mean_loss if ":" in loss else gluon.loss.SoftmaxCrossEntropyLoss()
        self.data = np.random.RandomState(2)

    def batch(self):
        """Return images and labels, each a list with one array for each device."""
        images = self.data.randn(8, 6).astype("float32")
        labels = self.data.randint(0, 3, 8).astype("int32")
        return [
            [mx.nd.array(part, ctx=d, dtype=part.dtype) for part, d in zip(parts, self.devices)]
            for parts in (np.split(images, len(self.devices)), np.split(labels, len(self.devices)))
        ]

    def backward(self, images, labels):
        with autograd.record():
            losses = [self.loss_fn(self.net(x), y) for x, y in zip(images, labels)]
            with amp.scale_loss(losses, self.trainer) as scaled:
                autograd.backward(scaled)
        return losses

    def step(self, passes=1, factor=1.0, check=False):
        for _ in range(passes):
            images, labels = self.batch()
            images = [image * factor for image in images]
            with self.recorder.step(images, labels):
                losses = self.backward(images, labels)
                if check:
                    self.recorder.check_loss(losses)
        self.trainer.step(8)
        return amp.step_was_skipped(self.trainer)

    def blow_up(self):
        weight = self.net[LARGE].weight
        weight.set_data(weight.data(self.devices[0]) * 2.0**14)

    @property
    def files(self):
        return sorted(path.name for path in self.folder.iterdir())

    @property
    def newest(self) -> Path:
        return self.folder / self.files[-1]


def content_of(path):
    header, arrays = read_archive(path, kind=RECORDED_STEP)
    return {n: value for n, value in header.items() if n not in ("format", "version")}, arrays


@pytest.fixture
def recorded(tmp_path):
    """Return the training whose third step overflows in the fourth layer, and was recorded."""
    training = Training(tmp_path / "overflows")
    assert [training.step(), training.step()] == [False, False]
    training.blow_up()
    assert training.step()
    return training


@pytest.mark.multiprocess
def test_a_fresh_process_names_the_layer_and_the_cure_that_works(recorded, tmp_path):
    path = shutil.move(recorded.newest, tmp_path / "elsewhere.npz")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "mpgluon", "replay", str(path)],
        capture_output=True,
        text=True,
        cwd=HERE,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    text = done.stdout
    assert "step 3, skipped at a loss scale of 1024" in text
    assert "replayed: the same bits in all 10 gradients, of which 10 are not finite" in text
    assert "forward: the first array that is not finite is what FullyConnected returned" in text
    assert "\nlayer: net[3]\n" in text
    cures = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert "no" in cures["half"]
    assert "no" in cures["any"]
    assert cures["net[3]"][3] == "yes"
    assert "yes" in cures["bfloat16,"]
    assert "mpgluon.cast_block(net, keep_fp32=(*mpgluon.NORMALIZATION_LAYERS, net[3]))" in text


@pytest.mark.parametrize("width", [60, 80])
def test_the_table_of_cures_fits_a_width_and_python_follows_in_lines_to_be_copied(recorded, width):
    result = replay(recorded.newest)
    text = result.text(width)
    lines = text[text.index("\ncure ") :].splitlines()
    assert max(len(line) for line in lines if not line.startswith("    ")) <= width
    for cure in result.cures:
        assert not cure.saves or f"    {cure.code}" in lines
    assert sum(line.endswith("yes") for line in lines) == sum(c.saves for c in result.cures)


def test_a_folder_is_refused(recorded):
    with pytest.raises(mpgluon.CheckpointError, match="is a folder, not a recorded step"):
        replay(recorded.folder)


@pytest.mark.parametrize(
    ("way", "flags"),
    [("float16", STATIC), ("float16", None), ("auto float16", {}), ("auto float16", None)],
)
def test_the_same_bits_come_back_imperative_and_hybridized(tmp_path, way, flags):
    training = Training(tmp_path, way=way, flags=flags)
    training.step()
    training.blow_up()
    assert training.step()
    recorded = read_step(training.newest)
    generators = random.getstate(), np.random.get_state()[1].tobytes()
    again = replay(training.newest, make_net("other_"), cures=False)
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == generators
    assert again.same_bits
    gradients = gradients_of(training.net)
    assert_same_bits({name: array for name, (array,) in again.gradients.items()}, gradients)
    assert not any(np.isfinite(gradient).all() for gradient in gradients.values())
    assert again.layer == f"net[{LARGE}]"
    weights = again.operands[1]
    values = recorded.parameters[f"{LARGE}.weight"]  # FP32 under autocast
    largest = np.abs(values.astype("float32")).max()
    assert (weights.dtype, weights.shape, weights.largest) == (values.dtype, (8, 8), largest)


@pytest.mark.parametrize("flags", [STATIC, None], ids=["static", "imperative"])
def test_gradients_of_which_most_are_finite_come_back_with_their_dropout(tmp_path, flags):
    training = Training(tmp_path, scale=StaticLossScale(2.0**15), flags=flags)
    assert training.step()
    again = replay(training.newest, cures=False)
    assert again.same_bits
    finite = [np.isfinite(values) for (values,) in again.gradients.values()]
    assert 0 < sum(some.all() for some in finite) < len(finite)
    assert again.overflow.direction == "backward"
    assert again.overflow.what.startswith("the gradient of")
    assert [operand.dtype for operand in again.operands] == ["float16"]


@pytest.mark.parametrize("devices", [ONE, TWO], ids=["one device", "two devices"])
def test_gradients_that_were_accumulated_come_back(tmp_path, devices):
    training = Training(tmp_path, devices=devices, grad_req="add")
    training.net.collect_params().zero_grad()
    assert not training.step(passes=2)
    training.blow_up()
    assert training.step(passes=2)
    assert len(read_step(training.newest).passes) == 2
    again = replay(training.newest, cures=False)
    assert again.same_bits
    assert len(again.losses) == 2 * len(devices)
    assert {len(gradients) for gradients in again.gradients.values()} == {len(devices)}


def test_a_pass_whose_block_raised_is_not_part_of_the_step(tmp_path):
    training = Training(tmp_path, grad_req="add")
    training.net.collect_params().zero_grad()
    with pytest.raises(ZeroDivisionError), training.recorder.step(*training.batch()):
        raise ZeroDivisionError
    training.blow_up()
    assert training.step()
    assert len(read_step(training.newest).passes) == 1
    assert replay(training.newest, cures=False).same_bits


def test_another_dropout_mask_gives_other_bits_and_the_command_says_so(
    recorded, monkeypatch, capsys
):
    header, arrays = content_of(recorded.newest)

    def written(**changes):
        write_archive(recorded.newest, {**header, **changes}, arrays, RECORDED_STEP)
        return replay(recorded.newest, cures=False)

    # The overflow in the fourth layer hides all masks: a loss scale of 1 and weights that fit.
    arrays["parameter/3.weight"] = arrays["parameter/3.weight"] * np.float16(2.0**-14)
    arrays["master/3.weight"] = arrays["master/3.weight"] * np.float32(2.0**-14)
    one = written()
    header["random"]["mxnet"] += 1
    other = written()
    assert one.gradients["0.weight"][0].tobytes() != other.gradients["0.weight"][0].tobytes()
    assert not other.same_bits
    assert other.elsewhere == other.different  # they are finite now
    assert other.overflow is None
    monkeypatch.syspath_prepend(str(HERE))
    assert commands.main(["replay", str(recorded.newest), "--no-cures"]) == 1
    printed = capsys.readouterr().out
    assert "replayed: 10 of 10 gradients, of which 10 are not finite, have other bits" in printed
    assert "not finite in other places" in printed
    assert "nothing overflows here: was another loss or network recorded" in printed
    text = str(written(processes=2, reduced=True))
    assert "recorded were sums over 2 processes" in text
    assert "another of the 2 processes overflowed" in text
    threads = computing_threads() + 1
    said = f"recorded with {threads} threads, replayed with {threads - 1}, "
    assert said in str(written(machine={"threads": threads}))
    assert "thread" not in str(written(machine={}, environment={}))


@pytest.mark.parametrize(
    ("record", "threads"),
    [
        ({"machine": {"threads": 3}, "environment": {"OMP_NUM_THREADS": "2"}}, 3),
        ({"machine": {"cores": 4}, "environment": {"OMP_NUM_THREADS": "2,1"}}, 2),  # version 0.2.0
        ({"machine": {"cores": 4}, "environment": {}}, None),
        ({"machine": {"threads": 10**400}}, None),
    ],
)
def test_files_say_with_how_many_threads_their_step_was_computed(record, threads):
    assert recorded_threads(record) == threads


def test_what_follows_the_layer_is_kept_in_fp32_too_and_so_is_what_was(tmp_path):
    # Without a normalization behind it, the next layer rounds the FP32 result to infinity.
    net = nn.HybridSequential(prefix="net_")
    net.add(nn.Dense(8, in_units=6), nn.Dense(8, in_units=8), nn.Dense(3, in_units=8))
    net.initialize(mx.init.Normal(0.5))
    amp.autocast(net, "float16", keep_fp32=[net[0]])
    net[1].weight.set_data(net[1].weight.data() * 2.0**20)
    net[2].weight.set_data(net[2].weight.data() * 2.0**-20)
    training = Training(tmp_path, net=net, way="float32", flags=None, scale=StaticLossScale(8.0))
    assert training.step()
    plain = in_sequence(nn.Dense(8), nn.Dense(8), nn.Dense(3))
    cures = {cure.name: cure for cure in replay(training.newest, plain).cures}
    assert not cures["net[1] in FP32"].saves
    both = cures["net[1], net[2] in FP32"]
    assert both.saves
    assert both.code == 'amp.autocast(net, "float16", keep_fp32=[net[0], net[1], net[2]])'


def test_a_sum_over_devices_that_overflows_alone_is_not_taken_for_an_array(tmp_path):
    names = {"network": "recorded_networks:make_line", "loss": "recorded_networks:outputs_alone"}
    scale = StaticLossScale(2.0**8)
    training = Training(tmp_path, net=make_line(), devices=TWO, scale=scale, flags=None, **names)
    training.loss_fn = outputs_alone
    images = [mx.nd.full((1, 1), 200, ctx=device) for device in TWO]  # 51200 each, times 2**8
    with training.recorder.step(images, [None, None]):
        training.backward(images, [None, None])
        training.trainer.step(2)
    assert amp.step_was_skipped(training.trainer)
    again = replay(training.newest)
    assert again.same_bits
    assert again.overflow is None
    assert "it was a sum of gradients that overflowed" in str(again)
    assert [cure.saves for cure in again.cures] == [True] * 3  # half the scale, bfloat16, FP32


def test_what_was_not_finite_before_the_step_is_named(tmp_path):
    training = Training(tmp_path, way="float32", scale="none")
    training.step(check=True)
    assert not training.folder.exists() or training.files == []
    training.step(check=True, factor=float("inf"))
    again = replay(training.newest)
    assert again.recorded.reason == "loss"
    assert again.same_bits
    assert "not finite before the step began: input 0 of pass 1; no cure" in str(again)
    assert not any(cure.saves for cure in again.cures)
    # The step that was not skipped came after the record: its weights are NaN, the file's are not.
    assert np.isnan(training.net[0].weight.data().asnumpy()).all()
    assert np.isfinite(again.recorded.parameters["0.weight"]).all()


def test_a_network_without_shapes_and_a_loss_of_ones_own_are_replayed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    names = {
        "network": "recorded_networks:make_deferred_net",
        "loss": "recorded_networks:mean_loss",
    }
    training = Training(tmp_path, **names)
    training.blow_up()
    assert training.step()
    assert replay(training.newest, cures=False).same_bits


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "compute=bfloat16"),
        ({"emulate": True, "param_dtype": "bfloat16", "compute_dtype": "bfloat16"},
            "params=bfloat16,compute=bfloat16,emulate=true"),
        ({"accumulation": "volta", "compute_dtype": "float16"},
            "compute=float16,accumulation=volta"),
        (
            {
                **{"compute_dtype": "float8_e4m3", "gradient_dtype": "float8_e5m2"},
                **{"between_dtype": "bfloat16", "scaling": "tensor", "amax_history": 16},
            },
            "compute=float8_e4m3,gradient=float8_e5m2,scaling=tensor,between=bfloat16,"
            "amax_history=16",
        ),
    ],
)  # fmt: skip
def test_a_policy_is_read_from_the_fields_that_0_2_0_wrote(fields, text):
    written = {
        **{"param_dtype": "float32", "compute_dtype": "bfloat16", "output_dtype": "float32"},
        **{"emulate": False, "gradient_dtype": None, "scaling": "none", "between_dtype": None},
        **{"accumulation": "float32", "amax_history": 0, **fields},
    }
    cast = {"block": "", "policy": written, "kept": [], "operators_fp32": [], "operators_16": []}
    values = {"casts": [cast], "hybridized": {}, "grad_req": {}, "synchronized": False}
    assert NetworkSettings.from_dict(values).casts[0].policy == Policy.parse(text)


def test_blocks_and_operators_that_were_kept_in_fp32_are_kept_again(tmp_path):
    net = make_net()
    kept = (*mpgluon.NORMALIZATION_LAYERS, net[0], "3:FullyConnected")
    mpgluon.cast_block(net, keep_fp32=kept, compute_16=["mean"])
    net.hybridize(static_alloc=True)
    before = NetworkSettings.of(net)
    assert before.casts[0].operators_fp32 == (("3", "FullyConnected"),)
    plain = make_net("plain_")
    NetworkSettings.from_dict(json.loads(json.dumps(before.as_dict()))).apply(plain, tmp_path)
    assert NetworkSettings.of(plain) == before
    kinds = [str(np.dtype(p.dtype)) for p in plain._collect_params_with_prefix().values()]
    assert kinds == [str(np.dtype(p.dtype)) for p in net._collect_params_with_prefix().values()]
    assert before.casts[0].kept == ("0", "1", "4")
    with_fewer_rules = before.casts[0].keeping(("3",))
    assert with_fewer_rules.kept == ("0", "1", "4", "3")
    assert with_fewer_rules.operators_fp32 == ()
    assert not {"3", "3.0"} & {place for place, _ in with_fewer_rules.operators_16}


def test_a_run_with_a_recorder_computes_the_same_and_copies_nothing(tmp_path, monkeypatch):
    def calls(recorder):
        made = []
        monkeypatch.undo()
        training = Training(tmp_path if recorder else None)
        for step in range(3):
            images, labels = training.batch()
            if step == 2:
                for name in ("asnumpy", "copy", "copyto", "wait_to_read"):
                    original = getattr(mx.nd.NDArray, name)
                    monkeypatch.setattr(
                        mx.nd.NDArray, name, lambda *a, n=name, o=original: made.append(n) or o(*a)
                    )
            if recorder:
                with training.recorder.step(images, labels, seed=step):
                    training.backward(images, labels)
                    training.trainer.step(8)
            else:
                mx.random.seed(step)
                training.backward(images, labels)
                training.trainer.step(8)
        monkeypatch.undo()
        return made, parameters_of(training.net)

    (made, with_recorder), (made_without, without) = calls(True), calls(False)
    assert made == made_without
    assert_same_bits(with_recorder, without)


def test_a_resumed_run_draws_the_same_masks(tmp_path):
    whole, begun, rest = (Training(tmp_path / name) for name in ("whole", "begun", "rest"))
    for training in (whole, whole, whole, begun, begun):
        training.step()
    checkpoint = tmp_path / "checkpoint.npz"
    mpgluon.save_checkpoint(checkpoint, begun.net, begun.trainer)
    mpgluon.load_checkpoint(checkpoint, rest.net, rest.trainer)
    rest.data = begun.data
    rest.step()
    assert_same_bits(parameters_of(rest.net), parameters_of(whole.net))


@pytest.mark.parametrize("devices", [ONE, TWO], ids=["one device", "two devices"])
def test_the_seed_follows_from_the_updates_and_the_skipped_steps(tmp_path, devices):
    training = Training(tmp_path, way="float32", scale="none", devices=devices)
    for _ in range(2):
        training.step()
    training.step(check=True, factor=float("inf"))
    assert training.files == ["overflow-00000003.npz"]
    seed = int(np.random.SeedSequence((2, 0)).generate_state(1)[0] >> 1)
    assert read_step(training.newest).random_states.mxnet_seed == seed


class InTurn:
    """A run whose steps train one of two layers each, so that MXNet counts half as many updates."""

    def __init__(self, folder, grad_req="write"):
        self.net = nn.Sequential()
        self.net.add(nn.Dense(2, in_units=3), nn.Dense(2, in_units=3))
        self.net.initialize()
        self.net.collect_params().setattr("grad_req", grad_req)
        self.trainer = gluon.Trainer(self.net.collect_params(), "sgd")
        amp.init_trainer(self.trainer, "none")
        self.recorder = FlightRecorder(self.net, self.trainer, folder, loss="L2Loss", keep=9)
        self.draws = []

    def train(self, *layers, factor=1.0):
        for layer in layers:
            with self.recorder.step(mx.nd.ones((2, 3)), mx.nd.zeros((2, 2))):
                self.draws.append(mx.nd.random.uniform().asscalar())
                with autograd.record():
                    loss = self.net[layer](mx.nd.ones((2, 3))).sum()
                autograd.backward(loss)
                self.recorder.check_loss(loss * factor)
            self.trainer.step(1, ignore_stale_grad=True)


def test_steps_that_update_only_some_parameters_have_seeds_and_files_of_their_own(tmp_path):
    run = InTurn(tmp_path)
    run.train(0, 1, 0, 1, factor=float("inf"))
    assert len(set(run.draws)) == 4
    names = [f"overflow-{number:08d}.npz" for number in (1, 2, 3, 4)]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_resumed_run_draws_the_same_masks_if_steps_update_only_some_parameters(tmp_path):
    whole, rest = InTurn(tmp_path), InTurn(tmp_path)
    whole.train(0, 1, 0)
    mpgluon.save_checkpoint(tmp_path / "checkpoint", whole.net, whole.trainer)
    mpgluon.load_checkpoint(tmp_path / "checkpoint", rest.net, rest.trainer)
    for run in (whole, rest):
        run.train(1, 0)
    assert whole.draws[3:] == rest.draws


def test_a_pass_that_accumulates_belongs_to_its_own_step_if_others_update_other_parameters(
    tmp_path,
):
    run = InTurn(tmp_path, grad_req="add")
    run.train(0, 1)
    run.train(0, factor=float("inf"))
    (path,) = tmp_path.iterdir()
    assert read_step(path).step == 3
    assert len(read_step(path).passes) == 1


def test_running_statistics_are_those_from_before_the_step(tmp_path):
    training = Training(tmp_path, scale=2.0**24)  # overflows in the gradients
    assert training.step()
    before = parameters_of(training.net)
    assert training.step()
    step, now = read_step(training.newest), parameters_of(training.net)
    assert list(step.statistics) == [f"{n}.running_{s}" for n in (1, 4) for s in ("mean", "var")]
    for name, (value,) in step.statistics.items():
        assert value.tobytes() == before[name].tobytes() != now[name].tobytes()


@pytest.mark.parametrize("trouble", ["the folder is a file", "the disk is full"])
def test_a_folder_that_cannot_be_written_is_warned_of_once(tmp_path, trouble, monkeypatch, caplog):
    training = Training(tmp_path / "overflows")
    training.blow_up()
    if trouble == "the folder is a file":
        (tmp_path / "overflows").write_text("")
    else:

        def full(_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
    with caplog.at_level(logging.WARNING, "mpgluon"):
        assert [training.step() for _ in range(3)] == [True] * 3
    warnings = [m for m in caplog.messages if "recorded" in m]
    assert len(warnings) == 1
    assert "could not be recorded, and training goes on" in warnings[0]
    if trouble == "the disk is full":
        assert training.files == []  # no part of a file


def test_a_step_that_the_recorder_was_not_told_of_is_warned_of(tmp_path, caplog):
    training = Training(tmp_path / "overflows")
    training.blow_up()
    for _ in range(2):
        training.backward(*training.batch())
        training.trainer.step(8)
    assert sum("whose batch recorder.step was not told" in m for m in caplog.messages) == 1
    assert not training.folder.exists()
    for _ in range(2):
        training.recorder.detach()
    training.step()
    assert not training.folder.exists()


def test_a_recorder_needs_a_trainer_that_skips_steps(tmp_path):
    net = make_net()
    with pytest.raises(mpgluon.TrainerStateError, match="has no loss scale yet"):
        FlightRecorder(net, gluon.Trainer(net.collect_params(), "sgd"), tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0}, "keep must be at least 1, received 0"),
        ({"network": "resnet999"}, "no model zoo has a network called 'resnet999'"),
        ({"network": "resnet18_v1(pretrained=True)"}, "arguments classes and image_size"),
        ({"network": "resnet18_v1(classes=-1)"}, "received classes=-1"),
        ({"network": "resnet18_v1(classes=open('x'))"}, "is like resnet18_v1\\(classes=10\\)"),
        ({"network": "resnet18_v1(10)"}, "only keyword arguments"),
        ({"network": "os:system(command='true')"}, "without arguments; received"),
        ({"network": "no_such_module:make"}, "names no function that can be imported"),
        ({"network": "helpers:no_such_function"}, "names no function that can be imported"),
        ({"loss": "NoSuchLoss"}, "mxnet.gluon.loss has no 'NoSuchLoss'"),
        ({"loss": "L2Loss(colour='red')"}, "is not a call of gluon.loss.L2Loss"),
    ],
)
def test_bad_options_are_refused_with_what_was_received(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        Training(tmp_path, **options)


@pytest.mark.parametrize(
    ("inputs", "labels", "error", "message"),
    [
        (np.zeros(3), mx.nd.zeros(3), TypeError, "inputs begin with an NDArray, received ndarray"),
        (mx.nd.zeros(3), {1, 2}, TypeError, "labels can be recorded as .*; received set"),
        ([mx.nd.zeros(3)], mx.nd.zeros(3), ValueError, "need a list of as many labels"),
        ([], [], ValueError, "inputs for 0 devices"),
        (mx.nd.ones((2, 2)).tostype("csr"), mx.nd.zeros(2), TypeError, "received a csr array"),
    ],
)  # fmt: skip
def test_batches_that_cannot_be_recorded_are_refused(tmp_path, inputs, labels, error, message):
    training = Training(tmp_path)
    with pytest.raises(error, match=message), training.recorder.step(inputs, labels):
        pytest.fail("the block ran")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_mark_of_a_gradient_does_not_depend_on_the_signs_of_nan(dtype):
    one, other = (np.array([1, nan, np.inf, -0.0], dtype) for nan in (np.nan, -np.nan))
    assert one.tobytes() != other.tobytes()
    assert GradientMark.of(one) == GradientMark.of(other)
    assert GradientMark.of(one).not_finite == 2
    assert GradientMark.of(one) != GradientMark.of(np.abs(one))  # of another zero
    finite = np.array([1, 2, -0.0], dtype)
    assert GradientMark.of(finite) == GradientMark.of(finite, nan_bits=True)


def test_a_step_that_was_recorded_with_the_bits_of_nan_has_the_same_bits(recorded):
    header, arrays = content_of(recorded.newest)
    again = replay(recorded.newest, cures=False)
    assert any(np.isnan(values).any() for (values,) in again.gradients.values())
    header["gradients"] = {
        name: [GradientMark.of(values, nan_bits=True) for values in of_all]
        for name, of_all in again.gradients.items()
    }
    write_archive(recorded.newest, header, arrays, RECORDED_STEP)
    assert replay(recorded.newest, cures=False).same_bits


def test_every_array_that_a_file_names_must_be_there(recorded, tmp_path):
    header, arrays = content_of(recorded.newest)
    for name in arrays:
        if name.startswith("master/"):
            continue  # a weight stands for itself then
        path = tmp_path / "edited.npz"
        write_archive(path, header, {n: a for n, a in arrays.items() if n != name}, RECORDED_STEP)
        with pytest.raises(CheckpointError, match="is damaged or was edited"):
            read_step(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)


def places_in(value, place=()):
    yield place
    if isinstance(value, (dict, list)) and len(place) < 6:
        keys = value if isinstance(value, dict) else range(min(len(value), 3))
        for key in keys:
            yield from places_in(value[key], (*place, key))


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_an_edited_header_is_read_or_refused_as_damaged(recorded, data):
    header, arrays = content_of(recorded.newest)
    place = data.draw(st.sampled_from([p for p in places_in(header) if p]))
    inner = header
    for key in place[:-1]:
        inner = inner[key]
    if isinstance(inner, dict) and data.draw(st.booleans()):
        del inner[place[-1]]
    else:
        inner[place[-1]] = data.draw(JSON)
    path = recorded.folder / "edited"
    write_archive(path, header, arrays, RECORDED_STEP)
    try:
        step = read_step(path)
    except CheckpointError:
        return
    finally:
        path.unlink()
    assert step.loss_scale > 0
    assert step.passes
