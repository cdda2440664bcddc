"""The states of Python's, NumPy's and MXNet's random generators, as JSON can hold them."""

from __future__ import annotations

import random
from typing import Any, NamedTuple, Optional

from mpgluon.checkpoint.fields import (
    Kind,
    check_fields,
    is_count,
    is_finite,
    is_text,
    is_word,
    is_words,
)

import mxnet as mx
import numpy as np

__all__ = ["RandomStates", "random_states", "set_random_states", "validated_random_states"]

_FIELDS: dict[str, Kind] = {
    "numpy": {
        "bit_generator": is_text,
        "state": {"key": is_words, "pos": is_count},
        "has_gauss": is_count,
        "gauss": is_finite,
    },
    "mxnet": is_word,
}


class RandomStates(NamedTuple):
    """The states as their generators take them."""

    python: Any
    numpy: dict[str, Any]
    mxnet_seed: int


def random_states(seed: Optional[int] = None) -> dict[str, Any]:
    """Return Python's and NumPy's states, and a new seed for MXNet's generators, which is set.

    Parameters
    ----------
    seed : int, optional
        For MXNet, which does not tell its state; by default drawn from its own generator.
    """
    numpy_state: Any = np.random.get_state(legacy=False)
    key = numpy_state["state"]["key"].tolist()
    if seed is None:
        seed = int(mx.nd.random.randint(0, 2**31 - 1, shape=(1,)).asscalar())
    mx.random.seed(seed)
    return {
        "python": random.getstate(),
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": key}},
        "mxnet": seed,
    }


def validated_random_states(states: dict[str, Any]) -> RandomStates:
    """Return the states of a file as their generators take them, after a try on other generators.

    Raises
    ------
    ValueError
        If a generator refuses its state.
    """
    try:
        check_fields(states, _FIELDS)
        version, internal, gauss = states["python"]
        python = (version, tuple(internal), gauss)
        numpy_state = states["numpy"]
        key = np.array(numpy_state["state"]["key"], dtype=np.uint32)
        numpy_state = {**numpy_state, "state": {**numpy_state["state"], "key": key}}
        if numpy_state["state"]["pos"] > len(key):  # NumPy does not look
            raise ValueError(f"position {numpy_state['state']['pos']} of {len(key)}")
        if gauss is not None:
            float(gauss)  # Python does not look
        random.Random().setstate(python)
        np.random.RandomState().set_state(numpy_state)
        return RandomStates(python, numpy_state, states["mxnet"])
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"its random states cannot be used ({error!r})") from error


def set_random_states(states: RandomStates) -> None:
    """Continue the generators of Python and NumPy, and seed MXNet's."""
    random.setstate(states.python)
    np.random.set_state(states.numpy)
    mx.random.seed(states.mxnet_seed)
