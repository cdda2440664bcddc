"""What the format of a sum costs: properties that theory gives, and one sum by hand."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from benchmarks.summation import WAYS, simulate, sum_table, summed

UNIT = 2.0**-11
simulated = cache(simulate)


def test_float16_rounds_after_each_addition_and_float32_once():
    # 2048 + 1 is 2048 in float16, which has only even numbers there.
    rows = np.array([[2048], [1], [1], [2]], dtype=np.float16)
    found = {way: summed(rows, way).tolist() for way in WAYS}
    assert found["float16"] == [2050]
    assert found["FP32"] == [2052]
    # 512 + 0.25 is halfway between two numbers of float16, and the even one is 512.
    assert found["float16, divided first"] == [512.5]
    assert found["FP32, divided first"] == [513]


@pytest.mark.parametrize("way", ["FP32", "FP32, divided first"])
@pytest.mark.parametrize("workers", [2, 64, 4096])
def test_float32_costs_one_rounding_to_float16_however_many_workers(workers, way):
    # Half a unit of float16, and float32's own roundings, 8192 times smaller each: their error
    # grows with the root of their number, and is no larger than u here.
    assert simulated(workers)[way].median <= UNIT * (1 + 4096 * 2.0**-13)


def test_float16_gets_worse_with_workers_and_float32_does_not():
    narrow = [simulated(workers)["float16"].median for workers in (8, 64, 512, 4096)]
    assert narrow == sorted(narrow)
    assert narrow[-1] > 50 * simulated(4096)["FP32"].median


@pytest.mark.parametrize("workers", [512, 4096])
def test_large_sums_are_infinite_unless_they_are_divided_and_small_parts_lost_if_they_are(workers):
    found = simulated(workers)
    assert found["float16"].infinite > 0.03
    # Only a sum within a rounding of 65504 may differ between the two.
    assert found["float16"].infinite == pytest.approx(found["FP32"].infinite, abs=0.01)
    assert found["float16, divided first"].lost > 0.05
    assert found["float16, divided first"].infinite == 0
    assert (found["FP32, divided first"].lost, found["FP32, divided first"].infinite) == (0, 0)


def test_the_table_has_a_row_for_each_number_of_workers():
    table = sum_table([2, 4])
    assert [row[0] for row in table.rows] == ["2", "4"]
    assert list(table.headings) == ["workers", *WAYS]
