"""How oneDNN computes bfloat16 on this processor: tried once, and recorded.

The answer comes from trying, not from the processor's name, and in a process of its own: MXNet
raises the error of a format that oneDNN lacks later, in whatever waits next.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from functools import cache

from mpgluon.kernels.library import fingerprint
from mpgluon.kernels.records import read_record, write_record

__all__ = ["bfloat16_products", "has_native_bfloat16"]

_logger = logging.getLogger(__name__)
_TIME_LIMIT_S = 120

# A convolution, forward and backward. DNNL_VERBOSE makes oneDNN print the implementation.
_TRIAL = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import mpgluon
import mxnet as mx
from mpgluon.kernels.dtypes import BFLOAT16_DTYPE
data = mx.sym.amp_cast(mx.sym.var("data"), dtype=BFLOAT16_DTYPE)
weight = mx.sym.amp_cast(mx.sym.var("weight"), dtype=BFLOAT16_DTYPE)
made = mx.sym.Convolution(data, weight, kernel=(3, 3), num_filter=16, no_bias=True)
made = mx.sym.amp_cast(made, dtype="float32")
bound = made.simple_bind(mx.cpu(), data=(2, 16, 8, 8), weight=(16, 16, 3, 3))
bound.forward(is_train=True)
bound.backward(mx.nd.ones((2, 16, 6, 6)))
mx.nd.waitall()
"""

# oneDNN's name for an implementation ends in the instructions that it uses. On a processor with
# AVX-512 but without bfloat16 it emulates, three times more slowly than FP32.
_NATIVE = re.compile(r",convolution,[^,]*:avx512_core(_bf16|_amx)\w*,")


def has_native_bfloat16() -> bool:
    """Whether oneDNN has convolutions in bfloat16 that use the processor's own instructions."""
    return bfloat16_products() == "native"


@cache
def bfloat16_products() -> str:
    """Return how oneDNN computes a convolution in bfloat16 here.

    The first call on a machine starts a process, which takes as long as importing MXNet; the answer
    is recorded in the native library's folder.

    Returns
    -------
    {"native", "slow", "none"}
        By the processor's own instructions; emulated by oneDNN, three times more slowly than FP32;
        or an error.
    """
    name = f"bfloat16-{_fingerprint()}"
    answer = read_record(name, "bfloat16")
    if answer not in ("native", "slow", "none"):  # not tried yet, or the record is damaged
        answer = _try()
        write_record(name, bfloat16=answer)
    return answer


def _try() -> str:
    environment = {**os.environ, "DNNL_VERBOSE": "1", "MPGLUON_NATIVE": "0"}
    command = [sys.executable, "-W", "ignore", "-c", _TRIAL, json.dumps(sys.path)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIME_LIMIT_S,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _logger.warning("bfloat16 is emulated, since trying it natively failed: %s", error)
        return "none"
    if done.returncode != 0:
        return "none"
    return "native" if _NATIVE.search(done.stdout) else "slow"


def _fingerprint() -> str:
    """Return a name made from everything that the answer depends on."""
    limits = sorted((k, v) for k, v in os.environ.items() if k.startswith(("DNNL_", "MKLDNN_")))
    return fingerprint(_TRIAL, _NATIVE.pattern, limits)
