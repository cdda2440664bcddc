"""Names of layers, parameters and variables in a PyTorch program, after the graph's."""

from __future__ import annotations

import keyword
import unicodedata
from collections.abc import Sequence

__all__ = ["OF_MODULES", "VARIABLES", "Names", "common_prefix", "short_name"]

VARIABLES = ("x", "y", "z", "u", "v", "w")
"""The names of results, as long as they suffice."""

OF_MODULES = (
    "T_destination", "add_module", "apply", "bfloat16", "buffers", "call_super_init", "children",
    "compile", "cpu", "cuda", "double", "dump_patches", "eval", "extra_repr", "float", "forward",
    "get_buffer", "get_extra_state", "get_parameter", "get_submodule", "half", "ipu",
    "load_state_dict", "modules", "mtia", "named_buffers", "named_children", "named_modules",
    "named_parameters", "parameters", "register_backward_hook", "register_buffer",
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
    "register_full_backward_pre_hook", "register_load_state_dict_post_hook",
    "register_load_state_dict_pre_hook", "register_module", "register_parameter",
    "register_state_dict_post_hook", "register_state_dict_pre_hook", "requires_grad_",
    "set_extra_state", "set_submodule", "share_memory", "state_dict", "to", "to_empty", "train",
    "training", "type", "xpu", "zero_grad",
)  # fmt: skip
"""The attributes of torch.nn.Module that do not begin with an underscore, in PyTorch 2.14."""


class Names:
    """Names that a program may use, each once.

    Parameters
    ----------
    prefix : str
        The network's, which names lose.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._taken = {*OF_MODULES, *dir(object), *VARIABLES, "torch", "nn", "F"}

    def free(self, name: str) -> str:
        """Return a node's or parameter's name without the prefix, as an identifier of its own."""
        name = unicodedata.normalize("NFKC", short_name(name, self._prefix))  # as Python does
        letters = (letter if f"_{letter}".isidentifier() else "_" for letter in name)
        name = "".join(letters).strip("_") or "layer"
        if not name.isidentifier() or keyword.iskeyword(name):
            name = f"_{name}"
        free, number = name, 2
        while free in self._taken:
            free, number = f"{name}_{number}", number + 1
        self._taken.add(free)
        return free


def short_name(name: str, prefix: str) -> str:
    """Return a node's name without the network's prefix and the operator's ending."""
    return name.removeprefix(prefix).removesuffix("_fwd").removesuffix("_rnn0")


def common_prefix(names: Sequence[str]) -> str:
    """Return the beginning that all names have, up to an underscore."""
    first, last = min(names, default=""), max(names, default="")
    length = next((i for i, pair in enumerate(zip(first, last)) if pair[0] != pair[1]), 0)
    return first[: first.rfind("_", 0, length) + 1]
