"""The former names of modules: importing one says where its things are now."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Optional

__all__ = ["NEW_PLACES", "name_new_places"]

_RECORDER = "mpgluon.tools.recorder"
_IN_RECIPES = ", in recipes/ of the repository, which is not installed with mpgluon"
NEW_PLACES = {
    "mpgluon.cast.table": "mpgluon.graph.operators",
    "mpgluon.data": f"recipes.data{_IN_RECIPES}",
    "mpgluon.deployment.classify": "mpgluon.tools.serving",
    "mpgluon.deployment.onnx_export": "mpgluon.tools.onnx",
    "mpgluon.deployment.onnx_operators": "mpgluon.tools.onnx.operators",
    "mpgluon.deployment.onnx_writer": "mpgluon.tools.onnx.writer",
    "mpgluon.deployment.serving": "mpgluon.tools.onnx",
    "mpgluon.diagnostics.cures": f"{_RECORDER}.cures",
    "mpgluon.diagnostics.flight_recorder": f"{_RECORDER}.flight_recorder",
    "mpgluon.diagnostics.named": f"{_RECORDER}.named",
    "mpgluon.diagnostics.recorded_network": f"{_RECORDER}.recorded_network",
    "mpgluon.diagnostics.recorded_step": f"{_RECORDER}.recorded_step",
    "mpgluon.diagnostics.report": "mpgluon.tools.report",
    "mpgluon.diagnostics.rerun": f"{_RECORDER}.rerun",
    "mpgluon.diagnostics.step_bench": f"{_RECORDER}.step_bench",
    "mpgluon.diagnostics.timing": "mpgluon.tools.timing",
    "mpgluon.diagnostics.verdict": "mpgluon.tools.verdict",
    "mpgluon.numerics": "mpgluon.formats and, for dtypes and reductions, mpgluon.kernels",
    "mpgluon.options": f"recipes.options{_IN_RECIPES}",
    "mpgluon.plots": "mpgluon.tools.plots",
    "mpgluon.random_states": "mpgluon.checkpoint.random_states",
    "mpgluon.scale_histories": "mpgluon.checkpoint.scale_histories",
    "mpgluon.trainer.average": "mpgluon.updates.average",
    "mpgluon.trainer.masters": "mpgluon.updates.masters",
    "mpgluon.training": f"recipes.training{_IN_RECIPES}",
    "mpgluon.weights": f"recipes.weights{_IN_RECIPES}",
    "mpgluon.zoo": "mpgluon.tools.zoo",
}


def name_new_places() -> None:
    """Let an import of a former name say where its things are now."""
    sys.meta_path.insert(0, _MovedModules())


class _MovedModules(MetaPathFinder):
    """Asked first: an old checkout leaves empty folders of former names behind."""

    def find_spec(
        self,
        fullname: str,
        path: Optional[Sequence[str]],  # noqa: ARG002
        target: Optional[ModuleType] = None,  # noqa: ARG002
    ) -> None:
        if fullname in NEW_PLACES:
            raise ModuleNotFoundError(
                f"{fullname} has moved to {NEW_PLACES[fullname]}", name=fullname
            )
