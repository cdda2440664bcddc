"""The model of many GPUs: against sums by hand, a ring that is really run, and its limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.measured_link import fit_link, measure_sums
from benchmarks.scaling import (
    A100,
    Cluster,
    Gpu,
    Link,
    Workload,
    batch_for,
    batch_table,
    bytes_table,
    clusters_of,
    exchange_table,
    predict,
    ring_bytes,
    workload_of,
)
from mpgluon.distributed import OneProcess

FAST, SLOW = Link("fast", 800, 1.0), Link("slow", 80, 10.0)
GPU = Gpu("test", {"float32": 3e9, "float16": 6e9})  # a billion multiply-adds: 1 s, 0.5 s
WORK = Workload("test", parameters=1000, multiply_adds=10**9, batch_size=1)


def ring_of(gpus: int, chunks: int) -> tuple[int, int]:
    """Run a ring: return the hops one after another, and the chunks that each GPU has sent.

    Each GPU holds as many chunks as there are GPUs. A chunk goes round to be added up, and round
    again to be given to all.
    """
    have = [[{owner} for _ in range(chunks)] for owner in range(gpus)]
    hops = sent = 0
    for turn in range(2 * (gpus - 1)):
        moving = [(gpu, (gpu - turn) % gpus) for gpu in range(gpus)]
        carried = [set(have[gpu][chunk]) for gpu, chunk in moving]
        for (gpu, chunk), values in zip(moving, carried):
            have[(gpu + 1) % gpus][chunk] |= values
        hops, sent = hops + 1, sent + 1
    assert all(len(chunk) == gpus for gpu in have for chunk in gpu)
    return hops, sent


@pytest.mark.parametrize("gpus", [2, 3, 8])
def test_bytes_and_hops_are_those_of_a_ring_that_is_run(gpus):
    hops, sent = ring_of(gpus, gpus)
    assert ring_bytes(gpus, 12.0) == pytest.approx(sent * 12 / gpus)
    cluster = Cluster(gpus, SLOW, FAST, gpus_per_machine=1)
    assert cluster.latency_s == pytest.approx(hops * 10e-6)


def test_one_gpu_exchanges_nothing():
    step = predict(WORK, Cluster(1, SLOW, FAST, gpu=GPU))
    assert (step.exchange_s, step.exposed_s, step.efficiency, step.hidden_fraction) == (0, 0, 1, 1)


def test_a_machine_of_its_own_waits_for_its_inner_links_and_several_for_the_slowest():
    # 10**9 bytes: 2 * 3 / 4 of 8e9 bits over 800e9 per second, six hops of 1 us.
    assert Cluster(4, SLOW, FAST).sum_seconds(1e9) == pytest.approx(0.015 + 6e-6)
    # 16 GPUs in two machines: 30 hops, two of them between machines.
    two = Cluster(16, SLOW, FAST)
    assert two.latency_s == pytest.approx((28 * 1 + 2 * 10) * 1e-6)
    assert two.sum_seconds(1e9) == pytest.approx(2 * 15 / 16 * 0.1 + two.latency_s)
    backwards = Cluster(16, FAST, SLOW)
    assert backwards.sum_seconds(1e9) == pytest.approx(2 * 15 / 16 * 0.1 + backwards.latency_s)


def schedule(each: float, backward: float, messages: int) -> float:
    """Return when the last message has come after the end of backward, one by one."""
    free = 0.0
    for number in range(1, messages + 1):
        free = max(free, backward * number / messages) + each
    return free - backward


@pytest.mark.parametrize("messages", [1, 2, 7, 64])
@pytest.mark.parametrize("gbit_per_s", [1e-6, 1e-5, 1.0])
def test_what_is_exposed_is_what_a_schedule_of_the_messages_leaves(messages, gbit_per_s):
    cluster = Cluster(4, Link("test", gbit_per_s, 5.0), FAST, gpus_per_machine=1, gpu=GPU)
    step = predict(WORK, cluster, messages)
    each = cluster.sum_seconds(2000 / messages)  # 1000 float16 numbers
    assert step.computation_s == pytest.approx(0.5)
    # At most 64 additions, each with an error of 2**-53 of the sum, which begins with 1/3 s.
    left = schedule(each, 0.5 * 2 / 3, messages)
    assert step.exposed_s == pytest.approx(left, rel=64 * 2.0**-53, abs=64 * 2.0**-53)
    assert step.hidden_fraction == pytest.approx(1 - step.exposed_s / (messages * each))
    assert step.efficiency == pytest.approx(0.5 / (0.5 + step.exposed_s))


def test_messages_are_few_where_hops_are_slow_and_many_where_bytes_are():
    def best(link: Link) -> int:
        return predict(WORK, Cluster(64, link, FAST, gpus_per_machine=1, gpu=GPU)).messages

    assert best(Link("far", 1e6, 1e5)) == 1
    assert best(Link("narrow", 1e-3, 0.0)) == 64


def test_the_batch_that_hides_is_the_smallest_one():
    cluster = Cluster(8, Link("test", 1e-5, 0.0), FAST, gpus_per_machine=1, gpu=GPU)
    batch = batch_for(WORK, cluster)
    assert batch > 1
    efficiencies = [
        predict(replace(WORK, batch_size=size), cluster).efficiency for size in (batch - 1, batch)
    ]
    assert efficiencies[0] < 0.95 <= efficiencies[1]
    assert batch_for(WORK, replace(cluster, between=Link("none", 1e-9, 0.0))) is None


def test_gradients_may_travel_in_another_format_than_the_computation():
    assert WORK.gradient_bytes == 2000
    mixed = replace(WORK, sent_as="float32")
    assert mixed.gradient_bytes == 4000
    assert mixed.computation_s(GPU) == WORK.computation_s(GPU) == 0.5
    assert replace(WORK, dtype="float32").computation_s(GPU) == 1.0


def test_a_gpu_is_as_fast_as_it_was_measured():
    gpu = Gpu.from_speed("mine", {"float16": 250.0}, WORK.multiply_adds)
    assert replace(WORK, batch_size=100).computation_s(gpu) == pytest.approx(0.4)


def test_the_reference_gpu_trains_its_network_as_fast_as_was_published():
    work = workload_of("resnet50_v1b")
    assert work.parameters == 25_557_032  # torchvision's and He's count
    # The constant has four digits.
    assert 1 / work.computation_s(A100) * work.batch_size == pytest.approx(2180, rel=5e-4)


def test_tables_have_a_row_for_each_cluster_and_the_figures_of_the_model():
    clusters = clusters_of([8, 64], [FAST, SLOW], gpu=GPU)
    assert [cluster.gpus for cluster in clusters] == [8, 64, 64]
    big = replace(WORK, parameters=10**8)
    table = exchange_table(big, clusters)
    assert [row[:2] for row in table.rows] == [
        ["8", "NVLink 3 in one machine"],
        ["64", "fast, 8 per machine"],
        ["64", "slow, 8 per machine"],
    ]
    assert table.rows[2][2] == f"{1e3 * clusters[2].sum_seconds(4e8):.1f}"
    assert bytes_table(big, [64, 8, 8]).rows[1][1:] == ["200.0", "350.0", "393.8"]
    rows = batch_table(big, clusters, [4096]).rows
    assert rows[2][2] == str(batch_for(replace(big, dtype="float32"), clusters[2]))


class Loopback(OneProcess):
    """Two processes of which one is a memory: it answers what this one says."""

    world_size = 2

    def gather(self, value, purpose):
        return [value, value]


def test_measured_sums_have_a_median_for_each_size():
    found = measure_sums(Loopback(), [64, 4096], rounds=3)
    assert list(found) == [64, 4096]
    assert all(0 < seconds < 1 for seconds in found.values())


@pytest.mark.parametrize("gpus", [2, 4, 64])
def test_a_fitted_link_gives_back_the_times_of_a_ring(gpus):
    cluster = Cluster(gpus, Link("true", 12.5, 30.0), gpus_per_machine=1)
    times = {size: cluster.sum_seconds(size) for size in (10**3, 10**5, 10**7, 10**8)}
    link = fit_link(gpus, times)
    assert link.gbit_per_s == pytest.approx(12.5)
    assert link.latency_us == pytest.approx(30.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link("x", 0.0, 1.0), "gbit_per_s must be positive, received 0.0"),
        (lambda: Link("x", float("nan"), 1.0), "gbit_per_s must be positive, received nan"),
        (lambda: Link("x", 1.0, -1.0), "latency_us must not be negative, received -1.0"),
        (lambda: Cluster(0, SLOW), "at least one GPU, received 0 of 8"),
        (lambda: Cluster(12, SLOW), "12 GPUs do not fill machines of 8"),
        (lambda: replace(WORK, dtype="int8"), "a format is one of .* received 'int8'"),
        (lambda: replace(WORK, batch_size=0), "must be at least 1, received 1000, .* and 0"),
        (lambda: Gpu.from_speed("x", {"float16": -1.0}, 1), "received -1 for 'float16'"),
        (lambda: WORK.computation_s(Gpu("x", {})), "the speed of x in float16 is not known"),
        (lambda: fit_link(1, {1: 1.0, 2: 2.0}), "two processes and two sizes, received 1 and 2"),
        (lambda: fit_link(2, {1: 2.0, 2: 1.0}), "sums of more bytes took no longer"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
