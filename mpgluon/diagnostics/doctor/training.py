"""Whether a network will train well with this Trainer and these labels.

Functions of the facts alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpgluon.diagnostics.doctor.findings import Finding, error, note, ok, warning
from mpgluon.diagnostics.doctor.network import TrainerFacts, TrainingFacts

__all__ = ["training"]

_LAST_COUNTED = 2**11  # float16 holds every integer up to here


def training(facts: TrainingFacts) -> Iterator[Finding]:
    """Yield findings about the training; a function of the facts alone."""
    for check in (
        _cast,
        _batch_norm,
        _sync_batch_norm,
        _output,
        _masters,
        _loss_scale,
        _own_gradients,
        _kvstore,
        _contrib,
        _labels,
    ):
        yield from check(facts)


def _cast(facts: TrainingFacts) -> Iterator[Finding]:
    if facts.plainly_cast:
        on_cpu = "cpu" in facts.device_types
        yield Finding(
            "error" if on_cpu else "warning",
            "cast",
            f"float16 parameters that cast_block did not make: {_examples(facts.plainly_cast)}",
            "MXNet refuses float16 convolutions and dense layers on a CPU"
            if on_cpu
            else "net.cast makes LayerNorm, GroupNorm and softmax compute in float16, and masters "
            "then begin with weights that are rounded already",
            'make the network in FP32 (net.cast("float32") takes a cast back), then '
            "mpgluon.cast_block(net)",
        )
    if facts.policy is not None:
        policy = facts.policy
        yield ok(
            "cast",
            f"parameters {policy.param_dtype}, computation {policy.compute_dtype}, "
            f"result {policy.output_dtype}",
        )
        if facts.arithmetic == "emulated" and policy.compute_dtype == "bfloat16":
            yield note(
                "speed",
                "bfloat16 is emulated: this processor has no instructions for it, or the policy "
                "asks for it",
                "each result is computed in FP32 and rounded once; a hybridized step takes a "
                "little longer than FP32's",
                "for speed train in float32 here, or in bfloat16 on a processor that has it",
            )
    elif not facts.plainly_cast and (facts.devices or facts.trainer):
        yield note(
            "cast",
            "nothing is in 16 bits",
            "the network trains in FP32, with no saving of time or memory",
            'mpgluon.cast_block(net), or amp.autocast(net, "bfloat16"), before the Trainer is made',
        )


def _batch_norm(facts: TrainingFacts) -> Iterator[Finding]:
    if facts.float16_batch_norms:
        yield error(
            "BatchNorm",
            f"float16 parameters or statistics in {_examples(facts.float16_batch_norms)}",
            "MXNet's operator takes FP32 ones only, and running means of small values would stall",
            "for each of these layers: for p in layer.collect_params().values(): "
            'p.cast("float32"); cast_block and net.cast leave them alone',
        )


def _sync_batch_norm(facts: TrainingFacts) -> Iterator[Finding]:
    if not facts.sync_batch_norms:
        return
    names = tuple(name for name, _ in facts.sync_batch_norms)
    if facts.plainly_cast:
        yield error(
            "SyncBatchNorm",
            f"{_examples(names)} in a network cast with net.cast",
            "its operator takes FP32 data only: data type do not match specified type",
            "mpgluon.cast_block(net) on a network in FP32 passes FP32 data to it",
        )
    wrong = [(name, count) for name, count in facts.sync_batch_norms if count != facts.devices]
    if wrong and facts.devices:
        name, count = wrong[0]
        yield error(
            "SyncBatchNorm",
            f"{name} has num_devices={count}, the network is on {facts.devices}",
            "it waits forever for devices that take no part"
            if count > facts.devices
            else "devices are not synchronized with each other",
            f"SyncBatchNorm(num_devices={facts.devices}); its default is all GPUs of the machine",
        )
    elif not facts.plainly_cast:
        yield ok("SyncBatchNorm", f"{_examples(names)} over {facts.devices} devices")


def _output(facts: TrainingFacts) -> Iterator[Finding]:
    by_policy = facts.policy is not None and facts.policy.output_dtype == "float16"
    if not by_policy and not facts.plainly_cast:
        return
    yield warning(
        "logits",
        "the network returns float16"
        if by_policy
        else "the network returns float16 unless a layer of its own casts the result",
        "softmax and the loss sum exponentials, on a CPU in float16 itself, and metrics "
        "overflow at 65504",
        'Policy(..., output_dtype="float32")'
        if by_policy
        else 'mpgluon.cast_block(net) returns FP32; or loss_fn(net(images).astype("float32"), …)',
    )


def _masters(facts: TrainingFacts) -> Iterator[Finding]:
    trainer = facts.trainer
    if trainer is not None and trainer.bfloat16_weights:
        yield _bfloat16_masters(trainer)
    if trainer is None or not trainer.float16_weights:
        return
    weights = f"{len(trainer.float16_weights)} float16 weights"
    fix = "create the Trainer's optimizer with multi_precision=True"
    if not trainer.multi_precision and trainer.obstacle is not None:
        yield error(
            "masters",
            f"{trainer.optimizer} updates {weights} without FP32 masters",
            trainer.obstacle,
            fix,
        )
    elif not trainer.multi_precision:
        yield warning(
            "masters",
            f"{trainer.optimizer} updates {weights} without FP32 masters",
            "updates below half a unit in a weight's last place are lost, 2^-12 at 1.0",
            fix,
        )
    elif not trainer.keeps_masters and facts.policy is not None:
        yield warning(
            "masters",
            "the Trainer was made before the network was cast",
            "it has MXNet's own masters, which begin with weights that are rounded already",
            "make the Trainer after mpgluon.cast_block, or call amp.init_trainer(trainer)",
        )
    else:
        yield ok("masters", f"{weights} with FP32 masters")


def _bfloat16_masters(trainer: TrainerFacts) -> Finding:
    weights = f"{len(trainer.bfloat16_weights)} bfloat16 weights"
    if trainer.multi_precision:
        return ok("masters", f"{weights} with FP32 masters")
    if trainer.update_rounding != "nearest":
        return ok("masters", f"{weights} without any, updates rounded: {trainer.update_rounding}")
    return warning(
        "masters",
        f"{trainer.optimizer} updates {weights} without FP32 masters",
        "updates below half a unit in a weight's last place are lost, 2^-9 at 1.0",
        "create the Trainer's optimizer with multi_precision=True, or call "
        'amp.init_trainer(trainer, update_rounding="stochastic")',
    )


def _loss_scale(facts: TrainingFacts) -> Iterator[Finding]:
    trainer = facts.trainer
    if trainer is None:
        return
    if trainer.scaler == "contrib":
        yield error(
            "loss scale",
            "the Trainer has that of mxnet.contrib.amp",
            "it fails on float16 and FP32 gradients together, looks at the first device only, and "
            "backs off a step late",
            "from mpgluon import amp instead, without amp.init(); a new Trainer, then "
            "amp.init_trainer(trainer)",
        )
    elif trainer.scaler in ("none", "mpgluon, none") and facts.computes_float16:
        yield warning(
            "loss scale",
            "none, though gradients are float16",
            "gradients below 2^-25 (3e-8) become 0, and those below 2^-14 lose digits; a step with "
            "infinite ones is not skipped",
            "amp.init_trainer(trainer), and amp.scale_loss around backward",
        )
    elif trainer.scaler not in ("none", "mpgluon, none", "mpgluon"):
        yield note(
            "loss scale",
            f"the Trainer asks an object of class {trainer.scaler} whether to skip a step",
            "it is neither mpgluon's nor MXNet's",
            "amp.init_trainer on a new Trainer, unless this is meant",
        )
    else:
        what = "mpgluon's" if trainer.scaler == "mpgluon" else "none, and none is needed"
        yield ok("loss scale", what)


def _own_gradients(facts: TrainingFacts) -> Iterator[Finding]:
    trainer = facts.trainer
    scaled = facts.computes_float16 if trainer is None else trainer.scaler == "mpgluon"
    if not facts.own_gradients or not scaled:
        return
    names = tuple(f"{operator} in {block}" for block, operator in facts.own_gradients)
    yield error(
        "own gradient",
        f"{_examples(names)} ignores the gradient that it receives",
        "no loss scale reaches the network's gradients, and amp.scale_loss refuses such a loss",
        "let the network return what goes into the operator, and use a loss of gluon.loss; call "
        "hybridize(False) on the block if the operator has a grad_scale; or "
        'amp.init_trainer(trainer, loss_scale="none")',
    )


def _kvstore(facts: TrainingFacts) -> Iterator[Finding]:
    if facts.trainer is None or not facts.trainer.updates_in_kvstore:
        return
    if facts.computes_float16:
        yield error(
            "kvstore",
            "the Trainer updates weights inside its kvstore",
            "no step with infinite gradients can be skipped there, and a changed loss scale raises",
            "gluon.Trainer(…, update_on_kvstore=False), or amp.init_trainer right after creating "
            "one that was not told (the default on several devices is True)",
        )


def _contrib(facts: TrainingFacts) -> Iterator[Finding]:
    if facts.contrib_initialized:
        yield error(
            "contrib.amp",
            "mxnet.contrib.amp.init() was called in this process",
            "it has patched mx.nd and mx.sym for good: operators cast their inputs without "
            "mpgluon, and after init('float16') an FP32 convolution on a CPU fails",
            "remove the call and start again: from mpgluon import amp needs no init",
        )


def _labels(facts: TrainingFacts) -> Iterator[Finding]:
    if not facts.labels:
        return
    worst = max(
        (one for one in facts.labels if one.dtype == "float16"),
        key=lambda one: one.largest,
        default=None,
    )
    if worst is None:
        yield ok("labels", ", ".join(sorted({one.dtype for one in facts.labels})))
        return
    rounded = worst.largest >= _LAST_COUNTED
    yield Finding(
        "error" if rounded else "warning",
        "labels",
        f"float16, the largest {worst.largest:g}",
        "float16 counts to 2048 only: 2049 has become 2048 already"
        if rounded
        else "float16 counts to 2048 only, and rounds targets of a regression to 11 bits",
        "leave labels as they are, int32 or float32, whatever the network's format",
    )


def _examples(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
