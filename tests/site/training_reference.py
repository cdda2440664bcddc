"""The live training in NumPy: its own implementation, which the figure equals bit for bit.

Operations on float32 arrays are rounded by NumPy as IEEE 754 says, and then by
:func:`mpgluon.formats.float_format.round_to` to the format. Sums are float32 and in order.
"""

from __future__ import annotations

import math

from mpgluon.formats.float_format import (
    FLOAT16,
    FLOAT32,
    SMALL,
    TFLOAT32,
    FloatFormat,
    format_named,
    round_to,
)

import numpy as np

FORMATS = {
    "FP32": FLOAT32,
    "TF32": TFLOAT32,
    "BF16": format_named("bfloat16"),
    "FP16": format_named("float16"),
    "E4M3": SMALL[0],
    "E5M2": SMALL[1],
}
POINTS, HIDDEN = 128, 24
SHAPES = {
    "W1": (2, HIDDEN),
    "b1": (HIDDEN,),
    "W2": (HIDDEN, HIDDEN),
    "b2": (HIDDEN,),
    "W3": (HIDDEN, 1),
    "b3": (1,),
}
DEFAULTS = {
    "format": "FP16",
    "masters": True,
    "scaling": "dynamic",
    "scale": 16,
    "normalization": "FP32",
    "stochastic": False,
    "start": "random",
    "rate": -4,
    "inputs": 0,
    "loss": 0,
}


def park_miller(seed):
    """Yield whole numbers from 1 to 2^31 - 2."""
    while True:
        seed = seed * 48271 % (2**31 - 1)
        yield seed


def spirals():
    """Return points, of shape (128, 2), and their labels, 1 and -1."""
    points, (x, y) = [], (1.0, 0.0)
    for place in range(POINTS // 2):
        radius = (place + 8) / 72
        points += [(radius * x, radius * y), (-radius * x, -radius * y)]
        x, y = (399 * x - 40 * y) / 401, (40 * x + 399 * y) / 401
    return np.array(points, np.float32), np.tile(np.float32([1, -1]), POINTS // 2)


def initial_weights(start):
    """Return all weights in one array, for a start "random" or "pairs"."""
    draws, made = park_miller(1), []
    for _ in range(8):
        next(draws)
    for name, shape in SHAPES.items():
        if name.startswith("b"):
            made.append(np.zeros(shape))
            continue
        four = [[next(draws) / (2**31 - 1) for _ in range(4)] for _ in range(shape[0] * shape[1])]
        sums = [((a + b) + c) + d for a, b, c, d in four]
        made.append((np.array(sums) - 2) * math.sqrt(6 / shape[0]))
    weights = np.concatenate([one.ravel() for one in made]).astype(np.float32)
    return weights if start == "random" else in_pairs(weights, draws)


def in_pairs(weights, draws):
    """Make weights large, and the second half of the second layer's units cancel the first."""
    w, large, half = parts(weights), np.float32(16), HIDDEN // 2
    uniform = np.array([next(draws) / (2**31 - 1) for _ in range(2 * HIDDEN)])
    b1, b2 = (2 * uniform - 1).reshape(HIDDEN, 2).astype(np.float32).T
    w2, w3 = w["W2"][:, :half] * large, w["W3"][:half] * large
    b2 = b2[:half] * large
    made = [w["W1"] * large * large, b1, np.hstack([w2, w2]), b2, b2, w3, -w3, w["b3"]]
    return np.concatenate([one.ravel() for one in made])


def parts(weights):
    """Return the arrays of weights by name."""
    ends = np.cumsum([int(np.prod(shape)) for shape in SHAPES.values()])
    split = np.split(weights, ends[:-1])
    return {name: one.reshape(shape) for (name, shape), one in zip(SHAPES.items(), split)}


def matrix_product(a, b):
    """Return a @ b, each sum in float32 and in order; 0 is added, so that no sum is -0."""
    products = a.T[:, :, None] * b[:, None, :]
    return np.add.accumulate(products, axis=0)[-1] + np.float32(0)


def round_stochastically(values, draws, fmt: FloatFormat):
    """Cut off, and go on to the number behind if the rest is more than the draw in 2^-24ths."""
    low = round_to(values, fmt, "toward_zero").astype(np.float64)
    _, exponent = np.frexp(values.astype(np.float64))
    spacing = np.ldexp(1.0, np.maximum(exponent - 1, fmt.min_exponent) - fmt.significand_bits + 1)
    rest = np.abs(values.astype(np.float64) - low) / spacing
    result = np.where(np.ldexp(rest, 24) > draws, low + np.copysign(spacing, values), low)
    beyond = np.copysign(fmt.overflow, values)
    result = np.where(np.abs(result) > fmt.max, beyond, result)
    return np.where(np.isfinite(values), result, round_to(values, fmt)).astype(np.float32)


class ReferenceTraining:
    """The same training; see docs/_live/training.step.js for the meaning of the settings."""

    def __init__(self, **settings):
        self.settings = {**DEFAULTS, **settings}
        self.weights = initial_weights(self.settings["start"])
        self.velocity = np.zeros_like(self.weights)
        self.scale = 2.0 ** self.settings["scale"]
        self.good_steps = self.skipped = 0
        self.draws = park_miller(2)
        self.prepare()

    def change(self, **settings):
        was = self.settings
        self.settings = {**was, **settings}
        if any(was[name] != self.settings[name] for name in ("scale", "scaling")):
            self.scale, self.good_steps = 2.0 ** self.settings["scale"], 0
        self.prepare()

    def prepare(self):
        settings = self.settings
        fmt = FORMATS[settings["format"]]
        self.stored = FLOAT32 if fmt == TFLOAT32 else fmt  # TF32 is for operands of products
        self.operands = fmt
        points, self.labels = spirals()
        self.points = self.to_format(points * np.float32(2.0 ** settings["inputs"]))
        if not settings["masters"]:
            self.weights = self.to_format(self.weights)
        self.copies = self.to_format(self.weights)
        if settings["scaling"] == "none":
            self.scale = 1.0

    def to_format(self, values):
        assert values.dtype == np.float32
        if self.stored == FLOAT16:  # NumPy rounds faster
            return values.astype(np.float16).astype(np.float32)
        return values if self.stored == FLOAT32 else round_to(values, self.stored)

    def inner(self, values):
        """Round the results of the normalization."""
        return values if self.settings["normalization"] == "FP32" else self.to_format(values)

    def product(self, a, b):
        if self.operands == TFLOAT32:
            a, b = round_to(a, TFLOAT32), round_to(b, TFLOAT32)
        return matrix_product(a, b)

    def mean(self, values):
        if self.settings["normalization"] == "FP32":
            return (np.add.accumulate(values)[-1] + np.float32(0)) / np.float32(POINTS)
        sums = np.zeros(values.shape[1], np.float32)
        for row in values:
            sums = self.inner(sums + row)
        return self.inner(sums / np.float32(POINTS))

    def gradients(self):
        """Return the loss, and the weights' gradients times the loss scale before rounding."""
        to_format, inner, w = self.to_format, self.inner, parts(self.copies)
        z = to_format(self.product(self.points, w["W1"]))
        centred = inner(z - self.mean(z))
        variance = self.mean(inner(centred * centred))
        deviation = inner(np.sqrt(inner(variance + np.float32(2.0**-16))))
        normal = to_format(centred / deviation)
        h1 = relu(to_format(normal + w["b1"]))
        h2 = relu(to_format(self.product(h1, w["W2"]) + w["b2"]))
        output = to_format(self.product(h2, w["W3"]) + w["b3"])

        errors = output - self.labels[:, None]
        loss = np.add.accumulate(errors * errors)[-1, 0] / np.float32(2 * POINTS)
        factor = np.float32(self.scale * 2.0 ** self.settings["loss"] / POINTS)
        g = to_format(errors * factor)
        ones = np.ones((1, POINTS), np.float32)
        made = {"W3": self.product(h2.T, g), "b3": matrix_product(ones, g)}
        g = through_relu(to_format(self.product(g, w["W3"].T)), h2)
        made.update(W2=self.product(h1.T, g), b2=matrix_product(ones, g))
        g = through_relu(to_format(self.product(g, w["W2"].T)), h1)
        made["b1"] = matrix_product(ones, g)
        parallel = inner(normal * self.mean(inner(g * normal)))
        g = to_format(inner(inner(g - self.mean(g)) - parallel) / deviation)
        made["W1"] = self.product(self.points.T, g)
        return loss, np.concatenate([made[name].ravel() for name in SHAPES])

    def step(self):
        """Train one step; return the loss and the loss scale that it had."""
        with np.errstate(all="ignore"):
            return self._step()

    def loss(self):
        """Return the loss after the steps so far."""
        with np.errstate(all="ignore"):
            return self.gradients()[0]

    def _step(self):
        settings, scale = self.settings, self.scale
        loss, gradients = self.gradients()
        gradients = self.to_format(gradients)
        finite = bool(np.isfinite(gradients).all())
        if finite or settings["scaling"] == "none":
            self.update(gradients / np.float32(scale * 2.0 ** settings["loss"]))
        else:
            self.skipped += 1
        if settings["scaling"] == "dynamic":
            self.good_steps = self.good_steps + 1 if finite else 0
            if not finite:
                self.scale = max(scale / 2, 1.0)
            elif self.good_steps == 50:
                self.scale, self.good_steps = min(scale * 2, 2.0**24), 0
        return loss, scale

    def update(self, gradients):
        settings = self.settings
        self.velocity = self.velocity * np.float32(0.9) + gradients
        weights = self.weights - self.velocity * np.float32(2.0 ** settings["rate"])
        if not settings["masters"]:
            if settings["stochastic"]:
                draws = [next(self.draws) // 128 for _ in weights]
                weights = round_stochastically(weights, np.array(draws), self.stored)
            else:
                weights = self.to_format(weights)
        self.weights, self.copies = weights, self.to_format(weights)


def relu(values):
    return np.where(values < 0, np.float32(0), values)


def through_relu(gradient, result):
    """Return the gradient in front of a ReLU; a result that is NaN leaves NaN."""
    return np.where(result > 0, gradient, np.float32(0) * result)
