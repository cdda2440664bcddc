"""The live training: its bits against NumPy's, what its presets show, and its controls."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import live_page
import numpy as np
import pytest
from live_page import assert_same_bits

pytest.importorskip("sphinx", reason="`make docs` installs Sphinx, and runs this")
pytest.importorskip("ziglang", reason="ziglang is in the environment of `make docs`")
from training_reference import FORMATS, ReferenceTraining

PAGE = Path(__file__).resolve().parents[2] / "docs" / "play.md"
STEPS = 60
ALONE = {"masters": False}
DRAWN = {"masters": False, "stochastic": True}
SETTINGS = [
    *({"format": name, **weights} for name in FORMATS for weights in ({}, ALONE, DRAWN)),
    *({"format": name, "normalization": "format"} for name in FORMATS),
    {"scaling": "none", "rate": -2},
    {"scaling": "none", "loss": 24},  # weights become NaN
    {"scaling": "static", "scale": 10, "inputs": 12},
    {"scaling": "dynamic", "scale": 24, "loss": 24},  # down to 1, and every step is skipped
    {"scaling": "none", "loss": -24, "format": "E5M2"},
    {"inputs": -4, "normalization": "format", "rate": -1},
    {"start": "pairs", "format": "BF16", "rate": 0, **DRAWN},
]
CHANGES = {  # the number of steps before which settings change
    10: {"format": "E5M2", "masters": False},
    20: {"scaling": "static", "scale": 20},
    30: {"scaling": "dynamic", "format": "BF16", "stochastic": True},
    40: {"masters": True, "loss": -8, "inputs": 3, "rate": -6},
    50: {"format": "TF32", "normalization": "format", "scaling": "none"},
}
BF16_ALONE = {"format": "BF16", "scaling": "none", "rate": -6, **ALONE}
PAIRS = {"start": "pairs", "rate": -17}
SMALL_LOSS = {"scaling": "none", "loss": -20}
PRESETS = {  # the settings of A and B
    "FP16 loses updates without masters": ({**PAIRS, **ALONE}, PAIRS),
    "E5M2 loses updates without masters": ({"format": "E5M2", **ALONE}, {"format": "E5M2"}),
    "BF16 without masters, rounded stochastically": (BF16_ALONE, {**BF16_ALONE, **DRAWN}),
    "FP16 gradients underflow without loss scaling": (SMALL_LOSS, {"loss": -20}),
    "BF16 needs no loss scaling": (SMALL_LOSS, {"format": "BF16", **SMALL_LOSS}),
    "The loss scale is too large": ({"scaling": "static", "scale": 24}, {"scale": 24}),
    "Normalization in FP16 overflows": ({"normalization": "format", "inputs": 9}, {"inputs": 9}),
    "E4M3 and E5M2 under one loss scale": tuple(
        {"scaling": "static", "scale": 12, "format": name} for name in ("E4M3", "E5M2")
    ),
}


@pytest.fixture
def in_node(folder, computed):
    """Return a function that runs lines with ``smallTraining`` in Node."""
    script = (folder / "training.step.js").read_text()
    return lambda lines: computed([], f"{script}\nconst {{Training}} = smallTraining;\n{lines}")


# --- the bits, in Node


def reference_rows(steps, settings, changes=()):
    """Return for each step the loss, the loss scale and all weights after it."""
    training, rows = ReferenceTraining(**settings), []
    for step in range(steps):
        if step in changes:
            training.change(**changes[step])
        loss, scale = training.step()
        rows.append(np.concatenate([np.float32([loss, scale]), training.weights]))
    return np.stack(rows), training


@pytest.mark.parametrize("name", FORMATS)
def test_sixty_steps_of_each_format_have_the_bits_of_numpy(name, in_node):
    settings = [one for one in SETTINGS if one.get("format", "FP16") == name]
    found = in_node(f"""
for (const settings of {json.dumps(settings)}) {{
  const training = new Training(settings);
  for (let step = 0; step < {STEPS}; step++) {{
    const {{loss, scale}} = training.step();
    results.push(loss, scale, ...training.weights);
  }}
}}
""").reshape(len(settings), STEPS, -1)
    for one, rows in zip(settings, found):
        expected, _ = reference_rows(STEPS, one)
        assert_same_bits(rows, expected)


def test_settings_that_change_between_steps_have_the_bits_of_numpy(in_node):
    found = in_node(f"""
const training = new Training({{}}), changes = {json.dumps(CHANGES)};
for (let step = 0; step < {STEPS}; step++) {{
  if (changes[step]) training.change(changes[step]);
  const {{loss, scale}} = training.step();
  results.push(loss, scale, ...training.weights);
}}
""")
    expected, training = reference_rows(STEPS, {}, CHANGES)
    assert_same_bits(found.reshape(expected.shape), expected)
    assert training.skipped > 0
    assert np.isfinite(expected).all()


def test_weights_become_nan_only_without_loss_scaling():
    """So the comparison of bits covers NaN, and a scale that stays at its smallest."""
    for scaling, nan, scale in (("none", True, 1), ("dynamic", False, 1)):
        training = ReferenceTraining(scaling=scaling, scale=24, loss=24)
        for _ in range(30):
            training.step()
        assert np.isnan(training.weights).all() == nan
        assert training.scale == scale


# --- the presets


def ends_of_presets():
    """Return the losses of A and B in the page's table, as texts."""
    page = PAGE.read_text("utf-8")
    (text,) = re.findall(r"```\{live\} training\n(.*?)```", page, re.DOTALL)
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return {name.strip(): [a.strip(), b.strip()] for name, a, b in rows[1:]}


def as_text(loss):
    """Return a loss as the page writes it, with three digits."""
    return f"{float(f'{loss:.2e}'):.10f}".rstrip("0").rstrip(".")


def moved(training):
    """Return the number of weights, of 697, that differ from those at the start."""
    start = ReferenceTraining(**training.settings).weights
    return (training.weights != start).sum()


def lost(training):
    """Return the share of the next step's updates that change no weight."""
    before = training.weights.copy()
    training.step()
    return (training.weights == before)[training.velocity != 0].mean()


def claim_updates_are_lost(a, b):
    assert moved(a) == 3
    assert moved(b) > 500
    assert lost(a) > 0.95 > 0.5 > lost(b)


def claim_learning_stops(a, b):
    assert a.losses[100] < 0.8 * a.losses[0]
    assert np.ptp(a.losses[100:]) < 0.01
    assert lost(a) > 0.95 > 0.5 > lost(b)


def claim_stochastic_rounding_goes_on(a, b):
    assert a.losses[200] < 1.5 * a.losses[-1]
    assert b.losses[200] > 2 * b.losses[-1]
    assert lost(a) > lost(b) > 0.5


def claim_all_gradients_underflow(a, b):
    assert moved(a) == 0
    assert not a.velocity.any()
    assert b.velocity.any()


def claim_each_step_is_skipped(a, b):
    assert a.skipped == 300
    assert 0 < b.skipped < 20
    assert b.scales.min() < b.scales[0]
    assert (np.diff(b.scales) > 0).any()


def claim_zeros_are_normal(a, b):
    assert (a.losses[:-1] == 0.5).all()
    assert moved(a) == 0
    assert a.skipped == b.skipped == 0


def claim_only_one_is_skipped(a, b):
    assert (a.skipped, b.skipped) == (300, 0)


CLAIMS = (
    claim_updates_are_lost,
    claim_learning_stops,
    claim_stochastic_rounding_goes_on,
    claim_all_gradients_underflow,
    claim_all_gradients_underflow,
    claim_each_step_is_skipped,
    claim_zeros_are_normal,
    claim_only_one_is_skipped,
)


@pytest.mark.parametrize(("name", "claim"), list(zip(PRESETS, CLAIMS)), ids=list(PRESETS))
def test_a_preset_fails_as_numpy_does_and_its_repair_learns(name, claim, in_node):
    found = in_node(f"""
const preset = smallTraining.PRESETS.find(({{name}}) => name === "{name}");
for (const name of ["A", "B"]) {{
  const training = new Training({{...preset.both, ...preset[name]}}), steps = smallTraining.STEPS;
  for (let step = 0; step < steps; step++) training.step();
  results.push(training.gradients().loss, training.skips.length);
  results.push(...training.weights, ...training.losses, ...training.scales);
}}
""").reshape(2, -1)
    runs = []
    for row, settings in zip(found, PRESETS[name]):
        expected, training = reference_rows(300, settings)
        loss = training.loss()
        end = [[loss, training.skipped], training.weights, expected[:, 0], expected[:, 1]]
        assert_same_bits(row, np.concatenate(end))
        training.losses, training.scales = expected[:, 0], expected[:, 1]
        runs.append(training)
    a, b = (float(row[0]) for row in found)
    assert ends_of_presets()[name] == [as_text(a), as_text(b)]
    assert b < a / 2
    claim(*runs)


def test_a_repair_in_the_middle_of_a_training_works_too(in_node):
    found = in_node("""
for (const {both, A, B} of smallTraining.PRESETS) {
  const training = new Training({...both, ...A});
  for (let step = 0; step < 150; step++) training.step();
  results.push(training.gradients().loss);
  training.change({...smallTraining.DEFAULTS, ...both, ...B});
  for (let step = 0; step < 150; step++) training.step();
  results.push(training.gradients().loss);
}
""").reshape(-1, 2)
    assert len(found) == len(PRESETS)
    assert (found[:, 1] < found[:, 0] / 2).all()


def test_units_make_no_difference_in_fp32():
    losses = []
    for settings in ({}, {"loss": -20}, {"inputs": 9}):
        training = ReferenceTraining(format="FP32", scaling="none", **settings)
        losses.append([training.step()[0] for _ in range(STEPS)])
    assert losses[0] == losses[1]
    np.testing.assert_allclose(losses[2], losses[0], rtol=0.1)


# --- the controls, in a browser

FIGURE = "[data-figure=training]"


evaluate = partial(live_page.evaluate, figure="training")
status = partial(live_page.status, figure="training")


def press(browser, text):
    evaluate(
        browser,
        "[...box.querySelectorAll('button')]"
        f".find((one) => one.textContent === {json.dumps(text)}).click();",
    )


def move(browser, label, value):
    """Move a control; True and False are for a checkbox."""
    evaluate(
        browser,
        f"""
const control = box.querySelector('[aria-label="{label}"]'), value = {json.dumps(value)};
if (control.type === "checkbox") {{ if (control.checked !== value) control.click(); }}
else {{
  control.value = value;
  for (const kind of ["input", "change"]) control.dispatchEvent(new Event(kind));
}}""",
    )


def measures(browser):
    """Return the table of measures: the texts of A and B by their label."""
    rows = evaluate(
        browser,
        "return [...[...box.querySelectorAll('.live-wide')].at(-1).querySelectorAll('tbody tr')]"
        ".map((row) => [...row.children].map((cell) => cell.textContent));",
    )
    return {label: values for label, *values in rows}


def losses(browser):
    return [float(text) for text in measures(browser)["loss"]]


def steps(browser):
    return int(evaluate(browser, "return box.querySelector('.steps').textContent.slice(5);"))


@pytest.fixture
def still(browser):
    """Return a browser whose training stands at its beginning, with FP16 that works."""
    press(browser, "The loss scale is too large")
    press(browser, "Pause")
    for name in "AB":
        move(browser, f"{name}: Loss scaling", "dynamic")
        move(browser, f"{name}: Loss scale, or its start", 15)
    press(browser, "Reset")
    assert steps(browser) == 0
    return browser


def set_as(browser, settings):
    for label, value in settings.items():
        move(browser, label, value)


def look(browser):
    """Return the drawn elements of A and B, as texts to compare."""
    return evaluate(
        browser,
        """
return ["A", "B"].map((name, which) => ({
  plane: box.querySelectorAll("canvas")[which].toDataURL(),
  loss: box.querySelectorAll(".live-curves")[0].querySelector(`.run-${name}`).getAttribute("d"),
  scale: box.querySelectorAll(".live-curves")[1].querySelector(`.run-${name}`).getAttribute("d"),
  ...Object.fromEntries(["weights", "gradients"].map((part, place) => [part,
    box.querySelectorAll(".live-histogram svg")[2 * which + place].innerHTML
      .replace(/live-\\w+-\\d+/g, "")])),
}));""",
    )


@pytest.mark.multiprocess
def test_steps_are_taken_one_by_one_and_everything_drawn_follows_them(still):
    before = look(still)
    for _ in range(3):
        press(still, "One step")
    assert steps(still) == 3
    after = look(still)
    for name in range(2):
        for part, drawn in after[name].items():
            assert drawn != before[name][part], part
    assert status(still).startswith("Step 3. A (FP16): loss ")
    press(still, "Reset")
    assert steps(still) == 0
    assert look(still) == before


@pytest.mark.multiprocess
def test_a_preset_runs_until_its_end_and_then_pauses(browser):
    move(browser, "Speed", "as fast as possible")
    press(browser, "FP16 gradients underflow without loss scaling")
    assert evaluate(browser, "return box.querySelector('[aria-pressed=true]').textContent;") == (
        "FP16 gradients underflow without loss scaling"
    )
    done = f"document.querySelector('{FIGURE} .steps').textContent === 'step 300'"
    browser.wait_for(done)
    buttons = f"[...document.querySelectorAll('{FIGURE} button')]"
    browser.wait_for(f"{buttons}.some((one) => one.textContent === 'Start')")
    texts = ends_of_presets()["FP16 gradients underflow without loss scaling"]
    assert measures(browser)["loss"] == texts
    assert measures(browser)["gradients that are zero"][0] == "100 %"
    assert (
        "A (FP16): loss 0.51, 65 of 128 points on the right side; all gradients are zero"
        in status(browser)
    )
    press(browser, "Start")
    browser.wait_for(f"!({done})")
    press(browser, "Pause")
    now = steps(browser)
    assert now > 300
    assert evaluate(browser, "return new Promise((go) => setTimeout(go, 200));") is None
    assert steps(browser) == now


@pytest.mark.multiprocess
def test_every_control_of_a_training_changes_it_alone(still):
    """A is changed; B, from the same weights, stays as it is."""
    press(still, "One step")
    same = look(still)
    assert same[0]["weights"] == same[1]["weights"].replace("B:", "A:")
    same_loss = losses(still)
    assert same_loss[0] == same_loss[1]

    for name in FORMATS:
        move(still, "A: Format", name)
        assert f" A ({name}): loss" in status(still)
        assert "B (FP16): loss" in status(still)
        assert f"In {name} " in evaluate(
            still, "return box.querySelector('.live-histogram svg').ariaLabel;"
        )
    move(still, "A: Format", "FP16")

    move(still, "A: Loss scaling", "none")
    assert measures(still)["loss scale"] == ["off", "2^15"]
    disabled = "return box.querySelector('[aria-label=\"A: Loss scale, or its start\"]').disabled;"
    assert evaluate(still, disabled)
    move(still, "A: Loss scaling", "static")
    assert not evaluate(still, disabled)
    move(still, "A: Loss scale, or its start", 23)
    assert measures(still)["loss scale"] == ["2^23", "2^15"]
    press(still, "One step")
    assert measures(still)["skipped steps"] == ["1", "0"]
    assert measures(still)["loss scale"] == ["2^23", "2^15"]
    move(still, "A: Loss scaling", "dynamic")
    press(still, "One step")
    assert measures(still)["skipped steps"] == ["2", "0"]
    assert measures(still)["loss scale"] == ["2^22", "2^15"]
    move(still, "A: Loss scale, or its start", 15)

    move(still, "A: Format", "E5M2")
    press(still, "One step")
    few = measures(still)["updates lost in the last step"]
    move(still, "A: FP32 master weights", False)
    press(still, "One step")
    many = measures(still)["updates lost in the last step"]
    assert float(many[0].split()[0]) > 3 * float(few[0].split()[0])
    press(still, "Reset")
    for _ in range(5):
        press(still, "One step")
    nearest = losses(still)
    move(still, "A: without masters: round stochastically", True)
    press(still, "Reset")
    for _ in range(5):
        press(still, "One step")
    drawn = losses(still)
    assert drawn[0] != nearest[0]
    assert drawn[1] == nearest[1]


@pytest.mark.multiprocess
def test_controls_of_both_change_both(still):
    move(still, "Inputs times", 9)
    move(still, "A: normalize in FP32", False)
    words = status(still)
    assert "the normalization divides 24 of its 24 units by infinity" in words.split(" B ")[0]
    assert "infinity" not in words.split(" B ")[1]
    move(still, "B: normalize in FP32", False)
    assert "infinity" in status(still).split(" B ")[1]
    for name in "AB":
        move(still, f"{name}: normalize in FP32", True)
        move(still, f"{name}: Loss scaling", "none")
    move(still, "Loss in other units: times", -24)
    assert measures(still)["gradients that are zero"] == ["100 %", "100 %"]
    move(still, "Loss in other units: times", 0)
    assert float(measures(still)["gradients that are zero"][0].split()[0]) < 20
    found = {}
    for rate in (-18, -2):
        move(still, "Learning rate", rate)
        press(still, "Reset")
        press(still, "One step")
        found[rate] = losses(still)
    assert found[-18][0] == found[-18][1] == pytest.approx(0.51, abs=0.001)
    assert abs(found[-2][0] - found[-18][0]) > 0.02
    move(still, "Inputs times", 0)
    move(still, "Weights at the start", "pairs")
    assert steps(still) == 0
    assert losses(still) == [0.5, 0.5]

    move(still, "Weights at the start", "random")  # and NaN is drawn and said
    move(still, "B: Loss scaling", "dynamic")
    move(still, "Loss in other units: times", 24)
    for _ in range(2):
        press(still, "One step")
    assert "A (FP16): loss NaN, 0 of 128 points on the right side; its outputs are NaN" in status(
        still
    )
    assert "each step is skipped, as gradients overflow" in status(still)
    picture = "box.querySelectorAll('.live-histogram svg')[3]"
    words = evaluate(still, f"return {picture}.ariaLabel;")
    assert re.search(r"B: histogram of gradients .* \d+ % overflow$", words)
    assert evaluate(still, f"return {picture}.querySelectorAll('.bar.overflow').length;") > 0
    text = "return box.querySelector('.live-curves').textContent;"
    assert "A: NaN" in evaluate(still, text)


def run_for_a_while(browser, speed):
    """Return the steps taken in 0.6 s, and how often curves and status line changed."""
    press(browser, "Reset")
    move(browser, "Speed", speed)
    press(browser, "Start")
    drawn, said = evaluate(
        browser,
        """
const counts = [".live-curves", "[role=status]"].map((where) => {
  const one = {count: 0};
  new MutationObserver(() => one.count++).observe(box.querySelector(where), {childList: true});
  return one;
});
return new Promise((go) => setTimeout(() => go(counts.map(({count}) => count)), 600));""",
    )
    press(browser, "Pause")
    return steps(browser), drawn, said


@pytest.mark.multiprocess
def test_the_speed_is_as_chosen_and_drawings_are_few_where_motion_is_reduced(still):
    slow, _, _ = run_for_a_while(still, "10 steps a second")
    fast, drawn, said = run_for_a_while(still, "60 steps a second")
    # On a busy machine a while is longer, and each speed is reached less.
    assert 1 <= slow < fast
    assert said < drawn
    reduced = [{"name": "prefers-reduced-motion", "value": "reduce"}]
    still.send("Emulation.setEmulatedMedia", features=reduced)
    _, drawn_calmly, _ = run_for_a_while(still, "60 steps a second")
    assert drawn_calmly < drawn


@pytest.mark.multiprocess
def test_nothing_is_cut_off_at_any_width(still):
    for width in (360, 700, 1600):
        nothing_is_cut_off(still, width)


def nothing_is_cut_off(still, width):
    with still.window(width):
        wide = evaluate(still, "return document.documentElement.scrollWidth - innerWidth;")
        assert wide <= 0
        cut = evaluate(
            still,
            """
const right = (one) => one.getBoundingClientRect().right;
return [...box.querySelectorAll("button, input, select, canvas, svg, fieldset, p, td")]
  .filter((one) => !one.closest(".live-wide"))
  .filter((one) => right(one) > right(one.parentElement.closest("fieldset") || box) - 4)
  .map((one) => one.outerHTML.slice(0, 80));""",
        )
        assert cut == []
