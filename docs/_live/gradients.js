// Recorded gradients under a loss scale: which become zero, and which overflow, in seven formats.
"use strict";

// The gradients, and rounding with a scale for each block of 32, as mpgluon.formats.scaling.round_scaled does it.
const gradientsUnderScale = (() => {
  const {layers, block} = mpgluonGradients;

  // Decode base64 of little-endian BF16 codes, the upper halves of FP32 numbers.
  function decoded(text) {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const words = new Uint32Array(bytes.length / 2).map((_, place) =>
      (bytes[2 * place] | bytes[2 * place + 1] << 8) << 16);
    return new Float32Array(words.buffer);
  }

  // Return a fraction in [0.5, 1) and an exponent of 2 whose product is a positive number.
  function parts(value) {
    let exponent = Math.floor(Math.log2(value)) + 1;
    if (value >= 2 ** exponent) exponent += 1;
    if (value < 2 ** (exponent - 1)) exponent -= 1;
    return [value / 2 ** exponent, exponent];
  }

  // Return the exponent of the largest power of two, within 2^-100 to 2^100, that keeps a number within the format.
  function scaleExponent(largest, format) {
    if (largest === 0) return 0;
    const [fraction, exponent] = parts(largest), [most, highest] = parts(format.largest);
    return Math.min(100, Math.max(-100, highest - exponent - (fraction > most ? 1 : 0)));
  }

  // Return the values times the scale of their block, and these scales' exponents.
  function scaledBlocks(values, format) {
    const scaled = new Float32Array(values.length), exponents = new Int32Array(values.length);
    for (let first = 0; first < values.length; first += block) {
      const largest = values.subarray(first, first + block).reduce((most, value) => Math.max(most, Math.abs(value)), 0);
      exponents.fill(Number.isFinite(largest) ? scaleExponent(largest, format) : 0, first, first + block);
      for (let place = first; place < Math.min(first + block, values.length); place++)
        scaled[place] = Number.isFinite(largest) ? values[place] * 2 ** exponents[place] : NaN;
    }
    return {scaled, exponents};
  }

  // Round to a format with a scale per block; returns a new array.
  function roundInBlocks(values, format) {
    const {scaled, exponents} = scaledBlocks(values, format);
    const rounded = live.round(scaled, {...format, beyond: format.largest});
    return rounded.map((value, place) => value / 2 ** exponents[place]);
  }

  return {values: decoded(mpgluonGradients.values), layers, scaledBlocks, roundInBlocks};
})();

live.figure("gradients", () => {
  const {make, formats, partOf, percent, PARTS} = live;
  const {layers, scaledBlocks} = gradientsUnderScale;
  const MOST = 40;  // the largest exponent of the loss scale
  const WAYS = {
    "FP16": {format: formats.FP16}, "BF16": {format: formats.BF16}, "E5M2": {format: formats.E5M2}, "E4M3": {format: formats.E4M3},
    "E5M2 in blocks (MX)": {format: formats.E5M2, blocks: true}, "E4M3 in blocks (MX)": {format: formats.E4M3, blocks: true},
    "E2M1 in blocks (MX)": {format: formats.E2M1, blocks: true},
  };
  // The first convolution, and the convolutions of ResNet-50's four stages.
  const ENDS = [0, 1, 11, 24, 43, 53];
  const GROUPS = {"all 53 convolutions": [0, layers], "the first convolution": [0, 1]};
  for (let stage = 1; stage <= 4; stage++) GROUPS[`stage ${stage}`] = [ENDS[stage], ENDS[stage + 1]];
  const [LOW, HIGH] = [-60, 40];  // exponents of the picture
  let chosen = "FP16";

  const slider = make("input", {id: "live-loss-scale", type: "range", min: 0, max: MOST, value: 0, oninput: show});
  const scaleText = make("output", {for: "live-loss-scale"});
  const group = make("select", {"aria-label": "Layers", onchange: show}, ...Object.keys(GROUPS).map((name) => make("option", {}, name)));
  const keeping = make("button", {type: "button", onclick: () => goTo(limits().keeps ?? MOST)}, "Smallest scale that loses nothing");
  const fitting = make("button", {type: "button", onclick: () => goTo(limits().fits ?? 0)}, "Largest scale without an overflow");
  const rows = new Map(Object.keys(WAYS).map((name) => [name, rowOf(name)]));
  const picture = make("div");
  const legend = make("p", {class: "live-parts"});
  const status = make("p", {role: "status"});

  function rowOf(name) {
    const choice = make("input", {type: "radio", name: "live-gradients-format", value: name, onchange: () => {
      chosen = name;
      show();
    }});
    const cells = {zero: make("td"), overflow: make("td"), subnormal: make("td")};
    const row = make("tr", {}, make("th", {scope: "row"}, make("label", {}, choice, " ", name)), ...Object.values(cells));
    return {row, choice, cells};
  }

  function goTo(exponent) {
    slider.value = exponent;
    show();
  }

  function gradients() {
    const each = gradientsUnderScale.values.length / layers;
    const [first, end] = GROUPS[group.value];
    return gradientsUnderScale.values.subarray(first * each, end * each);
  }

  // Round the gradients times 2^exponent; return what was rounded (in blocks, times their scales) and what became of it.
  function roundedAt(exponent, {format, blocks}) {
    const scaled = gradients().map((value) => value * 2 ** exponent);
    const given = blocks ? scaledBlocks(scaled, format).scaled : scaled;
    const results = live.round(given, blocks ? {...format, beyond: format.largest} : format);
    const became = [...results].map((result, place) => partOf(given[place], result, format));
    return {given, became};
  }

  const countOf = (became, part) => became.reduce((count, one) => count + (one === part), 0);

  // Return the exponents of the smallest scale that makes no gradient zero, and of the largest without an overflow.
  function limits() {
    const way = WAYS[chosen], sizes = [...gradients()].map(Math.abs).filter((size) => size > 0);
    const smallest = sizes.reduce((a, b) => Math.min(a, b)), largest = sizes.reduce((a, b) => Math.max(a, b));
    const powers = Array.from({length: MOST + 1}, (_, exponent) => exponent);
    const at = (size, exponent) => live.round([size * 2 ** exponent], way.format)[0];
    return {
      keeps: powers.find((exponent) => at(smallest, exponent) !== 0),
      fits: powers.filter((exponent) => Number.isFinite(at(largest, exponent))).at(-1),
    };
  }

  // The limits as a sentence.
  function limitsText({format, blocks}) {
    if (blocks) return "Each block of 32 has a scale of its own, which follows its largest gradient: the loss scale changes nothing.";
    const {keeps, fits} = limits();
    const kept = keeps === undefined ? `Up to 2^${MOST}, each scale loses some` : `From 2^${keeps} on none becomes zero`;
    const over = fits === MOST ? `up to 2^${MOST} none overflows` : fits === undefined ? "the largest overflows at every scale"
      : `from 2^${fits + 1} on the largest overflows`;
    const both = keeps !== undefined && fits !== undefined && keeps <= fits ? "" : ` No scale keeps all of them in ${format.name}.`;
    return `${kept}; ${over}.${both}`;
  }

  function show() {
    // Shares are of the gradients that are not zero in FP32 already.
    const exponent = Number(slider.value), total = gradients().filter((value) => value !== 0).length;
    scaleText.textContent = `2^${exponent} = ${(2 ** exponent).toLocaleString("en")}`;
    for (const [name, {row, choice, cells}] of rows) {
      const {given, became} = roundedAt(exponent, WAYS[name]);
      for (const [part, cell] of Object.entries(cells)) cell.textContent = percent(countOf(became, part), total);
      choice.checked = name === chosen;
      row.classList.toggle("chosen", choice.checked);
      if (choice.checked) draw(given, became, exponent, total);
    }
    keeping.disabled = fitting.disabled = Boolean(WAYS[chosen].blocks);
  }

  // The histogram of the chosen format, and its words.
  function draw(given, became, exponent, total) {
    const way = WAYS[chosen], {format} = way;
    const shares = Object.fromEntries(PARTS.map((part) => [part, percent(countOf(became, part), total)]));
    const size = way.blocks ? "gradient × loss scale × scale of its block" : "gradient × loss scale";
    picture.replaceChildren(live.histogram(given, became, format, {low: LOW, high: HIGH, axis: `exponent of 2 of ${size}`,
      words: `Histogram of ${size}: ${shares.zero} become zero, ${shares.subnormal} are subnormal, ${shares.normal} normal, ` +
        `${shares.overflow} overflow in ${chosen}`, beyond: way.blocks ? "" : "overflow"}));
    legend.replaceChildren(...PARTS.map((part) => make("span", {class: part},
      part === "zero" ? `becomes zero: ${shares.zero}` : part === "overflow" ? `overflows: ${shares.overflow}` : `${part}: ${shares[part]}`)));
    status.textContent = `At loss scale 2^${exponent}, ${shares.zero} of the gradients become zero in ${chosen}, ` +
      `${shares.subnormal} are subnormal, and ${shares.overflow} overflow. ${limitsText(way)}`;
  }

  const head = ["format", "become zero", "overflow", "subnormal"].map((text) => make("th", {scope: "col"}, text));
  show();
  return [
    make("p", {class: "live-controls"}, make("label", {for: "live-loss-scale"}, "Loss scale "), slider, " ", scaleText),
    make("p", {class: "live-controls"}, keeping, " ", fitting, " ", make("label", {}, "Layers ", group)),
    status, picture, legend,
    make("div", {class: "live-wide", tabindex: 0, role: "region", "aria-label": "The gradients in seven formats"},
      make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...[...rows.values()].map(({row}) => row)))),
  ];
});
