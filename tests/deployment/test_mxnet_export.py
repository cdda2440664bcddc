"""Files for plain MXNet: in the requested format, loaded and computed without mpgluon."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import mpgluon
from mpgluon import CheckpointError, DataError, PrecisionError
from mpgluon.deployment import export_mxnet, import_mxnet, inference_network
from mpgluon.kernels.dtypes import dtype_name
from mpgluon_tools.deployment.mxnet_export import operators_for_gpu_only

import mxnet as mx
import numpy as np
import pytest
from deployment_helpers import (
    Lambda,
    distance,
    fp32_bound,
    logits_of,
    small_network,
    some_images,
    with_random_values,
)
from mxnet import gluon
from mxnet.gluon import nn
from test_networks import build, inputs_of

# What MXNet says of every imported graph.
pytestmark = pytest.mark.filterwarnings("ignore:Cannot decide type for the following arguments")

NETWORKS = ("resnet18_v2", "mobilenetv3_small", "cifar_resnet20_v1")
DTYPES = ("float32", "float16", "bfloat16")

PLAIN_MXNET = """
import sys
import mxnet as mx
import numpy as np
from mxnet import gluon

for path in sys.argv[1:]:
    net = gluon.SymbolBlock.imports(f"{path}-symbol.json", ["data"], f"{path}-0000.params")
    np.save(f"{path}-out.npy", net(mx.nd.array(np.load(f"{path}-in.npy"))).asnumpy())
assert "mpgluon" not in sys.modules
"""


IMAGES = (2, 3, 6, 6)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "1.24.0",
    reason="MXNet 1.9.1 is imported by NumPy 1.24 and newer with mpgluon only",
)
def test_plain_mxnet_computes_the_exports_to_the_same_bits_without_mpgluon(tmp_path):
    expected, paths = {}, []
    for name in NETWORKS:
        images, _ = inputs_of(name)
        net = build(name, images)
        for dtype in DTYPES:
            path = tmp_path / f"{name}-{dtype}"
            export_mxnet(net, path, dtype=dtype)
            np.save(f"{path}-in.npy", images.asnumpy())
            expected[path] = logits_of(inference_network(net, dtype), images)
            paths.append(str(path))
    command = [sys.executable, "-W", "ignore", "-c", PLAIN_MXNET, *paths]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr
    for path, logits in expected.items():
        assert np.load(f"{path}-out.npy").tobytes() == logits.tobytes()
    for name in NETWORKS:  # and the formats differ
        assert len({expected[tmp_path / f"{name}-{dtype}"].tobytes() for dtype in DTYPES}) == 3


def imported_by_gluon(path):
    return gluon.SymbolBlock.imports(f"{path}-symbol.json", ["data"], f"{path}-0000.params")


@pytest.mark.usefixtures("native_bfloat16")
def test_the_silent_fp32_graph_of_mxnets_own_export_is_not_ours(tmp_path):
    from mxnet.contrib import amp as mxnets_amp

    net, images = small_network(), some_images(*IMAGES)
    net.hybridize()
    in_fp32 = logits_of(net, images)
    bound = fp32_bound(net, images)

    # Upstream: computed in bfloat16, exported in FP32.
    converted = mxnets_amp.convert_hybrid_block(net, "bfloat16", ctx=mx.cpu())
    assert distance(logits_of(converted, images), in_fp32) > bound
    converted.export(str(tmp_path / "upstream"))
    assert distance(logits_of(imported_by_gluon(tmp_path / "upstream"), images), in_fp32) <= bound

    export_mxnet(net, tmp_path / "ours", dtype="bfloat16")
    ours = logits_of(import_mxnet(tmp_path / "ours"), images)
    assert distance(ours, in_fp32) > bound
    assert (ours == logits_of(inference_network(net, "bfloat16"), images)).all()


def test_the_graph_that_cannot_be_computed_is_not_ours(tmp_path):
    net, images = small_network(), some_images(*IMAGES)
    mpgluon.cast_block(net)
    net.hybridize()
    net(images)

    # Gluon's way: float16 parameters, and no casts between them and FP32 data.
    net.export(str(tmp_path / "gluon"), remove_amp_cast=True)
    with pytest.raises(mx.MXNetError, match="requires uniform type"):
        imported_by_gluon(tmp_path / "gluon")(images)

    export_mxnet(net, tmp_path / "ours", dtype="float16")
    ours = import_mxnet(tmp_path / "ours")
    assert (logits_of(ours, images) == logits_of(inference_network(net, "float16"), images)).all()


def test_a_graph_for_a_gpu_computes_every_product_in_float16(tmp_path):
    images, _ = inputs_of("resnet18_v2")
    net = build("resnet18_v2", images)
    graphs = {}
    for device in ("cpu", "gpu"):
        symbol_path, parameters = export_mxnet(net, tmp_path / device, device=device)
        graphs[device] = mx.sym.load(str(symbol_path))
        assert set(mx.nd.load(str(parameters))) == {
            *(f"arg:{name}" for name in graphs[device].list_arguments() if name != "data"),
            *(f"aux:{name}" for name in graphs[device].list_auxiliary_states()),
        }
    assert operators_for_gpu_only(graphs["cpu"]) == []
    assert len(operators_for_gpu_only(graphs["gpu"])) == 21  # 20 convolutions, a dense layer


def test_a_graph_for_a_gpu_is_refused_on_a_cpu_with_what_to_do(tmp_path):
    export_mxnet(small_network(), tmp_path / "net", device="gpu")
    with pytest.raises(PrecisionError, match=r"needs FP32 fallbacks: .*device=\"cpu\""):
        import_mxnet(tmp_path / "net")
    # MXNet's own error comes later and says less.
    with pytest.raises(mx.MXNetError, match="FP16 gemm on cpu not implemented"):
        imported_by_gluon(tmp_path / "net")(some_images(*IMAGES)).asnumpy()


def test_the_parameter_file_has_the_bytes_that_mxnet_writes(tmp_path):
    for dtype in DTYPES:
        _, parameters = export_mxnet(small_network(), tmp_path / "net", dtype=dtype)
        mx.nd.save(str(tmp_path / "by_mxnet"), mx.nd.load(str(parameters)))
        assert parameters.read_bytes() == (tmp_path / "by_mxnet").read_bytes()


@pytest.mark.parametrize("suffix", ["-0000.params", "-symbol.json"])
@pytest.mark.parametrize("units", [2, 500])  # a file that one buffer holds, and a larger one
def test_a_full_disk_is_named_and_the_files_from_before_stay(tmp_path, units, suffix):
    net = with_random_values(nn.Dense(units, in_units=3))
    files = export_mxnet(net, tmp_path / "net", dtype="float32")
    before = [path.read_bytes() for path in files]
    # Where the new file is written first: a device on which every write fails.
    (tmp_path / f".net{suffix}.{os.getpid()}.part").symlink_to("/dev/full")
    with pytest.raises(DataError, match=rf"disk is full .*net{suffix}: .*then export again"):
        export_mxnet(net, tmp_path / "net", dtype="float32")
    assert [path.read_bytes() for path in files] == before
    assert sorted(os.listdir(tmp_path)) == sorted(path.name for path in files)


def test_an_export_that_was_stopped_between_its_files_is_refused(tmp_path, monkeypatch):
    replace = os.replace

    def stopped_at_the_graph(source, target):
        if str(target).endswith("-symbol.json"):
            raise KeyboardInterrupt
        replace(source, target)

    net = small_network()
    symbol, _ = export_mxnet(net, tmp_path / "net", dtype="float32")
    net[0].weight.set_data(2 * net[0].weight.data())
    monkeypatch.setattr(os, "replace", stopped_at_the_graph)
    with pytest.raises(KeyboardInterrupt):
        export_mxnet(net, tmp_path / "net", dtype="float32")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"are not of one export; .*: export again"):
        import_mxnet(tmp_path / "net")
    graph = json.loads(symbol.read_text())
    del graph["attrs"]["mpgluon_parameters"]  # a file of mpgluon 0.2.0
    symbol.write_text(json.dumps(graph))
    import_mxnet(tmp_path / "net")


def test_an_import_with_other_parameters_can_be_exported_by_gluon(tmp_path):
    images = some_images(*IMAGES)
    export_mxnet(small_network(), tmp_path / "net", dtype="float32")
    net = import_mxnet(tmp_path / "net")
    weight = next(p for name, p in net.collect_params().items() if name.endswith("weight"))
    weight.set_data(2 * weight.data())
    net.hybridize()
    expected = logits_of(net, images)
    net.export(str(tmp_path / "again"), remove_amp_cast=False)
    assert (logits_of(import_mxnet(tmp_path / "again"), images) == expected).all()


def test_mxnet_reads_names_in_any_script(tmp_path):
    net = Lambda(lambda F, x: F.square(x))
    symbol, parameters = export_mxnet(net, tmp_path / "net", dtype="float32", inputs=("größe",))
    imported = gluon.SymbolBlock.imports(str(symbol), ["größe"], str(parameters))
    assert imported(mx.nd.array([3])).asnumpy().tolist() == [9]


class LastFirst(gluon.HybridBlock):
    """A network of two inputs of one shape, whose graph uses the second one first."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.dense = nn.Dense(4, in_units=4)

    def hybrid_forward(self, F, left, right):
        return F.concat(self.dense(right) * 2, left, dim=1)


def last_first() -> tuple[gluon.HybridBlock, list[mx.nd.NDArray]]:
    return with_random_values(LastFirst()), [some_images(2, 4, seed=seed) for seed in range(2)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_import_takes_its_inputs_in_the_order_of_the_networks_arguments(tmp_path, dtype):
    net, arguments = last_first()
    expected = inference_network(net, dtype, inputs=("b", "a"))(*arguments).asnumpy()
    symbol, _ = export_mxnet(net, tmp_path / "net", dtype=dtype, inputs=("b", "a"))
    assert mx.sym.load(str(symbol)).list_inputs()[0] == "a"  # or this would test nothing
    imported = import_mxnet(tmp_path / "net")
    assert (imported(*arguments).asnumpy() == expected).all()
    # Exported again, under other names.
    export_mxnet(imported, tmp_path / "again", dtype=dtype, inputs=("x", "a"))
    assert (import_mxnet(tmp_path / "again")(*arguments).asnumpy() == expected).all()


def test_an_argument_without_a_use_is_one_of_the_import_too(tmp_path):
    net = Lambda(lambda F, a, _, b: F.concat(b, a, dim=0))
    arguments = [mx.nd.array([value]) for value in (1, 2, 3)]
    export_mxnet(net, tmp_path / "net", dtype="float32", inputs=("a", "unused", "b"))
    again = import_mxnet(tmp_path / "net")
    with pytest.warns(UserWarning, match="1-th input to HybridBlock is not used"):
        assert again(*arguments).asnumpy().tolist() == [3, 1]


def test_gluons_own_names_say_the_order_of_an_export_without_it(tmp_path):
    net = Lambda(lambda F, *inputs: F.concat(*inputs[::-1], dim=1))
    net.hybridize()
    arguments = [mx.nd.ones((1, size)) * size for size in range(2, 14)]  # data10 too
    expected = net(*arguments).asnumpy()
    net.export(str(tmp_path / "net"))
    assert (import_mxnet(tmp_path / "net")(*arguments).asnumpy() == expected).all()


def test_several_inputs_in_an_unknown_order_are_refused_until_they_are_named(tmp_path):
    net = Lambda(lambda F, a, b: F.concat(b, a, dim=0))
    symbol, _ = export_mxnet(net, tmp_path / "net", dtype="float32", inputs=("a", "b"))
    symbol.write_text(symbol.read_text().replace("__mpgluon_inputs__", "__other__"))
    with pytest.raises(CheckpointError, match=r"b, a and do not say their order.*inputs="):
        import_mxnet(tmp_path / "net")
    again = import_mxnet(tmp_path / "net", inputs=("a", "b"))
    assert again(mx.nd.array([1]), mx.nd.array([3])).asnumpy().tolist() == [3, 1]


@pytest.mark.parametrize("inputs", [None, ("data",), ("image",)])
def test_a_parameter_that_the_file_lacks_is_not_taken_for_an_input(tmp_path, inputs):
    _, path = export_mxnet(small_network(), tmp_path / "net", dtype="float32")
    values = mx.nd.load(str(path))
    lacking = next(name for name in values if name.endswith("weight"))
    mx.nd.save(str(path), {name: value for name, value in values.items() if name != lacking})
    name = lacking.removeprefix("arg:")
    with pytest.raises(CheckpointError, match=rf"has no values of .*{name}"):
        import_mxnet(tmp_path / "net", inputs=inputs)


def test_missing_and_damaged_files_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="there is no file"):
        import_mxnet(tmp_path / "net")
    symbol, parameters = export_mxnet(small_network(), tmp_path / "net")
    for path in (parameters, symbol):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(CheckpointError, match="cannot be loaded"):
            import_mxnet(tmp_path / "net")
        path.write_bytes(content)
    with symbol.open("a") as file:  # MXNet reads the first object
        file.write("}")
    with pytest.raises(CheckpointError, match="cannot be loaded: Extra data"):
        import_mxnet(tmp_path / "net")


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_in_the_file_in_the_format_of_the_export(dtype, tmp_path):
    _, path = export_mxnet(small_network(), tmp_path / "net", dtype=dtype)
    formats = {name: dtype_name(value) for name, value in mx.nd.load(str(path)).items()}
    weights = {fmt for name, fmt in formats.items() if "conv" in name or "dense" in name}
    assert weights == {dtype}
    assert {fmt for name, fmt in formats.items() if "batchnorm" in name} == {"float32"}
