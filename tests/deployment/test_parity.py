"""Ports to PyTorch, compared with recordings: right ones are not blamed, faults are named."""

import json
import subprocess
from pathlib import Path

from mpgluon.deployment import export_torch, record_layers

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn, rnn
from test_torch_export import NEEDS_TORCH, TORCH, randomized, small_net

ROOT = Path(__file__).resolve().parents[2]


class Images(nn.HybridBlock):
    """Layers of images, in two branches."""

    def __init__(self):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.first = nn.Conv2D(4, 3, strides=2, padding=1, in_channels=3)
            self.norm = nn.BatchNorm(in_channels=4, momentum=0.8, epsilon=1e-4)
            self.depthwise = nn.Conv2D(4, 3, padding=1, groups=4, in_channels=4)
            self.fixed = nn.BatchNorm(in_channels=4, scale=False)
            self.frozen = nn.BatchNorm(in_channels=4, use_global_stats=True)
            self.up = nn.Conv2DTranspose(4, 2, strides=2, in_channels=4)
            self.dense, self.head = nn.Dense(16, in_units=16), nn.Dense(5, in_units=16)
            self.slope, self.pool = nn.PReLU(in_channels=1), nn.AvgPool2D(3, 2, 1)

    def hybrid_forward(self, F, x):
        x = F.relu(self.norm(self.first(x)))
        x = self.slope(self.fixed(self.depthwise(x))) + self.frozen(x)
        x = F.LeakyReLU(self.up(self.pool(x)), act_type="leaky", slope=0.1)
        x = F.concat(x, F.clip(x, 0, 0.5), dim=1)
        x = F.Pooling(x, kernel=(2, 2), stride=(4, 4), pool_type="avg")
        return self.head(F.sigmoid(self.dense(x.slice_axis(axis=1, begin=3, end=7))))


class Words(nn.HybridBlock):
    """Recurrent layers over an embedding."""

    def __init__(self):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.embedding, self.norm = nn.Embedding(10, 6), nn.LayerNorm(in_channels=6)
            self.lstm = rnn.LSTM(4, bidirectional=True, layout="NTC", input_size=6)
            self.gru = rnn.GRU(4, layout="NTC", input_size=8)
            self.head = nn.Dense(3, flatten=False, in_units=4)

    def hybrid_forward(self, F, x):
        x = self.gru(self.lstm(self.norm(self.embedding(x))))
        return F.log_softmax(self.head(x / 2), axis=-1)


class Twins(nn.HybridBlock):
    """Two layers with the same parameters, and results beyond float16."""

    def __init__(self):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.one, self.other = (nn.BatchNorm(in_channels=3) for _ in range(2))
        self.initialize()

    def hybrid_forward(self, F, x):
        return F.relu(self.one(x) + self.other(x * 2)) * 100


def networks():
    mx.random.seed(0)
    words = Words()
    words.initialize(mx.init.Uniform(0.7))
    images = mx.nd.random.normal(shape=(2, 3, 16, 16))
    rows = nn.HybridSequential()
    rows.add(nn.Embedding(7, 3), nn.Dense(3))  # MXNet clips the indices
    rows.initialize(mx.init.Uniform(0.7))
    found = {
        "small": (small_net(), images),
        "images": (randomized(Images()), images),
        "twins": (Twins(), images * 1000),
        "rows": (rows, mx.nd.array([[-1, 3, 9.0], [6.7, 0, -0.4]])),
        "words": (words, mx.nd.array(np.arange(10).reshape(2, 5))),
    }
    for net, batch in found.values():
        net(batch)
        for one in net.collect_params(".*bias").values():
            one.set_data(mx.nd.random.normal(shape=one.shape))
    return found


def port_of(net, batch, folder):
    export_torch(net, folder, [batch.shape])
    record_layers(net, folder / "layers.npz", batch)


@pytest.fixture(scope="module")
def ports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ports")
    for name, (net, batch) in networks().items():
        port_of(net, batch, folder / name)
    return folder


# A port, a text in it, the faulty text, and the place that must be named. "end" stands
# for the statement that returns the port.
FAULTS = [
    ("images", "eps=0.0001", "eps=0.001", "is batchnorm0: another result"),
    ("images", "momentum=0.2", "momentum=0.1", "is batchnorm0: a step of training"),
    ("images", "Frozen(4)", "nn.BatchNorm2d(4)", "is batchnorm2: a step of training"),
    ("images", "F.relu(self.batchnorm0(self.conv0(x)))", "self.batchnorm0(self.conv0(x))",
     "between batchnorm0 and conv1"),
    ("images", "self.conv0(x)", "self.conv0(F.pad(x, (1, 0, 1, 0)))",
     "between the input and conv0"),
    ("images", "3, stride=2, padding=1)\n", "3, stride=2)\n", "is conv0"),
    ("images", "3, stride=2, padding=1))", "3, 2, 1, count_include_pad=False))",
     "between batchnorm2 and conv2"),
    ("images", "F.leaky_relu(x, 0.1)", "F.leaky_relu(x, 0.11)", "between conv2 and dense0"),
    ("images", "x.clamp(0, 0.5)", "x.clamp(0, 0.6)", "between conv2 and dense0"),
    ("images", "2, stride=4)", "3, stride=4)", "between conv2 and dense0"),
    ("images", "torch.cat([x, x.clamp(0, 0.5)], 1)", "torch.cat([x.clamp(0, 0.5), x], 1)",
     "between conv2 and dense0"),
    ("images", "torch.sigmoid(self", "torch.tanh(self", "between dense0 and dense1"),
    ("images", " + self.batchnorm2(x)", " + x", "between prelu0 and conv2"),
    ("images", "end", "net.dense0.weight.data = net.dense0.weight.data.t()", "is dense0"),
    ("images", "end", "net.batchnorm1.weight.data *= 1.001", "is batchnorm1"),
    ("images", "end", "net.conv1.bias.data.zero_()", "is conv1"),
    ("images", "end", "net.conv1.weight.data = net.conv1.weight.data.flip(3)", "is conv1"),
    ("images", "end", "net.conv2.weight.data = net.conv2.weight.data.transpose(0, 1)", "is conv2"),
    ("images", "end", "net.batchnorm0.running_mean, net.batchnorm0.running_var = "
     "net.batchnorm0.running_var, net.batchnorm0.running_mean", "is batchnorm0"),
    ("words", "end", "net.lstm0.weight_ih_l0.data = "
     "net.lstm0.weight_ih_l0.data.reshape(4, 4, -1)[[0, 1, 3, 2]].flatten(0, 1)", "is lstm0"),
    ("words", "end", "net.gru0.bias_hh_l0.data = "
     "net.gru0.bias_hh_l0.data.reshape(3, 4)[[1, 0, 2]].flatten()", "is gru0"),
    ("words", "end", "net.lstm0.weight_hh_l0, net.lstm0.weight_hh_l0_reverse = "
     "net.lstm0.weight_hh_l0_reverse, net.lstm0.weight_hh_l0", "is lstm0"),
    ("words", "x.long()", "(x.long() + 1)", "between the input and embedding0"),
    ("words", "nn.LayerNorm(6)", "nn.LayerNorm(6, eps=1e-4)", "is layernorm0"),
    ("words", "/ 2.0", "/ 2.001", "between gru0 and dense0"),
    ("words", ", -1)  # (N, 5, 3)", ", 1)  # (N, 5, 3)", "between dense0 and result 0"),
    ("small", "F.max_pool2d", "F.avg_pool2d", "between residual0_batchnorm0 and dense0"),
    ("small", "torch.flatten(x, 1)", "torch.flatten(x.transpose(1, 2), 1)",
     "between residual0_batchnorm0 and dense0"),
    ("small", "(torch.flatten(x, 1))", "(torch.flatten(x, 1))[:, None]", "result 0: the shape is"),
    ("small", "self.conv0(x)  #", "self.conv0(self.conv0(x).repeat(1, 1, 3, 3)[:, :3])  #",
     "between conv0 and Conv2d: the port has one more"),
]  # fmt: skip
# Ports that people write: other names, other orders, other layouts.
RIGHT = [
    ("images", "", ""),
    ("words", "", ""),
    ("rows", "", ""),
    ("small", "", ""),
    ("images", "self.prelu0(self.batchnorm1(self.conv1(x))) + self.batchnorm2(x)",
     "self.batchnorm2(x) + self.prelu0(self.batchnorm1(self.conv1(x)))"),
    ("images", "end", "net = net.to(memory_format=torch.channels_last)"),
    ("images", "end", "net.stem, net.conv0 = net.conv0, nn.Sequential(net.conv0)"),
    ("words", "end", "net.lstm0.batch_first = net.gru0.batch_first = True\n"
     "    net.forward = lambda x: F.log_softmax(net.dense0(net.gru0(net.lstm0("
     "net.layernorm0_layernorm0(net.embedding0(x.long())))[0])[0] * 0.5), -1)"),
    ("small", "F.relu(x + y)", "(y + x).clamp(min=0)"),
    ("small", "end", "net.requires_grad_(False)"),
    ("twins", "", ""),
    ("twins", "self.batchnorm0(x) + self.batchnorm1(x * 2.0)",
     "self.batchnorm1(x * 2.0) + self.batchnorm0(x)"),
]  # fmt: skip
COMPARE = """
import importlib.util, json, sys
from pathlib import Path
from mpgluon_tools.leaving.parity import compare_port

found = []
for number, (name, text) in enumerate(json.load(sys.stdin)):
    folder = Path(sys.argv[1], name)
    path = folder / f"port{number}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    port = module.load(folder / "model.safetensors").train()
    compared = compare_port(port, folder / "layers.npz")
    assert all(one.training for one in port.modules())
    found.append(compared.verdict)
json.dump(found, sys.stdout)
"""


def verdicts(ports, changes):
    """The verdicts of changed ports, each of which is a name, an old text and a new one."""
    changed = []
    for name, old, new in changes:
        text = (ports / name / "model.py").read_text()
        old, new = (
            ("return net.eval()", f"{new}\n    return net.eval()") if old == "end" else (old, new)
        )
        assert old in text, old
        changed.append((name, text.replace(old, new, 1)))
    done = subprocess.run(
        [str(TORCH), "-c", COMPARE, str(ports)], input=json.dumps(changed), capture_output=True,
        env={"PYTHONPATH": str(ROOT)}, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@NEEDS_TORCH
@pytest.mark.slow
def test_each_planted_fault_is_named_where_it_is(ports):
    found = verdicts(ports, [fault[:3] for fault in FAULTS])
    wrong = [(fault[1:], verdict) for fault, verdict in zip(FAULTS, found)
             if fault[3] not in verdict]  # fmt: skip
    assert wrong == []


@NEEDS_TORCH
@pytest.mark.slow
def test_nothing_is_blamed_in_right_ports(ports):
    assert {one.partition(":")[0] for one in verdicts(ports, RIGHT)} == {"the same function"}
