"""MXNet's files read by NumPy alone: the same bits as MXNet reads, and an error for each damage."""

import json
import struct
import subprocess
import sys
from pathlib import Path

from mpgluon_tools.leaving import mxnet_files
from mpgluon_tools.leaving.mxnet_files import FileFormatError, read_params, read_symbol
from mpgluon_tools.leaving.record_files import RecordFile, unpack

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

DTYPES = ("float32", "float64", "float16", "uint8", "int32", "int8", "int64", "bool")
ODD = struct.pack("<I", 0xCED7230A)  # the word that begins a record


def arrays(dtype="float32"):
    values = np.random.default_rng(0).normal(0, 50, (3, 4)).astype(dtype)
    return {"weight": values, "bias": values[0], "one": values[:1, :1]}


def saved(path, values, save=mx.nd.save):
    save(str(path), values)
    return path


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_dtype_has_the_bits_that_were_saved(tmp_path, dtype):
    values = arrays(dtype)
    path = saved(
        tmp_path / "net.params", {k: mx.nd.array(v, dtype=dtype) for k, v in values.items()}
    )
    found = read_params(path)
    assert list(found) == list(values)
    for name, value in values.items():
        assert found[name].dtype == value.dtype
        assert found[name].tobytes() == value.tobytes()
        found[name][:] = 0  # may be written to


def test_bfloat16_becomes_the_same_values_in_float32(tmp_path):
    values = mx.nd.array(np.float32([1, 0.1, -3e38, np.inf]))
    path = saved(tmp_path / "net.params", [mx.nd.amp_cast(values, "bfloat16")])
    (found,) = read_params(path)
    assert found.dtype == np.float32
    rounded = mx.nd.amp_cast(mx.nd.amp_cast(values, "bfloat16"), "float32").asnumpy()
    assert found.tobytes() == rounded.tobytes()


def test_arrays_of_the_numpy_interface_keep_their_shapes(tmp_path):
    with mx.util.np_shape(active=True), mx.util.np_array(active=True):
        values = [mx.np.array(2.5), mx.np.zeros((0, 3)), mx.np.ones((2, 1))]
        path = saved(tmp_path / "net.params", values, mx.npx.save)
    assert [one.shape for one in read_params(path)] == [(), (0, 3), (2, 1)]
    assert read_params(path)[0] == 2.5


def test_parameters_of_networks_are_read_as_mxnet_reads_them(tmp_path):
    net = gluon.model_zoo.vision.resnet18_v1(classes=5)
    net.initialize()
    net.hybridize()
    net(mx.nd.zeros((1, 3, 32, 32)))
    net.save_parameters(str(tmp_path / "net.params"))
    net.export(str(tmp_path / "net"))
    for name in ("net.params", "net-0000.params"):
        theirs, ours = mx.nd.load(str(tmp_path / name)), read_params(tmp_path / name)
        assert list(ours) == list(theirs)
        assert all(ours[k].tobytes() == theirs[k].asnumpy().tobytes() for k in theirs)


def of_first_versions(shape, values, magic=None):
    """A file as MXNet 0.8 wrote it, or, with a magic number, 0.11."""
    form = "I" if magic is None else "q"
    head = struct.pack("<I", len(shape)) if magic is None else struct.pack("<II", magic, len(shape))
    array = head + struct.pack(f"<{len(shape)}{form}", *shape) + struct.pack("<iii", 1, 0, 0)
    names = struct.pack("<QQ", 1, 1) + b"w"
    return struct.pack("<QQQ", 0x112, 0, 1) + array + values.tobytes() + names


@pytest.mark.parametrize("magic", [None, 0xF993FAC8])
def test_files_of_older_versions_are_read(tmp_path, magic):
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    data = of_first_versions((2, 3), values, magic)
    (tmp_path / "old.params").write_bytes(data)
    assert mx.nd.load(str(tmp_path / "old.params"))["w"].asnumpy().tolist() == values.tolist()
    assert read_params(data)["w"].tolist() == values.tolist()


def test_every_truncation_is_an_error(tmp_path):
    path = saved(tmp_path / "net.params", {k: mx.nd.array(v) for k, v in arrays().items()})
    data = path.read_bytes()
    for length in range(len(data)):
        with pytest.raises(FileFormatError):
            read_params(data[:length])
    with pytest.raises(FileFormatError, match="1 bytes follow the last name"):
        read_params(data + b"x")


@pytest.mark.parametrize("kind", ["params", "symbol", "records"])
def test_a_thousand_mutations_end_in_an_answer_or_a_clear_error(tmp_path, kind):
    random = np.random.default_rng(7)
    data = bytearray(a_file(tmp_path, kind))
    refused = []
    for _ in range(1000):
        damaged = bytearray(data)
        for place in random.integers(len(data), size=random.integers(1, 4)):
            damaged[place] = random.integers(256)
        try:
            read(kind, bytes(damaged))
        except FileFormatError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert all("the bytes" in words for words in refused)


def a_file(folder, kind):
    if kind == "params":
        path = saved(folder / "net.params", {k: mx.nd.array(v) for k, v in arrays().items()})
    elif kind == "symbol":
        net = gluon.nn.HybridSequential()
        net.add(gluon.nn.Conv2D(4, 3, in_channels=3), gluon.nn.BatchNorm(in_channels=4))
        net.initialize()
        net.hybridize()
        net(mx.nd.zeros((1, 3, 8, 8)))
        net.export(str(folder / "net"))
        path = folder / "net-symbol.json"
    else:
        path = folder / "photos.rec"
        file = mx.recordio.MXRecordIO(str(path), "w")
        for number in range(4):
            file.write(b"abc" * number)
        file.close()
    return path.read_bytes()


def read(kind, data):
    if kind == "params":
        return read_params(data)
    return read_symbol(data) if kind == "symbol" else list(RecordFile(data))


def test_what_a_file_is_not_is_said(tmp_path):
    with pytest.raises(FileFormatError, match=r"does not begin with 0x112; numpy.load reads"):
        read_params(b"PK\x03\x04" + bytes(40))
    sparse = mx.nd.array(np.eye(3)).tostype("row_sparse")
    with pytest.raises(FileFormatError, match=r"storage 1, .* save array.tostype\('default'\)"):
        read_params(saved(tmp_path / "sparse.params", {"w": sparse}))
    with pytest.raises(FileFormatError, match="is not a graph of MXNet"):
        read_symbol(b'{"nodes": [{}], "heads": []}')
    backwards = {"op": "relu", "name": "a", "inputs": [[0, 0, 0]]}
    with pytest.raises(FileFormatError, match="relu 'a' takes no node before it"):
        read_symbol(json.dumps({"nodes": [backwards], "heads": [[0, 0, 0]]}).encode())
    with pytest.raises(FileNotFoundError):
        read_params(tmp_path / "missing.params")


def test_a_graph_has_the_nodes_and_options_of_the_symbol(tmp_path):
    graph = read_symbol(a_file(tmp_path, "symbol"))
    ops = [node.op for node in graph.nodes if node.op != "null"]
    assert ops == ["Convolution", "BatchNorm"]
    convolution = next(node for node in graph.nodes if node.op == "Convolution")
    assert convolution.value("kernel") == (3, 3)
    assert convolution.value("no_bias") is False
    assert convolution.value("layout") == "NCHW"
    assert convolution.value("absent", 7) == 7
    old = {"op": "relu", "name": "a", "attr": {"x": "1"}, "param": {"y": "two"}, "inputs": []}
    (node,) = read_symbol(json.dumps({"nodes": [old], "heads": [[0, 0]]}).encode()).nodes
    assert node.attrs == {"x": "1", "y": "two"}


@pytest.mark.filterwarnings("ignore:tostring")  # of MXNet
def test_records_are_those_that_mxnet_reads(tmp_path):
    header = mx.recordio.IRHeader(0, 3.0, 7, 0)
    labels = mx.recordio.IRHeader(0, np.float32([1, 2]), 8, 9)
    records = [mx.recordio.pack(header, b"photo"), mx.recordio.pack(labels, b""),
               b"", ODD, b"1234" + ODD + ODD + b"12", b"123" + ODD]  # fmt: skip
    path, index = str(tmp_path / "photos.rec"), str(tmp_path / "photos.idx")
    file = mx.recordio.MXIndexedRecordIO(index, path, "w")
    for number, one in enumerate(records):
        file.write_idx(10 * number, one)
    file.close()
    with RecordFile(path) as found:
        assert list(found) == records
        assert [found[10 * number] for number in range(len(records))] == records
        with pytest.raises(KeyError, match="6 keys, and none is 5"):
            found[5]
    assert unpack(records[0]) == ((3.0, 7, 0), b"photo")
    (label, *ids), rest = unpack(records[1])
    assert (label.tolist(), ids, rest) == ([1, 2], [8, 9], b"")
    with pytest.raises(FileFormatError, match="a key, a tab and a place"):
        RecordFile(path, b"no number\t5\n")
    with pytest.raises(FileFormatError, match="label of a record would take"):
        unpack(records[0][:5])


def test_neither_mxnet_nor_the_library_is_imported():
    program = (
        "import sys; sys.modules['mxnet'] = None; sys.modules['mpgluon'] = None; "
        "from mpgluon_tools.leaving import mxnet_files, record_files, torch_writer; print('ok')"
    )
    root = Path(mxnet_files.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert done.stdout == "ok\n", done.stderr
    lines = Path(mxnet_files.__file__).read_text("utf-8").count("\n")
    assert lines <= 300
