"""No operator of a training step in native bfloat16 runs in slow code, in any network of the zoo.

Nor of a prediction, in a few networks for inference.

Two checks: oneDNN's names for its slow implementations, and the time for an element. Slow code
takes 10 to 500 times as long as it should, so that a wide limit finds it; times by the clock on a
busy machine may be longer, and are then measured again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import NamedTuple, Optional

from mpgluon_tools.commands import parser_of
from mpgluon_tools.commands.bench import profile_of_process
from mpgluon_tools.step_profile import ENVIRONMENT, Cost, StepProfile, is_slow_code, read_profile

import pytest
from helpers import run_python
from test_networks import NETWORKS, image_size

BATCH = 8
LIMIT_NS = 10  # for an element; most elementwise operators take 0.1 to 1 on one core
CALL_NS = 50_000  # of an operator, whatever its size
FEWEST_ELEMENTS = 100_000  # of all calls in a step; below, the time is not checked
ROUNDS = (3, 5, 15)  # of each attempt
SLOW = ("ref", "gemm:jit", "ncsp_bnorm")

# Operators and primitives whose time follows their multiplications, not their elements: oneDNN's
# names show their slow code. The time of all others is checked.
PRODUCTS = ("Convolution", "FullyConnected", "convolution", "inner_product", "matmul")


PREDICTING = ("densenet121", "googlenet", "mobilenetv2_1.0", "resnet18_v1", "resnext50_32x4d")
PREDICTION = """
import sys
import mxnet as mx
from mpgluon.deployment import inference_network
from mpgluon_tools.step_profile import profile_process
from recipes.training.networks import build_network

name, size, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def make_step():
    net = build_network(name, classes=10, image_size=size, devices=[mx.cpu()])
    images = mx.nd.random.normal(shape=(8, 3, size, size))
    net(images)
    net = inference_network(net, "bfloat16", fuse_for=images)
    net(images).wait_to_read()
    return lambda: net(images).wait_to_read()

profile_process(make_step, steps=rounds)
"""


class Remaining(NamedTuple):
    """Slow code that remains, with a limit of its own.

    Attributes
    ----------
    name : str
        An operator, or a primitive as ``too_long`` names it.
    networks : tuple of str
        Beginnings of the names of networks that it runs in.
    limit_ns : float
        For an element.
    """

    name: str
    networks: tuple[str, ...]
    limit_ns: float


# With nanoseconds for an element as measured, on two cores with AVX-512-BF16 that had other work.
EXCEPTIONS = (
    # 0.2 to 3.8: channels that are not a multiple of 16, such as 24, 40 and the 10 classes; its
    # fast code does not pad them.
    Remaining("x64:gemm:jit of convolution", ("mobilenet", "efficientnet"), 60),
    Remaining("x64:gemm:jit of convolution", ("googlenet", "squeezenet"), 60),
    # 0.6 to 1.1: gradients in two layouts are added.
    Remaining("ref:any of sum", ("mobilenet", "se_resnext"), LIMIT_NS),
    # 52: the gradient of its average comes in another layout than its input.
    Remaining("ref:any of pooling_v2", ("squeezenet",), 600),
)


def limit_of(name: str, network: str) -> Optional[float]:
    """Return the limit of an exception in ns an element, or None for other operators."""
    limits = [
        one.limit_ns for one in EXCEPTIONS if one.name == name and network.startswith(one.networks)
    ]
    return limits[0] if limits else None


def takes_too_long(cost: Cost, limit_ns: float = LIMIT_NS) -> bool:
    if cost.elements is None or cost.elements < FEWEST_ELEMENTS:
        return False
    return 1e6 * cost.ms - CALL_NS * cost.calls > limit_ns * cost.elements


def named_slow(profile: StepProfile, network: str) -> set[str]:
    """Return the primitives with the name of slow code that are not exceptions."""
    return {
        f"{name} of {kind}"
        for kind, name in profile.primitives
        if is_slow_code(kind, name)
        and any(part in name for part in SLOW)
        and limit_of(f"{name} of {kind}", network) is None
    }


def too_long(profile: StepProfile, network: str) -> set[str]:
    """Return the operators and primitives above their limit."""
    costs = dict(profile.operators)
    costs |= {f"{name} of {kind}": cost for (kind, name), cost in profile.primitives.items()}
    found = set()
    for name, cost in costs.items():
        limit = limit_of(name, network)
        if limit is None and not name.endswith(PRODUCTS) and takes_too_long(cost):
            found.add(name)
        if limit is not None and takes_too_long(cost, limit):
            found.add(name)
    return found


def in_every(attempts: Iterable[set[str]]) -> set[str]:
    """Return the names that are in each attempt; no attempt follows one without names."""
    names: set[str] = set()
    for number, found in enumerate(attempts):
        names = names & found if number else found
        if not names:
            break
    return names


def assert_no_slow_code(network: str, profile: Callable[[int], StepProfile]) -> StepProfile:
    """Check the profiles of so many rounds; return the first."""
    first = profile(ROUNDS[0])
    assert named_slow(first, network) == set()
    attempts = (first if rounds == ROUNDS[0] else profile(rounds) for rounds in ROUNDS)
    assert in_every(too_long(one, network) for one in attempts) == set()
    return first


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.usefixtures("native_bfloat16", "native_operators")
@pytest.mark.parametrize("name", NETWORKS)
def test_a_training_step_in_bfloat16_runs_no_slow_code(name, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    sizes = (f"--image-size={image_size(name)}", f"--batch-size={BATCH}", "--classes=10")

    def profile(rounds: int) -> StepProfile:
        options = parser_of("bench").parse_args([name, *sizes, f"--rounds={rounds}"])
        return profile_of_process(options, "bfloat16")

    assert_no_slow_code(name, profile)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.usefixtures("native_bfloat16", "native_operators")
@pytest.mark.parametrize("name", PREDICTING)
def test_a_prediction_in_bfloat16_runs_no_slow_code(name):
    environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1"}

    def profile(rounds: int) -> StepProfile:
        done = run_python(PREDICTION, name, image_size(name), rounds, env=environment)
        assert done.returncode == 0, done.stderr
        return read_profile(done.stdout)

    first = assert_no_slow_code(name, profile)
    assert "clip" not in first.operators  # MXNet's, on plain arrays


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (Cost(1, 10.0, 1_000_000), False),  # 10 ns for an element, less the cost of a call
        (Cost(1, 10.1, 1_000_000), True),
        (Cost(100, 6.9, 200_000), False),  # 100 calls cost 5 ms of it
        (Cost(100, 7.1, 200_000), True),
        (Cost(1, 99.0, 99_999), False),
        (Cost(1, 99.0, None), False),
    ],
)
def test_the_limit_is_for_an_element_beyond_the_cost_of_calls(cost, expected):
    assert takes_too_long(cost) is expected


def test_slow_code_is_found_by_its_name_or_by_its_time():
    slow, fast, worse = Cost(1, 50.0, 10**6), Cost(1, 0.5, 10**6), Cost(1, 999.0, 10**6)
    profile = StepProfile(
        {"_backward_clip": slow, "clip": fast, "_mpgluon_grouped_Convolution": slow},
        {
            ("batch_normalization", "bnorm_ref:any"): slow,
            ("convolution", "x64:gemm:jit"): worse,
            ("inner_product", "x64:gemm:jit"): slow,
            ("reorder", "jit:uni"): fast,
        },
    )
    by_time = {"_backward_clip", "bnorm_ref:any of batch_normalization"}
    by_name = {"bnorm_ref:any of batch_normalization", "x64:gemm:jit of convolution"}
    assert too_long(profile, "resnet18_v1") == by_time  # of a product its name counts
    assert named_slow(profile, "resnet18_v1") == by_name
    # An exception has a limit of its own.
    assert too_long(profile, "mobilenet0.5") == by_time | {"x64:gemm:jit of convolution"}
    assert named_slow(profile, "mobilenet0.5") == {"bnorm_ref:any of batch_normalization"}


def test_a_time_that_was_too_long_once_is_measured_again():
    assert in_every([{"clip", "Pad"}, {"clip"}, {"clip", "add_n"}]) == {"clip"}
    attempts = iter([{"clip"}, set(), {"clip"}])
    assert in_every(attempts) == set()
    assert list(attempts) == [{"clip"}]
