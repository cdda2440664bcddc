"""The training side of a PyTorch program: optimizer and loss scale, where MXNet's Trainer is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpgluon.checkpoint.saved import Run
from mpgluon.checkpoint.trainer import export_loss_scale, export_optimizer
from mpgluon.errors import PrecisionError
from mpgluon.formats.loss_scale import NoLossScale
from mpgluon.updates import gluon_trainer
from mpgluon_tools.leaving.safetensors_file import safetensors
from mpgluon_tools.leaving.torch_writer import TorchProgram

import numpy as np
from mxnet import gluon

__all__ = ["training_files"]

_PROGRAM = '''"""Continue the training of the network where MXNet's Trainer left it."""
import torch
from safetensors.torch import load_file

OTHERS = {others}  # parameters that the Trainer does not have
FACTORS = {factors}  # of learning rate and weight decay, by parameter; 1 for all others
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def training(net, path="training.safetensors", device=DEVICE):
    """Return the optimizer and the gradient scaler of a network, which then is in training mode.

    MXNet's Trainer divides gradients by the batch: use the mean of the losses. Learning rates
    come from the last step; set a schedule yourself.
    """
    groups, states = {{}}, load_file(path, device)
    net.to(device).train()
    for name, parameter in net.named_parameters():
        if parameter.requires_grad and name not in OTHERS:
            groups.setdefault(FACTORS.get(name, (1.0, 1.0)), []).append(parameter)
    optimizer = torch.optim.{kind}(
        [
            {{"params": parameters, "lr": {rate!r} * rate, "weight_decay": {decay!r} * decay}}
            for (rate, decay), parameters in groups.items()
        ],
        {options},
    )
    for name, parameter in net.named_parameters():
        prefix = f"{{name}}/"
        state = {{key[len(prefix):]: one for key, one in states.items() if key.startswith(prefix)}}
        if state:
            optimizer.state[parameter] = state
    scaler = torch.amp.GradScaler(device, enabled={enabled})
    scaler.load_state_dict({scale})
    return optimizer, scaler
'''


def training_files(
    net: gluon.HybridBlock, trainer: gluon.Trainer, program: TorchProgram
) -> dict[str, bytes]:
    """Return ``training.py`` and ``training.safetensors``.

    Parameters
    ----------
    net : gluon.HybridBlock
    trainer : gluon.Trainer
    program : TorchProgram

    Raises
    ------
    PrecisionError
        If PyTorch has no equal optimizer, or an option of it has no equal; if the learning rate is
        0, by which the momentum would have to be divided.
    TrainerStateError
        If the kvstore holds the optimizer's state.
    """
    run = Run(net, trainer)
    content = export_optimizer(run)
    optimizer = gluon_trainer.optimizer_of(trainer)
    kind, options, parts = _equal_of(optimizer)
    if gluon_trainer.scale_of(trainer) != 1:
        raise PrecisionError(
            "PyTorch's optimizers do not scale gradients, received rescale_grad="
            f"{gluon_trainer.scale_of(trainer)}; multiply the loss by it, and train with 1"
        )
    if not trainer.learning_rate:
        raise PrecisionError("the learning rate is 0; set another one before the export")
    trained = {id(one) for one in gluon_trainer.parameters_of(trainer)}
    (counts,) = list(content.fields["update_counts"].values())[:1] or [{}]
    arrays = content.arrays.get("state", {})
    state: dict[str, Any] = {}
    factors, others = {}, []
    for place, parameter in run.parameters.items():
        name = program.names.get(parameter.name)
        if name is None or parameter.grad_req == "null":
            continue
        if id(parameter) not in trained:
            others.append(name)
            continue
        rate = trainer.learning_rate * parameter.lr_mult
        if (parameter.lr_mult, parameter.wd_mult) != (1.0, 1.0):
            factors[name] = (parameter.lr_mult, parameter.wd_mult)
        for part, (ending, over_rate) in parts.items():
            if f"{place}{ending}" in arrays and (rate or not over_rate):
                value = arrays[f"{place}{ending}"].astype(np.float32)
                shape = program.state[name].shape
                value = np.repeat(value.ravel(), np.prod(shape, dtype=int) // value.size)
                value = -value / np.float32(rate) if over_rate else value
                state[f"{name}/{part}"] = value.reshape(shape)
        if kind == "Adam" and f"{name}/exp_avg" in state:
            state[f"{name}/step"] = np.asarray(counts.get(place, 0), np.float32)
    scaler = _scaler_of(export_loss_scale(run).fields["loss_scale"] or {})
    text = _PROGRAM.format(
        factors=factors, others=sorted(others), kind=kind,
        rate=float(trainer.learning_rate), decay=float(optimizer.wd),
        options=", ".join(f"{name}={value!r}" for name, value in options.items()),
        enabled=bool(scaler), scale=scaler,
    )  # fmt: skip
    return {"training.py": text.encode(), "training.safetensors": safetensors(state)}


def _equal_of(optimizer: Any) -> tuple[str, dict[str, Any], dict[str, tuple[str, bool]]]:
    """Return PyTorch's optimizer, its options, and the endings of MXNet's arrays by its own.

    MXNet's momentum is minus the learning rate times PyTorch's.
    """
    name = type(optimizer).__name__
    if getattr(optimizer, "clip_gradient", None):
        raise PrecisionError(
            "PyTorch's optimizers do not clip each gradient, received clip_gradient="
            f"{optimizer.clip_gradient}; clip in the loop with torch.nn.utils.clip_grad_value_"
        )
    if name in ("SGD", "NAG"):
        options = {"momentum": float(optimizer.momentum)}
        if name == "NAG" and optimizer.momentum:
            options["nesterov"] = True
        return "SGD", options, {"momentum_buffer": ("", True)} if optimizer.momentum else {}
    if name == "Adam":
        betas = (float(optimizer.beta1), float(optimizer.beta2))
        parts = {"exp_avg": ("/0", False), "exp_avg_sq": ("/1", False)}
        return "Adam", {"betas": betas, "eps": float(optimizer.epsilon)}, parts
    raise PrecisionError(
        f"the state of {name} is not translated to PyTorch, only SGD's, NAG's and Adam's are; "
        "export the network without its trainer"
    )


def _scaler_of(scale: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of PyTorch's GradScaler; a static scale stays as it is."""
    if "scale" not in scale or scale["kind"] == NoLossScale.__name__:
        return {}
    return {
        "scale": float(scale["scale"]),
        "growth_factor": float(scale.get("growth_factor", 2.0)),
        "backoff_factor": float(scale.get("backoff_factor", 1.0)),
        "growth_interval": int(scale.get("growth_interval", 2**31 - 1)),
        "_growth_tracker": int(scale.get("growth_tracker", 0)),
    }
