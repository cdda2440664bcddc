// The arithmetic of the live training: a small network, trained step by step in a format. No DOM here.
//
// Every operation is one of IEEE 754 on FP32 numbers (a JavaScript number that is the sum, product, quotient or square root of FP32
// numbers, and is stored in a Float32Array, is rounded as FP32 arithmetic rounds it), then rounded to the format. Sums are FP32, in order.
"use strict";

const smallTraining = (() => {
  const {transposed} = live;
  const POINTS = 128, HIDDEN = 24, MOMENTUM = Math.fround(0.9), EPSILON = 2 ** -16, PAIRS = 4;
  const INTERVAL = 50, LARGEST_SCALE = 2 ** 24;  // of dynamic loss scaling: finite steps until the scale grows, and how far
  const FORMATS = ["FP32", "TF32", "BF16", "FP16", "E4M3", "E5M2"];
  const SHAPES = {W1: [2, HIDDEN], b1: [1, HIDDEN], W2: [HIDDEN, HIDDEN], b2: [1, HIDDEN], W3: [HIDDEN, 1], b3: [1, 1]};

  // What differs between two trainings; the last three are powers of two, as exponents.
  const DEFAULTS = {format: "FP16", masters: true, scaling: "dynamic", scale: 16, normalization: "FP32", stochastic: false,
    start: "random", rate: -4, inputs: 0, loss: 0};

  // Two spirals of 64 points, as rows x, y; the second is the first turned by half a turn. Labels are 1 and -1.
  function spirals() {
    const inputs = new Float32Array(2 * POINTS), labels = new Float32Array(POINTS);
    let [x, y] = [1, 0];
    for (let place = 0; place < POINTS / 2; place++) {
      const radius = (place + 8) / 72;
      inputs.set([radius * x, radius * y, -radius * x, -radius * y], 4 * place);
      labels.set([1, -1], 2 * place);
      [x, y] = [(399 * x - 40 * y) / 401, (40 * x + 399 * y) / 401];  // 40² + 399² = 401²: a turn by 5.7 degrees
    }
    return {inputs, labels};
  }

  // He's initialization; a sum of four uniform numbers has nearly a normal distribution. Or lesson 02's: all weights are large, and the
  // hidden units of the second layer come in pairs with opposite output weights, so that the network's output is 0.
  function initialWeights(start) {
    const uniform = live.random(1), half = HIDDEN / 2;
    for (let warm = 0; warm < 8; warm++) uniform();
    const weights = Float32Array.from(Object.entries(SHAPES).flatMap(([name, [inner, columns]]) => Array.from({length: inner * columns}, () =>
      name.startsWith("b") ? 0 : (uniform() + uniform() + uniform() + uniform() - 2) * Math.sqrt(6 / inner))));
    if (start === "random") return weights;
    const {W1, b1, W2, b2, W3} = parts(weights);
    for (let place = 0; place < W1.length; place++) W1[place] *= 2 ** (2 * PAIRS);
    for (let unit = 0; unit < HIDDEN; unit++) [b1[unit], b2[unit]] = [2 * uniform() - 1, 2 ** PAIRS * (2 * uniform() - 1)];
    for (let unit = 0; unit < half; unit++) {
      for (let inner = 0; inner < HIDDEN; inner++) W2[HIDDEN * inner + half + unit] = W2[HIDDEN * inner + unit] *= 2 ** PAIRS;
      [b2[half + unit], W3[half + unit]] = [b2[unit], -(W3[unit] *= 2 ** PAIRS)];
    }
    return weights;
  }

  // Return the parts of an array of all weights, by name.
  function parts(weights) {
    let end = 0;
    return Object.fromEntries(Object.entries(SHAPES).map(([name, [inner, columns]]) =>
      [name, weights.subarray(end, end += inner * columns)]));
  }

  // One network that is trained, with settings that may change between steps.
  class Training {
    constructor(settings) {
      this.settings = {...DEFAULTS, ...settings};
      this.weights = initialWeights(this.settings.start);  // FP32 masters; without masters, numbers of the format
      this.velocity = new Float32Array(this.weights.length);
      this.scale = 2 ** this.settings.scale;
      this.finiteSteps = 0;  // in a row, since the scale changed
      this.skips = [];  // numbers of the steps that were skipped
      this.draw = live.randomIntegers(2);  // for stochastic rounding
      this.losses = [];
      this.scales = [];
      this.prepare();
    }

    // Change settings. A new start value of the loss scale is its value from now on.
    change(settings) {
      const changed = Object.entries(settings).filter(([name, value]) => this.settings[name] !== value).map(([name]) => name);
      Object.assign(this.settings, settings);
      if (changed.some((name) => name === "scale" || name === "scaling")) [this.scale, this.finiteSteps] = [2 ** this.settings.scale, 0];
      this.prepare();
    }

    // Round what the settings ask for: TF32 is a format of the operands of products alone, all else is FP32 there.
    prepare() {
      const {format, masters, normalization, inputs} = this.settings, data = spirals();
      const stored = live.formats[format === "TF32" ? "FP32" : format];
      const asTheyAre = (values) => values;
      this.round = stored.name === "FP32" ? asTheyAre : (values) => live.round(values, stored);
      this.roundOperand = format === "TF32" ? (values) => live.round(values, live.formats.TF32) : asTheyAre;
      this.roundInNormalization = normalization === "FP32" ? asTheyAre : this.round;
      this.stored = stored;
      this.labels = data.labels;
      this.inputs = this.round(data.inputs.map((value) => value * 2 ** inputs));
      if (!masters) this.weights = this.round(this.weights);
      this.copies = this.round(this.weights);
      if (this.settings.scaling === "none") this.scale = 1;
    }

    product(a, b, inner) {
      return live.product(this.roundOperand(a), this.roundOperand(b), inner);
    }

    // A product plus a bias, rounded once.
    dense(x, weights, bias, inner) {
      const columns = bias.length;
      return this.round(this.product(x, weights, inner).map((value, place) => value + bias[place % columns]));
    }

    // Means over the rows in the normalization: sums in order, which are rounded after each addition if it is not in FP32.
    meanOfRows(values) {
      let sums = new Float32Array(HIDDEN);
      for (let first = 0; first < values.length; first += HIDDEN) {
        for (let column = 0; column < HIDDEN; column++) sums[column] += values[first + column];
        sums = this.roundInNormalization(sums);
      }
      return this.roundInNormalization(sums.map((sum) => sum / POINTS));
    }

    // Batch normalization over the rows: from their own mean and deviation, or from those of the training.
    normalize(z, moments) {
      const {roundInNormalization: round} = this;
      let mean, deviation;
      if (moments) ({mean, deviation} = moments);
      else mean = this.meanOfRows(z);
      const centred = round(z.map((value, place) => value - mean[place % HIDDEN]));
      if (!moments) {
        const squares = round(centred.map((value) => value * value));
        const variance = this.meanOfRows(squares);
        deviation = round(round(variance.map((value) => value + EPSILON)).map((value) => Math.sqrt(value)));
      }
      return {normal: this.round(centred.map((value, place) => value / deviation[place % HIDDEN])), mean, deviation};
    }

    throughNormalization(gradient, {normal, deviation}) {
      const {roundInNormalization: round} = this;
      const mean = this.meanOfRows(gradient);
      const along = round(gradient.map((value, place) => value * normal[place]));
      const meanAlong = this.meanOfRows(along);
      const parallel = round(normal.map((value, place) => value * meanAlong[place % HIDDEN]));
      const centred = round(gradient.map((value, place) => value - mean[place % HIDDEN]));
      const rest = round(centred.map((value, place) => value - parallel[place]));
      return this.round(rest.map((value, place) => value / deviation[place % HIDDEN]));
    }

    forward(inputs, moments) {
      const {W1, b1, W2, b2, W3, b3} = parts(this.copies), relu = (values) => values.map((value) => value < 0 ? 0 : value);
      const normalized = this.normalize(this.round(this.product(inputs, W1, 2)), moments);
      const h1 = relu(this.round(normalized.normal.map((value, place) => value + b1[place % HIDDEN])));
      const h2 = relu(this.dense(h1, W2, b2, HIDDEN));
      return {normalized, h1, h2, output: this.dense(h2, W3, b3, HIDDEN)};
    }

    // Return the output for points, normalized as the training's points are now.
    predict(points) {
      const inputs = this.round(points.map((value) => value * 2 ** this.settings.inputs)), results = [];
      const moments = this.forward(this.inputs).normalized;
      for (let first = 0; first < inputs.length; first += 1024)
        results.push(...this.forward(inputs.subarray(first, first + 1024), moments).output);
      return results;
    }

    // The loss, and the gradients of all weights times the loss scale: sums in FP32, and those rounded to the format.
    gradients() {
      const {labels} = this, {W2, W3} = parts(this.copies), {normalized, h1, h2, output} = this.forward(this.inputs);
      const errors = output.map((value, point) => value - labels[point]);
      const squares = errors.map((error) => error * error);
      const loss = Math.fround(squares.reduce((sum, square) => Math.fround(sum + square), 0) / (2 * POINTS));
      const factor = this.scale * 2 ** this.settings.loss / POINTS, ones = new Float32Array(POINTS).fill(1);
      const open = (gradient, h) => gradient.map((value, place) => h[place] > 0 ? value : 0 * h[place]);  // NaN stays NaN

      const givenAtOutput = errors.map((error) => error * factor), atOutput = this.round(givenAtOutput);
      const of = {W3: this.product(transposed(h2, HIDDEN), atOutput, POINTS), b3: live.product(ones, atOutput, POINTS)};
      const atH2 = open(this.round(this.product(atOutput, transposed(W3, 1), 1)), h2);
      [of.W2, of.b2] = [this.product(transposed(h1, HIDDEN), atH2, POINTS), live.product(ones, atH2, POINTS)];
      const atH1 = open(this.round(this.product(atH2, transposed(W2, HIDDEN), HIDDEN)), h1);
      of.b1 = live.product(ones, atH1, POINTS);
      const atZ = this.throughNormalization(atH1, normalized);
      of.W1 = this.product(transposed(this.inputs, 2), atZ, POINTS);
      const given = new Float32Array(this.weights.length);
      Object.entries(parts(given)).forEach(([name, part]) => part.set(of[name]));
      return {loss, given, rounded: this.round(given), givenAtOutput, atOutput, output, deviation: normalized.deviation};
    }

    // Train one step; returns what it was.
    step() {
      const {masters, stochastic, rate, loss: lossExponent, scaling} = this.settings, {scale} = this;
      const found = this.gradients(), finite = found.rounded.every(Number.isFinite), skipped = !finite && scaling !== "none";
      this.losses.push(found.loss);
      this.scales.push(scale);
      let kept = 0, moved = 0;
      if (skipped) this.skips.push(this.losses.length);
      else {
        const trueGradients = found.rounded.map((value) => value / (scale * 2 ** lossExponent));
        const slowed = this.velocity.map((value) => MOMENTUM * value);
        this.velocity = slowed.map((value, place) => value + trueGradients[place]);
        const updates = this.velocity.map((value) => value * 2 ** rate);
        let next = this.weights.map((value, place) => value - updates[place]);
        if (!masters && stochastic) next = live.roundEachStochastically(next, next.map(() => Math.floor(this.draw() / 128)), this.stored);
        else if (!masters) next = this.round(next);
        updates.forEach((update, place) => {
          if (update !== 0) next[place] === this.weights[place] ? kept++ : moved++;
        });
        this.weights = next;
        this.copies = this.round(next);
      }
      if (scaling === "dynamic") this.updateScale(finite);
      return {...found, scale, finite, skipped, lostUpdates: kept, updates: kept + moved};
    }

    // The rule of dynamic loss scaling.
    updateScale(finite) {
      if (!finite) [this.scale, this.finiteSteps] = [Math.max(this.scale / 2, 1), 0];
      else if (++this.finiteSteps === INTERVAL) [this.scale, this.finiteSteps] = [Math.min(2 * this.scale, LARGEST_SCALE), 0];
    }

    // How many of the points lie on their side, of `output`.
    static right(output, labels) {
      return output.reduce((count, value, point) => count + (value * labels[point] > 0 ? 1 : 0), 0);
    }
  }

  // Pairs of trainings: what both have, what A and B have, and the losses that they end with, rounded to three digits.
  const STEPS = 300;
  const PRESETS = [
    {name: "FP16 loses updates without masters", both: {start: "pairs", rate: -17}, A: {masters: false}, B: {}, losses: ["0.489", "0.14"],
      words: "All weights are large, and all updates small. Without masters A rounds nearly every sum of a weight and its " +
        "update back to the weight. B adds the same updates to FP32 masters."},
    {name: "E5M2 loses updates without masters", both: {format: "E5M2"}, A: {masters: false}, B: {}, losses: ["0.373", "0.0194"],
      words: "With 3 significant bits an update must be a sixteenth of its weight at least, or it is lost. A learns as long as updates are " +
        "large, and then stands still. B has FP32 masters."},
    {name: "BF16 without masters, rounded stochastically", both: {format: "BF16", masters: false, scaling: "none", rate: -6}, A: {},
      B: {stochastic: true}, losses: ["0.0241", "0.00896"], words: "Neither has masters. A rounds its weights to the nearest number, and soon " +
        "loses nearly all updates. B rounds stochastically: most updates are lost there too, but those that remain are larger, and right in the mean."},
    {name: "FP16 gradients underflow without loss scaling", both: {loss: -20}, A: {scaling: "none"}, B: {}, losses: ["0.51", "0.000533"],
      words: "The loss is in units in which it is a million times smaller. In FP16 all gradients of A are zero. The loss scale of B begins at 2^16, " +
        "and its gradients are divided by it in FP32."},
    {name: "BF16 needs no loss scaling", both: {loss: -20, scaling: "none"}, A: {}, B: {format: "BF16"}, losses: ["0.51", "0.00278"],
      words: "The same small loss, and neither has a loss scale. BF16 has the exponents of FP32, so no gradient of B is lost."},
    {name: "The loss scale is too large", both: {scale: 24}, A: {scaling: "static"}, B: {}, losses: ["0.51", "0.000606"],
      words: "At 2^24 gradients overflow in FP16, and each such step is skipped. A stays there. B halves its scale after each overflow " +
        "until the gradients fit, and doubles it after 50 finite steps."},
    {name: "Normalization in FP16 overflows", both: {inputs: 9}, A: {normalization: "format"}, B: {}, losses: ["0.5", "0.00056"],
      words: "The inputs are 512 times as large, which batch normalization should undo. In FP16 its squares are infinite from 256 on; a number " +
        "divided by infinity is 0, so A sees the same for each point. Its gradients are finite, and no step is skipped. B normalizes in FP32."},
    {name: "E4M3 and E5M2 under one loss scale", both: {scaling: "static", scale: 12}, A: {format: "E4M3"}, B: {format: "E5M2"}, losses: ["0.516", "0.0245"], words: "E4M3 ends at 448, and E5M2 at 57344. At 2^12 gradients overflow in E4M3, and each step of A is skipped."},
  ];

  return {POINTS, HIDDEN, INTERVAL, FORMATS, SHAPES, DEFAULTS, PRESETS, STEPS, Training, spirals, initialWeights, parts};
})();
