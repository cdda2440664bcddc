"""A network as a PyTorch program: its text, its values, and the same numbers as MXNet's."""

import ast
import json
import struct
import subprocess
from functools import partial
from pathlib import Path

import mpgluon
from mpgluon.deployment import export_torch
from mpgluon.errors import PrecisionError
from mpgluon.tools.zoo import build_network
from mpgluon_tools.leaving.mxnet_files import read_params, read_symbol
from mpgluon_tools.leaving.torch_names import OF_MODULES, Names
from mpgluon_tools.leaving.torch_writer import torch_program

import mxnet as mx
import numpy as np
import pytest
from interfaces import interface
from mxnet.gluon import nn, rnn

TORCH = Path(__file__).resolve().parents[2] / ".venv-peers" / "bin" / "python"
NEEDS_TORCH = pytest.mark.skipif(
    not TORCH.exists(), reason="PyTorch has no environment here; make test WITH=peers makes one"
)
# Names of both zoos, with a size of their images.
ZOO = {
    "alexnet": 64, "cifar_resnet20_v1": 32, "cifar_resnet20_v2": 32, "densenet121": 64,
    "efficientnet_lite0": 64, "googlenet": 64, "inceptionv3": 80, "mobilenet1.0": 64,
    "mobilenetv2_1.0": 64, "mobilenetv3_large": 64, "mobilenetv3_small": 64, "resnet18_v1": 64,
    "resnet18_v2": 64, "resnet50_v1": 64, "resnet50_v1b": 64, "resnet50_v1d": 64,
    "resnet50_v2": 64, "resnext50_32x4d": 64, "se_resnext50_32x4d": 64, "squeezenet1.0": 64,
    "vgg11_bn": 32, "vgg16": 32, "bn_inception": 64,
}  # fmt: skip


class Residual(nn.HybridBlock):
    def __init__(self, channels):
        super().__init__()
        with self.name_scope():
            self.body = nn.Conv2D(channels, 3, padding=1, use_bias=False, in_channels=channels)
            self.norm = nn.BatchNorm(in_channels=channels, momentum=0.8, scale=False)

    def hybrid_forward(self, F, x):
        return F.relu(x + self.norm(self.body(x)))


def small_net():
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(4, 3, strides=2, in_channels=3), Residual(4), nn.Dropout(0.25))
        net.add(nn.MaxPool2D(), nn.Flatten(), nn.Dense(5, in_units=36))
    return randomized(net)


def randomized(net):
    """Initialize a network with statistics and scales that differ from the first ones."""
    mx.random.seed(0)
    np.random.seed(0)
    net.initialize(mx.init.Xavier(), force_reinit=True)
    for name, one in net.collect_params().items():
        if name.endswith(("running_var", "gamma")):
            one.set_data(mx.nd.random.uniform(0.5, 1.5, shape=one.shape))
        elif name.endswith(("running_mean", "beta")):
            one.set_data(mx.nd.random.normal(scale=0.2, shape=one.shape))
    return net


def state_of(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    header.pop("__metadata__")
    dtypes = {"F32": np.float32, "I64": np.int64}
    return {
        name: np.frombuffer(rest[slice(*one["data_offsets"])], dtypes[one["dtype"]]).reshape(
            one["shape"]
        )
        for name, one in header.items()
    }


def test_a_program_reads_as_a_person_would_write_it(tmp_path):
    text = (
        export_torch(small_net(), tmp_path, [(8, 3, 16, 16)], title="A net.") / "model.py"
    ).read_text()
    assert (
        text
        == '''"""A net."""
import torch
import torch.nn.functional as F
from torch import nn

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv0 = nn.Conv2d(3, 4, 3, stride=2)
        self.residual0_conv0 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.residual0_batchnorm0 = nn.BatchNorm2d(4, momentum=0.2)
        self.residual0_batchnorm0.weight.requires_grad = False
        self.dense0 = nn.Linear(36, 5)

    def forward(self, x):
        x = self.conv0(x)  # (N, 4, 7, 7)
        y = self.residual0_batchnorm0(self.residual0_conv0(x))  # (N, 4, 7, 7)
        x = F.max_pool2d(F.dropout(F.relu(x + y), 0.25, self.training), 2, stride=2)  # (N, 4, 3, 3)
        return self.dense0(torch.flatten(x, 1))  # (N, 5)


def load(path="model.safetensors"):
    """Return the network with the parameters of a file, for inference."""
    from safetensors.torch import load_file

    net = Network()
    net.load_state_dict(load_file(path))
    return net.eval()
'''
    )


def test_values_are_those_of_the_network_and_a_fixed_scale_is_one(tmp_path):
    net = small_net()
    state = state_of(export_torch(net, tmp_path, [(8, 3, 16, 16)]) / "model.safetensors")
    parameters = net.collect_params()
    weight = parameters["net_residual0_conv0_weight"].data().asnumpy()
    assert state["residual0_conv0.weight"].tobytes() == weight.tobytes()
    assert state["residual0_batchnorm0.weight"].tolist() == [1] * 4
    assert state["residual0_batchnorm0.num_batches_tracked"] == 0


def test_a_cast_network_is_written_with_its_masters_and_unchanged(tmp_path):
    net = small_net()
    plain = export_torch(net, tmp_path / "plain", [(8, 3, 16, 16)])
    mpgluon.cast_block(net)
    cast = export_torch(net, tmp_path / "cast", [(8, 3, 16, 16)])
    for name in ("model.py", "model.safetensors", "check.npz"):
        assert (plain / name).read_bytes() == (cast / name).read_bytes()
    assert net.collect_params()["net_dense0_weight"].dtype == "float16"


def test_neither_mxnet_nor_the_library_is_needed_to_write(tmp_path):
    net = small_net()
    net.hybridize()
    net(mx.nd.zeros((2, 3, 16, 16)))
    net.export(str(tmp_path / "net"))
    values = read_params(tmp_path / "net-0000.params")
    values = {name.partition(":")[2]: value for name, value in values.items()}
    program = torch_program(
        read_symbol(tmp_path / "net-symbol.json"), values, ["data"], title="A net."
    )
    assert "self.residual0_conv0 = nn.Conv2d(4, 4, 3, padding=1, bias=False)" in program.text
    assert "(N," not in program.text
    with pytest.raises(ValueError, match="variable data, which is neither an input"):
        torch_program(read_symbol(tmp_path / "net-symbol.json"), values, ["image"], title="")


class Unusual(nn.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.gamma(F.gammaln(x))


def test_operators_without_an_equal_are_named_and_nothing_is_written(tmp_path):
    net = Unusual()
    net.initialize()
    with pytest.raises(PrecisionError, match=r"gammaln0 \(gammaln: not translated\).*gamma0"):
        export_torch(net, tmp_path / "net", [(2, 5)])
    assert not (tmp_path / "net").exists()
    with pytest.raises(ValueError, match="does not work on input of shape"):
        export_torch(small_net(), tmp_path / "net", [(2, 4, 16, 16)])


class Tied(nn.HybridBlock):
    """An embedding whose weight is the head's too, a constant, and a part without gradients."""

    def __init__(self):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.embedding = nn.Embedding(10, 4)
            self.body = nn.Dense(4, in_units=4, flatten=False)
            self.head = nn.Dense(10, in_units=4, flatten=False, params=self.embedding.params)
            self.shift = self.params.get_constant("shift", np.float32([[1, 2, 3, 4]]))
        self.body.collect_params().setattr("grad_req", "null")

    def hybrid_forward(self, F, x, shift):
        return self.head(F.broadcast_add(self.body(self.embedding(x)), shift))


def test_what_is_shared_and_what_is_not_trained_stays_so(tmp_path):
    net = Tied()
    text = (export_torch(randomized(net), tmp_path, [(2, 7)]) / "model.py").read_text()
    assert "self.dense1.weight = self.embedding0.weight" in text
    assert "self.dense0.weight.requires_grad = False" in text
    assert "self.dense0.bias.requires_grad = False" in text
    assert "self.shift.requires_grad = False" in text
    assert "self.dense1.bias.requires_grad" not in text
    assert "self.embedding0(x.long().clamp(0, 9))" in text


class Odd(nn.HybridBlock):
    def __init__(self, results):
        super().__init__(prefix="net_")
        self.results = results
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(3,), init="ones")

    def hybrid_forward(self, F, x, weight):
        return self.results(F, x, weight)


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        (lambda _, x, weight: [weight, x], "return self.net_weight, x"),
        (lambda F, x, _: [x, F.relu(x)], "return x, y"),
        (lambda F, x, _: F.clip(x, 0, np.inf), 'x.clamp(0, float("inf"))'),
        (lambda F, x, _: F.reshape(x, shape=-1), "x.reshape(-1)"),
        (lambda F, x, _: F.squeeze(x * np.inf, axis=None), 'x * float("inf")).squeeze()'),
        (lambda F, x, _: F.sum(x, axis=(0, 1), exclude=True), "return x  # (N, 3)"),
        (lambda F, x, weight: F.dot(x, F.reshape(weight, shape=(0, 1))),
         "return x @ y.reshape(y.shape[0], 1)"),
    ],
)  # fmt: skip
def test_unusual_results_and_options_are_written(tmp_path, results, expected):
    text = (export_torch(randomized(Odd(results)), tmp_path, [(2, 3)]) / "model.py").read_text()
    compile(text, "model.py", "exec")
    assert expected in text.partition("def forward")[2]


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        (lambda F, x, _: F.split(x, 3)[1], "return x.chunk(3, 1)[1]"),
        (lambda F, x, _: F.split(x, 3, squeeze_axis=True)[:2], "x, y, _ = x.unbind(1)"),
        (lambda F, x, _: F.topk(x, k=2, ret_typ="both"), "return x.values, x.indices.float()"),
    ],
)
def test_operators_with_several_results_have_names_for_those_that_are_used(
    tmp_path, results, expected
):
    text = (export_torch(randomized(Odd(results)), tmp_path, [(2, 3)]) / "model.py").read_text()
    compile(text, "model.py", "exec")
    assert expected in text.partition("def forward")[2]


def test_statistics_of_a_batch_norm_are_refused_as_results():
    symbol = mx.sym.BatchNorm(mx.sym.var("data"), output_mean_var=True, name="norm")[1]
    graph = read_symbol(symbol.tojson().encode())
    names = ("norm_gamma", "norm_beta", "norm_moving_mean", "norm_moving_var")
    values, shapes = dict.fromkeys(names, np.ones(3, np.float32)), {(0, 0): (2, 3)}
    with pytest.raises(ValueError, match=r"norm \(BatchNorm: its second result is used"):
        torch_program(graph, values, ["data"], title="", shapes=shapes)


def test_without_shapes_the_axes_follow_from_the_operators_before_or_are_refused():
    def graph(*operators):
        nodes = [{"op": "null", "name": "data", "inputs": []}]
        nodes += [
            {"op": op, "name": f"n{i}", "attrs": attrs, "inputs": [[i, 0, 0]]}
            for i, (op, attrs) in enumerate(operators)
        ]
        content = {"nodes": nodes, "heads": [[len(nodes) - 1, 0, 0]]}
        return read_symbol(json.dumps(content).encode())

    pooling = (
        "Pooling",
        {"global_pool": "true", "kernel": "(1, 1, 1)", "count_include_pad": "None"},
    )
    text = torch_program(graph(pooling), {}, ["data"], title="").text
    assert "x.mean((2, 3, 4), keepdim=True)" in text or "x.amax((2, 3, 4), keepdim=True)" in text
    with pytest.raises(ValueError, match="reverses axes whose number is not known"):
        torch_program(graph(("transpose", {})), {}, ["data"], title="")


class Transposed(nn.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.dot(x, x, transpose_a=True)


class WidePadding(nn.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.Pooling(x, kernel=(3,), pad=(2,), pool_type="max")


@pytest.mark.parametrize(
    ("block", "shape", "why"),
    [
        (Transposed, (3, 4), "dot: a transposed operand"),
        (WidePadding, (2, 3, 8), "Pooling: its padding is more than half of its window"),
    ],
)
def test_options_without_an_equal_are_named(tmp_path, block, shape, why):
    with pytest.raises(PrecisionError, match=why):
        export_torch(block(), tmp_path / "net", [shape])


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda F, x: F.cast(F.cast(x, "int32") / 2, "float32"), "that may make fractions"),
        (lambda F, x: F.clip(F.cast(x, "int32"), 0, 1.5), "clip: integers and a number"),
        (lambda F, x: F.maximum(F.cast(x, "int32"), 1.5), "_maximum_scalar: integers and a number"),
        (lambda F, x: F.sum(F.cast(x, "int32"), axis=1) < 0.5, "_lesser_scalar: integers and a"),
        (lambda F, x: F.sqrt(F.abs(F.cast(x, "int32"))), "sqrt: of integers"),
        (lambda F, x: F.mean(F.cast(x, "int32"), axis=1), "the mean of integers"),
        (lambda F, x: F.norm(F.cast(x, "int32"), axis=1), "the norm of integers"),
        (lambda F, x: F.topk(x, axis=None), "topk: it names no axis"),
        (lambda F, x: F.softmax(x, dtype="float16"), "dtype=float16"),
        (lambda F, x: F.reshape_like(x, x, lhs_begin=0, lhs_end=2, rhs_begin=0, rhs_end=2),
         "a part of the axes"),
    ],
)  # fmt: skip
def test_options_of_functions_without_an_equal_are_named(tmp_path, function, why):
    with pytest.raises(PrecisionError, match=why):
        export_torch(Functions([function]), tmp_path / "net", [(2, 6, 4)])


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda F, x: F.np.average(x, axis=1, weights=F.np.abs(x)), "_npi_average: weights"),
        (lambda F, x: F.np.concatenate([x, x], axis=None), "_npi_concatenate: it names no axis"),
        (lambda F, x: F.np.flip(x), "_npi_flip: it names no axis"),
        (lambda _, x: (x > 0) * 2.5, "integers and a number that may make fractions"),
        (lambda _, x: x.astype("int32") + 1.5, "integers and a number that may make fractions"),
        (lambda F, x: F.np.var(x.astype("int32"), axis=1), "whose mean MXNet rounds"),
        (lambda F, x: F.np.sum(x, axis=1, dtype="float64"), "dtype=float64"),
        (lambda F, x: F.np.reshape(x, (-1, 3), order="F"), "order='F'"),
        (lambda F, x: F.np.dot(x, F.np.swapaxes(x, 1, 2)), "not known to be a vector or a matrix"),
        (lambda F, x: F.np.linalg.norm(x, ord="nuc", axis=(1, 2)), "a norm of a matrix"),
        (lambda F, x: F.np.pad(x, ((0, 0), (1, 1), (0, 0)), "edge"), "mode='edge'"),
        (lambda F, x: F.np.prod(x, axis=(1, 2)), "a product over several axes"),
        (lambda F, x: x + F.np.arange(4, dtype="int32"), "or integers"),
    ],
)
def test_options_of_numpy_without_an_equal_are_named(tmp_path, function, why):
    with interface(True), pytest.raises(PrecisionError, match=why):
        export_torch(Functions([function]), tmp_path / "net", [(2, 6, 4)])


def test_inputs_of_the_check_are_positive_where_others_have_no_result(tmp_path):
    for name, function, is_positive in (("roots", "sqrt", True), ("squares", "square", False)):
        net = nn.HybridLambda(function)
        with np.load(export_torch(net, tmp_path / name, [(4, 9)]) / "check.npz") as recorded:
            assert np.isfinite(recorded["result0"]).all()
            assert (recorded["input0"] >= 0).all() == is_positive


def test_scales_of_groups_are_frozen_with_their_parameter(tmp_path):
    net = nn.GroupNorm(2)
    net.initialize()
    net(mx.nd.ones((2, 4, 3)))
    net.collect_params().setattr("grad_req", "null")
    text = (export_torch(net, tmp_path, [(2, 4, 3)]) / "model.py").read_text()
    assert text.count("requires_grad = False") == 2


def test_an_input_that_is_not_used_is_named(tmp_path):
    class First(nn.HybridBlock):
        def hybrid_forward(self, F, x, y):
            return F.relu(x)

    with pytest.raises(ValueError, match="does not use its input 1"):
        export_torch(First(), tmp_path, [(2, 3), (2, 3)])


def test_a_layer_has_no_name_of_a_torch_module(tmp_path):
    net = nn.HybridSequential(prefix="")
    net.add(nn.Dense(3, in_units=4, prefix="half_"), nn.Dense(2, in_units=3, prefix="class_"))
    net.initialize()
    text = (export_torch(net, tmp_path, [(2, 4)]) / "model.py").read_text()
    assert "self.half_2 = nn.Linear(4, 3)" in text
    assert "self._class = nn.Linear(3, 2)" in text


@pytest.mark.parametrize(
    ("name", "free"),
    [("register_forward_hook", "register_forward_hook_2"), ("T_destination", "T_destination_2"),
     ("\u00b5", "\u03bc"), ("x\u00b2", "x2"), ("x\u0bf0y", "x_y"), ("\u00b2", "_2")],
)  # fmt: skip
def test_a_name_is_an_identifier_that_no_module_has(name, free):
    assert Names("").free(name) == free


@pytest.mark.parametrize("title", ['He said "hi"', "back\\", 'a """ b', "\\n", "plain"])
def test_a_title_is_the_docstring_whatever_it_quotes(title, tmp_path):
    folder = export_torch(small_net(), tmp_path, [(2, 3, 16, 16)], title=title)
    text = (folder / "model.py").read_text()
    assert ast.get_docstring(ast.parse(text), clean=False) == title


@pytest.mark.parametrize(
    ("results", "shapes"),
    [
        (lambda F, x, n: F.SequenceMask(x, n, use_sequence_length=True, axis=1), [(2, 4, 3), (2,)]),
        (lambda F, x, n: F.gather_nd(x, F.expand_dims(n, axis=0)), [(2, 3), (2,)]),
    ],
)
def test_lengths_and_indices_of_the_check_are_in_range(tmp_path, results, shapes):
    class Net(nn.HybridBlock):
        def hybrid_forward(self, F, x, n):
            return results(F, x, n)

    with np.load(export_torch(Net(), tmp_path, shapes) / "check.npz") as recorded:
        assert set(recorded["input1"]) <= {0, 1}
        assert (recorded["input0"] < 0).any()


def check(folder):
    done = subprocess.run([str(TORCH), str(folder / "check.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@NEEDS_TORCH
def test_all_attributes_of_a_torch_module_are_known():
    code = "import torch; print(*dir(torch.nn.Module()))"
    done = subprocess.run([str(TORCH), "-c", code], capture_output=True, text=True, check=True)
    found = {name for name in done.stdout.split() if not name.startswith("_")}
    assert found - set(OF_MODULES) == set()


@NEEDS_TORCH
@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_networks_of_both_zoos_have_the_same_numbers(name, tmp_path):
    size = ZOO[name]
    net = build_network(name, classes=10, image_size=size, devices=[mx.cpu()])
    folder = export_torch(randomized(net), tmp_path, [(1, 3, size, size)])
    assert "largest relative error" in check(folder)


class Layers(nn.HybridBlock):
    """Operators that the zoos lack, one after the other."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.up = nn.Conv2DTranspose(
                6, 3, strides=2, padding=1, output_padding=1, in_channels=4
            )
            self.instance, self.group = (
                nn.InstanceNorm(in_channels=6),
                nn.GroupNorm(3),
            )
            self.slopes, self.layer = nn.PReLU(in_channels=1), nn.LayerNorm(in_channels=16)
            self.frozen = nn.BatchNorm(use_global_stats=True, in_channels=6)
            self.scale = self.params.get("scale", shape=(1, 6, 1, 1))

    def hybrid_forward(self, F, x, scale):
        x = self.frozen(self.group(self.instance(self.up(x))))
        x = F.broadcast_mul(F.LeakyReLU(x, act_type="gelu") * 2 - 1, scale)
        x = self.slopes(F.pad(x, mode="reflect", pad_width=(0, 0, 0, 0, 1, 2, 3, 4)))
        x = F.Pooling(x, kernel=(3, 3), stride=(2, 2), pool_type="avg", pooling_convention="full")
        x = F.concat(x, 1 - F.sigmoid(x) / (x + 3), dim=1)
        x = F.UpSampling(x, scale=2, sample_type="nearest").slice_axis(axis=3, begin=0, end=16)
        x = self.layer(F.elu(x) if hasattr(F, "elu") else F.LeakyReLU(x, act_type="elu", slope=1))
        left = x.reshape((0, 0, -1)).transpose((0, 2, 1))
        products = F.batch_dot(left / 1000, left, transpose_a=True)
        return F.softmax(products), x.mean(axis=(1, 2)).square()


@NEEDS_TORCH
@pytest.mark.slow
def test_operators_that_the_zoos_lack_have_the_same_numbers(tmp_path):
    net = Layers()
    check(export_torch(randomized(net), tmp_path, [(1, 4, 9, 9)]))


class Recurrent(nn.HybridBlock):
    """A layer, and an unrolled cell of the same input."""

    def __init__(self, layer):
        super().__init__()
        with self.name_scope():
            self.layer, self.cell = layer, mx.gluon.rnn.LSTMCell(4, input_size=3)
            self.head = nn.Dense(2, flatten=False)

    def hybrid_forward(self, F, x):
        outputs, _ = self.cell.unroll(5, x, merge_outputs=True, layout="NTC")
        return self.head(F.concat(self.layer(x), outputs, dim=2))


class WithStates(nn.HybridBlock):
    def __init__(self, layer):
        super().__init__()
        with self.name_scope():
            self.layer = layer

    def hybrid_forward(self, F, x, *states):
        outputs, states = self.layer(x, list(states))
        return [F.tanh(outputs), *states]


FUNCTIONS = {
    "joined and split": lambda F, x: F.reshape(F.reshape(x, (0, -4, 2, -1, -2)), (0, -3, -2)),
    "swapped": lambda F, x: F.SwapAxis(x, dim1=1, dim2=2),
    "sliced": lambda F, x: F.slice(x, begin=(None, 1, None), end=(None, 5, -1), step=(1, 2, 1)),
    "like": lambda F, x: F.slice_like(x, F.slice_axis(x, axis=-1, begin=0, end=3), axes=(2,)),
    "parts": lambda F, x: F.split(x, 3, axis=1)[1] * 2 + F.split(x, 3, axis=1)[0],
    "unbound": lambda F, x: F.split(x, 4, axis=2, squeeze_axis=True)[3],
    "stacked": lambda F, x: F.stack(x, x * 2, axis=1),
    "taken": lambda F, x: F.take(x, F.floor(x * 9), axis=1),
    "picked": lambda F, x: F.pick(x, F.argmax(x, axis=1), axis=1),
    "kept": lambda F, x: F.pick(x, F.argmin(x, axis=2), axis=2, keepdims=True),
    "hot": lambda F, x: F.one_hot(F.argmax(x, axis=1), 6),
    "where": lambda F, x: F.where(x > 0, x, F.zeros_like(x)) + F.ones_like(x),
    "compared": lambda F, x: F.broadcast_greater_equal(x, 1 - x) - (x != 0) * (x <= 0.1),
    "to": lambda F, x: F.broadcast_to(F.slice_axis(x, axis=1, begin=0, end=1), (0, 6, 0)),
    "along": lambda F, x: F.broadcast_axis(F.sum(x, axis=1, keepdims=True), axis=1, size=3),
    "as": lambda F, x: F.broadcast_like(F.mean(x, axis=2, keepdims=True), x),
    "repeated": lambda F, x: F.repeat(x, repeats=2, axis=1),
    "all repeated": lambda F, x: F.repeat(x, repeats=2),
    "split and sized": lambda F, x: F.reshape(x, (-4, 1, -1, 24)),
    "joined and sized": lambda F, x: F.reshape(x, (0, -3, 1)) + F.reshape(x, (0, -1, 1)),
    "rows": lambda F, x: F.where(F.mean(x, axis=(1, 2)) > 0, x, -x),
    "orders": lambda F, x: F.argsort(x, axis=1) + F.argsort(x, axis=-1, is_ascend=False),
    "sorted": lambda F, x: F.sort(x, axis=1) + F.sort(x, axis=2, is_ascend=False),
    "parts of boxes": lambda F, x: F.contrib.ROIAlign(
        F.expand_dims(x, 1), boxes_at(F, x), (2, 3), 0.7, sample_ratio=2),
    "aligned": lambda F, x: F.contrib.ROIAlign(
        F.expand_dims(x, 1), boxes_at(F, x), (3, 2), 1.0, sample_ratio=3, aligned=True),
    "tiled": lambda F, x: F.tile(x, reps=(1, 2, 1)),
    "turned": lambda F, x: F.reverse(x, axis=1),
    "counted": lambda F, x: F.broadcast_add(F.contrib.arange_like(x, axis=2), x),
    "normed": lambda F, x: F.L2Normalization(x, mode="channel") + F.L2Normalization(x),
    "norm": lambda F, x: F.norm(x, ord=1, axis=2),
    "rows out of range": lambda F, x: F.one_hot(x * 5, 4),
    "of all axes": lambda F, x: F.sum(x, axis=(0, 1, 2)) + F.norm(x, axis=(0, 1, 2)),
    "of one axis": lambda F, x: F.Flatten(F.cumsum(x)) + F.reshape(F.cumsum(x), (0, -1)),
    "whole sums": lambda F, x: F.clip(F.sum(F.cast(x * 5, "int32"), axis=1), 0, 3),
    "all": lambda F, x: F.broadcast_add(F.sum(x), F.max(x, axis=1, exclude=True)),
    "best": lambda F, x: F.topk(x, k=2, axis=1, ret_typ="value") + F.topk(x, k=2, axis=1),
    "cast": lambda F, x: F.cast(F.cast(x * 5, "int32"), "float32"),
    "powers": lambda F, x: (-2.0) ** F.floor(x * 3) + F.topk(x, k=0, axis=1, ret_typ="value"),
    "ties": lambda F, x: F.rint(F.floor(x * 8) / 2),
    "whole": lambda F, x: F.cast(F.cast(F.abs(x) * 100, "uint8") * 2, "float32"),
    "counts": lambda F, x: F.broadcast_div(
        F.one_hot(F.cast(F.argmax(x, axis=1), "int32"), 6),
        F.one_hot(F.cast(F.argmin(x, axis=1), "int32"), 6) + 2),
    "added": lambda F, x: F.add_n(x, x * 2, F.hard_sigmoid(x)),
    "scaled": lambda F, x: F.contrib.div_sqrt_dim(2 ** x) + F.rint(x * 3),
    "masked": lambda F, x: F.SequenceMask(
        x, F.argmax(F.slice_axis(x, axis=1, begin=0, end=4), axis=1).mean(axis=1),
        use_sequence_length=True, axis=1, value=-1),
}  # fmt: skip


def boxes_at(F, x):
    """Return boxes of images, (12, 5), from numbers, (2, 6, 4); some reach beyond the images."""
    x = F.reshape(x, (-1, 4))
    first, size = F.slice_axis(x, axis=1, begin=0, end=2), F.slice_axis(x, axis=1, begin=2, end=4)
    number = F.expand_dims(F.arange(12), 1) > 5
    return F.concat(number, first * 3 + 1, first * 3 + 1 + F.abs(size) * 6, dim=1)


NUMPY_FUNCTIONS = {
    "signs": lambda _, x: (2 - (x + 1 - x * 3 / 4)) ** 2 / (x * x + 1) + 1 / (x * x + 1) - x**3,
    "powers": lambda F, x: 2**x + (-2) ** F.np.floor(x) + F.np.power(x * x, x),
    "remainders": lambda _, x: x % 3 + x % (x * x + 1),
    "whole numbers": lambda _, x: (x * 9).astype("int32") / 4 + (x * 9).astype("int32") * 2 - 1,
    "functions": lambda F, x: F.np.sqrt(F.np.abs(x)) + F.np.log1p(x * x) - F.np.sin(x) * F.np.tanh(
        x) + F.np.square(x) - F.np.negative(F.np.fix(x * 2)) + F.np.arctan(x) + F.npx.erf(x),
    "rounded": lambda F, x: F.np.rint(F.np.floor(x * 8) / 2) + F.np.around(x * 2, 1),
    "everything": lambda F, x: F.np.mean(x) + F.np.sum(x) + F.np.max(x) - F.np.min(x),
    "along": lambda F, x: F.np.mean(x, axis=(1, 2)) + F.np.prod(x, axis=1).max(axis=-1),
    "kept": lambda F, x: F.np.sum(x, axis=-1, keepdims=True) + F.np.max(x, axis=1, keepdims=True),
    "deviations": lambda F, x: F.np.var(x, axis=1) + F.np.std(x, axis=1, ddof=1),
    "deviation of all": lambda F, x: F.np.std(x) + F.np.var(x, keepdims=False, ddof=1),
    "norms": lambda F, x: F.np.linalg.norm(x, axis=1) + F.np.linalg.norm(x, axis=1, ord=1),
    "norm of all": lambda F, x: F.np.linalg.norm(x) + F.np.average(x, axis=1).sum(),
    "places": lambda F, x: F.npx.one_hot(F.np.argmax(x, axis=1), 6) + F.np.expand_dims(
        F.np.argmin(x, axis=1), 2),
    "ends": lambda F, x: F.np.maximum(x, 0.1) + F.np.minimum(x, x * x) + F.np.clip(x, 0, 1),
    "where": lambda F, x: F.np.where(x > 0, x, x * 2) + F.np.where(x, 1.0, x) + F.np.where(
        x != x * x, x, 0.5) + F.np.where(x <= 0, 3.0, 4.0),
    "truths": lambda _, x: x > 0,
    "questions": lambda F, x: (x > x * x) * x + F.np.sum(x >= 0, axis=1, keepdims=True) * x,
    "not": lambda F, x: F.np.logical_not(x > 0) * x + F.np.where(F.np.logical_not(x), 1.0, x),
    "reshaped": lambda F, x: F.np.reshape(x, (-1, 8)).reshape(-1, 4, 2),
    "codes": lambda F, x: F.npx.reshape(x, (-2, -6, 3, -1, -4)),
    "joined": lambda F, x: F.npx.reshape(x, (-5, -2)) + F.npx.reshape(x, (-5, 4)),
    "heads": lambda F, x: F.np.transpose(F.npx.reshape(x, (-2, -2, 2, -1)), (0, 2, 1, 3)),
    "rest": lambda F, x: F.npx.reshape(x, (-1, 2, -4)),
    "one axis less": lambda F, x: x[:, 0] + x[:, 1:3][:, 1] + F.np.squeeze(x[:, 5:6], axis=1),
    "steps": lambda _, x: x[:, ::2] + x[:, 1::2],
    "moved": lambda F, x: F.np.swapaxes(x, 1, 2) + F.np.moveaxis(x, 1, 2) + F.np.transpose(
        x, (0, 2, 1)),
    "reversed": lambda F, x: F.np.transpose(x),
    "turned": lambda F, x: F.np.flip(x, axis=1) + F.np.roll(x, 2, axis=1) + F.np.tril(x, 1),
    "running": lambda F, x: F.np.cumsum(x, axis=1) + F.np.cumsum(x)[0],
    "shares": lambda _, x: (x > 0).mean(axis=1) + (x * 9).astype("int32").mean(axis=1),
    "opposites": lambda F, x: 1 - (x > 0) + F.np.expand_dims(x > 0, 1)[:, 0] * 2 - (x - (x > 1)),
    "together": lambda F, x: F.np.concatenate([x, x], axis=1) + F.np.tile(
        x, (1, 2, 1)) + F.np.repeat(x, 2, axis=1),
    "stacked": lambda F, x: F.np.stack([x, x * 2], axis=2),
    "parts": lambda F, x: F.np.split(x, 3, axis=1)[1] + F.np.split(x, [2, 4], axis=1)[2],
    "uneven parts": lambda F, x: F.np.array_split(x, 4, axis=1)[0] + F.np.split(
        x, [2, 5], axis=1)[0],
    "broadcast": lambda F, x: F.np.broadcast_to(x.mean(axis=1, keepdims=True), (-2, 3, 4)),
    "filled": lambda F, x: F.np.zeros_like(x) + F.np.ones_like(x) * F.np.full_like(x, 2.5),
    "made": lambda F, x: x + F.np.zeros((6, 4)) - F.np.ones((4,)) * F.np.arange(4),
    "products": lambda F, x: F.np.dot(x, F.np.ones((4, 3))).sum() + F.np.matmul(
        x, F.np.swapaxes(x, 1, 2)) + F.np.einsum("bij,bkj->bik", x, x),
    "of all": lambda F, x: F.np.tensordot(x, x, axes=([0, 1, 2], [0, 1, 2])),
    "tensors": lambda F, x: F.np.tensordot(x, F.np.ones((4, 3)), axes=1),
    "heads of attention": lambda F, x: F.npx.batch_dot(
        F.npx.reshape(x, (-2, -6, 2, 3, -2)), F.npx.reshape(x, (-2, -6, 2, 3, -2)),
        transpose_b=True),
    "attention": lambda F, x: F.npx.batch_dot(F.npx.softmax(F.npx.batch_dot(
        x, x, transpose_b=True)), x),
    "activations": lambda F, x: F.npx.relu(x) + F.npx.sigmoid(x) + F.npx.leaky_relu(
        x, act_type="gelu"),
    "picked": lambda F, x: F.npx.pick(x, F.np.argmax(x, axis=1), axis=1) + F.np.take(
        x, F.np.argmin(x[0], axis=0), axis=1)[:, 0],
    "masked": lambda F, x: F.npx.sequence_mask(
        x.transpose(1, 0, 2), F.np.sum(x > 0, axis=(1, 2)) / 4, use_sequence_length=True),
    "padded": lambda F, x: F.np.pad(x, ((0, 0), (1, 0), (0, 2))),
    "like": lambda F, x: F.npx.reshape_like(x.reshape(-1), x),
}  # fmt: skip


def piled(F, x):  # MXNet does not infer shapes of a network that has a split too
    return F.np.vstack([x, x]).sum() + F.np.dstack([x, x]) - F.np.hstack([x, x]).sum()


class Functions(nn.HybridBlock):
    def __init__(self, functions):
        super().__init__()
        self.functions = functions

    def hybrid_forward(self, F, x):
        return [function(F, x) for function in self.functions]


@NEEDS_TORCH
@pytest.mark.slow
def test_functions_of_arrays_have_the_same_numbers(tmp_path):
    check(export_torch(Functions(FUNCTIONS.values()), tmp_path, [(2, 6, 4)]))


@NEEDS_TORCH
@pytest.mark.slow
def test_functions_of_numpy_have_the_same_numbers(tmp_path):
    with interface(True):
        for functions in (NUMPY_FUNCTIONS.values(), [piled]):
            check(export_torch(Functions(functions), tmp_path, [(2, 6, 4)]))


RECURRENT = {
    "lstm": partial(rnn.LSTM, 5, 2, bidirectional=True, dropout=0.3),
    "gru": partial(rnn.GRU, 5, 1),
    "relu": partial(rnn.RNN, 5, 2, activation="relu"),
    "tanh": partial(rnn.RNN, 5, 1, activation="tanh", bidirectional=True),
}


@NEEDS_TORCH
@pytest.mark.slow
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_and_cells_have_the_same_numbers(kind, tmp_path):
    net = Recurrent(RECURRENT[kind](layout="NTC", input_size=3))
    net.initialize(mx.init.Uniform(0.7))
    net(mx.nd.zeros((1, 5, 3)))
    check(export_torch(net, tmp_path / "net", [(2, 5, 3)]))
    if kind in ("lstm", "gru"):
        net = WithStates(RECURRENT[kind](input_size=3))
        net.initialize(mx.init.Uniform(0.7))
        state = (4 if kind == "lstm" else 1, 2, 5)
        check(
            export_torch(
                net, tmp_path / "states", [(7, 2, 3)] + [state] * (kind == "lstm") + [state]
            )
        )


class OfMatrices(mx.init.Xavier):
    """Xavier's initialization, and ones for vectors, which it does not take."""

    def _init_weight(self, name, arr):
        if arr.ndim > 1:
            super()._init_weight(name, arr)
        else:
            arr[:] = 1


DETECTION = {
    "center_net_mobilenetv3_small_duc_voc": 128,
    "ssd_300_mobilenet0.25_voc": 300,
    "yolo3_mobilenet0.25_voc": 128,
    "mobile_pose_resnet18_v1b": 128,
    "custom_mask_rcnn_fpn": 128,
}


@NEEDS_TORCH
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Cannot decide type")
@pytest.mark.parametrize("name", DETECTION)
def test_detection_networks_find_the_same_boxes(name, tmp_path):
    gluoncv = pytest.importorskip("gluoncv")
    size = DETECTION[name]
    options = {"classes": ["a", "b", "c"], "rpn_test_post_nms": 50} if "custom" in name else {}
    net = gluoncv.model_zoo.get_model(name, pretrained=False, pretrained_base=False, **options)
    net.initialize(OfMatrices(), force_reinit=True)
    net(mx.nd.zeros((1, 3, size, size)))
    folder = export_torch(net, tmp_path, [(1, 3, size, size)])
    if "mask" in name:  # its masks take the rounding of boxes in pixels
        program = (folder / "check.py").read_text()
        (folder / "check.py").write_text(program.replace("1e-5", "5e-5"))
    check(folder)
    with np.load(folder / "check.npz") as recorded:
        assert len(np.unique(recorded[recorded.files[-1]])) > 4  # there are boxes
        if "ssd" in name:  # nearly equal scores can come in another order, others not
            numbers = dict(recorded)
            _swap_rows(numbers, 0, 1)
            np.savez(folder / "check.npz", **numbers)
            check(folder)
            _swap_rows(numbers, 0, 20)
            np.savez(folder / "check.npz", **numbers)
            with pytest.raises(AssertionError, match=r"result 2.*error 0\."):
                check(folder)


def _swap_rows(numbers, first, second):
    for name in numbers:
        if name.startswith("result"):
            numbers[name][0, [first, second]] = numbers[name][0, [second, first]]


@NEEDS_TORCH
@pytest.mark.slow
def test_a_wrong_program_fails_its_check(tmp_path):
    folder = export_torch(small_net(), tmp_path, [(1, 3, 16, 16)])
    check(folder)
    check(export_torch(randomized(Tied()), tmp_path / "tied", [(2, 7)]))
    nan = export_torch(randomized(Odd(lambda _F, x, _: [x, x * 0])), tmp_path / "nan", [(2, 3)])
    program = (nan / "model.py").read_text()
    (nan / "model.py").write_text(program.replace("x * 0.0", 'x * float("nan")'))
    done = subprocess.run([str(TORCH), str(nan / "check.py")], capture_output=True, text=True)
    assert (done.returncode, "error nan" in done.stdout) == (1, True), done.stdout + done.stderr
    text = (folder / "model.py").read_text()
    (folder / "model.py").write_text(text.replace("stride=2)", "stride=2, padding=1)", 1))
    done = subprocess.run([str(TORCH), str(folder / "check.py")], capture_output=True, text=True)
    assert done.returncode == 1
    (folder / "model.py").write_text(text.replace("momentum=0.2", "momentum=0.2, eps=0.01"))
    done = subprocess.run([str(TORCH), str(folder / "check.py")], capture_output=True, text=True)
    assert done.returncode == 1
