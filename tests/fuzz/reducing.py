"""Making a program smaller while it fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from fuzz.programs import Input, Node, Program

__all__ = ["reduced"]


def reduced(program: Program, fails: Callable[[Program], bool]) -> Program:
    """Return a smaller program that still fails: each first change with which it does."""
    changed = True
    while changed:
        changed = False
        for candidate in _smaller(program):
            if _size(candidate) < _size(program) and fails(candidate):
                program, changed = candidate, True
                break
    return program


def _size(program: Program) -> tuple[int, ...]:
    extras = bool(program.frozen) + program.adds + bool(program.wrapper)
    extras += program.is_plain + (program.interface != "nd")
    extras += (program.optimizer != "sgd") + (program.packing != "tuple")
    extras += sum(loss != "out * head" for loss in program.losses)
    length = sum(len(v.expression) for v in program.values.values() if isinstance(v, Node))
    return len(program.nodes), len(program.outputs), len(program.inputs), extras, length


def _smaller(program: Program) -> Iterator[Program]:
    yield from (one.without_dead_code() for one in _changes(program))


def _changes(program: Program) -> Iterator[Program]:
    for number in program.nodes:  # the first value at which it fails
        if (number,) != program.outputs:
            yield replace(program, outputs=(number,), losses=("out * head",))
    if len(program.outputs) > 1:
        for k in range(len(program.outputs)):
            outputs = program.outputs[:k] + program.outputs[k + 1 :]
            losses = program.losses[:k] + program.losses[k + 1 :]
            yield replace(program, outputs=outputs, losses=losses)
    for number in reversed(program.nodes):
        node = program.values[number]
        yield _with_value(program, number, Input(node.shape))
        for taken in node.takes:
            if program.values[taken].shape == node.shape:
                yield _replaced(program, number, taken)
        for short in ("F.relu({0})", "{0}", "{0} + {1}"):
            same = all(program.values[taken].shape == node.shape for taken in node.takes)
            if same and len(short) < len(node.expression) and short.count("{") == len(node.takes):
                yield _with_value(program, number, replace(node, expression=short))
        parts = node.expression.removeprefix("(").removesuffix(")").split(") + (")
        if len(parts) > 2:
            for k in range(len(parts)):
                shorter = f"({') + ('.join(parts[:k] + parts[k + 1 :])})"
                yield _with_value(program, number, replace(node, expression=shorter))
    yield replace(program, frozen=())
    yield replace(program, adds=False)
    yield replace(program, wrapper="")
    yield replace(program, is_plain=False)
    yield replace(program, interface="nd")
    yield replace(program, optimizer="sgd")
    yield replace(program, packing="tuple")
    yield replace(program, losses=tuple("out * head" for _ in program.losses))


def _with_value(program: Program, number: int, value: Input | Node) -> Program:
    values = {**program.values, number: value}
    ordered = {n: v for n, v in values.items() if isinstance(v, Input)}
    return replace(program, values={**ordered, **values}, outputs=program.outputs)


def _replaced(program: Program, number: int, other: int) -> Program:
    """Return the program with ``other`` in place of a value."""
    values = {
        n: replace(v, takes=tuple(other if t == number else t for t in v.takes))
        if isinstance(v, Node)
        else v
        for n, v in program.values.items()
        if n != number
    }
    outputs = tuple(other if n == number else n for n in program.outputs)
    kept = [k for k, n in enumerate(outputs) if n not in outputs[:k]]
    return replace(
        program,
        values=values,
        outputs=tuple(outputs[k] for k in kept),
        losses=tuple(program.losses[k] for k in kept),
    )
