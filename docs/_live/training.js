// A training that can be broken: two networks in formats and with settings of their own, trained beside each other.
"use strict";

live.figure("training", () => {
  const {make, textOf, formats, partOf, percent, PARTS} = live;
  const {POINTS, HIDDEN, INTERVAL, FORMATS, DEFAULTS, PRESETS, STEPS, Training, spirals} = smallTraining;
  const NAMES = ["A", "B"], SPEEDS = {"10 steps a second": 10, "60 steps a second": 60, "as fast as possible": 10000};
  const SIDE = 40, PIXELS = 200, EDGE = 1.15;  // of the picture of the plane: cells, pixels, largest coordinate
  const [LOW, HIGH] = [-40, 24];  // exponents of the histograms
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  const points = spirals();
  const grid = Float32Array.from({length: 2 * SIDE * SIDE}, (_, place) => {
    const cell = Math.floor(place / 2), along = place % 2 ? SIDE - 1 - Math.floor(cell / SIDE) : cell % SIDE;
    return EDGE * (2 * (along + 0.5) / SIDE - 1);
  });
  let runs, running = false, stopAt = null, drawnAt = 0, spokenAt = 0, due = 0, before = 0;

  // ---- Controls: those of each training, and those of the problem, which both have.

  const power = (exponent) => `2^${exponent}`;
  const checkbox = (label) => ({label, type: "checkbox", read: (box) => box.checked, write: (box, value) => { box.checked = value; }});
  const WORDS = {zero: "become zero", subnormal: "are subnormal", normal: "are normal", overflow: "overflow"};
  const slider = (label, min, max) => ({label, type: "range", min, max, read: (box) => Number(box.value),
    write: (box, value) => { box.value = value; }, text: power});
  const choice = (label, options) => ({label, options, read: (box) => box.value, write: (box, value) => { box.value = value; }});
  const OWN = {
    format: choice("Format", Object.fromEntries(FORMATS.map((name) => [name, name]))),
    masters: checkbox("FP32 master weights"),
    stochastic: checkbox("without masters: round stochastically"),
    scaling: choice("Loss scaling", {none: "off", static: "static", dynamic: "dynamic"}),
    scale: slider("Loss scale, or its start", 0, 24),
    normalization: {...checkbox("normalize in FP32"), read: (box) => box.checked ? "FP32" : "format",
      write: (box, value) => { box.checked = value === "FP32"; }},
  };
  const SHARED = {
    rate: slider("Learning rate", -18, 0),
    loss: slider("Loss in other units: times", -24, 24),
    inputs: slider("Inputs times", -4, 12),
    start: choice("Weights at the start", {random: "random, around 0", pairs: "large, in pairs that cancel"}),
  };

  // Make a control; `change` receives the settings that it changes.
  function control(name, kind, change, prefix = "") {
    const text = make("output"), {read, write, options, label, type, min = false, max = false} = kind;
    const attributes = {"aria-label": prefix + label, "data-setting": name};
    const tell = () => {
      if (!kind.text) return;
      text.textContent = kind.text(read(box));
      box.setAttribute("aria-valuetext", text.textContent);
    };
    const act = () => {
      tell();
      change({[name]: read(box)});
    };
    const box = options ? make("select", {...attributes, onchange: act},
      ...Object.entries(options).map(([value, words]) => make("option", {value}, words)))
      : make("input", {...attributes, type, min, max, [type === "range" ? "oninput" : "onchange"]: act});
    const set = (value) => {
      write(box, value);
      tell();
    };
    const element = type === "checkbox" ? make("label", {}, box, ` ${label}`) : make("label", {}, `${label} `, text, " ", box);
    return {box, set, element};
  }

  const own = NAMES.map((name, which) => Object.fromEntries(Object.entries(OWN).map(([setting, kind]) =>
    [setting, control(setting, kind, (settings) => changeOwn(which, settings), `${name}: `)])));
  const shared = Object.fromEntries(Object.entries(SHARED).map(([setting, kind]) => [setting, control(setting, kind, changeShared)]));
  const start = make("button", {type: "button", onclick: () => (running ? pause() : go())});
  const one = make("button", {type: "button", onclick: () => {
    pause();
    stepBoth();
    show();
  }}, "One step");
  const again = make("button", {type: "button", onclick: reset}, "Reset");
  const speed = make("select", {"aria-label": "Speed"}, ...Object.keys(SPEEDS).map((words) => make("option", {}, words)));
  speed.value = "60 steps a second";
  const count = make("span", {class: "steps"}), explanation = make("p"), status = make("p", {role: "status"});
  const lossBox = make("div", {class: "live-curves"}), scaleBox = make("div", {class: "live-curves"});
  const planes = NAMES.map(() => make("canvas", {width: PIXELS, height: PIXELS, role: "img"}));
  const histograms = NAMES.map(() => make("div"));
  const MEASURES = ["loss", "points on the right side", "loss scale", "skipped steps", "updates lost in the last step",
    "gradients that are zero", "gradients that are not finite"];
  const cells = MEASURES.map(() => NAMES.map(() => make("td")));
  const presetRows = PRESETS.map((one) => {
    const button = make("button", {type: "button", "aria-pressed": "false", onclick: () => {
      load(one);
      go();
    }}, one.name);
    return {one, button, row: make("tr", {}, make("th", {scope: "row"}, button), ...one.losses.map((loss) => make("td", {}, loss)))};
  });

  // ---- What the controls do.

  function load(chosen) {
    for (const {one: other, button} of presetRows) button.setAttribute("aria-pressed", String(other === chosen));
    explanation.textContent = chosen.words;
    NAMES.forEach((name, which) => {
      const settings = {...DEFAULTS, ...chosen.both, ...chosen[name]};
      for (const [setting, {set}] of Object.entries(own[which])) set(settings[setting]);
      for (const [setting, {set}] of Object.entries(shared)) set(settings[setting]);
    });
    reset();
  }

  const readAll = (controls, kinds) => Object.fromEntries(Object.entries(controls).map(([name, {box}]) => [name, kinds[name].read(box)]));

  function reset() {
    pause();
    runs = own.map((controls) => new Training({...readAll(shared, SHARED), ...readAll(controls, OWN)}));
    stopAt = STEPS;
    show();
  }

  function changeOwn(which, settings) {
    runs[which].change(settings);
    show();
  }

  function changeShared(settings) {
    for (const run of runs) run.change(settings);
    if ("start" in settings) reset();
    else show();
  }

  function stepBoth() {
    for (const run of runs) run.last = run.step();
  }

  function go() {
    running = true;
    [due, before] = [0, performance.now()];
    start.textContent = "Pause";
    requestAnimationFrame(frame);
  }

  function pause() {
    running = false;
    start.textContent = "Start";
    if (runs) show();
  }

  // Take the steps that are due, in at most 25 ms, and draw a few times a second.
  function frame(now) {
    if (!running) return;
    const end = performance.now() + 25;
    due = Math.min(60, due + Math.max(0, now - before) * SPEEDS[speed.value] / 1000);
    before = now;
    for (; due >= 1 && performance.now() < end; due--) {
      stepBoth();
      if (runs[0].losses.length === stopAt) {
        stopAt = null;
        pause();
        return;
      }
    }
    if (now - drawnAt > (calm.matches ? 1000 : 200)) {
      drawnAt = now;
      show(now - spokenAt > 1000);
    }
    requestAnimationFrame(frame);
  }

  // ---- What is shown.

  function show(speak = true) {
    own.forEach(({stochastic, masters, scaling, scale}) => {
      stochastic.box.disabled = masters.box.checked;
      scale.box.disabled = scaling.box.value === "none";
    });
    count.textContent = `step ${runs[0].losses.length}`;
    const states = runs.map(stateOf);
    states.forEach((state, which) => state.measures.forEach((text, row) => { cells[row][which].textContent = text; }));
    drawCurves(lossBox, runs.map(({losses}) => losses), {low: -4, high: 1, scale: Math.log10, text: (power) => String(10 ** power),
      title: "loss", words: (values) => textOf(values.at(-1) ?? NaN, 2)});
    drawCurves(scaleBox, runs.map(({scales}) => scales), {low: 0, high: 24, by: 8, scale: Math.log2, text: power,
      title: "loss scale, and skipped steps", words: (values) => textOf(values.at(-1) ?? NaN), skips: runs.map(({skips}) => skips)});
    runs.forEach((run, which) => {
      drawPlane(planes[which], run, `${NAMES[which]}: ${states[which].right} of ${POINTS} points are on the right side`);
      histograms[which].replaceChildren(...histogramsOf(NAMES[which], run, states[which]));
    });
    if (!speak) return;
    spokenAt = performance.now();
    status.textContent = `Step ${runs[0].losses.length}. ${states.map((state, which) => sentence(NAMES[which], runs[which], state)).join(" ")}`;
  }

  // The state of a training: what its next step would find.
  function stateOf(run) {
    const found = run.gradients(), format = run.stored, {last} = run;
    const drawn = [...found.givenAtOutput, ...found.given];  // what the histogram shows
    const became = [...found.atOutput, ...found.rounded].map((result, place) => partOf(drawn[place], result, format));
    const right = Training.right(found.output, run.labels), zeros = found.rounded.reduce((sum, value) => sum + (value === 0), 0);
    const overflows = found.rounded.reduce((sum, value) => sum + !Number.isFinite(value), 0);
    const measures = [textOf(found.loss, 3), `${right} of ${POINTS}`, run.settings.scaling === "none" ? "off" : power(Math.log2(run.scale)),
      String(run.skips.length), last && !last.skipped ? percent(last.lostUpdates, last.updates) : "–",
      percent(zeros, found.rounded.length), percent(overflows, found.rounded.length)];
    return {...found, drawn, became, right, measures, overflows, allZero: zeros === found.rounded.length,
      infinite: found.deviation.reduce((sum, value) => sum + (value === Infinity), 0)};
  }

  function sentence(name, run, state) {
    const {last, skips, losses, settings} = run, words = [];
    const latest = skips.filter((step) => step > losses.length - 20).length;
    if (Number.isNaN(state.loss)) words.push("its outputs are NaN");
    else if (state.infinite) words.push(`the normalization divides ${state.infinite} of its ${HIDDEN} units by infinity, which leaves zeros`);
    else if (state.allZero) words.push("all gradients are zero");
    if (latest >= Math.min(20, losses.length) && latest > 0) words.push("each step is skipped, as gradients overflow");
    else if (skips.length) words.push(skips.length === 1 ? "1 step was skipped" : `${skips.length} steps were skipped`);
    if (last && !last.skipped && last.updates && last.lostUpdates > last.updates / 2)
      words.push(`${percent(last.lostUpdates, last.updates)} of the updates are lost`);
    if (settings.scaling === "dynamic") words.push(`the loss scale is ${power(Math.log2(run.scale))}`);
    return `${name} (${settings.format}): loss ${textOf(state.loss, 2)}, ${state.right} of ${POINTS} points on the right side` +
      `${words.length ? `; ${words.join("; ")}` : ""}.`;
  }

  // Draw what A and B had at each step, on a logarithmic scale; A as a solid line, B dashed.
  function drawCurves(box, series, {low, high, by = 1, scale, text, title, words, skips = [[], []]}) {
    const steps = Math.max(2, ...series.map((values) => values.length)), every = Math.ceil(steps / 500);
    const x = (step) => 44 + 276 * step / (steps - 1);
    const y = (value) => 24 + 140 * (high - Math.min(high, Math.max(low, scale(value)))) / (high - low);
    const lines = [];
    for (let power = low; power <= high; power += by) {
      const height = 24 + 140 * (high - power) / (high - low);
      lines.push(`<path class="grid" d="M44 ${height}h276"/><text class="end" x="38" y="${height + 4}">${text(power)}</text>`);
    }
    const paths = series.map((values, which) => {
      let pen = "M";
      const path = values.map((value, step) => {
        if (step % every && step < values.length - 1) return "";
        if (Number.isNaN(value)) {
          pen = "M";
          return "";
        }
        const point = `${pen}${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
        pen = "L";
        return point;
      }).join("");
      return `<path class="run-${NAMES[which]}" d="${path}"/>`;
    });
    const ends = series.map((values) => values.length && !Number.isNaN(values.at(-1)) ? y(values.at(-1)) + 4 : 176);
    if (Math.abs(ends[0] - ends[1]) < 14) ends[1] = ends[0] + (ends[0] > 150 ? -14 : 14);
    const labels = series.map((values, which) => values.length
      ? `<text x="${(x(values.length - 1) + 6).toFixed(1)}" y="${ends[which].toFixed(1)}">${NAMES[which]}${Number.isNaN(values.at(-1)) ? ": NaN" : ""}</text>` : "");
    const ticks = skips.map((list, which) => list.length
      ? `<path class="run-${NAMES[which]} skip" d="${list.filter((_, place) => place % Math.ceil(list.length / 500) === 0)
        .map((step) => `M${x(step - 1).toFixed(1)} ${168 + 7 * which}v5`).join("")}"/>` : "");
    box.innerHTML = `<svg viewBox="0 0 360 204" role="img">${lines.join("")}${paths.join("")}${ticks.join("")}${labels.join("")}` +
      `<text x="44" y="14">${title}</text><text x="44" y="198">step 1</text><text class="end" x="320" y="198">step ${steps}</text></svg>`;
    box.firstChild.setAttribute("aria-label", `${title} at each step: ${series.map((values, which) =>
      `${NAMES[which]} is at ${words(values)}${skips[which].length ? ` and skipped ${skips[which].length} steps` : ""}`).join(", ")}`);
  }

  // Draw the network's output over the plane, from -1 (orange) to 1 (blue), and the points of both spirals.
  function drawPlane(canvas, run, words) {
    const brush = canvas.getContext("2d"), cell = PIXELS / SIDE, at = (value) => PIXELS * (value / EDGE + 1) / 2;
    run.predict(grid).forEach((value, place) => {
      const part = Math.min(1, Math.abs(value)), colour = value > 0 ? [0, 114, 178] : [213, 94, 0];
      brush.fillStyle = Number.isNaN(value) ? "#888" : `rgb(${colour.map((one) => Math.round(255 + part * (one - 255))).join(" ")})`;
      brush.fillRect(cell * (place % SIDE), cell * Math.floor(place / SIDE), cell, cell);
    });
    [brush.strokeStyle, brush.fillStyle, brush.lineWidth] = ["#000", "#fff", 1.2];
    points.labels.forEach((label, point) => {
      const x = at(points.inputs[2 * point]), y = PIXELS - at(points.inputs[2 * point + 1]);
      brush.beginPath();
      if (label > 0) {
        brush.arc(x, y, 2.4, 0, 7);
        brush.fill();
      } else {
        for (const side of [-1, 1]) {
          brush.moveTo(x - 2.4, y - 2.4 * side);
          brush.lineTo(x + 2.4, y + 2.4 * side);
        }
      }
      brush.stroke();
    });
    canvas.setAttribute("aria-label", words);
  }

  // Weights and gradients by their exponents, and what becomes of them in the format.
  function histogramsOf(name, run, state) {
    const shown = run.settings.format === "TF32" ? formats.TF32 : run.stored;
    const weights = [...run.copies].map((result, place) => partOf(run.weights[place], result, run.stored));
    const draw = (given, became, what) => {
      const of = (part) => percent(became.reduce((sum, one) => sum + (one === part), 0), given.length);
      return live.histogram(given, became, shown, {low: LOW, high: HIGH, axis: `${name}: exponent of 2 of ${what}`,
        words: `${name}: histogram of ${what}. In ${run.settings.format} ${PARTS.map((part) => `${of(part)} ${WORDS[part]}`).join(", ")}`,
        beyond: shown.finiteOnly ? "NaN" : "overflow"});
    };
    return [draw(run.weights, weights, run.settings.masters ? "masters" : "weights"),
      draw(state.drawn, state.became, "gradients of output and weights × loss scale")];
  }

  const table = (head, rows) => make("table", {}, make("thead", {}, make("tr", {}, ...head.map((text) => make("th", {scope: "col"}, text)))),
    make("tbody", {}, ...rows));
  const wide = (label, ...content) => make("div", {class: "live-wide", tabindex: 0, role: "region", "aria-label": label}, ...content);
  const groups = NAMES.map((name, which) => make("fieldset", {}, make("legend", {}, name),
    ...Object.values(own[which]).map(({element}) => make("p", {}, element))));
  const both = make("fieldset", {}, make("legend", {}, "Both"), ...Object.values(shared).map(({element}) => make("p", {}, element)));
  load(PRESETS[0]);
  return [
    wide("Failures and their repairs", table([`Press a failure. After ${STEPS} steps:`, "loss of A", "loss of B"], presetRows.map(({row}) => row))),
    explanation,
    make("div", {class: "live-settings"}, ...groups, both),
    make("p", {class: "live-controls"}, start, one, again, make("label", {}, "Speed ", speed), count),
    status,
    make("div", {class: "live-details"}, lossBox, scaleBox),
    make("p", {class: "live-legend"}, make("span", {class: "fp32"}, "A"), " ", make("span", {class: "fp16"}, "B"),
      ` Dynamic loss scales double after ${INTERVAL} finite steps; marks below show skipped steps.`),
    make("div", {class: "live-details"}, ...NAMES.map((name, which) => make("figure", {}, planes[which],
      make("figcaption", {}, `${name}: output over the plane. ○ should be blue (1), × orange (−1)`)))),
    wide("Measures of both trainings", table(["now", ...NAMES], MEASURES.map((measure, row) =>
      make("tr", {}, make("th", {scope: "row"}, measure), ...cells[row])))),
    make("div", {class: "live-details"}, ...histograms),
    make("p", {class: "live-parts"}, ...PARTS.map((part) => make("span", {class: part}, WORDS[part].replace("are ", "")))),
  ];
});
