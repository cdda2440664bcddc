"""Mixed-precision training for MXNet Gluon: float16 and bfloat16 on CPUs, float16 on GPUs.

The public names, in the order in which a program needs them.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

import numpy as _np

if int(_np.__version__.partition(".")[0]) >= 2:
    raise ImportError(
        f"MXNet 1.9.1 cannot be imported with NumPy {_np.__version__}, which packages such as "
        'onnx bring; run pip install "numpy<2"',
        name="mxnet",
    )
# MXNet 1.9.1 and gluoncv use aliases that NumPy 1.24 dropped. Their meaning never changed.
for _alias, _meaning in (("bool", bool), ("float", float), ("int", int)):
    if _alias not in _np.__dict__:
        setattr(_np, _alias, _meaning)

from mpgluon.base.cuda_libraries import import_mxnet as _import_mxnet  # noqa: E402

_import_mxnet()  # before anything below does, with CUDA's libraries and clear errors

from mpgluon.cast import network_cast as _network_cast  # noqa: E402
from mpgluon.cast.block import (  # noqa: E402
    NORMALIZATION_LAYERS,
    CastReport,
    cast_block,
    restore,
)
from mpgluon.errors import (  # noqa: E402
    CheckpointError,
    DataError,
    DistributedError,
    LossScaleCollapseError,
    MpgluonError,
    PrecisionError,
    TrainerStateError,
)
from mpgluon.formats.float_format import (  # noqa: E402
    BFLOAT16,
    FLOAT4_E2M1,
    FLOAT6_E2M3,
    FLOAT6_E3M2,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    TFLOAT32,
    FloatFormat,
    round_to,
)
from mpgluon.formats.loss_scale import (  # noqa: E402
    DynamicLossScale,
    MeasuredLossScale,
    NoLossScale,
    StaticLossScale,
)
from mpgluon.formats.policy import Policy  # noqa: E402
from mpgluon.formats.scaling import ScaledOperands  # noqa: E402
from mpgluon.formats.tensor_core import TensorCoreSums  # noqa: E402

if _TYPE_CHECKING:
    from mpgluon import amp, estimator
    from mpgluon.checkpoint import load_checkpoint, save_checkpoint
    from mpgluon.preparation import prepare
    from mpgluon.updates.average import WeightAverage

__version__ = "0.2.0"

__all__ = [
    "BFLOAT16",
    "FLOAT4_E2M1",
    "FLOAT6_E2M3",
    "FLOAT6_E3M2",
    "FLOAT8_E4M3",
    "FLOAT8_E5M2",
    "FLOAT16",
    "FLOAT32",
    "NORMALIZATION_LAYERS",
    "TFLOAT32",
    "CastReport",
    "CheckpointError",
    "DataError",
    "DistributedError",
    "DynamicLossScale",
    "FloatFormat",
    "LossScaleCollapseError",
    "MeasuredLossScale",
    "MpgluonError",
    "NoLossScale",
    "Policy",
    "PrecisionError",
    "ScaledOperands",
    "StaticLossScale",
    "TensorCoreSums",
    "TrainerStateError",
    "WeightAverage",
    "amp",
    "cast_block",
    "estimator",
    "load_checkpoint",
    "load_classifier",
    "prepare",
    "restore",
    "round_to",
    "save_checkpoint",
]

# Imported when they are first used: names of this package, and its folders.
_HOMES = {
    "WeightAverage": "mpgluon.updates.average",
    "load_checkpoint": "mpgluon.checkpoint",
    "load_classifier": "mpgluon.deployment",
    "prepare": "mpgluon.preparation",
    "save_checkpoint": "mpgluon.checkpoint",
}
_FOLDERS = [
    "amp",
    "checkpoint",
    "deployment",
    "diagnostics",
    "distributed",
    "estimator",
    "fp16_utils",
    "tools",
]


def __getattr__(name: str) -> _Any:
    if name in _FOLDERS:
        return _import_module(f"mpgluon.{name}")
    if name in _import_module("mpgluon.amp").__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it is amp.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_FOLDERS})


def _keep_masters_of(trainer: _Any) -> None:
    """Give a Trainer of a cast network its masters; the first one imports the steps."""
    _import_module("mpgluon.trainer.master_keeper").keep_masters_of(trainer)


_network_cast.call_with_new_trainers(_keep_masters_of)
