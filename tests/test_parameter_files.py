"""Parameter files are plain MXNet's: each kind of network reads the files of all others.

A file has the network's formats: float16 where a cast made it so, else FP32. Formats that
differ are MXNet's business, and it asks for ``cast_dtype=True`` then.
"""

import inspect
import json

import mpgluon
from mpgluon import amp
from mpgluon_tools.parameter_files import load_parameter_file

import mxnet as mx
import numpy as np
import pytest
from helpers import BOTH, assert_same_bits, run_python
from mxnet import gluon
from mxnet.gluon import nn

# What MXNet says of every imported graph.
pytestmark = pytest.mark.filterwarnings("ignore:Cannot decide type for the following arguments")

KINDS = {
    "plain": lambda net: None,  # noqa: ARG005
    "cast float16": mpgluon.cast_block,
    "autocast float16": amp.autocast,
    "autocast bfloat16": lambda net: amp.autocast(net, "bfloat16"),
}
CAST = "cast float16"
FLOAT16_PARAMETERS = {"0.weight", "0.bias", "3.weight", "3.bias"}  # of a cast network
FOUR_KINDS = pytest.mark.parametrize("kind", KINDS)


def network() -> nn.HybridSequential:
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(6, 3, in_channels=3), nn.BatchNorm(in_channels=6))
        net.add(nn.Activation("relu"), nn.Dense(4, in_units=96))
    return net


def images() -> mx.nd.NDArray:
    return mx.nd.array(np.sin(np.arange(2 * 3 * 6 * 6)).reshape(2, 3, 6, 6), dtype="float32")


def some_values(seed: int) -> dict[str, np.ndarray]:
    """Return FP32 values by place in the network, few of which float16 has."""
    random = np.random.RandomState(seed)
    parameters = network()._collect_params_with_prefix()
    values = {
        place: random.uniform(0.5, 1.5, parameter.shape).astype(np.float32)
        for place, parameter in parameters.items()
    }
    # Ties in float16, of which one goes down, one up and one up among the subnormals; and -65519,
    # almost half a step past the least float16 number.
    values["3.bias"][:] = [1 + 2**-11, 1 + 3 * 2**-11, 1.5 * 2**-24, -65519]
    return values


VALUES = some_values(seed=0)


def in_formats_of(kind: str, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return ``values`` as a network of this kind holds them, rounded by NumPy."""
    in_float16 = FLOAT16_PARAMETERS if kind == CAST else set()
    return {
        place: value.astype(np.float16 if place in in_float16 else np.float32)
        for place, value in values.items()
    }


def of_kind(kind: str, values: dict[str, np.ndarray], *, hybridize: bool = False):
    """Return a network whose parameters were set by hand, one by one, after its cast."""
    net = network()
    net.initialize()
    KINDS[kind](net)
    for place, parameter in net._collect_params_with_prefix().items():
        value = in_formats_of(kind, values)[place]
        parameter.set_data(mx.nd.array(value, dtype=value.dtype))
    net.hybridize(hybridize)
    return net


def assert_holds(net, expected: dict[str, np.ndarray]) -> None:
    mx.nd.waitall()
    parameters = net._collect_params_with_prefix()
    assert parameters.keys() == expected.keys()
    for place, parameter in parameters.items():
        value = parameter.data().asnumpy()
        assert np.dtype(parameter.dtype) == value.dtype == expected[place].dtype, place
        assert value.tobytes() == expected[place].tobytes(), place


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return the folder with a parameter file of each kind of network."""
    folder = tmp_path_factory.mktemp("files")
    for kind in KINDS:
        of_kind(kind, VALUES).save_parameters(str(folder / f"{kind}.params"))
    return folder


@FOUR_KINDS
def test_a_file_holds_the_formats_of_the_network(files, kind):
    expected = in_formats_of(kind, VALUES)
    saved = mx.nd.load(str(files / f"{kind}.params"))
    assert saved.keys() == expected.keys()
    for place, array in saved.items():
        assert array.dtype == expected[place].dtype
        assert array.asnumpy().tobytes() == expected[place].tobytes()


@BOTH
@FOUR_KINDS
@pytest.mark.parametrize("saved", KINDS)
def test_every_kind_of_network_loads_the_file_of_every_kind(files, saved, kind, hybridize):
    in_file = in_formats_of(saved, VALUES)
    expected = in_formats_of(kind, in_file)
    net = of_kind(kind, some_values(seed=1), hybridize=hybridize)
    before = net(images()).asnumpy()  # with a graph, and weights in oneDNN's own layout
    net.load_parameters(str(files / f"{saved}.params"), cast_dtype=True)
    assert_holds(net, expected)
    by_hand = of_kind(kind, in_file, hybridize=hybridize)(images()).asnumpy()
    assert np.isfinite(by_hand).all()
    assert (net(images()).asnumpy() == by_hand).all()
    assert (before != by_hand).any()


@pytest.mark.parametrize(
    ("saved", "kind"), [(CAST, other) for other in KINDS if other != CAST] + [("plain", CAST)]
)
def test_without_cast_dtype_mxnet_refuses_formats_that_differ_with_advice(files, saved, kind):
    net = of_kind(kind, VALUES)
    with pytest.raises(AssertionError, match=r"dtype incompatible.*Set cast_dtype=True to cast"):
        net.load_parameters(str(files / f"{saved}.params"))
    assert_holds(net, in_formats_of(kind, VALUES))


def test_a_cast_network_that_loaded_a_file_is_restored_to_what_it_loaded(files):
    net = of_kind(CAST, some_values(seed=1))
    net.load_parameters(str(files / "plain.params"), cast_dtype=True)
    mpgluon.restore(net)
    assert_holds(net, in_formats_of("plain", in_formats_of(CAST, VALUES)))


# Exports: a graph and its parameters


def exported(net, path, **options):
    """Export a network that has been called, and return it as MXNet imports it."""
    net.export(str(path), **options)
    graph, parameters = f"{path}-symbol.json", f"{path}-0000.params"
    return gluon.SymbolBlock.imports(graph, ["data"], parameters)


@pytest.mark.parametrize("remove_amp_cast", [True, False])
@FOUR_KINDS
def test_a_restored_network_has_the_export_of_one_never_cast(tmp_path, kind, remove_amp_cast):
    plain, net = (of_kind("plain", VALUES, hybridize=True) for _ in range(2))
    result = plain(images()).asnumpy()
    KINDS[kind](net)
    net(images())
    mpgluon.restore(net)
    net(images())
    graphs = []
    for name, one in (("plain", plain), ("restored", net)):
        imported = exported(one, tmp_path / name, remove_amp_cast=remove_amp_cast)
        assert (imported(images()).asnumpy() == result).all()
        nodes = json.loads((tmp_path / f"{name}-symbol.json").read_text())["nodes"]
        graphs.append([(node["op"], node["name"]) for node in nodes])
    assert graphs[0] == graphs[1]
    saved = [mx.nd.load(str(tmp_path / f"{name}-0000.params")) for name in ("plain", "restored")]
    assert saved[0].keys() == saved[1].keys()
    for name, array in saved[0].items():
        assert array.asnumpy().tobytes() == saved[1][name].asnumpy().tobytes()
        assert array.dtype == saved[1][name].dtype


def test_mxnet_refuses_to_compute_the_export_of_a_cast_network_without_its_casts(tmp_path):
    net = of_kind(CAST, VALUES, hybridize=True)
    net(images())
    imported = exported(net, tmp_path / "net", remove_amp_cast=True)
    with pytest.raises(mx.MXNetError, match="requires uniform type"):
        imported(images())


PLAIN_MXNET = f"""
import sys
import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn

{inspect.getsource(network)}
{inspect.getsource(images)}
def show(net):
    print(net(images()).asnumpy().tobytes().hex())

folder, *kinds = sys.argv[1:]
for kind in kinds:
    net = network()
    net.load_parameters(f"{{folder}}/{{kind}}.params", cast_dtype=True)
    show(net)
    graph, parameters = f"{{folder}}/{{kind}}-symbol.json", f"{{folder}}/{{kind}}-0000.params"
    show(gluon.SymbolBlock.imports(graph, ["data"], parameters))
assert "mpgluon" not in sys.modules
"""


@pytest.mark.multiprocess
@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "1.24.0",
    reason="MXNet 1.9.1 is imported by NumPy 1.24 and newer with mpgluon only",
)
def test_plain_mxnet_loads_parameters_and_exports_of_all_kinds_without_mpgluon(tmp_path):
    expected = []
    for kind in KINDS:
        net = of_kind(kind, VALUES, hybridize=True)
        own_result = net(images()).asnumpy()
        net.save_parameters(str(tmp_path / f"{kind}.params"))
        net.export(str(tmp_path / kind))
        in_fp32 = of_kind("plain", in_formats_of(kind, VALUES))(images()).asnumpy()
        expected += [in_fp32.tobytes().hex(), own_result.tobytes().hex()]
    finished = run_python(PLAIN_MXNET, tmp_path, *KINDS)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines() == expected
    assert len(set(expected)) == 4  # FP32 of FP32 and of float16 values, float16, bfloat16


# The option --parameters


def waiting(classes: int, units: int = 6) -> nn.HybridSequential:
    """Return a network whose shapes wait for its first call."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(units, 3), nn.BatchNorm(), nn.Activation("relu"), nn.Dense(classes))
    net.initialize()
    return net


def test_shapes_that_wait_for_the_first_call_are_those_of_the_file(files):
    net = waiting(classes=4)
    assert load_parameter_file(net, files / "plain.params", classes=4) == []
    assert_holds(net, in_formats_of("plain", VALUES))


def test_a_head_of_another_size_waits_as_before(files):
    net = waiting(classes=5)
    fresh = load_parameter_file(net, files / "plain.params", classes=5)
    assert sorted(fresh) == ["3.bias", "3.weight"]
    assert net[3].weight.shape == (5, 0)
    assert net(images()).shape == (2, 5)
    kept = {name: p.data().asnumpy() for name, p in net._collect_params_with_prefix().items()}
    expected = in_formats_of("plain", VALUES)
    rest = expected.keys() - fresh
    assert_same_bits({name: kept[name] for name in rest}, {name: expected[name] for name in rest})


def test_a_file_that_does_not_fit_leaves_shapes_unknown(files):
    net = waiting(classes=4, units=7)
    with pytest.raises(mpgluon.CheckpointError, match=r"0\.weight is .*\(7, 0, 3, 3\)"):
        load_parameter_file(net, files / "plain.params", classes=4)
    assert net[3].weight.shape == (4, 0)
    assert net(images()).shape == (2, 4)


def test_a_shape_of_which_nothing_is_known_is_that_of_the_file(files):
    net = waiting(classes=4)
    net[3].bias._shape = None
    net[3].bias._deferred_init = net[3].weight._deferred_init
    net[3].bias._data = net[3].bias._grad = None
    assert load_parameter_file(net, files / "plain.params", classes=4) == []
    assert_holds(net, in_formats_of("plain", VALUES))


def test_a_name_that_is_not_text_is_refused(files, tmp_path):
    damaged = tmp_path / "damaged.params"
    damaged.write_bytes((files / "plain.params").read_bytes().replace(b"weight", b"w\x80ight"))
    with pytest.raises(mpgluon.CheckpointError, match="is not an MXNet parameter file"):
        load_parameter_file(waiting(classes=4), damaged, classes=4)
