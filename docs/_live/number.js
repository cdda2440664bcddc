// A number in nine formats: type it, drag it, or flip a bit of one of them.
"use strict";

live.figure("number", () => {
  const {make, percent, textOf} = live;
  const formats = Object.values(live.formats);
  const DRAWS = 200;
  let typed = 0.1, chosen = live.formats.FP16, draws = null;

  const input = make("input", {id: "live-number", type: "text", inputmode: "decimal", size: 14, oninput: () => {
    const value = valueOfText(input.value);
    input.setAttribute("aria-invalid", String(value === null));
    if (value !== null) show(value);
    else status.textContent = (input.value.trim() ? `Cannot read "${input.value.trim()}" as a number: ` : "Type a number: ") +
      `0.1 or 0,1, 1/3, 2^-24, 1e-8, inf or nan. Shown is ${textOf(typed)}.`;
  }});
  const slider = make("input", {type: "range", min: -40, max: 20, step: 0.01, "aria-label": "Its size: drag", oninput: () => {
    set((typed < 0 ? -1 : 1) * Number((2 ** Number(slider.value)).toPrecision(4)));
  }});
  const examples = ["0.1", "1/3", "2049", "65520", "2^-24", "1e-8"].map((text) =>
    make("button", {type: "button", onclick: () => set(valueOfText(text), text)}, text));
  const rows = new Map(formats.map((format) => [format, rowOf(format)]));
  const status = make("p", {role: "status"});
  const line = make("div", {class: "live-line"});
  const again = make("button", {type: "button", onclick: () => {
    draws = Array.from({length: DRAWS}, () => Math.random());
    showLine();
  }}, `Round it stochastically, ${DRAWS} times`);

  // A decimal number, with a point or a comma, a fraction such as 1/3, a power such as 2^-24, "inf" or "nan"; else null.
  function valueOfText(text) {
    const plain = text.trim().toLowerCase().replace(/[−–]/g, "-");
    const special = plain.match(/^([+-]?)(?:(inf|infinity|∞)|nan)$/);
    if (special) return special[2] ? (special[1] === "-" ? -Infinity : Infinity) : NaN;
    const numbers = plain.split(/[/^]/).map((part) => part.trim() ? Number(part.replace(",", ".")) : NaN);
    if (numbers.length > 2 || numbers.some(Number.isNaN)) return null;
    const [a, b] = numbers;
    if (b === undefined) return a;
    return plain.includes("/") ? a / b : a ** b;
  }

  function rowOf(format) {
    const bits = live.bitsOf(0, format).map((_, place) => {
      const part = place === 0 ? "sign" : place <= format.exponentBits ? "exponent" : "fraction";
      const within = place <= format.exponentBits ? format.exponentBits - place
        : format.exponentBits + live.fractionBits(format) - place;
      const name = `${format.name}, ${part}${part === "sign" ? "" : `, bit ${within}`}`;
      return make("button", {type: "button", class: part, "aria-label": name, tabindex: place ? -1 : 0,
        onclick: () => flip(format, place), onkeydown: (event) => move(event, format, place)});
    });
    const choice = make("input", {type: "radio", name: "live-number-format", value: format.name, onchange: () => {
      chosen = format;
      show(typed);
    }});
    const cells = {value: make("td"), error: make("td"), what: make("span", {class: "what"})};
    const row = make("tbody", {},
      make("tr", {}, make("th", {scope: "row", rowspan: 2}, make("label", {}, choice, " ", format.name)), cells.value, cells.error),
      make("tr", {}, make("td", {class: "bits", colspan: 2}, ...bits, cells.what)));
    return {row, bits, choice, cells};
  }

  // Tab goes to a format, arrows go from bit to bit.
  function move(event, format, place) {
    const {bits} = rows.get(format), step = {ArrowRight: 1, ArrowLeft: -1, Home: -place, End: bits.length - 1 - place}[event.key];
    if (step === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    const next = bits[Math.min(bits.length - 1, Math.max(0, place + step))];
    for (const bit of bits) bit.tabIndex = bit === next ? 0 : -1;
    next.focus();
  }

  function flip(format, place) {
    const bits = live.bitsOf(rounded(format), format);
    bits[place] = 1 - bits[place];
    chosen = format;
    set(live.valueOf(bits, format));
  }

  const rounded = (format) => live.round([typed], format)[0];

  // Whether a rounded number is NaN, and the format has no code for it.
  const hasNo = (value, format) => Number.isNaN(value) && format.finiteOnly && !format.hasNaN;

  // What rounding to the format did to the number, in words.
  function whatHappened(value, format) {
    if (Number.isNaN(typed)) return hasNo(value, format) ? "this format has no NaN" : "not a number";
    if (!Number.isFinite(typed) && !Number.isNaN(value)) return Number.isFinite(value) ? "overflow: the largest number" : "infinite";
    if (Number.isNaN(value)) return "overflow: NaN, as it has no infinity";
    if (!Number.isFinite(value)) return "overflow: infinite";
    if (Math.abs(typed) > format.largest && Number.isFinite(format.beyond)) return "overflow: the largest number";
    if (value === 0) return typed === 0 ? "exact" : "underflow: zero";
    const subnormal = Math.abs(value) < 2 ** format.minExponent ? ", subnormal: fewer bits" : "";
    return (value === typed ? "exact" : "rounded") + subnormal;
  }

  function errorText(value) {
    if (!Number.isFinite(value) || !Number.isFinite(typed) || typed === 0) return value === typed ? "0 %" : "–";
    return percent(Math.abs(value - typed) / Math.abs(typed));
  }

  function set(value, text) {
    input.value = text ?? textOf(value, 17).replace("−", "-");
    input.setAttribute("aria-invalid", "false");
    show(value);
  }

  function show(value) {
    typed = value;
    draws = null;
    const size = Math.abs(value);
    if (size > 0 && Number.isFinite(size) && document.activeElement !== slider) slider.value = Math.log2(size);
    for (const [format, {row, bits, choice, cells}] of rows) {
      const result = rounded(format), isMissing = hasNo(result, format);
      live.bitsOf(result, format).forEach((bit, place) => {
        bits[place].dataset.bit = isMissing ? "" : bit;  // shown by the style sheet; the name and aria-pressed say it
        bits[place].setAttribute("aria-pressed", String(bit === 1 && !isMissing));
      });
      choice.checked = format === chosen;
      row.classList.toggle("chosen", format === chosen);
      cells.value.textContent = isMissing ? "–" : textOf(result);
      cells.error.textContent = errorText(result);
      cells.what.textContent = whatHappened(result, format);
    }
    const result = rounded(chosen);
    status.textContent = `${textOf(value)} in ${chosen.name} is ${textOf(result)}: ` +
      `${whatHappened(result, chosen)}; relative error ${errorText(result)}.`;
    showLine();
  }

  // The two numbers of the chosen format beside the typed one, the cloud of stochastic roundings, and its mean.
  function showLine() {
    const nearest = rounded(chosen);
    again.disabled = !Number.isFinite(nearest) || nearest === typed || Math.abs(typed) > chosen.largest;
    if (again.disabled) {
      const why = Number.isNaN(typed) ? "NaN lies between no two numbers: nothing is rounded." : nearest === typed ? `${chosen.name} has this number: nothing is rounded.`
        : `Beyond ${chosen.name}'s largest number, ${textOf(chosen.largest)}, there is no other to round to.`;
      line.replaceChildren(make("p", {}, why));
      return;
    }
    const [under, over] = live.neighbours(nearest, chosen);
    const [below, above] = nearest < typed ? [nearest, over] : [under, nearest];
    const share = (typed - below) / (above - below), place = (value) => 100 * (value - below) / (above - below);
    const ends = [["below", below], ["above", above]].map(([name, value]) =>
      make("span", {class: `end ${name} ${value === nearest ? "nearest" : ""}`}, textOf(value)));
    const marks = [make("span", {class: "typed", style: `left: ${place(typed)}%`, title: "the number"})];
    const words = [`Between ${textOf(below)} and ${textOf(above)}, ${textOf(above - below, 3)} apart; the nearest is ` +
      `${textOf(nearest)}.`];
    if (draws) {
      const results = live.roundStochastically(typed, draws, chosen);
      const up = results.reduce((count, value) => count + (value === Math.fround(above)), 0);
      const mean = below + (above - below) * up / DRAWS;
      results.forEach((value, count) => marks.push(make("span", {class: "dot",
        style: `left: ${place(value) + (value < typed ? 4 : -4) * (draws[count] * 7919 % 1)}%; top: ${12 + 40 * (draws[count] * 104729 % 1)}%`})));
      marks.push(make("span", {class: "mean", style: `left: ${place(mean)}%`, title: "the mean of the roundings"}));
      words.push(`Stochastically, ${up} of ${DRAWS} went up, where ${Math.round(DRAWS * share)} were to be expected: ` +
        `their mean is ${textOf(mean, 5)}, and rounding to the nearest always gives ${textOf(nearest, 5)}.`);
    }
    line.replaceChildren(make("div", {class: draws ? "axis cloud" : "axis", "aria-hidden": "true"}, ...ends, ...marks), make("p", {}, words.join(" ")));
  }

  const head = ["format", "value", "error"].map((text) => make("th", {scope: "col"}, text));
  const legend = ["sign", "exponent", "fraction"].map((part) => make("span", {class: part}, part));
  set(typed, "0.1");
  return [
    make("p", {class: "live-controls"}, make("label", {for: "live-number"}, "A number "), input, " ", slider),
    make("p", {class: "live-controls"}, "or ", ...examples, make("span", {class: "live-key"}, "bits: ", ...legend)),
    make("div", {class: "live-wide", tabindex: 0, role: "region", "aria-label": "The number in nine formats"},
      make("table", {}, make("thead", {}, make("tr", {}, ...head)), ...[...rows.values()].map(({row}) => row))),
    status, line, make("p", {class: "live-controls"}, again),
  ];
});
