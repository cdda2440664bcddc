"""Helpers of the tests of live figures."""

from __future__ import annotations

import numpy as np


def evaluate(browser, lines, *, figure):
    """Run lines of JavaScript in the page, with ``box``, the figure's element."""
    place = f"document.querySelector('[data-figure={figure}]')"
    return browser.evaluate(f"(() => {{const box = {place}; {lines}}})()")


def status(browser, figure):
    """Return a figure's text for screen readers."""
    return evaluate(browser, "return box.querySelector('[role=status]').textContent", figure=figure)


def assert_same_bits(found, expected):
    """Assert equal bits; NaN of any kind are equal, as WebAssembly leaves their bits open."""
    found, expected = np.array(found, np.float32), np.array(expected, np.float32)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    for array in (found, expected):
        array[np.isnan(array)] = 0
    np.testing.assert_array_equal(found.view(np.int32), expected.view(np.int32))
