// What the figures share: the package's kernels, formats as bits, and small helpers for controls.
"use strict";

const live = (() => {
  const {formats, accumulations} = mpgluonKernels;
  for (const format of Object.values(formats)) format.beyond = Number(format.beyond);
  for (const [name, format] of Object.entries(formats)) format.name = name;

  const bytes = Uint8Array.from(atob(mpgluonKernels.module), (letter) => letter.charCodeAt(0));
  const {exports} = new WebAssembly.Instance(new WebAssembly.Module(bytes), {});
  exports._initialize();
  const buffer = new Float32Array(exports.memory.buffer, exports.buffer(), 1 << 16);
  const gridOf = (f) => [f.significandBits, f.minExponent, f.largest, f.beyond];

  // Round numbers to a format; returns a new array.
  function round(values, format) {
    buffer.set(values);
    if (format.name === "FP16") exports.round_float16(values.length);
    else exports.round_grid(values.length, ...gridOf(format));
    return buffer.slice(0, values.length);
  }

  // Round a number stochastically, once for each draw in [0, 1).
  function roundStochastically(value, draws, format) {
    buffer.set(draws.map((draw) => Math.floor(draw * 2 ** 24)));
    exports.round_stochastically(value, draws.length, ...gridOf(format));
    return buffer.slice(0, draws.length);
  }

  // Round numbers stochastically, each with a draw of its own from 0 to 2^24 - 1; returns a new array.
  function roundEachStochastically(values, draws, format) {
    buffer.set(values);
    buffer.set(draws, values.length);
    exports.round_each_stochastically(values.length, ...gridOf(format));
    return buffer.slice(0, values.length);
  }

  // Multiply matrices, (rows, inner) and (inner, columns), each sum in FP32 and in order.
  function product(a, b, inner) {
    const rows = a.length / inner, columns = b.length / inner, before = a.length + b.length;
    buffer.set(a);
    buffer.set(b, a.length);
    exports.product(rows, inner, columns);
    return buffer.slice(before, before + rows * columns);
  }

  // Return the columns of a matrix, given their number, as rows.
  function transposed(a, columns) {
    const rows = a.length / columns, result = new Float32Array(a.length);
    for (let row = 0; row < rows; row++)
      for (let column = 0; column < columns; column++) result[rows * column + row] = a[columns * row + column];
    return result;
  }

  // Whole random numbers from 1 to 2^31 - 2, the same for every reader (Park and Miller's generator).
  function randomIntegers(seed) {
    let state = seed;
    return () => (state = state * 48271 % 2147483647);
  }

  // The same as numbers in (0, 1).
  function random(seed) {
    const draw = randomIntegers(seed);
    return () => draw() / 2147483647;
  }

  // Add the products of two lists of FP16 numbers as a generation of Tensor Cores does.
  function sumAsTensorCore(a, b, generation) {
    a.forEach((value, place) => buffer.set([value, b[place]], 2 * place));
    return exports.sum_as_tensor_core(a.length, ...accumulations[generation], -14);
  }

  // Return the sums so far of products, in FP32 or rounded to FP16 after each addition.
  function runningSums(a, b, inFloat16) {
    a.forEach((value, place) => buffer.set([value, b[place]], 2 * place));
    exports.running_sums(a.length, inFloat16 ? 1 : 0);
    return buffer.slice(0, a.length);
  }

  // ---- Numbers of a format as codes: sign, exponent field and fraction.

  const fractionBits = (f) => f.significandBits - 1;
  const widthOf = (f) => 1 + f.exponentBits + fractionBits(f);

  // Return the code of a number of the format, as an integer without the sign.
  function sizeCode(value, f) {
    const size = Math.abs(value), top = 2 ** f.exponentBits - 1, one = 2 ** fractionBits(f);
    if (Number.isNaN(value)) return f.finiteOnly ? top * one + one - 1 : top * one + one / 2;
    if (size === Infinity) return top * one;
    if (size < 2 ** f.minExponent) return size / 2 ** (f.minExponent - fractionBits(f));
    let exponent = Math.floor(Math.log2(size));
    if (2 ** exponent > size) exponent -= 1;
    if (2 ** (exponent + 1) <= size) exponent += 1;
    return (exponent - f.minExponent) * one + (size / 2 ** exponent) * one;
  }

  // Return the number that a code without its sign stands for.
  function sizeOf(code, f) {
    const top = 2 ** f.exponentBits - 1, one = 2 ** fractionBits(f);
    const field = Math.floor(code / one), fraction = code % one;
    if (field === top && !f.finiteOnly) return fraction ? NaN : Infinity;
    if (field === top && f.hasNaN && fraction === one - 1) return NaN;
    const scale = 2 ** (Math.max(field, 1) - 1 + f.minExponent);
    return scale * ((field ? 1 : 0) + fraction / one);
  }

  const isNegative = (value) => value < 0 || Object.is(value, -0);

  // Return the bits of a number of the format, the sign first.
  function bitsOf(value, f) {
    const code = sizeCode(value, f);
    const bits = [isNegative(value) ? 1 : 0];
    for (let place = widthOf(f) - 2; place >= 0; place--) bits.push(Math.floor(code / 2 ** place) % 2);
    return bits;
  }

  function valueOf(bits, f) {
    const code = bits.slice(1).reduce((sum, bit) => 2 * sum + bit, 0);
    return (bits[0] ? -1 : 1) * sizeOf(code, f);
  }

  // Return the numbers below and above a finite number of the format.
  function neighbours(value, f) {
    const code = sizeCode(value, f), sign = isNegative(value) ? -1 : 1;
    const outer = sign * sizeOf(code + 1, f);
    const inner = code > 0 ? sign * sizeOf(code - 1, f) : -sign * sizeOf(1, f);
    return sign > 0 ? [inner, outer] : [outer, inner];
  }

  // ---- Controls.

  // Make an element with attributes, and children that are elements or text.
  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children);
    return element;
  }

  // Write a number so that no digit of the format is missing, and few more are there.
  function textOf(value, digits = 9) {
    if (Number.isNaN(value)) return "NaN";
    if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
    if (Object.is(value, -0)) return "−0";
    return String(Number(value.toPrecision(digits))).replace("-", "−").replace("e−", "e-");
  }

  // A part in percent, with two digits; only the whole is 100 %.
  function percent(part, of = 1) {
    const rounded = Number((100 * part / of).toPrecision(2));
    return !Number.isFinite(rounded) ? "–" : `${part < of ? Math.min(99.9, rounded) : rounded} %`;
  }

  // ---- Histograms over exponents of 2, with the range of a format.

  const PARTS = ["zero", "subnormal", "normal", "overflow"];
  let histograms = 0;

  // Say what became of a number that was rounded: one of PARTS, or "none" of a zero and of what was not finite.
  function partOf(given, result, f) {
    if (given === 0 || !Number.isFinite(given)) return "none";
    if (!Number.isFinite(result)) return "overflow";
    if (result === 0) return "zero";
    return Math.abs(result) < 2 ** f.minExponent ? "subnormal" : "normal";
  }

  // Draw numbers by their exponents from `low` to below `high`, and what became of each; `words` describe the picture.
  function histogram(given, became, f, {low, high, axis, words, beyond = "overflow"}) {
    const counts = new Map(), number = histograms++;
    given.forEach((value, place) => {
      if (became[place] === "none") return;
      const bin = Math.min(high - 1, Math.max(low, Math.floor(Math.log2(Math.abs(value)))));
      if (!counts.has(bin)) counts.set(bin, Object.fromEntries(PARTS.map((part) => [part, 0])));
      counts.get(bin)[became[place]] += 1;
    });
    const tallest = Math.max(1, ...[...counts.values()].map((of) => PARTS.reduce((sum, part) => sum + of[part], 0)));
    const x = (power) => 480 * (Math.min(high, Math.max(low, power)) - low) / (high - low);
    const rect = (kind, part, left, top, right, bottom) => bottom - top < 0.01 ? "" :
      `<rect class="${kind} ${part}" ${part === "zero" || part === "overflow" ? `style="fill: url(#live-${part}-${number})"` : ""} ` +
      `x="${left.toFixed(2)}" y="${top.toFixed(2)}" width="${(right - left).toFixed(2)}" height="${(bottom - top).toFixed(2)}"/>`;
    const bars = [...counts].flatMap(([bin, of]) => {
      let bottom = 190;
      return PARTS.map((part) => {
        const lost = part === "zero" || part === "overflow";  // even one is to be seen
        const height = of[part] ? Math.max(lost ? 3 : 0, 140 * of[part] / tallest) : 0;
        bottom -= height;
        return rect("bar", part, x(bin) + 0.3, bottom, x(bin + 1) - 0.3, bottom + height);
      });
    });
    const edges = [low, f.minExponent - fractionBits(f) - 1, f.minExponent, Math.log2(f.largest), high].map(x);
    const zones = ["zero", "subnormal", "normal", beyond].map((name, place) => {
      const [from, to] = edges.slice(place, place + 2), middle = Math.min(440, Math.max(40, (from + to) / 2));
      if (to - from < 1) return "";
      return `${to < 480 ? `<path d="M${to.toFixed(2)} 42V190"/>` : ""}<text x="${middle.toFixed(2)}" y="${place % 2 ? 36 : 16}">${name}</text>`;
    });
    const first = Math.ceil((low + 3) / 10) * 10;
    const marks = Array.from({length: Math.floor((high - 3 - first) / 10) + 1}, (_, count) => first + 10 * count)
      .map((power) => `<text x="${x(power)}" y="208">${power}</text><path d="M${x(power)} 190v4"/>`);
    const box = make("div", {class: "live-histogram"});
    box.innerHTML = `<svg viewBox="0 0 480 236" role="img"><defs>` +
      `<pattern id="live-zero-${number}" class="zero" width="4" height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><path d="M2 0v4"/></pattern>` +
      `<pattern id="live-overflow-${number}" class="overflow" width="4" height="4" patternUnits="userSpaceOnUse"><path d="M0 2h4M2 0v4"/></pattern>` +
      `</defs>${bars.join("")}${zones.join("")}<path class="ground" d="M0 190h480"/>${marks.join("")}<text x="240" y="230"></text></svg>`;
    box.querySelector("svg").setAttribute("aria-label", words);
    box.querySelector("text:last-child").textContent = axis;
    return box;
  }

  const figures = {};

  // Replace what stands in the place of each figure of a name.
  function figure(name, build) {
    figures[name] = build;
    const start = () => {
      for (const box of document.querySelectorAll(`.live[data-figure="${name}"]`)) {
        box.replaceChildren(...build());
        box.classList.add("ready");
      }
    };
    if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
    else start();
  }

  return {
    formats, accumulations, round, roundStochastically, roundEachStochastically, product, transposed,
    randomIntegers, random, sumAsTensorCore, runningSums,
    bitsOf, valueOf, neighbours, fractionBits, make, textOf, percent, figure, histogram, partOf, PARTS,
  };
})();
