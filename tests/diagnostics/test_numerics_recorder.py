"""The recorder of numerics: its recordings, its errors, and that it changes nothing."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mpgluon
from mpgluon import amp, diagnostics
from mpgluon.errors import CheckpointError, TrainerStateError
from mpgluon_tools.recorder.numerics import notes
from mpgluon_tools.recorder.numerics.page import write_page

import mxnet as mx
import numpy as np
import pytest
from helpers import backward_from, cast_net, in_sequence, initialized, run_python, with_loss_scale
from mxnet import autograd, gluon
from mxnet.gluon import nn
from numerics_runs import BATCH, Run

TESTS = Path(__file__).parents[1]


def weights(run):
    parameters = run.net._collect_params_with_prefix().values()
    return [parameter.data().asnumpy().tobytes() for parameter in parameters]


@pytest.mark.parametrize(
    ("cast", "hybridize", "every", "options"),
    [
        *((cast, False, 1, {}) for cast in (None, "float16", "bfloat16", "mixed_float8")),
        ("float16", True, 2, {}),
        (None, True, 1, {"activations_every": 100}),
    ],
)
def test_recording_changes_no_bit_of_a_run(tmp_path, cast, hybridize, every, options, request):
    if cast == "mixed_float8":
        request.getfixturevalue("native_operators")
    runs = {every: Run(cast=cast), 100: Run(cast=cast)}
    for steps, run in runs.items():
        if hybridize:
            run.net.hybridize(static_alloc=True, static_shape=True)
        run.train(tmp_path / str(steps), every=steps, **options)
    assert len(diagnostics.read_numerics(tmp_path / str(every)).numbers) == {1: 5, 2: 3}[every]
    assert weights(runs[every]) == weights(runs[100])


def test_a_step_holds_every_tensor_with_its_numbers(tmp_path):
    run = Run(dropout=0.0)
    step = diagnostics.read_numerics(run.train(tmp_path, steps=1)).step(1)
    found = {str(name): tensor for name, tensor in step.tensors.items()}
    layers = [f"activation of {number}" for number in range(6)]
    assert [name for name in found if name.startswith("activation of")] == layers
    for name in ("input 0", "label 0", "loss", "weight of 1.running_mean", "master of 3.weight"):
        assert name in found
    images = found["input 0"].statistics
    np.testing.assert_allclose(images.norm, np.linalg.norm(run.images[0]), rtol=1e-6)
    assert images.largest == np.abs(run.images[0]).max()
    weight = found["weight of 0.weight"]
    assert (weight.format, weight.shape) == ("float16", (4, 3, 3, 3))
    assert found["weight of 1.gamma"].format == "float32"
    assert found["activation of 3"].block == "Dense"
    assert found["activation gradient of 3"].format == "float16"
    assert step.line["loss"] == pytest.approx(math.log(5), rel=0.3)
    assert (step.line["loss_scale"], step.line["skipped"]) == (16.0, False)
    assert step.about["versions"]["mxnet"] == mx.__version__


def test_gradients_and_updates_are_those_of_the_step(tmp_path):
    mx.random.seed(0)
    net = initialized(nn.Dense(2, use_bias=False, in_units=2), mx.init.One())
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5})
    amp.init_trainer(trainer, "none")
    recorder = diagnostics.NumericsRecorder(net, trainer, tmp_path)
    with recorder.step() as told:
        told.loss = backward_from(lambda: net(mx.nd.array([[2.0, 0.0]])).sum(), trainer)
        trainer.step(1)
    step = diagnostics.read_numerics(tmp_path).step(1)
    of = {str(name): tensor.values for name, tensor in step.tensors.items()}
    np.testing.assert_array_equal(of["gradient of weight"], [2, 0, 2, 0])
    np.testing.assert_array_equal(of["update of weight"], [-1, 0, -1, 0])
    np.testing.assert_array_equal(of["activation gradient of Dense"], [1, 1])


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64", "float64", "bool"])
def test_inputs_and_labels_of_other_dtypes(tmp_path, dtype):
    run = Run()
    run.train(tmp_path, steps=1)
    values = np.array([[0, 1], [1, 1]]).astype(dtype)
    with run.recorder.step([mx.nd.array(values, dtype=dtype)], (3, None)) as told:
        images = mx.nd.array(run.images[1])
        told.loss = backward_from(lambda: run.net(images).sum(), run.trainer)
        run.trainer.step(1)
    recorded = diagnostics.read_numerics(tmp_path).step(2).of("input")[0]
    assert recorded.format == dtype
    np.testing.assert_array_equal(recorded.values, [0, 1, 1, 1])


@pytest.mark.usefixtures("native_operators")
def test_steps_that_are_skipped_keep_their_gradients_and_flags(tmp_path):
    run = Run(dropout=0.0)
    run.scale = 2.0**24
    run.train(tmp_path, steps=1)
    step = diagnostics.read_numerics(tmp_path).step(1)
    assert step.line["skipped"]
    assert any("overflow" in flag for flag in step.line["flags"])
    assert any(tensor.overflow > 0 for tensor in step.of("gradient"))
    assert all(tensor.statistics.norm == 0 for tensor in step.of("update"))


def test_every_nth_step_is_recorded_and_each_has_a_line(tmp_path):
    recording = diagnostics.read_numerics(Run().train(tmp_path, steps=7, every=3))
    assert recording.numbers == [1, 3, 6]
    assert [line["step"] for line in recording.lines] == list(range(1, 8))
    assert all(line["loss"] is not None for line in recording.lines)


def test_activations_are_recorded_less_often(tmp_path):
    options = {"steps": 12, "every": 2, "activations_every": 6}
    recording = diagnostics.read_numerics(Run().train(tmp_path, **options))
    assert recording.numbers == [1, 2, 4, 6, 8, 10, 12]
    kinds = {step.number: {name.kind for name in step.tensors} for step in recording}
    assert {number for number, of in kinds.items() if "activation" in of} == {1, 6, 12}
    assert all({"weight", "gradient", "update", "loss"} <= of for of in kinds.values())


def test_the_number_of_files_is_bounded(tmp_path):
    recording = diagnostics.read_numerics(Run().train(tmp_path, steps=12, keep=4))
    assert recording.numbers == [1, 4, 8, 12]


def test_whole_arrays_of_a_window_of_steps(tmp_path):
    run = Run()
    recording = diagnostics.read_numerics(run.train(tmp_path, steps=4, every=4, arrays=(2, 3)))
    assert recording.numbers == [1, 2, 3, 4]
    step = recording.step(2)
    np.testing.assert_array_equal(next(tensor for tensor in step.of("input")).array, run.images[1])
    assert all(tensor.array.shape == tensor.shape for tensor in step.tensors.values())
    assert all(tensor.array is None for tensor in recording.step(4).tensors.values())


def test_a_window_of_whole_arrays_may_be_longer_than_the_number_of_files(tmp_path):
    options = {"steps": 20, "every": 1, "arrays": (1, 8), "keep": 2}
    assert diagnostics.read_numerics(Run().train(tmp_path, **options)).numbers == [*range(1, 9), 16]


@pytest.mark.parametrize("recorder", ["a new one", "the same one"])
def test_a_run_that_goes_on_from_a_checkpoint_replaces_later_steps(tmp_path, recorder, caplog):
    run = Run()
    run.train(tmp_path / "numerics", steps=2)
    mpgluon.save_checkpoint(tmp_path / "checkpoint", run.net, run.trainer)
    for step in (3, 4):
        run.one_step(step)
    before = diagnostics.read_numerics(tmp_path / "numerics").step(3).tensors
    mpgluon.load_checkpoint(tmp_path / "checkpoint", run.net, run.trainer)
    if recorder == "a new one":
        run.recorder = diagnostics.NumericsRecorder(
            run.net, run.trainer, tmp_path / "numerics", every=1
        )
    with caplog.at_level(logging.WARNING):
        run.one_step(3)
    message = "replacing the recorded steps 3 to 4, which are at or after this run's"
    assert recorder == "a new one" or message in caplog.text
    recording = diagnostics.read_numerics(tmp_path / "numerics")
    assert recording.numbers == [line["step"] for line in recording.lines] == [1, 2, 3]
    after = recording.step(3).tensors
    assert {n: t.checksum for n, t in before.items()} == {n: t.checksum for n, t in after.items()}


def test_a_line_that_is_not_text_is_left_out(tmp_path):
    run = Run()
    run.train(tmp_path, steps=2)
    with open(tmp_path / "steps.jsonl", "ab") as file:
        file.write(b"\xff\x00\n")
    run.recorder = diagnostics.NumericsRecorder(run.net, run.trainer, tmp_path, every=1)
    run.one_step(3)
    assert [line["step"] for line in diagnostics.read_numerics(tmp_path).lines] == [1, 2, 3]


class Branches(gluon.Block):
    """A network of two layers, of which each step uses one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Dense(16, in_units=4), nn.Dense(16, in_units=4)

    def forward(self, x, branch):
        return getattr(self, branch)(x)


class InTurn:
    """A run that records which layers of ``Branches`` its steps use."""

    def __init__(self, folder):
        self.net = Branches()
        self.net.initialize()
        self.trainer = gluon.Trainer(self.net.collect_params(), "sgd", {"learning_rate": 0.1})
        amp.init_trainer(self.trainer, "none")
        self.recorder = diagnostics.NumericsRecorder(self.net, self.trainer, folder, every=1)

    def train(self, *branches):
        for branch in branches:
            with self.recorder.step() as told:
                with autograd.record():
                    told.loss = self.net(mx.nd.ones((2, 4)), branch).mean()
                    with amp.scale_loss(told.loss, self.trainer) as scaled:
                        scaled.backward()
                self.trainer.step(1, ignore_stale_grad=True)


def test_steps_have_different_numbers_if_each_updates_only_some_parameters(tmp_path):
    InTurn(tmp_path).train(*("first", "second") * 3)
    recording = diagnostics.read_numerics(tmp_path)
    assert recording.numbers == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in recording.lines] == recording.numbers


def test_a_loaded_step_is_replaced_also_if_it_updated_only_some_parameters(tmp_path):
    run = InTurn(tmp_path / "numerics")
    run.train("first")
    mpgluon.save_checkpoint(tmp_path / "checkpoint", run.net, run.trainer)
    run.train("second")
    mpgluon.load_checkpoint(tmp_path / "checkpoint", run.net, run.trainer)
    run.train("second", "first")
    assert diagnostics.read_numerics(tmp_path / "numerics").numbers == [1, 2, 3]


def test_parameters_that_a_step_does_not_use_have_no_gradient_and_lose_no_update(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        InTurn(tmp_path).train("first", "second", "first")
    assert caplog.messages == []
    recording = diagnostics.read_numerics(tmp_path)
    for step, used in zip(recording, ("first", "second", "first")):
        both = [f"{used}.weight", f"{used}.bias"]
        assert [tensor.id.name for tensor in step.of("gradient")] == both
        assert [tensor.id.name for tensor in step.of("update")] == both
        assert step.lost_updates() == {f"{used}.weight": 0.0}
        assert len(step.of("weight")) == 4
    write_page(recording, tmp_path / "page.html")


def test_the_gradients_of_another_trainer_are_recorded_before_its_step(tmp_path):
    net = initialized(in_sequence(nn.Dense(3, in_units=2), nn.Dense(1, in_units=3)))
    trainers = [gluon.Trainer(layer.collect_params(), "sgd") for layer in net]
    for trainer in trainers:
        amp.init_trainer(trainer, 8.0)
    recorder = diagnostics.NumericsRecorder(net, trainers[0], tmp_path)
    with recorder.step() as told:
        told.loss = backward_from(lambda: net(mx.nd.ones((1, 2))), trainers)
        for trainer in trainers:
            trainer.step(1)
    step = diagnostics.read_numerics(tmp_path).step(1)
    assert len(step.of("gradient")) == len(step.of("update")) == 4


def test_masters_from_before_the_cast_are_taken_to_the_device_of_the_weights(tmp_path):
    device = mx.cpu(1)
    net = cast_net(initialized(nn.Dense(2, in_units=3), ctx=device))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"multi_precision": True})
    amp.init_trainer(trainer, 8.0)
    recorder = diagnostics.NumericsRecorder(net, trainer, tmp_path, every=1)
    for _ in range(2):
        with recorder.step() as told:
            before = list(recorder._before.values())
            with autograd.record():
                told.loss = net(mx.nd.ones((2, 3), ctx=device)).astype("float32")
                with amp.scale_loss(told.loss, trainer) as scaled:
                    scaled.backward()
            trainer.step(2)
        masters = map(recorder._master_of, net.collect_params().values())
        assert [array.context for array in (*before, *masters)] == [device] * 4


def test_forward_passes_in_several_threads_are_recorded(tmp_path):
    net = in_sequence(nn.Dense(4, in_units=3), nn.Dense(2, in_units=4))
    devices = [mx.cpu(0), mx.cpu(1)]
    net.initialize(ctx=devices)
    trainer = with_loss_scale(gluon.Trainer(net.collect_params(), "sgd"), "none")

    def backward(device):
        return backward_from(lambda: net(mx.nd.ones((2, 3), ctx=device)).sum())

    recorder = diagnostics.NumericsRecorder(net, trainer, tmp_path)
    with recorder.step() as told, ThreadPoolExecutor(2) as pool:
        told.loss = list(pool.map(backward, devices))
        trainer.step(4)
    step = diagnostics.read_numerics(tmp_path).step(1)
    for kind in ("activation", "activation gradient"):
        names = {tensor.id[1:] for tensor in step.of(kind)}
        assert names == {("0", 0), ("0", 1), ("1", 0), ("1", 1)}


def test_threads_that_take_statistics_at_once_do_not_mix_them_up(monkeypatch):
    begun, ended = threading.Event(), threading.Event()
    statistics = notes.statistics

    def slow_in_a_thread(*arrays):
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert ended.wait(30)
        return statistics(*arrays)

    monkeypatch.setattr(notes, "statistics", slow_in_a_thread)
    both = notes.StepNotes(nn.Dense(1), keeps_arrays=False)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(both.note, "loss", [("of 3", mx.nd.ones(3), "")])
        assert begun.wait(30)
        both.note("loss", [("of 2", mx.nd.ones(2), "")])
        ended.set()
        slow.result()
    sizes = {name.name: tensor.statistics.size for name, tensor in both.tensors().items()}
    assert sizes == {"of 2": 2, "of 3": 3}


def test_a_run_that_was_continued_without_its_optimizer_is_numbered_by_hand(tmp_path, caplog):
    Run().train(tmp_path, steps=3)
    again = Run()
    again.train(tmp_path / "other", steps=0)
    recorder = diagnostics.NumericsRecorder(again.net, again.trainer, tmp_path, every=1)
    images = mx.nd.array(again.images[0])
    with caplog.at_level(logging.WARNING), recorder.step(images, number=3) as told:
        told.loss = backward_from(lambda: again.net(images).sum(), again.trainer)
        again.trainer.step(1)
    assert "replacing the recorded steps 3 to 3, which are at or after this run's" in caplog.text
    assert diagnostics.read_numerics(tmp_path).numbers == [1, 2, 3]


def test_the_learning_rate_is_that_of_the_update(tmp_path):
    class Tenths(mx.lr_scheduler.LRScheduler):
        def __call__(self, update):
            return update / 10

    run = Run()
    run.options["lr_scheduler"] = Tenths()
    recording = diagnostics.read_numerics(run.train(tmp_path, steps=3))
    assert [line["learning_rate"] for line in recording.lines] == [0.1, 0.2, 0.3]


def test_running_statistics_are_recorded_as_the_step_leaves_them(tmp_path):
    first, second = diagnostics.read_numerics(Run().train(tmp_path, steps=2))
    names = [one.id.name for one in first.of("running statistic")]
    assert names == ["1.running_mean", "1.running_var"]
    for one in first.of("running statistic"):
        name = one.id._replace(kind="weight")
        assert one.checksum == second.tensors[name].checksum != first.tensors[name].checksum


def test_a_block_that_is_called_twice_and_a_graph_that_changes(tmp_path):
    class Twice(gluon.Block):
        def __init__(self):
            super().__init__()
            self.layer, self.times = nn.Dense(3, in_units=3), 2

        def forward(self, x):
            for _ in range(self.times):
                x = self.layer(x)
            return x

    net = initialized(Twice())
    trainer = with_loss_scale(gluon.Trainer(net.collect_params(), "sgd"), "none")
    recorder = diagnostics.NumericsRecorder(net, trainer, tmp_path, every=1)
    for times in (2, 1):
        net.times = times
        with recorder.step(), autograd.record():
            net(mx.nd.ones((1, 3))).sum().backward()
            autograd.set_recording(False)
            trainer.step(1)
    recording = diagnostics.read_numerics(tmp_path)
    names = [[str(t.id) for t in recording.step(n).of("activation")] for n in (1, 2)]
    assert names == [
        ["activation of layer", "activation of layer, call 2"],
        ["activation of layer"],
    ]


@pytest.mark.slow
def test_without_native_operators_the_numbers_are_the_same(tmp_path):
    code = """
        import sys
        from pathlib import Path
        from numerics_runs import Run
        Run(cast=None).train(Path(sys.argv[1]), steps=2)
    """
    for native in ("", "0"):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / f"native{native}")],
            env={**os.environ, "MPGLUON_NATIVE": native},
            cwd=TESTS,
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    found = diagnostics.compare_numerics(tmp_path / "native", tmp_path / "native0")
    assert found.step is None
    assert found.compared == 2


def test_a_full_disk_is_one_warning(tmp_path, caplog, monkeypatch):
    run = Run()
    place = "mpgluon_tools.recorder.numerics.recorder.write_numerics"
    run.before_step = lambda _, step: step == 3 and monkeypatch.setattr(place, disk_full)
    with caplog.at_level(logging.WARNING):
        run.train(tmp_path)
    warnings = [record.getMessage() for record in caplog.records if "numerics" in record.message]
    assert len(warnings) == 1
    assert "training goes on" in warnings[0]
    assert "full" in warnings[0]
    assert diagnostics.read_numerics(tmp_path).numbers == [1, 2]


def disk_full(*_):
    raise CheckpointError("the disk is full")


@pytest.mark.slow
def test_what_a_killed_run_has_recorded_can_be_read(tmp_path):
    code = """
        import os, signal, sys
        from pathlib import Path
        from numerics_runs import Run
        run = Run()
        run.before_step = lambda run, step: step == 4 and os.kill(os.getpid(), signal.SIGKILL)
        run.train(Path(sys.argv[1]))
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "numerics")]
    assert subprocess.run(command, cwd=TESTS, check=False).returncode == -signal.SIGKILL
    lines = tmp_path / "numerics" / "steps.jsonl"
    lines.write_text(lines.read_text() + '{"step": 4, "lo')
    recording = diagnostics.read_numerics(tmp_path / "numerics")
    assert recording.numbers == [1, 2, 3]
    assert len(recording.lines) == 3
    assert recording.step(3).tensors


def test_files_are_read_with_numpy_alone(tmp_path):
    run = Run()
    run.train(tmp_path, steps=1)
    done = run_python(
        f"""
import json, sys
sys.modules["mxnet"] = None
import numpy as np

with np.load({str(tmp_path / "step-00000001.npz")!r}) as file:
    header = json.loads(file["header"].tobytes())
    for row, (kind, name, *_) in enumerate(header["tensors"]):
        if (kind, name) == ("input", "0"):
            zeros, not_finite, largest, squares, size = file["numbers"][row]
            print(header["step"], size, largest, file["counts"][row].sum() + zeros + not_finite)
"""
    )
    images = run.images[0]
    assert done.stdout.split() == [
        *("1", f"{float(images.size)}", f"{float(np.abs(images).max())}", f"{float(images.size)}")
    ]


def test_a_file_of_a_newer_version_is_refused(tmp_path):
    Run().train(tmp_path, steps=1)
    path = tmp_path / "step-00000001.npz"
    with np.load(path) as file:
        arrays = dict(file)
    header = json.loads(arrays["header"].tobytes())
    header["version"] = 2
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez(path, **arrays)
    with pytest.raises(
        CheckpointError, match="reads version 1 of a 'mpgluon recording of numerics"
    ):
        diagnostics.read_numerics(tmp_path).step(1)


def test_a_damaged_file_and_a_folder_without_a_recording_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="has no recorded step"):
        diagnostics.read_numerics(tmp_path / "nothing")
    Run().train(tmp_path, steps=1)
    path = tmp_path / "step-00000001.npz"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match="damaged"):
        diagnostics.read_numerics(tmp_path).step(1)
    with pytest.raises(CheckpointError, match="step 2 was not recorded"):
        diagnostics.read_numerics(tmp_path).step(2)


def test_a_step_that_raises_or_does_not_end_leaves_nothing_behind(tmp_path):
    run = Run()
    run.train(tmp_path, steps=1)
    with pytest.raises(ZeroDivisionError), run.recorder.step():
        raise ZeroDivisionError
    with run.recorder.step():
        pass  # such as a test
    run.one_step(2)
    assert diagnostics.read_numerics(tmp_path).numbers == [1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every and activations_every must be at least 1"),
        ({"activations_every": 0}, "every and activations_every must be at least 1"),
        ({"keep": 1}, "keep at least 2"),
        ({"arrays": (3, 2)}, "the first and the last of some steps"),
    ],
)
def test_bad_options(tmp_path, options, message):
    run = Run()
    run.train(tmp_path, steps=1)
    with pytest.raises(ValueError, match=message):
        diagnostics.NumericsRecorder(run.net, run.trainer, tmp_path, **options)


def test_a_trainer_without_a_loss_scale_is_refused(tmp_path):
    net = initialized(nn.Dense(1, in_units=1))
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    with pytest.raises(TrainerStateError, match="init_trainer"):
        diagnostics.NumericsRecorder(net, trainer, tmp_path)


def test_a_network_of_the_numpy_interface_is_recorded(tmp_path):
    with mx.util.np_shape(True), mx.util.np_array(True):
        net = in_sequence(nn.Dense(4, in_units=3, activation="relu"), nn.Dense(2, in_units=4))
        net.initialize()
        trainer = with_loss_scale(gluon.Trainer(net.collect_params(), "sgd"), "none")
        recorder = diagnostics.NumericsRecorder(net, trainer, tmp_path)
        images = mx.np.ones((BATCH, 3))
        with recorder.step(images) as told:
            told.loss = backward_from(lambda: net(images).sum(), trainer)
            trainer.step(BATCH)
    step = diagnostics.read_numerics(tmp_path).step(1)
    assert [t.id.name for t in step.of("activation")] == ["0.act", "1"]
    assert [t.id.name for t in step.of("activation gradient")] == ["1", "0.act"]
