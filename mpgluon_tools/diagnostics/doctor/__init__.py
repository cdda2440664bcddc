"""Whether a machine, and a network with its Trainer, are fit for mixed precision.

Facts are gathered first (``machine``, ``network``), then judged by functions of the facts alone
(``installation`` and ``hardware``; ``training``). Nothing is changed. The checks of the machine
import no MXNet, so they work where MXNet does not.
"""

from __future__ import annotations

from typing import Any

from mpgluon.base.findings import LEVELS, DoctorReport, Finding
from mpgluon_tools.diagnostics.doctor.hardware import hardware
from mpgluon_tools.diagnostics.doctor.installation import installation
from mpgluon_tools.diagnostics.doctor.machine import MachineFacts, gather

__all__ = [
    "LEVELS",
    "DoctorReport",
    "Finding",
    "check_machine",
    "check_network",
    "check_training",
    "judge_machine",
]


def check_machine() -> DoctorReport:
    """Check the machine: MXNet's build and its libraries, GPU, processor, settings.

    Imports MXNet in another process, which adds two numbers on the GPU if there is one. Takes
    seconds, changes nothing, and works where MXNet cannot be imported.
    """
    return judge_machine(gather())


def judge_machine(facts: MachineFacts) -> DoctorReport:
    """Judge a machine by facts about it."""
    return DoctorReport((*installation(facts), *hardware(facts)))


def check_network(net: Any, input_shape: Any, *, ctx: Any = None) -> DoctorReport:
    """Find numbers that a network's format does not have, and faults of MXNet's that it meets.

    Reads the graph that the network would compute; runs nothing, and changes nothing.

    Parameters
    ----------
    net : gluon.HybridBlock
        Cast, autocast or plain; hybridized as in training, since some faults of MXNet's depend on
        it. A plain network has nothing in float16.
    input_shape : tuple of int, or sequence of such tuples
        Shape of its input, batch included; or of each of its inputs, in order.
    ctx : Context, optional
        Whose arithmetic it would use; by default the current one.

    Returns
    -------
    DoctorReport
        A warning for each operator that turns a finite number into an infinite one, with its block,
        and an error for each fault of MXNet's own operators that the network meets: wrong gradients
        of PReLU in a hybridized FP32 network, for example.

    Raises
    ------
    TypeError, ValueError
        As :func:`mpgluon.graph.description.trace`.
    """
    from mpgluon.graph.description import trace
    from mpgluon_tools.diagnostics.doctor.known_faults import known_faults
    from mpgluon_tools.diagnostics.doctor.scalars import scalars

    graph = trace(net, input_shape, ctx=ctx)
    return DoctorReport((*scalars(graph), *known_faults(net, graph)))


def check_training(net: Any = None, trainer: Any = None, labels: Any = None) -> DoctorReport:
    """Check a network, its Trainer and its labels, just before training begins.

    Reads formats, devices, settings and the names of operators in forward methods; runs nothing,
    and changes nothing. Waits for the labels.

    Parameters
    ----------
    net : gluon.Block, optional
        With or without initialized parameters, cast or not.
    trainer : gluon.Trainer, optional
        Without ``net``, its parameters are checked.
    labels : NDArray, NumPy array, or a sequence of them, optional
        One batch.

    Raises
    ------
    TypeError
        If an argument is of another kind.
    ValueError
        If all are missing.
    """
    # They import MXNet, which check_machine must do without.
    from mpgluon_tools.diagnostics.doctor.training import training

    return DoctorReport(tuple(training(net, trainer, labels)))
