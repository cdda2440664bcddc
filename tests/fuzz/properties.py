"""Running a program in one format, in one process: the bits that others are compared with.

A run trains the network for some steps and returns NumPy arrays by name. NaNs are made equal: how a
processor makes one decides its payload.
"""

from __future__ import annotations

import copy
import re
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import mpgluon
from mpgluon import Policy, amp, diagnostics

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

from fuzz.checking import COUNTERPART, differences

__all__ = ["MODES", "WAYS", "differences", "executed", "run", "trial"]

WAYS = {
    "cast float16": lambda net: mpgluon.cast_block(net, "float16"),
    "autocast float16": lambda net: amp.autocast(net, "float16"),
    "autocast bfloat16": lambda net: amp.autocast(net, "bfloat16"),
    "bfloat16 weights": lambda net: mpgluon.cast_block(net, "bfloat16"),
    "emulated bfloat16": lambda net: amp.autocast(net, Policy.parse("emulated_bfloat16")),
    "emulated bfloat16 weights": lambda net: mpgluon.cast_block(
        net, Policy.parse("params=bfloat16,compute=bfloat16,emulate=true")
    ),
    "float32": lambda _: None,
}
MODES = {
    "imperative": None,
    "hybridized": {},
    "static": {"static_alloc": True, "static_shape": True},
}
# Computed by plain FP32 in place of what fails in MXNet's graphs, and not in a cast network's.
_IN_PLAIN_FP32 = {
    r"nn\.PReLU\(": "PReLU(",  # the gradient of its slope is wrong
    r"F\.np\.hstack\((\[.*?\])\)": r"F.np.concatenate(\1, axis=1)",  # shapes become unknown
    r"F\.np\.dstack\((\[.*?\])\)": r"F.np.concatenate(\1, axis=2)",
}


class PReLU(nn.PReLU):
    """The same function, of operators whose gradients are right."""

    def hybrid_forward(self, F, x, alpha):
        x, alpha = x.as_nd_ndarray(), alpha.as_nd_ndarray()
        flat = F.reshape(x, shape=(0, 0, -1))
        negative = F.broadcast_mul(F.reshape(alpha, shape=(1, -1, 1)), F.relu(-flat))
        result = F.reshape_like(F.relu(flat) - negative, x)
        return result.as_np_ndarray() if mx.util.is_np_array() else result


STEPS = 3
LOSS_SCALE = 64.0
Results = dict[str, np.ndarray]


_numbers = count()


@contextmanager
def executed(source: str) -> Iterator[types.ModuleType]:
    """Execute a program's source in a module of its own, so that its classes can be pickled.

    Its interface of MXNet is switched on while the context is open.
    """
    before = {"shape": mx.util.is_np_shape(), "array": mx.util.is_np_array()}
    module = types.ModuleType(f"fuzz_program_{next(_numbers)}")
    module.PReLU = PReLU
    sys.modules[module.__name__] = module
    try:
        mx.npx.reset_np()
        exec(compile(source, module.__name__, "exec"), module.__dict__)
        yield module
    finally:
        mx.npx.set_np(**before)
        del sys.modules[module.__name__]


def outputs_of(result) -> list:
    if isinstance(result, (list, tuple)):
        return [array for item in result for array in outputs_of(item)]
    return [result]


def run(program, way: str, mode: str) -> Results:
    """Train a program's network, and return all that a user could see."""
    net = _network(program, way, mode)
    training = _Training(program, net, way, mode)
    results = training.step(0)
    for step in range(1, STEPS):
        training.step(step)
    results.update(training.state())
    with autograd.predict_mode():
        predicted = outputs_of(net(*program.inputs(STEPS)))
    results.update({f"prediction {k}": _bits(one) for k, one in enumerate(predicted)})
    return results


def _network(program, way: str, mode: str) -> gluon.Block:
    net = program.network()
    WAYS[way](net)
    if MODES[mode] is not None:
        net.hybridize(**MODES[mode])
    return net


class _Training:
    """A network, its Trainer and its steps."""

    def __init__(self, program, net: gluon.Block, way: str, mode: str) -> None:
        self.program, self.net, self.way = program, net, way
        self.is_static = mode == "static"
        parameters = net.collect_params()
        self.adds = any(parameter.grad_req == "add" for parameter in parameters.values())
        options = {"learning_rate": 0.01, "multi_precision": True}
        if program.OPTIMIZER == "sgd":
            options["momentum"] = 0.9
        self.trainer = gluon.Trainer(parameters, program.OPTIMIZER, options)
        if way != "float32":
            amp.init_trainer(self.trainer, LOSS_SCALE if "float16" in way.split() else "none")

    def backward(self, batch) -> tuple[list, mx.nd.NDArray]:
        with autograd.record():
            outputs = outputs_of(self.net(*batch))
            loss = self.program.loss_of(outputs)
            if self.way == "float32":
                loss.backward()
            else:
                with amp.scale_loss(loss, self.trainer) as scaled:
                    scaled.backward()
        return outputs, loss

    def step(self, step: int) -> Results:
        """Make a step, and return its results."""
        found: Results = {}
        for part in range(1 + self.adds):
            batch = self.program.inputs(10 * step + part)
            floating = [one for one in batch if one.dtype == np.float32]
            for one in floating:
                one.attach_grad()
            outputs, _ = self.backward(batch)
            found.update({f"output {part}.{k}": _bits(one) for k, one in enumerate(outputs)})
            if not self.is_static:  # MXNet adds gradients of inputs wrongly there, in FP32 too
                names = {f"gradient of input {part}.{k}": x for k, x in enumerate(floating)}
                found.update({name: _bits(x.grad) for name, x in names.items()})
        found.update(_gradients(self.net))
        self.trainer.step(4)
        if self.adds:
            self.net.collect_params().zero_grad()
        return found

    def state(self) -> Results:
        mx.nd.waitall()
        return {
            f"value of {name}": _bits(parameter.data())
            for name, parameter in self.net._collect_params_with_prefix().items()
        }


def _gradients(net: gluon.Block) -> Results:
    return {
        f"gradient of {name}": _bits(parameter.grad())
        for name, parameter in net._collect_params_with_prefix().items()
        if parameter.grad_req != "null"
    }


def _bits(array: mx.nd.NDArray) -> np.ndarray:
    values = array.asnumpy()
    if values.dtype.kind == "f" and np.isnan(values).any():
        values = np.where(np.isnan(values), values.dtype.type(np.nan), values)
    return values


# ---- Properties of one process. Each returns what is wrong, or an empty text.


def resumes(program, way: str, mode: str) -> str:
    """Save after a step, and load into a new network: the steps that follow have the same bits."""
    first = _Training(program, _network(program, way, mode), way, mode)
    first.step(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.npz"
        mpgluon.save_checkpoint(path, first.net, first.trainer)
        second = _Training(program, _network(program, way, mode), way, mode)
        mpgluon.load_checkpoint(path, second.net, second.trainer)
    one, other = ({**t.step(1), **t.step(2), **t.state()} for t in (first, second))
    return _sentence(differences(one, other), "after a checkpoint was loaded")


def restores(program, way: str, mode: str) -> str:
    """Cast and restore: the FP32 network of before."""
    untouched, net = _network(program, "float32", mode), _network(program, way, mode)
    for one in (untouched, net):  # MXNet writes gamma in a forward pass if it is not learned
        one(*program.inputs(0))
    mpgluon.restore(net)
    found = []
    for one in (untouched, net):
        training = _Training(program, one, "float32", mode)
        found.append({**training.state(), **training.step(0)})
    return _sentence(differences(*found), "after a cast and restore")


def copies(program, way: str, mode: str) -> str:
    """Copy a cast network after a step: the copy computes and trains to the same bits."""
    net = _network(program, way, mode)
    _Training(program, net, way, mode).step(0)
    copied = copy.deepcopy(net)
    found = []
    for one in (net, copied):
        training = _Training(program, one, way, mode)
        one.collect_params().zero_grad()
        found.append({**training.step(1), **training.state()})
    return _sentence(differences(*found), "in a deep copy")


def replays(program, way: str, mode: str) -> str:
    """Record a step, and run it again in a new network: its gradients have the same bits."""
    _refuse_what_mxnet_cannot_train(program, mode)
    training = _Training(program, _network(program, way, mode), way, mode)
    training.step(0)
    with tempfile.TemporaryDirectory() as folder:
        recorder = diagnostics.FlightRecorder(training.net, training.trainer, folder)
        for part in range(1 + training.adds):
            batch = program.inputs(10 + part)
            with recorder.step(tuple(batch), ()):
                training.backward(batch)
        recorder.check_loss(_array([np.nan]))  # pretend, so that the step is recorded
        (path,) = Path(folder).glob("*.npz")
        found = diagnostics.replay(
            path,
            program.network(),
            loss_fn=lambda result, _: program.loss_of(outputs_of(result)),
            cures=False,
        )
    return _sentence([f"gradient of {name}" for name in found.different], "in a replay")


class MXNetsOwnError(Exception):
    """Plain FP32 MXNet cannot run the program."""


def _refuse_what_mxnet_cannot_train(program, mode: str) -> None:
    """Raise MXNetsOwnError if plain FP32 fails without gradients of inputs, as in a recording."""
    training = _Training(program, _network(program, "float32", mode), "float32", mode)
    try:
        training.backward(program.inputs(10))
        mx.nd.waitall()
    except mx.MXNetError as error:
        raise MXNetsOwnError(str(error).splitlines()[-1]) from error


def is_near_fp32(program, way: str, mode: str, noisy) -> str:
    """The first outputs differ from FP32's by as much as roundings of each value make them differ.

    ``noisy`` is the same program with a function ``perturbed`` around each value. Eight runs with
    random errors of one rounding each give the distance that is allowed, times ten: layers round
    several times inside, and eight runs are few.
    """
    unit = 2.0**-11 if "float16" in way.split() else 2.0**-8
    rng = np.random.default_rng(program.SEED)
    largest = [0.0]

    def perturbed(array):
        largest[0] = max(largest[0], float(np.abs(array.asnumpy()).max()))
        return _perturbed(array, unit, rng)

    noisy.perturbed = perturbed
    batch = program.inputs(0)

    def forward(net, inputs):
        with autograd.train_mode():
            return [one.asnumpy().astype(np.float64) for one in outputs_of(net(*inputs))]

    exact = forward(program.network(), batch)
    allowed = [0.0] * len(exact)
    for _ in range(8):
        net = noisy.network()
        for parameter in net.collect_params().values():
            if not isinstance(parameter, gluon.Constant):  # a cast does not change its values
                parameter.set_data(_perturbed(parameter.data(), unit, rng))
        found = forward(net, [_perturbed(one, unit, rng) for one in batch])
        for k, (one, other) in enumerate(zip(found, exact)):
            allowed[k] = max(allowed[k], float(np.abs(one - other).max()))
    if largest[0] > 2.0**14:  # float16 may overflow there
        return ""
    for k, (one, other) in enumerate(zip(forward(_network(program, way, mode), batch), exact)):
        distance = float(np.abs(one - other).max())
        if not distance <= 10 * allowed[k] + unit:
            return (
                f"output {k} is {distance:.3g} away from FP32's; errors of one rounding of each "
                f"value make {allowed[k]:.3g}"
            )
    return ""


def _perturbed(array, unit: float, rng):
    noise = rng.choice([-1.0, 1.0], array.shape)
    values = array.asnumpy()
    if np.array_equal(values, np.floor(values)):  # counts, positions, classes
        return array
    return _array(values + noise * (unit * np.abs(values) + 2.0**-25), array.dtype)


def _array(values, dtype="float32") -> mx.nd.NDArray:
    """Return values as an array of the interface that is switched on."""
    return (mx.np if mx.util.is_np_array() else mx.nd).array(values, dtype=dtype)


def _sentence(names: list[str], when: str) -> str:
    return f"other bits {when}: {', '.join(names[:4])}" if names else ""


PROPERTIES = {"resumes": resumes, "restores": restores, "replays": replays, "copies": copies}


def trial(sources: dict[str, str], way: str, modes, properties) -> dict:
    """Run a program, and return the arrays of each mode and what each property says.

    An error's result is its message, and fails like a difference. The sources are the program's
    (``""``), the same with noise, and its counterpart's, which has modes of its own.
    """
    if way == "float32":
        sources = {kind: _for_plain_fp32(source) for kind, source in sources.items()}
    found = {"modes": {}, "properties": {}, "errors": False}
    with warnings.catch_warnings(), executed(sources[""]) as program:
        warnings.simplefilter("ignore")
        for mode in modes:
            if mode == COUNTERPART:
                with executed(sources["counterpart"]) as counterpart:
                    said = _or_error(run, counterpart, way, "imperative")
            else:
                said = _or_error(run, program, way, mode)
            found["modes"][mode] = said
            found["errors"] |= "error" in said
            if found["errors"]:
                return found
        for name, mode in properties:
            if name == "is near FP32":
                with executed(sources["noisy"]) as noisy:
                    said = _or_error(is_near_fp32, program, way, mode, noisy)
            elif name == "restores":  # to plain FP32
                with executed(_for_plain_fp32(sources[""])) as plain:
                    said = _or_error(restores, plain, way, mode)
            else:
                said = _or_error(PROPERTIES[name], program, way, mode)
            found["errors"] |= isinstance(said, dict)
            found["properties"][name] = said["error"] if isinstance(said, dict) else said
    return found


def _for_plain_fp32(source: str) -> str:
    for pattern, replacement in _IN_PLAIN_FP32.items():
        source = re.sub(pattern, replacement, source)
    return source


def _or_error(function, *args):
    try:
        return function(*args)
    except Exception as error:  # noqa: BLE001 - any error of a network is a finding
        lines = str(error).strip().splitlines() or [""]
        return {"error": f"{type(error).__name__}: {lines[-1][:300]}"}
