"""A network as a PyTorch program with its parameters, and a check against MXNet's numbers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Optional, Union

from mpgluon.base.files import atomic_write, disk_error
from mpgluon.errors import PrecisionError
from mpgluon_tools.deployment.layers import run_recorded
from mpgluon_tools.deployment.recording import Recording, record
from mpgluon_tools.deployment.torch_training import training_files
from mpgluon_tools.leaving.mxnet_files import read_symbol
from mpgluon_tools.leaving.safetensors_file import safetensors
from mpgluon_tools.leaving.torch_writer import MOVES, UnsupportedError, torch_program

import mxnet as mx
import numpy as np
from mxnet import gluon

__all__ = ["export_torch"]

Shapes = dict[tuple[int, int], tuple[int, ...]]

_INDICES = {"SequenceMask": 1, "gather_nd": 1, "take": 1, "_contrib_ROIAlign": 1}
"""The operands that are indices or lengths, of operators that do not clip them."""
_SORTS = {"_contrib_box_nms", "argsort", "sort", "topk"}
_BATCHES = 2, 3  # of the recorded numbers, and one more to see which sizes follow the batch
_CHECK = '''"""Compare the network with MXNet's numbers; the exit status is 1 if they differ."""
import sys
from pathlib import Path

import numpy as np
import torch
from model import load

LARGEST = 1e-5  # relative to the largest number of a result: FP32 sums in another order

folder = Path(__file__).resolve().parent
recorded = np.load(folder / "check.npz")
inputs = [torch.from_numpy(recorded[name]) for name in recorded.files if name.startswith("input")]
with torch.no_grad():
    results = load(folder / "model.safetensors")(*inputs)
results = results if isinstance(results, tuple) else (results,)
results = [result.double().numpy() for result in results]
wanted = [recorded[f"result{number}"].astype(float) for number in range(len(results))]
for number, (result, expected) in enumerate(zip(results, wanted)):
    if result.shape != expected.shape:
        sys.exit(f"result {number} has the shape {result.shape}, and MXNet's {expected.shape}")
errors = []
for number, (result, expected) in enumerate(zip(results, wanted)):
    errors.append(np.abs(result - expected).max() / (np.abs(expected).max() or 1))
    print(f"result {number}, shape {result.shape}: largest relative error {errors[-1]:.2g}")
sys.exit(not all(error <= LARGEST for error in errors))
'''
_PAIRS = """# The rows are sorted by scores, and rounding decides which of two nearly equal
# scores comes first: each row is compared with the nearest of the next that are free.
rows, wanted_rows = (
    np.concatenate([one.reshape(*one.shape[:2], -1) / (np.abs(expected).max() or 1)
                    for one, expected in zip(many, wanted)], axis=2)
    for many in (results, wanted)
)  # fmt: skip
for image, expected_rows in enumerate(wanted_rows):
    free, places = list(range(len(expected_rows))), []
    for row in expected_rows:
        places.append(free.pop(np.abs(rows[image, free[:4]] - row).max(axis=1).argmin()))
    for result in results:
        result[image] = result[image, places]
"""


def export_torch(
    net: gluon.HybridBlock,
    folder: Union[str, Path],
    input_shapes: Sequence[tuple[int, ...]],
    *,
    trainer: Optional[gluon.Trainer] = None,
    title: str = "A network that was trained in MXNet Gluon.",
) -> Path:
    """Write a network as a PyTorch program that needs neither MXNet nor this package.

    ``model.py`` has the class ``Network`` (layers with Gluon's names, shapes as comments) and
    ``load``; ``model.safetensors`` the parameters in FP32, of a cast network the values behind its
    16-bit ones; ``check.py`` compares the network with MXNet's numbers on random inputs, in
    ``check.npz``. The program can be trained: Dropout is there, and BatchNorm has its momentum
    (PyTorch updates the running variance by n / (n - 1) times as much, for n numbers). Waits for
    the devices.

    Parameters
    ----------
    net : gluon.HybridBlock
        Plain, cast or autocast, with values. It is not changed.
    folder : str or Path
        Is made.
    input_shapes : sequence of tuple of int
        A shape for each input. If the first sizes are the same, they are the batch, of any size.
    trainer : gluon.Trainer, optional
        Its optimizer's state and loss scale are written too: ``training.py`` has a function that
        returns PyTorch's optimizer and ``GradScaler``. SGD, NAG and Adam are translated.
    title : str
        The docstring of ``model.py``.

    Returns
    -------
    Path
        ``folder``.

    Raises
    ------
    ValueError
        If a parameter has no values, or the network does not work on input of those shapes.
    PrecisionError
        If an operator, or the optimizer, has no equal in PyTorch; the message names each.
    TrainerStateError
        If the kvstore holds the optimizer's state.
    DataError
        If a file cannot be written. Each file is complete or as it was before.
    """
    names = ["data"] if len(input_shapes) == 1 else [f"data{i}" for i in range(len(input_shapes))]
    recording = record(net, names, for_training=True)
    unused = [str(names.index(name)) for name in recording.unused_inputs()]
    if unused:
        raise ValueError(f"the network does not use its input {', '.join(unused)}; leave it out")
    graph = read_symbol(recording.graph.symbol().tojson(remove_amp_cast=False).encode())
    nodes = [node.name for node in graph.nodes]
    shapes, known, others = _with_two_batches(recording, input_shapes, nodes)
    sizes = {entry: _in_words(shape, others[entry]) for entry, shape in known.items()}
    frozen = {name for name, one in net.collect_params().items() if one.grad_req == "null"}
    try:
        program = torch_program(
            graph, recording.values, names, title=title, frozen=frozen, shapes=known,
            sizes=sizes,
        )  # fmt: skip
    except UnsupportedError as error:
        raise PrecisionError(
            f"{error}; write these blocks with other operators, or export the part of the network "
            "before them"
        ) from error
    files = {
        "model.py": program.text.encode(),
        "model.safetensors": safetensors(program.state),
        "check.npz": _numbers(recording, shapes),
        "check.py": _check(recording).encode(),
    }
    if trainer is not None:
        files |= training_files(net, trainer, program)
    folder = Path(folder)
    for name, content in files.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(folder / name) as file:
                file.write(content)
        except OSError as error:
            raise disk_error(error, folder / name, "export again") from error
    return folder


def _with_two_batches(
    recording: Recording, input_shapes: Sequence[tuple[int, ...]], names: Sequence[str]
) -> tuple[Sequence[tuple[int, ...]], Shapes, Shapes]:
    """Return the inputs' shapes, and all results' with these and with a larger batch.

    They are the given ones, twice, if the first sizes are not a batch of any size.
    """
    if len({shape[0] for shape in input_shapes}) == 1:
        smaller, larger = ([(batch, *one[1:]) for one in input_shapes] for batch in _BATCHES)
        try:
            known = _shapes(recording, smaller, names)
            return smaller, known, _shapes(recording, larger, names)
        except ValueError:  # the first axis is another one, or the network fixes the batch
            pass
    known = _shapes(recording, input_shapes, names)
    return input_shapes, known, known


def _shapes(
    recording: Recording, shapes: Sequence[tuple[int, ...]], names: Sequence[str]
) -> Shapes:
    """Infer the shape of each result, by place of its node in a list of names."""
    recording.infer(shapes)
    outputs = {node.name: node.outputs for node in recording.graph.nodes}
    return {
        (place, number): output.shape
        for place, name in enumerate(names)
        for number, output in enumerate(outputs[name])
    }


def _in_words(shape: tuple[int, ...], larger: tuple[int, ...]) -> tuple[str, ...]:
    """Return a shape with the sizes that follow the batch in terms of it."""
    sizes = []
    for size, other in zip(shape, larger):
        times = size // _BATCHES[0]
        follows = (size, other) == tuple(times * batch for batch in _BATCHES)
        words = "N" if times == 1 else f"{times}N"
        sizes.append(str(size) if size == other else words if follows else "...")
    return tuple(sizes)


def _indices(recording: Recording) -> set[str]:
    """Return the names of inputs that are indices or lengths: MXNet does not check their range."""
    found = set()
    nodes = [entry.node for node in recording.graph.nodes if node.operator in _INDICES
             for entry in node.inputs[_INDICES[node.operator] :][:1]]  # fmt: skip
    while nodes:
        node = nodes.pop()
        if node.is_variable:
            found.add(node.name)
        elif node.operator == "Cast" or MOVES.fullmatch(node.operator):
            nodes += [entry.node for entry in node.inputs]
    return found


def _check(recording: Recording) -> str:
    """Return the program that compares; of a detector, whose results are sorted, by rows."""
    shapes = [entry.value.shape for entry in recording.graph.heads]
    are_rows = len({shape[:2] for shape in shapes}) == 1 and all(len(one) > 2 for one in shapes)
    if are_rows and any(node.operator in _SORTS for node in recording.graph.nodes):
        return _CHECK.replace("errors = []\n", _PAIRS + "errors = []\n")
    return _CHECK


def _numbers(recording: Recording, shapes: Sequence[tuple[int, ...]]) -> bytes:
    """Return a file of NumPy with random inputs and MXNet's results in FP32.

    The inputs are positive if the network has results that are not finite otherwise, and 0 or 1 if
    they are indices or lengths.
    """
    random, indices = np.random.default_rng(0), _indices(recording)
    inputs = [random.standard_normal(shape, np.float32) for shape in shapes]
    inputs = [(one > 0).astype(np.float32) if name in indices else one
              for name, one in zip(recording.inputs, inputs)]  # fmt: skip
    results = run_recorded(recording, [mx.nd.array(one) for one in inputs])
    if not all(np.isfinite(one).all() for one in results):
        inputs = [np.abs(one) for one in inputs]
        results = run_recorded(recording, [mx.nd.array(one) for one in inputs])
    numbers = {f"input{number}": one for number, one in enumerate(inputs)}
    numbers |= {f"result{number}": one for number, one in enumerate(results)}
    file = io.BytesIO()
    np.savez(file, **numbers)
    return file.getvalue()
