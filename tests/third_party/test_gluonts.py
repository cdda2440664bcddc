"""GluonTS's forecasting networks in 16 bits.

Their distributions ask an array or a symbol for ``mx.nd`` or ``mx.sym``, and call its operators.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from mpgluon.deployment import export_torch

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from third_party_helpers import (
    WAYS,
    Case,
    change_a_little,
    check,
    distance,
    every_way_and_format,
    format_of,
    train,
)

pytest.importorskip("gluonts.mx", reason="GluonTS is not installed (make test WITH=third-party)")
import pandas as pd
from gluonts.dataset.common import ListDataset
from gluonts.mx.model.canonical import CanonicalRNNEstimator
from gluonts.mx.model.deep_factor import DeepFactorEstimator
from gluonts.mx.model.deepar import DeepAREstimator
from gluonts.mx.model.deepstate import DeepStateEstimator
from gluonts.mx.model.deepvar import DeepVAREstimator
from gluonts.mx.model.gp_forecaster import GaussianProcessEstimator
from gluonts.mx.model.n_beats import NBEATSEstimator
from gluonts.mx.model.seq2seq import MQCNNEstimator, MQRNNEstimator
from gluonts.mx.model.simple_feedforward import SimpleFeedForwardEstimator
from gluonts.mx.model.tft import TemporalFusionTransformerEstimator
from gluonts.mx.model.transformer import TransformerEstimator
from gluonts.mx.model.wavenet import WaveNetEstimator
from gluonts.mx.trainer import Trainer
from gluonts.mx.trainer.callback import Callback

pytestmark = [
    pytest.mark.third_party,
    # GluonTS's own, on newer versions of pandas and without a faster module for JSON.
    pytest.mark.filterwarnings("ignore"),
]

TORCH = Path(__file__).resolve().parents[2] / ".venv-peers" / "bin" / "python"
DAYS, BATCH_SIZE, BATCHES = 120, 8, 3
ALL = {"prediction_length": 7}
SIZED = {**ALL, "batch_size": BATCH_SIZE}
DAILY = {**SIZED, "freq": "D"}
SHORT = {**DAILY, "context_length": 14}
# Without dropout, whose masks differ between imperative and hybridized networks.
ESTIMATORS = {
    "Canonical RNN": partial(
        CanonicalRNNEstimator, freq="D", context_length=14, num_cells=16, cell_type="lstm", **ALL
    ),
    "DeepAR": partial(DeepAREstimator, num_cells=16, dropout_rate=0.0, **SHORT),
    "DeepFactor": partial(DeepFactorEstimator, **SHORT),
    "DeepState": partial(
        DeepStateEstimator, cardinality=[3], num_cells=16, past_length=28, dropout_rate=0.0, **DAILY
    ),
    "DeepVAR": partial(DeepVAREstimator, target_dim=3, num_cells=16, dropout_rate=0.0, **SHORT),
    "Gaussian process": partial(GaussianProcessEstimator, cardinality=BATCH_SIZE, **SHORT),
    "MQ-CNN": partial(
        MQCNNEstimator,
        decoder_mlp_dim_seq=[8],
        channels_seq=[8, 8],
        dilation_seq=[1, 3],
        kernel_size_seq=[3, 3],
        **SHORT,
    ),
    "MQ-RNN": partial(MQRNNEstimator, decoder_mlp_dim_seq=[8], **SHORT),
    "N-BEATS": partial(NBEATSEstimator, num_stacks=3, **SHORT),
    "SimpleFeedForward": partial(
        SimpleFeedForwardEstimator, context_length=14, num_hidden_dimensions=[16, 16], **SIZED
    ),
    "TFT": partial(TemporalFusionTransformerEstimator, dropout_rate=0.0, **SHORT),
    "Transformer": partial(TransformerEstimator, dropout_rate=0.0, **SHORT),
    "WaveNet": partial(WaveNetEstimator, **DAILY),
}


def series(several: bool = False) -> ListDataset:
    """Return weekly waves with noise: eight of one value a day, or one of three values."""
    random = np.random.RandomState(0)
    days = np.arange(DAYS)
    waves = [
        5 + 2 * np.sin(2 * np.pi * days / 7 + phase) + 0.1 * random.standard_normal(DAYS)
        for phase in range(8)
    ]
    start = pd.Period("2020-01-01", freq="D")
    entries = [
        {"start": start, "target": wave, "feat_static_cat": [number % 3], "item_id": str(number)}
        for number, wave in enumerate(waves)
    ]
    if several:
        entries = [{**entries[0], "target": np.stack(waves[:3]), "feat_static_cat": [0]}]
    return ListDataset(entries, freq="D", one_dim_target=not several)


@cache
def batches(name: str) -> list[list[Any]]:
    """Return an estimator's first batches, by its own loader."""
    np.random.seed(0)
    estimator = ESTIMATORS[name]()
    data = estimator.create_transformation().apply(series(name == "DeepVAR"), is_train=True)
    loader = estimator.create_training_data_loader(data)
    return [list(batch.values()) for batch in islice(loader, BATCHES)]


def make(name: str) -> mx.gluon.Block:
    # A new estimator each time: some share blocks among the networks that they make.
    net = ESTIMATORS[name]().create_training_network()
    net.initialize(mx.init.Xavier(), force_reinit=True)
    with autograd.train_mode():  # inference changes the layout of convolutions' weights
        net(*batches(name)[0])
    return net


def losses(name: str, net: mx.gluon.Block, step: int) -> Any:
    result = net(*batches(name)[step % BATCHES])
    return result[0] if isinstance(result, (list, tuple)) else result


CASES = {
    name: Case(
        partial(make, name),
        partial(losses, name),
        BATCH_SIZE,
        learning_rate=0.001 if name in ("DeepFactor", "N-BEATS") else 0.01,
        loss_scale=2.0 ** (-2 if name == "DeepFactor" else 6),
        data_roundings=1,
    )
    for name in ESTIMATORS
}


@every_way_and_format
@pytest.mark.parametrize("name", sorted(ESTIMATORS.keys() - {"Gaussian process"}))
def test_a_forecasting_network_trains_in_16_bits_like_fp32(name, way, hybridize):
    check(CASES[name], way, hybridize)


@every_way_and_format
def test_the_gaussian_process_which_computes_in_float64_has_the_same_losses(way, hybridize):
    case = CASES["Gaussian process"]
    for one, other in zip(train(case, way, hybridize).losses, train(case, "FP32").losses):
        assert one.dtype == other.dtype == np.float64
        np.testing.assert_array_equal(one, other)


class OnNetwork(Callback):
    """Calls a function with the network that GluonTS trains, once its shapes are known."""

    def __init__(self, function: Callable[[mx.gluon.Block], Any]) -> None:
        self.function = function

    def on_network_initializing_end(self, training_network: mx.gluon.Block) -> None:
        self.function(training_network)


def forecast(
    name: str, function: Callable[[mx.gluon.Block], Any], *, casts_both: bool = True
) -> np.ndarray:
    """Return GluonTS's forecast after training; ``function`` gets the networks of both, or one."""
    mx.random.seed(0)
    np.random.seed(0)
    trainer = Trainer(epochs=2, num_batches_per_epoch=5, callbacks=[OnNetwork(function)])
    predictor = ESTIMATORS[name](trainer=trainer).train(series())
    if casts_both:
        function(predictor.prediction_net)
    mx.random.seed(0)
    return np.stack([one.mean for one in predictor.predict(series())])


@pytest.mark.parametrize("way", ["autocast", "autocast bfloat16"])
@pytest.mark.parametrize("name", ["SimpleFeedForward", "DeepAR"])
def test_gluonts_own_trainer_trains_and_forecasts_in_16_bits_like_fp32(name, way):
    fp32 = forecast(name, lambda _: None)
    changed = forecast(name, partial(change_a_little, fmt=format_of(way)))
    found = forecast(name, WAYS[way])
    # third_party_helpers.check says why 4; and each forecast is a value that is rounded itself.
    bound = 4 * distance(changed, fp32) + format_of(way).unit_roundoff
    assert 0 < distance(found, fp32) < bound


@pytest.mark.parametrize("name", ["MQ-CNN", "Transformer"])
def test_forecasts_by_a_plain_network_that_shares_the_trained_ones_blocks_are_like_fp32(name):
    fp32 = forecast(name, lambda _: None, casts_both=False)
    changed = forecast(name, change_a_little, casts_both=False)
    found = forecast(name, WAYS["autocast"], casts_both=False)
    assert (
        0
        < distance(found, fp32)
        < 4 * distance(changed, fp32) + format_of("autocast").unit_roundoff
    )


class Part(mx.gluon.HybridBlock):
    """A forecasting network without the inputs that it does not use and without absent results."""

    def __init__(self, net: mx.gluon.HybridBlock, unused: tuple[int, ...]) -> None:
        super().__init__()
        self.net, self.unused = net, unused

    def hybrid_forward(self, F: Any, *inputs: Any) -> Any:
        arguments = list(inputs)
        for place in self.unused:
            arguments.insert(place, F.zeros(1))
        return [one for one in self.flat(self.net(*arguments)) if one is not None]

    def flat(self, results: Any) -> list[Any]:
        if not isinstance(results, (list, tuple)):
            return [results]
        return [one for part in results for one in self.flat(part)]


@pytest.mark.skipif(
    not TORCH.exists(), reason="PyTorch: make test WITH=peers makes its environment"
)
@pytest.mark.parametrize(
    ("name", "unused"), [("MQ-CNN", ()), ("MQ-RNN", ()), ("N-BEATS", (2, 3)), ("TFT", ())]
)
def test_a_network_that_draws_no_samples_gives_the_same_forecast_in_pytorch(name, unused, tmp_path):
    arguments = []
    estimator = ESTIMATORS[name]()
    predictor = estimator.create_predictor(estimator.create_transformation(), make(name))
    hook = predictor.prediction_net.register_forward_pre_hook(
        lambda _, inputs: arguments.append(inputs)
    )
    next(iter(predictor.predict(series())))
    hook.detach()
    shapes = [one.shape for place, one in enumerate(arguments[0]) if place not in unused]
    folder = export_torch(Part(predictor.prediction_net, unused), tmp_path, shapes)
    done = subprocess.run([str(TORCH), str(folder / "check.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
