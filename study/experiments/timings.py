"""Numbers and tables of the pages from the records of benchmarks in ``study/results``."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Optional

from mpgluon_tools.timing import Quartiles, quartiles, ratios

from study.benchmarks.growth import growth
from study.benchmarks.memory import largest_batch, peaks_by_batch
from study.benchmarks.race import CaseResult, Result
from study.benchmarks.record import BenchmarkRecord, read_record
from study.benchmarks.tuning import gains, tuning_table

__all__ = ["CONTESTANTS", "Timings"]

FLOAT32, PREPARED = "Gluon float32", "mpgluon float32"
CAST, AUTOCAST, BFLOAT16 = "mpgluon float16", "mpgluon autocast float16", "mpgluon bfloat16"
TORCH, COMPILED = "PyTorch bfloat16", "PyTorch bfloat16, compiled"
CONTESTANTS = {
    "FLOAT32": FLOAT32,
    "CAST": CAST,
    "AUTOCAST": AUTOCAST,
    "BFLOAT16": BFLOAT16,
    "EMULATED": f"{BFLOAT16}, emulated",
    "FOLDED": f"{BFLOAT16}, folded",
}
"""Names of contestants for expressions on pages."""

_NETWORKS = {
    "alexnet": "AlexNet",
    "vgg11_bn": "VGG-11 with BatchNorm",
    "vgg16": "VGG-16",
    "googlenet": "GoogLeNet",
    "inceptionv3": "Inception v3",
    "densenet121": "DenseNet-121",
    "squeezenet1.0": "SqueezeNet 1.0",
    "mobilenet1.0": "MobileNet 1.0",
    "mobilenetv2_1.0": "MobileNet v2",
    "mobilenetv3_small": "MobileNet v3 small",
    "mobilenetv3_large": "MobileNet v3 large",
    "resnet18_v1": "ResNet-18",
    "resnet50_v1": "ResNet-50",
    "resnet50_v2": "ResNet-50 v2",
    "resnet50_v1d": "ResNet-50 v1d",
    "se_resnext50_32x4d": "SE-ResNeXt-50",
    "resnext50_32x4d": "ResNeXt-50 32x4d",
    "efficientnet_lite0": "EfficientNet-Lite0",
    "cifar_resnet20_v1": "CIFAR ResNet-20 v1",
    "cifar_resnet20_v2": "CIFAR ResNet-20 v2",
}


@dataclass(frozen=True)
class Timings:
    """The records of benchmarks, read when they are asked for.

    Attributes
    ----------
    folder : Path
        With a JSON file for each record.
    stem : str
        The beginning of the names of this machine's records.
    """

    folder: Path
    stem: str = "cpu-amd-epyc-2-cores"

    def record(self, name: str = "") -> BenchmarkRecord:
        """Return the record whose name is ``stem``, a hyphen and ``name``."""
        return _read(self.folder / f"{self.stem}{name and '-'}{name}.json")

    def case(self, title: str, name: str = "") -> CaseResult:
        """Return the case whose title has some words."""
        return next(case for case in self.record(name).cases if title in case.title)

    def seconds(self, title: str, contestant: str, name: str = "") -> float:
        """Return a median."""
        return _of(self.case(title, name), contestant).time.median

    def relative(
        self, title: str, contestant: str, name: str = "", *, base: Optional[str] = None
    ) -> float:
        """Return the median of the ratios of each round to the baseline's, or another's."""
        case = self.case(title, name)
        return _relative(case, contestant, base or case.baseline).median

    def speeds(self) -> list[float]:
        """Return images a second after each measure of the log of tuning."""
        return [one.images_per_second.median for one in gains(self.case("tuning", "tuning"))]

    def memory(self, title: str, contestant: str, name: str) -> float:
        """Return the peak over plain Gluon's in FP32."""
        case = self.case(title, name)
        return _peak(case, contestant) / _peak(case, FLOAT32)

    def mean(self, contestant: str, name: str) -> float:
        """Return the geometric mean of a contestant's ratios over the networks of a record."""
        return geometric_mean(self.ratios(contestant, name))

    def ratios(self, contestant: str, name: str) -> list[float]:
        """Return a contestant's ratios over the networks of a record, sorted."""
        cases = self.record(name).cases
        return sorted(_relative(case, contestant, FLOAT32).median for case in cases)

    def most(self, contestant: str, name: str) -> float:
        """Return the largest ratio of a contestant."""
        return self.ratios(contestant, name)[-1]

    def memories(self, contestant: str, name: str) -> list[float]:
        """Return the ratios of the peaks over the networks of a record, sorted."""
        cases = self.record(name).cases
        return sorted(_peak(one, contestant) / _peak(one, FLOAT32) for one in cases)

    def over_pytorch(self) -> list[float]:
        """Return the ratios of BF16 steps to PyTorch's better ones, sorted."""
        return sorted(
            _relative(case, BFLOAT16, _faster(case, TORCH, COMPILED)).median
            for *_, case in self._networks()
        )

    def largest_batch(self, contestant: str) -> int:
        """Return the largest batch that fits into the limit of the record of memory."""
        cases = self.record("memory").cases
        limit = cases[0].settings["memory_limit_mib"]
        found = largest_batch(peaks_by_batch(cases)[contestant], limit)
        assert found is not None
        return found

    def exponent(self, dtype: str) -> float:
        """Return the power of the multiply-adds by which time grows with depth."""
        found = growth(self.case(f"depth: batch 8, 224 px, {dtype}", "scale")).time_exponent
        assert found is not None
        return found

    def zoo_table(self) -> list[list[str]]:
        """Return the cells of the table of FP16 steps of 18 networks."""
        return [
            [
                _NETWORKS[case.settings["model"]] + _unusual(case),
                f"{_of(case, FLOAT32).time.median:.2f}",
                *(_with_quartiles(_relative(case, one, FLOAT32)) for one in (CAST, AUTOCAST)),
            ]
            for case in self.record("zoo").cases
        ]

    def sequences_table(self) -> list[list[str]]:
        """Return the cells of the table of steps of recurrent networks and transformers."""
        cases = [one for one in self.record().cases if one.name in ("recurrent", "attention")]
        return [
            [
                case.title.removeprefix("training step, "),
                f"{1000 * _of(case, FLOAT32).time.median:.0f}",
                *(_ratio(case, one, FLOAT32) for one in (CAST, AUTOCAST, "PyTorch float32")),
            ]
            for case in cases
        ]

    def memory_table(self) -> list[list[str]]:
        """Return the cells of the table of peaks of ResNet-50 by batch."""
        rows = []
        for batch in (8, 16, 32):
            case = self.case(f"resnet50_v1, batch {batch}, ", "memory")
            cells = [f"{_peak(case, FLOAT32):,.0f}"]
            for one in (CAST, AUTOCAST):
                cells += [
                    f"{_peak(case, one):,.0f}",
                    f"{self.memory(case.title, one, 'memory'):.2f}",
                ]
            rows.append([str(batch), *cells])
        return rows

    def networks_table(self) -> list[list[str]]:
        """Return the cells of the table of steps in BF16 and in PyTorch."""
        shown = (FLOAT32, PREPARED, CAST, BFLOAT16, TORCH, COMPILED)
        return [
            [
                _NETWORKS[case.settings["model"]] + _unusual(case),
                *(f"{_of(case, one).time.median:.2f}" for one in shown),
                _ratio(case, BFLOAT16, FLOAT32),
                _ratio(case, BFLOAT16, PREPARED),
                _ratio(case, BFLOAT16, _faster(case, TORCH, COMPILED)),
                ", ".join(_ratio(one, BFLOAT16, _faster(one, TORCH, COMPILED)) for one in earlier),
            ]
            for *earlier, case in self._networks()
        ]

    def _networks(self) -> list[list[CaseResult]]:
        """Return the cases with PyTorch of each network, in the order of the records."""
        runs: defaultdict[str, list[CaseResult]] = defaultdict(list)
        for name in ("", "-more", "-last", "-second", "-third"):
            for case in self.record(f"networks{name}").cases:
                runs[case.settings["model"]].append(case)
        return list(runs.values())

    def predicting_table(self) -> list[list[str]]:
        """Return the cells of the table of predictions in BF16 and in PyTorch."""
        folded = f"{BFLOAT16}, folded"
        shown = (FLOAT32, f"{PREPARED}, folded", folded, COMPILED)
        return [
            [
                _NETWORKS[case.settings["model"]] + _unusual(case),
                *(f"{1000 * _of(case, one).time.median:.0f}" for one in shown),
                _ratio(case, folded, COMPILED),
            ]
            for case in self.record("networks-predicting").cases
        ]

    def libraries_table(self) -> list[list[str]]:
        """Return the cells of the table of libraries, by training step and predictions."""
        training = self.case("training step, resnet50_v1")
        cases = [self.case(f"inference, resnet50_v1, batch {batch}") for batch in (8, 1)]
        rows = []
        for words, names in _LIBRARIES.items():
            step = [_of(training, one) for one in names if _has(training, one)][:1]
            cells = [f"{one.time.median:.2f}" for one in step] or ["-"]
            for case in cases:
                found = [_of(case, one) for one in reversed(names) if _has(case, one)][:1]
                cells += [f"{1000 * one.time.median:.0f}" for one in found] or ["-"]
            rows.append([words, *cells])
        return rows

    def processors_table(self) -> list[list[str]]:
        """Return the cells of the table of a training step on two processors."""
        cases = [self.case("training step, resnet50_v1", name) for name in ("avx2", "")]
        rows = [["Gluon FP32", *(f"1 ({_of(one, FLOAT32).time.median:.2f} s)" for one in cases)]]
        for words, name in _FORMATS.items():
            rows.append([words, *(_ratio(case, name, FLOAT32) for case in cases)])
        return [*rows, ["BF16, native", "-", _ratio(cases[1], BFLOAT16, FLOAT32)]]

    def loss_scaling_table(self) -> list[list[str]]:
        """Return the cells of the table of steps with a loss scale over those without."""
        return [
            [words, _with_quartiles(_relative(case, "amp", case.baseline))]
            for dtype, words in (("float32", "FP32"), ("bfloat16", "BF16 (autocast)"),
                                 ("float16", "FP16 (cast)"))
            for case in [self.case(f"loss scaling, {dtype}")]
        ]  # fmt: skip

    def tuning_table(self) -> list[list[str]]:
        """Return the cells of the table of measures that make a training step faster."""
        return [list(row) for row in tuning_table(self.case("tuning", "tuning")).rows]

    def version(self, package: str) -> str:
        """Return the first two numbers of the version in the record of all cases."""
        return ".".join(self.record().versions[package].split(".")[:2])

    def engines_table(self) -> list[list[str]]:
        """Return the cells of the table of predictions relative to FP32."""
        cases = [self.case(f"inference, resnet50_v1, batch {batch}") for batch in (1, 8)]
        cases.append(self.case("mobilenetv2_1.0", "networks-predicting"))
        times = (f"1 ({1000 * _of(case, FLOAT32).time.median:.0f} ms)" for case in cases)
        rows = [["FP32, MXNet", *times]]
        for words, name in _ENGINES.items():
            rows.append([words, *(_ratio(case, name, FLOAT32) for case in cases)])
        return rows


_LIBRARIES = {  # a contestant for training; the last one for predictions
    "MXNet FP32": (FLOAT32,),
    "mpgluon FP32, folded and fused": (f"{PREPARED}, folded",),
    "mpgluon FP16, cast": (CAST,),
    "**mpgluon BF16**; for predictions folded and fused": (BFLOAT16, f"{BFLOAT16}, folded"),
    "`contrib.amp` BF16": ("contrib.amp bfloat16",),
    "the same with its loss scale": ("contrib.amp bfloat16, scaled",),
    "PyTorch FP32, eager": ("PyTorch float32",),
    "PyTorch FP32, compiled": ("PyTorch float32, compiled",),
    "PyTorch BF16, eager": (TORCH,),
    "PyTorch BF16, compiled": (COMPILED,),
    "zentorch FP32": ("zentorch float32",),
    "zentorch BF16": ("zentorch bfloat16",),
    "TensorFlow FP32": ("TensorFlow float32",),
    "TensorFlow BF16": ("TensorFlow bfloat16",),
    "ONNX Runtime FP32": ("onnxruntime float32",),
    "OpenVINO FP32": ("OpenVINO float32",),
    "OpenVINO BF16": ("OpenVINO bfloat16",),
}
_FORMATS = {
    "mpgluon FP32": PREPARED,
    "FP16, cast": CAST,
    "FP16, autocast": AUTOCAST,
    "BF16, emulated": f"{BFLOAT16}, emulated",
}
_ENGINES = {
    "autocast BF16": BFLOAT16,
    "`inference_network`, FP32": f"{PREPARED}, folded",
    "`inference_network`, FP16": f"{CAST}, folded",
    "`inference_network`, BF16": f"{BFLOAT16}, folded",
    "ONNX Runtime, FP32": "onnxruntime float32",
    "OpenVINO, FP32": "OpenVINO float32",
    "OpenVINO, BF16": "OpenVINO bfloat16",
}


@cache
def _read(path: Path) -> BenchmarkRecord:
    return read_record(path)


def _has(case: CaseResult, contestant: str) -> bool:
    return any(one.name == contestant for one in case.results)


def _of(case: CaseResult, contestant: str) -> Result:
    return next(one for one in case.results if one.name == contestant)


def _relative(case: CaseResult, contestant: str, base: str) -> Quartiles:
    return quartiles(ratios(_of(case, contestant).seconds, _of(case, base).seconds))


def _ratio(case: CaseResult, contestant: str, base: str) -> str:
    return f"{_relative(case, contestant, base).median:.2f}" if _has(case, contestant) else "-"


def _with_quartiles(one: Quartiles) -> str:
    return f"{one.median:.2f} ({one.lower:.2f} to {one.upper:.2f})"


def _faster(case: CaseResult, *contestants: str) -> str:
    return min(contestants, key=lambda one: _of(case, one).time.median)


def _peak(case: CaseResult, contestant: str) -> float:
    mib = _of(case, contestant).peak_memory_mib
    assert mib is not None
    return mib


def _unusual(case: CaseResult) -> str:
    """Return batch and size of the images in words, where they are not 8 of 224 pixels."""
    batch, size = (case.settings[name] for name in ("batch_size", "image_size"))
    if (batch, size) == (8, 224):
        return ""
    return f" ({size} pixels)" if batch == 8 else f" ({batch} images of {size} pixels)"
