"""How a network was set up when a step was recorded: casts, hybridization, frozen parameters.

Plain values, and back to a network of the same structure. Values of parameters are not among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mpgluon.cast.block import apply_policy, blocks_of
from mpgluon.cast.forward import forward_of
from mpgluon.cast.network_cast import NetworkCast
from mpgluon.distributed import synchronize_batch_norm
from mpgluon.errors import CheckpointError
from mpgluon.formats.policy import Policy
from mpgluon.graph.operators import Rule

from mxnet import gluon
from mxnet.gluon.contrib.nn import SyncBatchNorm

__all__ = ["BlockCast", "NetworkSettings", "code_of", "lies_in", "paths_of"]

_FLAGS = {
    "static_alloc": bool,
    "static_shape": bool,
    "inline_limit": int,
    "forward_bulk_size": int,
    "backward_bulk_size": int,
}
_GRAD_REQS = ("write", "add", "null")


class BlockCast(NamedTuple):
    """A cast of a network or of a part of it; blocks are named by their paths."""

    block: str
    policy: Policy
    kept: tuple[str, ...]  # blocks that keep_fp32 names
    operators_fp32: tuple[tuple[str, str], ...] = ()  # blocks and their operators with own rules
    operators_16: tuple[tuple[str, str], ...] = ()

    def keeping(
        self, blocks: Sequence[str] = (), operators: Sequence[tuple[str, str]] = ()
    ) -> BlockCast:
        """Return the cast with more in FP32, of what lies in it.

        In ``blocks``, operators have no rules of their own any more; ``operators`` are pairs of a
        block and an operator that it calls.
        """
        blocks = [path for path in blocks if lies_in(path, self.block)]
        operators = [(path, name) for path, name in operators if lies_in(path, self.block)]

        def outside(named: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
            return tuple(
                dict.fromkeys(
                    (place, name)
                    for place, name in named
                    if not any(lies_in(place, block) for block in blocks)
                )
            )

        return self._replace(
            kept=tuple(dict.fromkeys([*self.kept, *blocks])),
            operators_fp32=outside([*self.operators_fp32, *operators]),
            operators_16=outside(one for one in self.operators_16 if one not in operators),
        )


@dataclass(frozen=True)
class NetworkSettings:
    """Casts and settings of a network, applied after it was made."""

    casts: tuple[BlockCast, ...]
    hybridized: Mapping[str, Mapping[str, Any]]  # the flags of hybridized blocks, by path
    grad_req: Mapping[str, str]  # by the parameter's name in the network's structure
    synchronized: bool  # whether its BatchNorms are SyncBatchNorms

    @classmethod
    def of(cls, net: gluon.Block) -> NetworkSettings:
        """Return the settings of a network."""
        paths = paths_of(net)
        forwards = [forward for forward in map(forward_of, paths) if forward is not None]
        network_casts = dict.fromkeys(forward.network_cast for forward in forwards)

        def operators(network_cast: NetworkCast, rule: Rule) -> tuple[tuple[str, str], ...]:
            return tuple(
                (paths[forward.block], operator)
                for forward in forwards
                if forward.network_cast is network_cast
                for operator, own in forward.plan.rules.items()
                if own is rule
            )

        casts = [
            BlockCast(
                paths[network_cast.root],
                network_cast.policy,
                tuple(
                    paths[forward.block]
                    for forward in forwards
                    if forward.network_cast is network_cast
                    and (forward.plan.keeps_parameters or forward.kept)
                ),
                operators(network_cast, Rule.FLOAT32),
                operators(network_cast, Rule.NORMALIZE),
            )
            for network_cast in network_casts
            if network_cast.root in paths
        ]
        hybrid = [b for b in paths if isinstance(b, gluon.HybridBlock) and b._active]
        return cls(
            casts=tuple(casts),
            hybridized={paths[block]: dict(block._flags) for block in hybrid},
            grad_req={n: p.grad_req for n, p in net._collect_params_with_prefix().items()},
            synchronized=any(isinstance(block, SyncBatchNorm) for block in paths),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as JSON can hold them."""
        return asdict(self) | {
            "casts": [{**c._asdict(), "policy": str(c.policy)} for c in self.casts]
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> NetworkSettings:
        """Return the settings from a dictionary of :meth:`as_dict`.

        Raises
        ------
        KeyError, TypeError, ValueError
            If a value is missing or invalid.
        """
        casts = tuple(
            BlockCast(
                _text(c["block"]),
                _policy_of(c["policy"]),
                tuple(map(_text, c["kept"])),
                *(
                    tuple((_text(block), _text(operator)) for block, operator in c[field])
                    for field in ("operators_fp32", "operators_16")
                ),
            )
            for c in values["casts"]
        )
        hybridized = {
            path: {name: _FLAGS[name](value) for name, value in dict(flags).items()}
            for path, flags in dict(values["hybridized"]).items()
        }
        grad_req = dict(values["grad_req"])
        unknown = [req for req in grad_req.values() if req not in _GRAD_REQS]
        if unknown:
            raise ValueError(f"grad_req is {unknown[0]!r}")
        return cls(casts, hybridized, grad_req, bool(values["synchronized"]))

    def synchronize(self, net: gluon.Block, devices: int) -> None:
        """Make a plain network's BatchNorms SyncBatchNorms, if they were."""
        if self.synchronized and not any(isinstance(b, SyncBatchNorm) for b in blocks_of(net)):
            synchronize_batch_norm(net, devices)

    def apply(self, net: gluon.Block, path: Path) -> None:
        """Cast and hybridize a plain FP32 network with initialized parameters.

        Raises
        ------
        CheckpointError
            If it lacks a block that the file ``path`` names.
        """
        blocks = {place: block for block, place in paths_of(net).items()}
        named = [
            *self.hybridized,
            *(p for cast in self.casts for p in (cast.block, *cast.kept)),
            *(p for cast in self.casts for p, _ in (*cast.operators_fp32, *cast.operators_16)),
        ]
        for place in named:
            if place not in blocks:
                raise CheckpointError(
                    f"{path} does not fit this network: it has no block {place!r}"
                )
        for cast in self.casts:
            fp32, half = (
                [f"{blocks[place].name}:{operator}" for place, operator in named]
                for named in (cast.operators_fp32, cast.operators_16)
            )
            kept = [*(blocks[place] for place in cast.kept), *fp32]
            apply_policy(blocks[cast.block], cast.policy, kept, half)
        for place, block in blocks.items():
            if isinstance(block, gluon.HybridBlock):
                block.hybridize(place in self.hybridized, **self.hybridized.get(place, {}))


def paths_of(net: gluon.Block) -> dict[gluon.Block, str]:
    """Return the path of each block by the names of children, parents first; "" for the network."""
    paths = {net: ""}
    for block in blocks_of(net):
        for name, child in block._children.items():
            paths.setdefault(child, f"{paths[block]}.{name}".lstrip("."))
    return paths


def code_of(net: gluon.Block, path: str) -> str:
    """Return the expression for a block of ``net`` in Python, such as ``net.features[3]``."""
    codes = {net: "net"}
    for block in blocks_of(net):
        for name, child in block._children.items():
            codes.setdefault(child, f"{codes[block]}{_code_of_child(block, name, child)}")
    return next(codes[block] for block, place in paths_of(net).items() if place == path)


def _code_of_child(block: gluon.Block, name: str, child: gluon.Block) -> str:
    if name.isdigit() and hasattr(block, "__getitem__"):
        return f"[{name}]"
    if name.isidentifier() and getattr(block, name, None) is child:
        return f".{name}"
    return f"._children[{name!r}]"


def lies_in(path: str, block: str) -> bool:
    """Whether a block is another one, or lies in it."""
    return f".{path}.".startswith(f".{block}." if block else ".")


def _policy_of(value: Any) -> Policy:
    """Return a policy from its text, or from the fields that version 0.2.0 wrote."""
    if not isinstance(value, Mapping):
        return Policy.parse(value)
    pairs = {name.removesuffix("_dtype"): one for name, one in value.items() if one is not None}
    pairs["params"] = pairs.pop("param")
    return Policy.parse(",".join(f"{key}={one}".lower() for key, one in pairs.items()))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not the name of a block")
    return value
