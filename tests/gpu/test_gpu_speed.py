"""Throughput and memory of FP32, cast float16 and autocast, side by side, into results/."""

from pathlib import Path

import pytest

from study.benchmarks.contestant import Contestant
from study.benchmarks.machine import file_stem
from study.benchmarks.race import Case, Conditions, race
from study.benchmarks.record import begin_record, read_record, write_record

pytestmark = pytest.mark.gpu
RESULTS = Path(__file__).resolve().parents[2] / "study" / "results"
FACTORY = f"{Path(__file__).with_name('gpu_contestants.py')}:training"
NETWORK = {"model": "resnet50_v1", "batch_size": 32, "image_size": 224}
NAMES = {
    "float32": "mpgluon float32",
    "float16": "mpgluon float16",
    "amp": "mpgluon float16, autocast",
}


@pytest.fixture(scope="module")
def record(gpu):
    """Time the three ways, and write the record into the folder of other machines' records."""
    racers = [Contestant(name, FACTORY, {"way": way, **NETWORK}) for way, name in NAMES.items()]
    device = f"gpu:{gpu.device_id}"
    title = "training step, {model}, batch {batch_size}, {image_size} px".format(**NETWORK)
    case = Case("training", title, racers, {**NETWORK, "device": device})
    conditions = Conditions(threads=4)
    begun = begin_record(conditions)
    assert begun.machine["gpus"], "nvidia-smi, which names the GPU, is not there"
    path = RESULTS / f"{file_stem(begun.machine, device)}.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MXNET_ENFORCE_DETERMINISM")  # as training usually is
        write_record(begun.with_case(race(case, conditions)), path)
    return read_record(path)


@pytest.fixture(scope="module")
def results(record):
    assert [failure for _, failure in record.failures] == []
    (case,) = record.cases
    return {result.name: result for result in case.results}


def test_the_record_names_the_gpu_and_has_times_of_all(record, results):
    assert record.machine["gpus"][0]
    assert list(results) == list(NAMES.values())
    assert all(len(result.seconds) == record.conditions.rounds for result in results.values())


def test_float16_takes_less_time_and_cast_less_memory_than_fp32(results):
    times = {way: results[name].time.median for way, name in NAMES.items()}
    assert max(times["float16"], times["amp"]) < times["float32"]
    memory = {way: results[name].facts["gpu_memory_mib"] for way, name in NAMES.items()}
    assert 0 < memory["float16"] < memory["float32"]
