"""The config: what it refuses, which precision it stands for, and what it may differ in."""

import json
import math
import re
from dataclasses import fields, replace

from mpgluon import DynamicLossScale, NoLossScale, Policy, StaticLossScale

import pytest

from recipes.training import TrainingConfig
from recipes.training.optimizers import make_optimizer

BFLOAT16_WEIGHTS = "params=bfloat16,compute=bfloat16"
BETWEEN = "compute=float8_e4m3,between=float16"
AT_LEAST = {
    **{"images_per_class": 2, "warmup_epochs": 0, "workers": 0},
    **dict.fromkeys(("train_per_class", "image_size", "batch_size", "accumulate", "epochs"), 1),
    **dict.fromkeys(("keep_checkpoints", "reference_batch_size"), 1),
}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("dtype", "float64", "received 'float64', .* 'float16'"),
        ("dataset", "mnist", "one of caltech101, folder, shapes, synthetic; received 'mnist'"),
        *(
            (name, least - 1, f"{name} must be at least {least}, received {least - 1}")
            for name, least in AT_LEAST.items()
        ),
        *(
            (name, value, rf"{name} must be in {re.escape(bounds)}, received {value}")
            for name, bounds, values in (
                ("ema", "(0, 1)", (0.0, 1.0, math.nan)),
                ("min_crop_area", "(0, 1]", (0.0, 1.001, math.nan)),
                ("momentum", "[0, 1)", (-0.1, 1.0, math.nan)),
                ("seed", "[0, 4294967295]", (-1,)),
            )
            for value in values
        ),
        ("kvstore", "nccl", "kvstore must be one of device, mpi; received 'nccl'"),
        ("timeout", 0.0, "timeout must be positive, received 0.0"),
        ("learning_rate", 0.0, "learning_rate must be positive, received 0.0"),
        ("learning_rate", math.nan, "learning_rate must be positive, received nan"),
        ("learning_rate", math.inf, "learning_rate must be positive and finite, received inf"),
        ("weight_decay", -1e-9, "weight_decay must be at least 0, received -1e-09"),
        ("weight_decay", math.nan, "weight_decay must be at least 0, received nan"),
        ("amp", True, "amp computes in 16 bits: choose dtype float16 or bfloat16"),
        ("update_rounding", "kahan", "for bfloat16 parameters .*compute=bfloat16.*not 'float32'"),
        ("loss_scale", "fixed", "a loss scale is .* received 'fixed'"),
        ("loss_scale", "1000", "must be a power of two.* received 1000"),
        ("loss_scale", "0", "must be a power of two.* received 0"),
        ("loss_scale", "inf", "must be a power of two.* received inf"),
        ("output_dir", "", "output_dir must be a folder, received ''; . is the current one"),
        ("data_dir", "", "data_dir must be a folder, received ''"),
        ("output_dir", "\udce4", "output_dir must be a name in UTF-8, .* received"),
    ],
)
def test_a_bad_value_is_refused_by_its_name(name, value, message):
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**{name: value})


@pytest.mark.parametrize(
    ("dtype", "amp", "policy", "automatic"),
    [
        ("float32", False, Policy("float32", "float32", "float32"), NoLossScale),
        ("float16", False, Policy("float16", "float16", "float32"), DynamicLossScale),
        ("float16", True, Policy("float32", "float16", "float32"), DynamicLossScale),
        ("bfloat16", False, Policy("float32", "bfloat16", "float32"), NoLossScale),
        ("bfloat16", True, Policy("float32", "bfloat16", "float32"), NoLossScale),
        ("mixed_float8", False, Policy.parse("mixed_float8"), NoLossScale),  # bfloat16 between
        ("compute=float8_e5m2", False, Policy.parse("compute=float8_e5m2"), DynamicLossScale),
        (BETWEEN, False, Policy.parse(BETWEEN), DynamicLossScale),
    ],
)
def test_dtype_and_amp_decide_formats_and_whether_auto_is_dynamic(dtype, amp, policy, automatic):
    config = TrainingConfig(dtype=dtype, amp=amp)
    assert config.policy == policy
    assert type(config.make_loss_scale(100)) is automatic
    for text, kind, scale in (
        ("none", NoLossScale, 1.0),
        ("1024", StaticLossScale, 1024.0),
        ("0.5", StaticLossScale, 0.5),
        ("dynamic", DynamicLossScale, 2.0**16),
    ):
        loss_scale = replace(config, loss_scale=text).make_loss_scale(100)
        assert (type(loss_scale), loss_scale.scale) == (kind, scale)


@pytest.mark.parametrize(
    ("total_steps", "interval"),
    [(1, 10), (109, 10), (110, 11), (19_999, 1999), (20_000, 2000), (10**6, 2000)],
)
def test_a_dynamic_scale_grows_after_a_tenth_of_a_run_from_10_to_2000_steps(total_steps, interval):
    loss_scale = TrainingConfig(dtype="float16").make_loss_scale(total_steps)
    assert isinstance(loss_scale, DynamicLossScale)
    assert loss_scale.growth_interval == interval


def test_a_config_is_equal_after_a_round_trip_through_json():
    config = TrainingConfig(dtype="float16", amp=True, growth_interval=7, pretrained="a.params")
    text = json.dumps(config.as_dict())
    assert TrainingConfig(**json.loads(text)) == config
    assert config.differences(json.loads(text)) == []


OTHER_VALUES = {
    **{"dtype": "bfloat16", "update_rounding": "kahan", "amp": True, "loss_scale": "8"},
    **{"growth_interval": 5, "model": "resnet18_v1", "pretrained": "start.params"},
    **{"dataset": "shapes", "classes": 11, "images_per_class": 61, "data_dir": "elsewhere"},
    **{"output_dir": "runs/other", "train_per_class": 31, "test_per_class": 50},
    **{"image_size": 225, "test_image_size": 256, "min_crop_area": 0.5, "batch_size": 33},
    **{"shifts": True, "accumulate": 2, "epochs": 31, "warmup_epochs": 3, "seed": 1},
    **{"learning_rate": 0.06, "head_rate": 10.0, "momentum": 0.8, "reference_batch_size": 64},
    **{"weight_decay": 2e-4, "optimizer": "adam", "label_smoothing": 0.1, "ema": 0.999},
    **{"devices": "cpu:0,1", "kvstore": "mpi", "timeout": 60.0, "sync_batch_norm": True},
    **{"workers": 3, "skip_unreadable": True, "keep_checkpoints": 3, "record_overflows": 2},
    **{"record_numerics": 10, "tensorboard": True, "test_share": 0.2},
}
# Places, and the parts of a step's batch, which is compared over all devices and processes.
FREE = {
    *("data_dir", "output_dir", "workers", "keep_checkpoints", "tensorboard"),
    *("record_overflows", "record_numerics", "batch_size", "accumulate", "devices"),
    *("kvstore", "timeout"),
}


@pytest.mark.parametrize("name", [field.name for field in fields(TrainingConfig)])
def test_a_difference_is_named_unless_it_changes_nothing_that_is_computed(name):
    dtype = "float16" if name != "update_rounding" else BFLOAT16_WEIGHTS
    before = TrainingConfig(dtype=dtype)
    after = replace(before, **{name: OTHER_VALUES[name]})
    assert after != before
    expected = f"{name} was {getattr(before, name)!r}, is {getattr(after, name)!r}"
    assert after.differences(before.as_dict()) == ([] if name in FREE else [expected])


def test_an_option_that_an_older_version_did_not_have_had_its_default_there():
    config = TrainingConfig(dtype="float16")
    older = {name: value for name, value in config.as_dict().items() if name != "label_smoothing"}
    assert config.differences(older) == []
    assert replace(config, label_smoothing=0.1).differences(older) == [
        "label_smoothing was 0.0, is 0.1"
    ]


def test_the_peak_learning_rate_is_for_the_reference_batch():
    assert TrainingConfig(learning_rate=0.1).peak_learning_rate(512) == 0.1
    config = TrainingConfig(learning_rate=0.1, reference_batch_size=256)
    assert [config.peak_learning_rate(size) for size in (64, 256, 1024)] == [0.025, 0.1, 0.4]


def test_options_that_change_nothing_are_named():
    assert TrainingConfig(dtype="float16", growth_interval=5).without_effect() == []
    assert TrainingConfig(pretrained="a.params", head_rate=10.0).without_effect() == []
    assert TrainingConfig(dataset="shapes", classes=12, images_per_class=9).without_effect() == []
    config = TrainingConfig(
        growth_interval=5, head_rate=10.0, min_crop_area=0.5, shifts=True, classes=12
    )
    assert config.without_effect() == [
        "growth_interval=5 has no effect: this run has no dynamic loss scale",
        "classes=12 has no effect: the images have their own",
        "min_crop_area=0.5 has no effect: whole images are used, as --shifts says",
        "head_rate=10.0 has no effect: it is for weights of --pretrained",
    ]


def test_the_learning_rate_rises_through_the_warm_up_and_falls_to_zero_as_a_cosine():
    config = TrainingConfig(epochs=4, warmup_epochs=1, learning_rate=0.5, reference_batch_size=10)
    optimizer = make_optimizer(config, 40, 20)
    rates = [optimizer.lr_scheduler(step) for step in (0, 5, 10, 25, 40)]
    assert rates == pytest.approx([0, 0.5, 1, 0.5, 0], abs=1e-9)
    short = make_optimizer(replace(config, epochs=1), 10, 20)  # no epoch is left for a warm-up
    assert short.lr_scheduler(1) == pytest.approx((1 + math.cos(math.pi / 10)) / 2)


@pytest.mark.parametrize(
    ("dtype", "rounding", "masters"),
    [
        *(("float32", None, False), ("float16", None, True), ("mixed_float16", None, False)),
        (BFLOAT16_WEIGHTS, "stochastic", False),
    ],
)
def test_masters_are_for_16_bit_parameters_whose_updates_are_not_rounded(dtype, rounding, masters):
    options = {"momentum": 0.25, "weight_decay": 0.125, "update_rounding": rounding}
    optimizer = make_optimizer(TrainingConfig(dtype=dtype, **options), 100, 10)
    assert optimizer.multi_precision == masters
    assert (optimizer.momentum, optimizer.wd) == (0.25, 0.125)
