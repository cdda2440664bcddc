// A long sum of FP16 products: in FP16, in FP32, and as three generations of Tensor Cores add.
"use strict";

live.figure("sum", () => {
  const {make, percent, textOf} = live;
  const LEVELS = [16, 64, 256, 1024, 4096];
  const ORDERS = {"as they come": (terms) => terms, "largest first": (terms) => sorted(terms, -1), "smallest first": (terms) => sorted(terms, 1)};
  const WAYS = {
    "FP16, rounded after each addition": (a, b) => live.runningSums(a, b, true).at(-1),
    "FP32, one after the other": (a, b) => live.runningSums(a, b, false).at(-1),
    "Tensor Core, Volta: 4 at a time": (a, b) => live.sumAsTensorCore(a, b, "volta"),
    "Tensor Core, Ampere: 8 at a time": (a, b) => live.sumAsTensorCore(a, b, "ampere"),
    "Tensor Core, Hopper: 16 at a time": (a, b) => live.sumAsTensorCore(a, b, "hopper"),
  };
  const sorted = (terms, sign) => [...terms].sort((x, y) => sign * (Math.abs(x[0] * x[1]) - Math.abs(y[0] * y[1])));

  const count = make("input", {type: "range", min: 0, max: LEVELS.length - 1, value: 3, "aria-label": "Number of terms", oninput: renew});
  const kind = make("select", {"aria-label": "Terms", onchange: renew},
    ...["all 1/3", "random, positive", "random, of both signs"].map((name) => make("option", {}, name)));
  const large = make("input", {type: "range", min: -1, max: 15, value: -1, step: 1, "aria-label": "A large first term", oninput: show});
  const order = make("select", {"aria-label": "Order", onchange: show}, ...Object.keys(ORDERS).map((name) => make("option", {}, name)));
  const [countText, largeText] = [make("output"), make("output")];
  const cells = new Map(Object.keys(WAYS).map((way) => [way, {value: make("td"), error: make("td")}]));
  const exactCell = make("td"), status = make("p", {role: "status"});
  const curve = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  curve.setAttribute("viewBox", "0 0 600 160");
  curve.setAttribute("role", "img");
  let terms = [];

  function renew() {
    const n = LEVELS[count.value], draw = live.random(7);
    const number = {"all 1/3": () => 1 / 3, "random, positive": draw, "random, of both signs": () => 2 * draw() - 1}[kind.value];
    const values = live.round(Array.from({length: 2 * n}, (_, place) => (place % 2 && kind.value === "all 1/3" ? 1 : number())), live.formats.FP16);
    terms = Array.from({length: n}, (_, place) => [values[2 * place], values[2 * place + 1]]);
    show();
  }

  function show() {
    const first = large.value < 0 ? [] : [[2 ** large.value, 1]];
    const all = ORDERS[order.value]([...first, ...terms]);
    const a = all.map(([x]) => x), b = all.map(([, y]) => y);
    // Products are exact in FP32; float64 holds the sum of these few thousand exactly enough to print it.
    const exact = a.reduce((sum, x, place) => sum + x * b[place], 0);
    const errors = [];
    for (const [way, sum] of Object.entries(WAYS)) {
      const value = sum(a, b), error = exact === 0 ? NaN : Math.abs(value - exact) / Math.abs(exact);
      cells.get(way).value.textContent = textOf(value);
      cells.get(way).error.textContent = percent(error);
      errors.push(error);
    }
    exactCell.textContent = textOf(exact);
    countText.textContent = `${LEVELS[count.value].toLocaleString("en")} products`;
    largeText.textContent = large.value < 0 ? "no large term" : `a first term of ${2 ** large.value}`;
    const half = cells.get("FP16, rounded after each addition");
    status.textContent = `The sum is ${textOf(exact)}. In FP16 it is ${half.value.textContent}, off by ${half.error.textContent}; ` +
      `with sums in FP32, ${cells.get("FP32, one after the other").error.textContent}.`;
    drawCurve(a, b);
  }

  // The sum so far in FP16 and in FP32.
  function drawCurve(a, b) {
    const series = [live.runningSums(a, b, false), live.runningSums(a, b, true)];
    const finite = series.flatMap((values) => [...values].filter(Number.isFinite));
    const [low, high] = [Math.min(0, ...finite), Math.max(1e-9, ...finite)];
    const path = (values) => [...values].filter(Number.isFinite).map((value, place) =>
      `${place ? "L" : "M"}${(10 + 580 * place / Math.max(1, values.length - 1)).toFixed(1)} ${(150 - 140 * (value - low) / (high - low)).toFixed(1)}`).join("");
    curve.innerHTML = `<path class="fp32" d="${path(series[0])}"/><path class="fp16" d="${path(series[1])}"/>`;
    curve.setAttribute("aria-label", `The sum so far: in FP32 it ends at ${textOf(series[0].at(-1))}, in FP16 at ${textOf(series[1].at(-1))}`);
  }

  const body = [...cells].map(([way, {value, error}]) => make("tr", {}, make("th", {scope: "row"}, way), value, error));
  const exactRow = make("tr", {}, make("th", {scope: "row"}, "exact"), exactCell, make("td"));
  renew();
  return [
    make("p", {class: "live-controls"}, make("label", {}, "How many ", count), " ", countText, " ", make("label", {}, "Terms ", kind)),
    make("p", {class: "live-controls"}, make("label", {}, "Drag a large term in ", large), " ", largeText, " ", make("label", {}, "Order ", order)),
    make("div", {class: "live-wide", tabindex: 0, role: "region", "aria-label": "The sum in five ways"},
      make("table", {}, make("thead", {}, make("tr", {}, ...["added", "sum", "error"].map((text) => make("th", {scope: "col"}, text)))),
        make("tbody", {}, exactRow, ...body))),
    curve, make("p", {class: "live-legend"}, make("span", {class: "fp32"}, "sum so far in FP32"), " ", make("span", {class: "fp16"}, "in FP16")),
    status,
  ];
});
