"""The live overflow hunt: its arithmetic, the truth of its faults, and its controls."""

from __future__ import annotations

import re
from functools import partial

import mpgluon  # noqa: F401 - before MXNet

import live_page
import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd

pytest.importorskip("sphinx", reason="`make docs` installs Sphinx, and runs this")
pytest.importorskip("ziglang", reason="ziglang is in the environment of `make docs`")

NAMES = ("input", "filters", "energy", "gate", "hidden", "norm", "exponential", "output")
PARAMETERS = ("filters", "hidden", "output")
CAUSES = ("input", "energy", "hidden", "norm", "loss scale", "output", "filters")
PASSES = ("forward", "backward")
FAULTS = range(3 * len(CAUSES))

DUMP = """
function dump(run) {
  for (const part of [run.values, run.labels, ...Object.values(run.weights)]) results.push(...part);
  results.push(run.loss, run.finite ? 1 : 0, Math.log2(run.lossScale));
  for (const gradient of Object.values(run.gradients)) results.push(...gradient);
  for (const pass of [run.forward, run.backward])
    for (const {name} of faultyNetwork.LAYERS)
      results.push(pass[name].overflow, pass[name].invalid);
}
"""
SHAPES = {
    "sounds": (16, 32),
    "labels": (16,),
    **{f"{name} weights": shape for name, shape in zip(PARAMETERS, ((32, 32), (16, 32), (32, 4)))},
    "loss": (),
    "finite": (),
    "exponent of the scale": (),
    **{f"{name} gradient": s for name, s in zip(PARAMETERS[::-1], ((32, 4), (16, 32), (32, 32)))},
    "flags": (2, 8, 2),  # forward and backward, layers, overflow and invalid
}
SIZE = sum(int(np.prod(shape)) for shape in SHAPES.values())


@pytest.fixture
def runs(folder, computed):
    """Return a function that runs steps, for each an expression in JavaScript, in Node."""

    def run(*expressions):
        page = 'const document = {readyState: "loading", addEventListener() {}};'
        lines = [page, (folder / "hunt.js").read_text(), "const {step, fault} = faultyNetwork;"]
        lines += [DUMP, *(f"dump({expression});" for expression in expressions)]
        found = computed([], "\n".join(lines)).reshape(len(expressions), SIZE)
        made = []
        for row in found:
            ends = np.cumsum([int(np.prod(shape)) for shape in SHAPES.values()])
            parts = np.split(row, ends[:-1])
            made.append({n: p.reshape(s) for (n, s), p in zip(SHAPES.items(), parts)})
        return made

    return run


# --- the arithmetic, in Node


def in_float32(run):
    """Return the loss and the gradients of the sound network by MXNet's autograd, in FP32."""
    weights = {name: mx.nd.array(run[f"{name} weights"]) for name in PARAMETERS}
    for weight in weights.values():
        weight.attach_grad()
    with autograd.record():
        filtered = mx.nd.dot(mx.nd.array(run["sounds"]) / 64, weights["filters"])
        squares = mx.nd.square(filtered).reshape((16, 16, 2))
        gated = mx.nd.relu(16 - mx.nd.log1p(mx.nd.mean(squares, axis=2)))
        hidden = mx.nd.dot(gated, weights["hidden"])
        normal = mx.nd.LayerNorm(hidden, mx.nd.ones(32), mx.nd.zeros(32), eps=1e-5)
        logits = mx.nd.dot(mx.nd.exp(normal), weights["output"])
        picked = mx.nd.pick(mx.nd.log_softmax(logits), mx.nd.array(run["labels"]))
        loss = -mx.nd.mean(picked)
    loss.backward(mx.nd.array([2.0 ** float(run["exponent of the scale"])]))
    return loss.asscalar(), {name: weight.grad.asnumpy() for name, weight in weights.items()}


def relative_error(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_step_in_fp32_has_the_gradients_of_autograd(seed, runs):
    (run,) = runs(f"step({{seed: {seed}, inFP16: false}})")
    loss, gradients = in_float32(run)
    np.testing.assert_allclose(run["loss"], loss, rtol=1e-5)
    for name, gradient in gradients.items():
        assert relative_error(run[f"{name} gradient"], gradient) < 1e-4, name


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_step_in_fp16_is_near_it(seed, runs):
    """Some ten roundings of at most 2^-11 each lie behind a gradient; inner products add more."""
    (run,) = runs(f"step({{seed: {seed}}})")
    loss, gradients = in_float32(run)
    assert abs(run["loss"] - loss) < 0.01 * loss
    for name, gradient in gradients.items():
        found = run[f"{name} gradient"]
        assert (found == found.astype(np.float16)).all()
        assert 0 < relative_error(found, gradient) < 0.02, name


class Emulated:
    """A step in NumPy's float16, with the flags that each layer's roundings raise."""

    def __init__(self, run, cause):
        self.flags = np.zeros((2, 8, 2), bool)
        with np.errstate(all="ignore"):
            self.compute(run, cause)

    def to16(self, direction, name, exact, *operands):
        given = np.asarray(exact, np.float32)
        rounded = given.astype(np.float16).astype(np.float32)
        flags = self.flags[PASSES.index(direction), NAMES.index(name)]
        flags[0] |= (np.isfinite(given) & ~np.isfinite(rounded)).any()
        flags[1] |= np.isnan(given).any() and not any(np.isnan(x).any() for x in operands)
        return rounded

    def compute(self, run, cause):
        to16 = self.to16
        w = {name: run[f"{name} weights"] for name in PARAMETERS}
        x = to16("forward", "input", run["sounds"] / (1 if cause == "input" else 64))
        filtered = to16("forward", "filters", x @ w["filters"], x)

        def in_energy(direction, exact, *operands):
            if cause == "energy":
                return to16(direction, "energy", exact, *operands)
            return np.asarray(exact, np.float32)

        squares = in_energy("forward", filtered * filtered, filtered)
        means = in_energy("forward", squares.reshape(16, 16, 2).mean(axis=2), squares)
        energies = to16("forward", "energy", np.log1p(means), means)
        before = to16("forward", "gate", 16 - energies, energies)
        gated = np.where(before < 0, np.float32(0), before)
        hidden = to16("forward", "hidden", gated @ w["hidden"], gated)
        normal = hidden
        deviation = np.sqrt(hidden.var(axis=1, keepdims=True) + 1e-5)
        if cause != "norm":
            normal = (hidden - hidden.mean(axis=1, keepdims=True)) / deviation
        normal = to16("forward", "norm", normal, hidden)
        powers = to16("forward", "exponential", np.exp(normal), normal)
        logits = to16("forward", "output", powers @ w["output"], powers)

        shifted = logits - logits.max(axis=1, keepdims=True)
        probability = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
        labels = np.eye(4, dtype=np.float32)[run["labels"].astype(int)]
        self.loss = -(np.log(probability) * labels).sum(axis=1).mean()
        scale = np.float32(2.0) ** run["exponent of the scale"]
        g = to16("backward", "output", scale * (probability - labels) / 16, logits)
        of_output = to16("backward", "output", powers.T @ g, powers, g)
        g = to16("backward", "output", g @ w["output"].T, g)
        g = to16("backward", "exponential", g * powers, g, powers)
        if cause != "norm":
            along = (g * normal).mean(axis=1, keepdims=True)
            into = (g - g.mean(axis=1, keepdims=True) - normal * along) / deviation
        else:
            into = g
        g = to16("backward", "norm", into, g, normal)
        of_hidden = to16("backward", "hidden", gated.T @ g, gated, g)
        g = to16("backward", "hidden", g @ w["hidden"].T, g)
        g = to16("backward", "gate", np.where(gated > 0, -g, 0 * gated), g, gated)
        g = in_energy("backward", g / (1 + means), g, means)
        g = in_energy("backward", np.repeat(g / 2, 2, axis=1), g)
        g = to16("backward", "energy", 2 * g * filtered, g, filtered)
        of_filters = to16("backward", "filters", x.T @ g, x, g)
        self.finite = all(np.isfinite(of).all() for of in (of_output, of_hidden, of_filters))


def test_flags_of_each_fault_are_those_of_numpy(runs):
    found = runs(*(f"step(fault({number}).options)" for number in FAULTS))
    for number, run in zip(FAULTS, found):
        emulated = Emulated(run, CAUSES[number % len(CAUSES)])
        np.testing.assert_array_equal(run["flags"] > 0, emulated.flags, str(number))
        assert bool(run["finite"]) == emulated.finite
        np.testing.assert_allclose(run["loss"], emulated.loss, rtol=0.01)


def first_flag(run):
    forward, backward = run["flags"].any(axis=2)
    if forward.any():
        return "forward", NAMES[np.argmax(forward)]
    return ("backward", NAMES[7 - np.argmax(backward[::-1])]) if backward.any() else None


def test_what_is_said_of_each_fault_is_true(runs):
    """The first flag is at the cause or behind it, the cure is one, and ReLU hides an overflow."""
    found = runs(*(f"step(fault({number}).options)" for number in FAULTS))
    wide = runs(*(f"step({{...fault({number}).options, inFP16: false}})" for number in FAULTS))
    for number, run, in_fp32 in zip(FAULTS, found, wide):
        cause = CAUSES[number % len(CAUSES)]
        direction, first = first_flag(run)
        assert np.isfinite(in_fp32["loss"])
        assert run["flags"][0 if direction == "forward" else 1, NAMES.index(first), 0] > 0
        if cause == "loss scale":
            assert direction == "backward"
        else:
            behind = {"input": "filters", "norm": "exponential"}
            assert (direction, first) == ("forward", behind.get(cause, cause))
        if cause == "input":
            assert 20_000 < np.abs(run["sounds"]).max() < 2**15
        if cause == "energy":
            assert run["finite"]
            assert abs(run["loss"] - in_fp32["loss"]) > 0.005 * in_fp32["loss"]
        else:
            assert not run["finite"]


def test_cures_leave_no_flag(runs):
    for run in runs(*(f"step(fault({number}).cured)" for number in FAULTS)):
        assert first_flag(run) is None
        assert run["finite"]


def test_half_of_the_loss_scale_is_still_too_large(runs):
    number = CAUSES.index("loss scale")
    options = f"fault({number}).options"
    whole, half, quarter = runs(
        *(f"step({{...{options}, lossScale: {options}.lossScale / {n}}})" for n in (1, 2, 4))
    )
    assert [first_flag(run) is not None for run in (whole, half, quarter)] == [True, True, False]


# --- the controls, in a browser


evaluate = partial(live_page.evaluate, figure="hunt")
status = partial(live_page.status, figure="hunt")


def press(browser, name):
    evaluate(
        browser,
        "[...box.querySelectorAll('button, input')].find((one) => (one.getAttribute('aria-label')"
        f" ?? one.textContent) === '{name}').click()",
    )


def cure(browser):
    evaluate(browser, "box.querySelector('[type=checkbox]').click()")


def symptom(browser):
    return evaluate(browser, "return box.querySelector('p').textContent")


def flags(browser, name):
    return evaluate(
        browser,
        f"return [...[...box.querySelectorAll('tbody tr')].find((row) => row.querySelector('th')"
        f".textContent === '{name}').children].slice(4, 6).map((cell) => cell.textContent)",
    )


def next_fault(browser, cause):
    for _ in range(CAUSES.index(cause)):
        press(browser, "Another fault")


@pytest.mark.multiprocess
def test_a_layer_is_looked_at(browser):
    assert flags(browser, "filters") == ["?", "?"]
    press(browser, "Look at filters")
    forward, _ = flags(browser, "filters")
    assert re.match(r"overflow: \d+", forward)
    assert flags(browser, "gate") == ["?", "?"]
    details = evaluate(
        browser, "return [...box.querySelectorAll('.live-details p')].map((p) => p.textContent)"
    )
    assert len(details) == 2
    assert details[0].startswith("filters, forward: sizes before rounding to FP16 from ")
    assert float(re.search(r" to (\S+); ", details[0])[1]) > 65504
    bars = "return box.querySelectorAll('.live-details .bar.overflow').length"
    assert evaluate(browser, bars) > 0
    press(browser, "Look at input")
    assert flags(browser, "input") == ["no flag", "no flag"]


@pytest.mark.multiprocess
@pytest.mark.parametrize("cause", CAUSES)
def test_the_layer_at_fault_is_found_and_cured(cause, browser):
    next_fault(browser, cause)
    assert ("the step is taken" in symptom(browser)) == (cause == "energy")
    for name in NAMES:
        press(browser, f"Look at {name}")
    raised = [name for name in NAMES if "overflow" in flags(browser, name)[0]]
    if cause == "loss scale":
        assert not raised
        raised = [n for n in reversed(NAMES) if "overflow" in flags(browser, n)[1]]
    wrong = next(name for name in reversed(NAMES) if name not in (raised[0], cause))
    press(browser, f"{wrong} is at fault")
    assert status(browser).startswith(f"{wrong} is not at fault: ")
    assert evaluate(browser, "return box.querySelector('[type=checkbox]').disabled")
    press(browser, f"{raised[0]} is at fault")
    words = status(browser)
    assert words.startswith(f"Right. {raised[0]} is the first layer whose flag is set")
    assert "The cure: " in words
    cure(browser)
    assert status(browser).startswith("With the cure")
    assert status(browser).endswith("the step is taken. No flag is set.")
    for name in NAMES:
        assert not any(word in "".join(flags(browser, name)) for word in ("overflow", "NaN"))
    cure(browser)
    assert status(browser).startswith("Without the cure")


@pytest.mark.multiprocess
def test_the_loss_scale_is_accused_and_the_answer_shown(browser):
    press(browser, "The loss scale is at fault")
    assert status(browser).startswith("Not the loss scale: a flag is set in the forward pass")
    press(browser, "Show the answer")
    assert status(browser).startswith("filters is the first layer whose flag is set")
    next_fault(browser, "loss scale")
    assert flags(browser, "filters") == ["?", "?"]
    press(browser, "The loss scale is at fault")
    assert status(browser).startswith("Right. ")
    assert "The cause is the loss scale." in status(browser)
