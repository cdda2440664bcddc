"""Names of other libraries' mixed precision, and what to write instead of each.

``mpgluon.amp`` says so when one of them is asked for. The texts are from the tables in
docs/migration.md, without their marks.
"""

from __future__ import annotations

from types import MappingProxyType

__all__ = ["INSTEAD"]

_SCALE = "with amp.scale_loss(loss, trainer) as scaled_loss: autograd.backward(scaled_loss)"
_STEP = "trainer.step(batch_size), which divides, skips an overflow, and updates the scale"
_SAVE = "mpgluon.save_checkpoint(path, net, trainer)"
_LOAD = "mpgluon.load_checkpoint(path, net, trainer)"
_AVERAGE = "mpgluon.WeightAverage(trainer, 0.999), update(), of the FP32 masters"
_KEEP = "a block in keep_fp32, of amp.autocast or mpgluon.cast_block"
_IMPORTED = "amp.autocast(net), on the gluon.SymbolBlock that the symbol was imported as"
_BY_HAND = "the same names in mpgluon.fp16_utils"
_GOVERNED = "nothing: all operators that a forward pass calls follow the cast"

INSTEAD = MappingProxyType(
    {
        # mxnet.contrib.amp
        "convert_bucketing_module": _IMPORTED,
        "list_fp16_ops": "amp.list_lp16_ops()",
        # Apex
        "initialize": "mpgluon.cast_block(net), a Trainer with multi_precision=True, and "
        "amp.init_trainer(trainer)",
        "float_function": _KEEP,
        "disable_casts": _KEEP,
        "half_function": _GOVERNED,
        "promote_function": _GOVERNED,
        "master_params": "after training mpgluon.restore(net); by hand "
        "fp16_utils.prep_param_lists(net)",
        "FP16_Optimizer": "a Trainer with multi_precision=True, and amp.init_trainer(trainer); "
        "gluon.Trainer has no closures",
        "network_to_half": _BY_HAND,
        "BN_convert_float": _BY_HAND,
        "state_dict": _SAVE,
        "load_state_dict": _LOAD,
        # torch.amp
        "GradScaler": "amp.init_trainer(trainer), right after the Trainer is made",
        "scale": _SCALE,
        "step": _STEP,
        "update": _STEP,
        "unscale_": "amp.clip_global_norm to clip, amp.unscaled_gradients(trainer) to look, "
        "amp.unscale(trainer) to change",
        "get_scale": "amp.loss_scale(trainer)",
        "AveragedModel": _AVERAGE,
        "update_parameters": _AVERAGE,
        # Keras
        "set_global_policy": 'amp.autocast(net, "float16"), after layers are made',
        "LossScaleOptimizer": "amp.init_trainer(trainer)",
        "get_scaled_loss": _SCALE,
        "get_unscaled_gradients": "nothing: the step divides; amp.unscaled_gradients(trainer) "
        "to look",
        "dynamic_scale": "amp.loss_scale(trainer), saved by mpgluon.save_checkpoint",
        "enable_mixed_precision_graph_rewrite": 'amp.autocast(net, "float16") and '
        "amp.init_trainer(trainer)",
        # Paddle
        "auto_cast": 'amp.autocast(net, "float16")',
        "decorate": "mpgluon.cast_block(net), and multi_precision=True",
        "minimize": _STEP,
    }
)
