// An overflow hunt: one training step of a small network in FP16 with a fault, and what each layer's flags say.
"use strict";

// The network, and a step of it. Products are summed in FP32 and rounded once to FP16, by the package's kernel.
const faultyNetwork = (() => {
  const {product, transposed} = live;
  const SOUNDS = 16, SAMPLES = 32, PITCHES = 4, GATE = 16, LOSS_SCALE = 2 ** 10;
  const INITIAL = {filters: 0.6, hidden: 1, output: 0.2};  // weights are drawn from -a to a

  // In the order of the forward pass: a name, what is computed, and how many numbers there are for a sound.
  const LAYERS = [
    {name: "input", computes: "x / 64", size: 32},
    {name: "filters", computes: "dense, 32 to 32", size: 32},
    {name: "energy", computes: "log(mean of 2 squares + 1)", size: 16},
    {name: "gate", computes: "ReLU(16 − x)", size: 16},
    {name: "hidden", computes: "dense, 16 to 32", size: 32},
    {name: "norm", computes: "layer normalization", size: 32},
    {name: "exponential", computes: "exp(x)", size: 32},
    {name: "output", computes: "dense, 32 to 4", size: 4},
  ];

  // Return sounds from quiet to loud as whole numbers of 16 bits, and the pitch of each.
  function sounds(draw) {
    const labels = Array.from({length: SOUNDS}, (_, sound) => sound % PITCHES);
    const values = labels.flatMap((pitch, sound) => {
      const loudness = 30000 * 2 ** ((sound - SOUNDS + 1) / 2), phase = 2 * Math.PI * draw();
      return Array.from({length: SAMPLES}, (_, time) =>
        Math.round(loudness * (Math.sin(2 * Math.PI * (pitch + 2) * time / SAMPLES + phase) + 0.05 * (2 * draw() - 1))));
    });
    return {values: Float32Array.from(values), labels};
  }

  // What one layer computes in one pass: the numbers before and after each rounding to FP16, and flags, as counts.
  class Pass {
    given = [];
    results = [];
    overflow = 0;
    invalid = 0;
    lost = 0;

    note(given, results, operands) {
      const hadNaN = operands.some((operand) => operand.some(Number.isNaN));
      results.forEach((result, place) => {
        const value = given[place];
        if (Number.isFinite(value) && !Number.isFinite(result)) this.overflow += 1;
        if (Number.isNaN(value) && !hadNaN) this.invalid += 1;
        if (value !== 0 && result === 0) this.lost += 1;
        this.given.push(value);
        this.results.push(result);
      });
    }

    get flagged() {
      return this.overflow > 0 || this.invalid > 0;
    }
  }

  // Run one step. Options say what differs from the sound network; returns the passes of each layer, and the loss.
  function step(options) {
    const {seed, scaled = true, weights = INITIAL, normalized = true, energyInFP32 = true, lossScale = LOSS_SCALE,
      inFP16 = true} = options;
    const draw = live.random(seed), {values, labels} = sounds(draw);
    const to16 = (numbers) => inFP16 ? live.round(numbers, live.formats.FP16) : Float32Array.from(numbers);
    const drawn = (count, a) => to16(Array.from({length: count}, () => a * (2 * draw() - 1)));
    const W = {filters: drawn(32 * 32, weights.filters), hidden: drawn(16 * 32, weights.hidden), output: drawn(32 * 4, weights.output)};
    const forward = Object.fromEntries(LAYERS.map(({name}) => [name, new Pass()]));
    const backward = Object.fromEntries(LAYERS.map(({name}) => [name, new Pass()]));

    // Round what a layer computed from some operands, and note it.
    function rounded(pass, exact, ...operands) {
      const given = Float32Array.from(exact), results = to16(given);
      pass.note(given, results, operands);
      return results;
    }
    // The same within a layer that is kept in FP32: nothing is rounded to FP16.
    const kept = (pass, exact) => Float32Array.from(exact);
    const inEnergy = energyInFP32 ? kept : rounded;
    const pairs = (x, of) => Float32Array.from({length: x.length / 2}, (_, pair) => of(x[2 * pair], x[2 * pair + 1]));

    // The forward pass.
    const x = rounded(forward.input, values.map((value) => value / (scaled ? 64 : 1)), values);
    const filtered = rounded(forward.filters, product(x, W.filters, 32), x, W.filters);
    const squares = inEnergy(forward.energy, filtered.map((value) => value * value), filtered);
    const means = inEnergy(forward.energy, pairs(squares, (a, b) => Math.fround(a + b) / 2), squares);
    const energies = rounded(forward.energy, means.map((mean) => Math.log1p(mean)), means);
    const gated = rounded(forward.gate, energies.map((energy) => GATE - energy), energies).map((value) => value < 0 ? 0 : value);
    const hidden = rounded(forward.hidden, product(gated, W.hidden, 16), gated, W.hidden);
    const moments = Array.from({length: SOUNDS}, (_, sound) => {
      const row = hidden.subarray(32 * sound, 32 * sound + 32), mean = row.reduce((sum, value) => sum + value, 0) / 32;
      const variance = row.reduce((sum, value) => sum + (value - mean) ** 2, 0) / 32;
      return {mean, deviation: Math.sqrt(variance + 1e-5)};
    });
    const momentsOf = (place) => moments[Math.floor(place / 32)];
    const normal = rounded(forward.norm, normalized ? hidden.map((value, place) =>
      (value - momentsOf(place).mean) / momentsOf(place).deviation) : hidden, hidden);
    const powers = rounded(forward.exponential, normal.map((value) => Math.exp(value)), normal);
    const logits = rounded(forward.output, product(powers, W.output, 32), powers, W.output);

    // The loss, in FP32: the mean cross-entropy, and its gradient times the loss scale.
    let loss = 0;
    const gradient = new Float32Array(logits.length);
    labels.forEach((label, sound) => {
      const row = logits.subarray(PITCHES * sound, PITCHES * sound + PITCHES), largest = Math.max(...row);
      const sum = row.reduce((total, value) => total + Math.exp(value - largest), 0);
      loss += (Math.log(sum) + largest - row[label]) / SOUNDS;
      row.forEach((value, pitch) => {
        const probability = Math.exp(value - largest) / sum;
        gradient[PITCHES * sound + pitch] = lossScale * (probability - (pitch === label ? 1 : 0)) / SOUNDS;
      });
    });

    // The backward pass.
    const of = backward;
    const atOutput = rounded(of.output, gradient, logits);
    const G = {output: rounded(of.output, product(transposed(powers, 32), atOutput, SOUNDS), powers, atOutput)};
    const atPowers = rounded(of.output, product(atOutput, transposed(W.output, 4), 4), atOutput, W.output);
    const atNormal = rounded(of.exponential, atPowers.map((value, place) => value * powers[place]), atPowers, powers);
    const atHidden = rounded(of.norm, normalized ? throughNorm(atNormal, normal, moments) : atNormal, atNormal, normal);
    G.hidden = rounded(of.hidden, product(transposed(gated, 16), atHidden, SOUNDS), gated, atHidden);
    const atGated = rounded(of.hidden, product(atHidden, transposed(W.hidden, 32), 32), atHidden, W.hidden);
    const atEnergies = rounded(of.gate, atGated.map((value, place) => gated[place] > 0 ? -value : 0 * gated[place]), atGated, gated);
    const atMeans = inEnergy(of.energy, atEnergies.map((value, place) => value / (1 + means[place])), atEnergies, means);
    const atSquares = inEnergy(of.energy, squares.map((_, place) => atMeans[Math.floor(place / 2)] / 2), atMeans);
    const atFiltered = rounded(of.energy, atSquares.map((value, place) => 2 * value * filtered[place]), atSquares, filtered);
    G.filters = rounded(of.filters, product(transposed(x, 32), atFiltered, SOUNDS), x, atFiltered);

    const finite = Object.values(G).every((values) => values.every(Number.isFinite));
    return {values, labels, weights: W, forward, backward, loss: Math.fround(loss), finite, gradients: G, lossScale};
  }

  // Return the gradient in front of a layer normalization.
  function throughNorm(gradient, normal, moments) {
    return gradient.map((value, place) => {
      const first = 32 * Math.floor(place / 32);
      let sum = 0, along = 0;
      for (let other = first; other < first + 32; other++) {
        sum += gradient[other];
        along += gradient[other] * normal[other];
      }
      return (value - sum / 32 - normal[place] * along / 32) / moments[first / 32].deviation;
    });
  }

  // Return the first layer of a step whose flag is set, in the order of the computation.
  function firstFlag({forward, backward}) {
    const names = LAYERS.map(({name}) => name);
    const ahead = names.find((name) => forward[name].flagged), back = [...names].reverse().find((name) => backward[name].flagged);
    if (ahead) return {layer: ahead, pass: "forward", overflow: forward[ahead].overflow > 0};
    return back ? {layer: back, pass: "backward", overflow: backward[back].overflow > 0} : null;
  }

  // Return a loss scale four times as large as the largest without an overflow.
  function tooLarge(seed) {
    let lossScale = 1;
    while (!firstFlag(step({seed, lossScale: 2 * lossScale}))) lossScale *= 2;
    return 4 * lossScale;
  }

  // The faults: where the cause is, what differs, why, and the cure.
  const KINDS = [
    {cause: "input", change: () => ({scaled: false}),
      why: "The sounds are not divided by 64: they are whole numbers of 16 bits, which fit into FP16, but sums of their products do not.",
      cure: "divide the input by 64"},
    {cause: "energy", change: () => ({energyInFP32: false}),
      why: "energy squares its input in FP16. 16 minus infinity is minus infinity, and the gate's ReLU makes 0 of it: the loss and all " +
        "gradients are finite, no step is skipped, and the network learns from zeros.",
      cure: "compute energy in FP32"},
    {cause: "hidden", change: () => ({weights: {...INITIAL, hidden: 10000}}),
      why: "Its weights were drawn from −10,000 to 10,000.", cure: "draw the weights of hidden from −1 to 1"},
    {cause: "norm", change: () => ({normalized: false}),
      why: "Without the normalization, numbers above 11.09 arrive at exp, which is then more than 65504.",
      cure: "put the layer normalization back"},
    {cause: "loss scale", change: (seed) => ({lossScale: tooLarge(seed)}),
      why: "The forward pass has no flag: only gradients are too large, since the loss scale is.", cure: "divide the loss scale by 4"},
    {cause: "output", change: () => ({weights: {...INITIAL, output: 20000}}),
      why: "Its weights were drawn from −20,000 to 20,000.", cure: "draw the weights of output from −0.2 to 0.2"},
    {cause: "filters", change: () => ({weights: {...INITIAL, filters: 600}}),
      why: "Its weights were drawn from −600 to 600.", cure: "draw the weights of filters from −0.6 to 0.6"},
  ];

  // Return a fault by its number: the kinds in turn, with other sounds and weights each time.
  function fault(number) {
    const kind = KINDS[number % KINDS.length], seed = 1 + 7919 * number, change = kind.change(seed);
    const cured = change.lossScale ? {seed, lossScale: change.lossScale / 4} : {seed};
    return {...kind, options: {seed, ...change}, cured};
  }

  return {LAYERS, INITIAL, KINDS, step, fault, firstFlag};
})();

live.figure("hunt", () => {
  const {make, textOf, partOf, PARTS, formats} = live;
  const {LAYERS, step, fault, firstFlag} = faultyNetwork;
  const PASSES = ["forward", "backward"];
  let number = 0, current, run, looked, shown, solved;

  const symptom = make("p"), status = make("p", {role: "status"});
  const details = make("div", {class: "live-details"});
  const rows = new Map(LAYERS.map((layer) => [layer.name, rowOf(layer)]));
  const scaleButton = make("button", {type: "button", onclick: () => guess("loss scale")}, "The loss scale is at fault");
  const answer = make("button", {type: "button", onclick: () => resolve("")}, "Show the answer");
  const cure = make("input", {type: "checkbox", onchange: () => {
    rerun();
    status.textContent = cure.checked ? `With the cure, to ${current.cure}: ${symptomText()} ${flagsText()}` : `Without the cure: ${symptomText()}`;
  }});
  const cureText = make("span");
  const another = make("button", {type: "button", onclick: () => begin(number + 1)}, "Another fault");

  function rowOf({name, computes, size}) {
    const cells = {forward: make("td"), backward: make("td")};
    const look = make("button", {type: "button", "aria-label": `Look at ${name}`, onclick: () => {
      looked.add(name);
      shown = name;
      show();
    }}, "look");
    const accuse = make("button", {type: "button", "aria-label": `${name} is at fault`, onclick: () => guess(name)}, "at fault");
    const row = make("tr", {}, make("th", {scope: "row", "data-computes": computes}, name), make("td", {}, computes), make("td", {}, `16 × ${size}`),
      make("td", {}, look), cells.forward, cells.backward, make("td", {}, accuse));
    return {row, cells};
  }

  function begin(next) {
    number = next;
    current = fault(number);
    looked = new Set();
    shown = null;
    solved = false;
    cure.checked = false;
    rerun();
    status.textContent = `Fault ${number + 1}: one thing is wrong in this network. Look at the layers, and say which one is at fault.`;
  }

  function rerun() {
    run = step(cure.checked ? current.cured : current.options);
    show();
  }

  function symptomText() {
    const wide = step({...(cure.checked ? current.cured : current.options), inFP16: false});
    const loss = (value) => textOf(value, 3);
    return `at loss scale 2^${Math.log2(run.lossScale)} the loss is ${loss(run.loss)} (in FP32 ${loss(wide.loss)}), and ` +
      (run.finite ? "all gradients are finite: the step is taken." : "not all gradients are finite: the step is skipped.");
  }

  function flagsText() {
    const first = firstFlag(run);
    return first ? `The flag of ${first.layer} is set.` : "No flag is set.";
  }

  // The flags of a layer in one pass, and how many results became zero.
  function flagsOf(pass) {
    const words = [];
    if (pass.overflow) words.push(`overflow: ${pass.overflow}`);
    if (pass.invalid) words.push(`NaN: ${pass.invalid}`);
    return (words.join(", ") || "no flag") + (pass.lost ? `; underflow: ${pass.lost}` : "");
  }

  // The range of the numbers that a layer computed in one pass, and their histogram.
  function detailsOf(name, direction) {
    const pass = run[direction][name], finite = pass.given.filter((value) => Number.isFinite(value) && value !== 0).map(Math.abs);
    const became = pass.results.map((result, place) => partOf(pass.given[place], result, formats.FP16));
    const [smallest, largest] = [Math.min, Math.max].map((pick) => finite.reduce((a, b) => pick(a, b), finite[0]));
    const range = finite.length ? `from ${textOf(smallest, 2)} to ${textOf(largest, 3)}` : "none that is finite and not zero";
    const others = pass.given.filter((value) => !Number.isFinite(value)).length;
    const counts = PARTS.map((part) => `${became.filter((one) => one === part).length} ${part}`).join(", ");
    const words = `${name}, ${direction}: sizes before rounding to FP16 ${range}; ${others} infinite or NaN already.`;
    return make("div", {}, make("p", {}, words), live.histogram(pass.given, became, formats.FP16, {low: -45, high: 45,
      axis: "exponent of 2, before rounding to FP16", words: `Histogram of ${name}, ${direction}: ${counts}`}));
  }

  function show() {
    symptom.textContent = `A training step in FP16: ${symptomText()}`;
    for (const [name, {row, cells}] of rows) {
      row.classList.toggle("chosen", name === shown);
      for (const pass of PASSES) {
        const seen = looked.has(name);
        cells[pass].textContent = seen ? flagsOf(run[pass][name]) : "?";
        cells[pass].classList.toggle("flagged", seen && run[pass][name].flagged);
      }
    }
    details.replaceChildren(...(shown ? PASSES.map((pass) => detailsOf(shown, pass)) : []));
    answer.disabled = solved;
    cure.disabled = !solved;
    cureText.textContent = solved ? ` Apply the cure: ${current.cure}` : " Apply the cure";
  }

  function guess(name) {
    const first = firstFlag(step(current.options));
    if (name === first.layer || name === current.cause) {
      resolve("Right. ");
      return;
    }
    const layer = name === "loss scale" ? null : step(current.options);
    const flagged = layer && PASSES.some((pass) => layer[pass][name].flagged);
    const spoiled = layer && PASSES.some((pass) => layer[pass][name].given.some((value) => !Number.isFinite(value)));
    status.textContent = !layer ? "Not the loss scale: a flag is set in the forward pass, which no loss scale changes."
      : flagged ? `${name} is not at fault: its flag is set, but that of another layer was set earlier in the step.`
      : spoiled ? `${name} is not at fault: its flag is not set; what is not finite there came from another layer.`
      : `${name} is not at fault: its flag is not set.`;
  }

  function resolve(verdict) {
    const first = firstFlag(step(current.options));
    const where = `${first.layer} is the first layer whose flag is set, in the ${first.pass} pass.`;
    const cause = current.cause === first.layer ? "" : ` The cause is ${current.cause === "loss scale" ? "the loss scale" : `in front of it, in ${current.cause}`}.`;
    solved = true;
    show();
    status.textContent = `${verdict}${where}${cause} ${current.why} The cure: ${current.cure}.`;
  }

  const head = ["layer", "should compute", "results", "look", "flags, forward", "flags, backward", "guess"].map((text) => make("th", {scope: "col"}, text));
  begin(0);
  return [
    symptom,
    make("div", {class: "live-wide live-layers", tabindex: 0, role: "region", "aria-label": "The layers of the network and their flags"},
      make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...[...rows.values()].map(({row}) => row)))),
    make("p", {class: "live-controls"}, scaleButton, " ", answer, " ", another),
    status,
    make("p", {class: "live-controls"}, make("label", {}, cure, cureText)),
    details,
  ];
});
