"""``import mpgluon`` in a fresh process: what it adds, and what it leaves alone."""

import json
from pathlib import Path

import pytest
from helpers import run_python

pytestmark = pytest.mark.multiprocess
SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"

# NumPy 1.24 and later: the aliases are gone, and asking for one is an error.
LATER_NUMPY = """
import numpy as np

original = np.__getattr__
def without_aliases(name):
    if name in ("bool", "float", "int"):
        raise AttributeError(f"module 'numpy' has no attribute {name!r}")
    return original(name)
for name in ("bool", "float", "int"):
    np.__dict__.pop(name, None)
np.__getattr__ = without_aliases
"""


def assert_runs(code: str) -> None:
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_mxnet_alone_cannot_be_imported_with_a_numpy_that_lacks_the_aliases():
    done = run_python(LATER_NUMPY + "import mxnet")
    assert "module 'numpy' has no attribute 'bool'" in done.stderr


def test_with_numpy_2_the_import_says_what_to_install():
    done = run_python("import numpy; numpy.__version__ = '2.0.1'; import mpgluon")
    said = done.stderr.splitlines()[-1]
    assert said.startswith("ImportError: MXNet 1.9.1 cannot be imported with NumPy 2.0.1, ")
    assert said.endswith('; run pip install "numpy<2"')


def test_with_mpgluon_first_mxnet_and_gluoncv_can_be_imported_with_such_a_numpy():
    code = """
import mpgluon
import mxnet as mx
from gluoncv import model_zoo
assert (np.bool, np.float, np.int) == (bool, float, int)
assert mx.nd.ones(2).asnumpy().tolist() == [1, 1]
"""
    assert_runs(LATER_NUMPY + code)


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_every_script_begins_with_such_a_numpy(script):
    code = f"""
import runpy, sys
sys.argv = [{str(script)!r}, "--help"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    done = run_python(LATER_NUMPY + code)
    needs_pytorch = script.stem.startswith("record_tensor_core_")
    assert done.returncode == 0 or (needs_pytorch and "this needs PyTorch" in done.stderr)


def test_names_that_numpy_has_are_not_replaced():
    code = """
import numpy as np
np.bool, np.float, np.int = np.bool_, np.float64, np.int64
import mpgluon
assert (np.bool, np.float, np.int) == (np.bool_, np.float64, np.int64)
"""
    assert_runs(code)


@pytest.fixture(scope="module")
def imported() -> dict[str, list[str]]:
    """Return the changes by ``import mpgluon`` in a fresh process, and its public names."""
    code = """
import json, sys
import numpy as np
before = dict(np.__dict__)
import mpgluon
print(json.dumps({
    # Submodules that others import appear in their parent.
    "added": [k for k, v in np.__dict__.items() if k not in before and not isinstance(v, type(np))],
    "changed": [name for name in before if np.__dict__[name] is not before[name]],
    "loaded": list(sys.modules),
    "missing": [name for name in mpgluon.__all__ if not hasattr(mpgluon, name)],
    "public": mpgluon.__all__,
}))
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_only_the_three_aliases_are_added_to_numpy(imported):
    assert set(imported["added"]) <= {"bool", "float", "int"}
    assert imported["changed"] == []


def test_nothing_that_is_slow_or_only_for_figures_and_images_is_imported(imported):
    slow = {"matplotlib", "gluoncv", "PIL", "cv2", "pandas", "tqdm"}
    assert slow & set(imported["loaded"]) == set()


def test_every_public_name_is_there_once(imported):
    assert imported["missing"] == []
    assert len(imported["public"]) == len(set(imported["public"])) > 0


LATER = [
    *("diagnostics.OverflowLocator", "deployment.inference_network", "distributed.MpiKVStore"),
    *("checkpoint.read_parameters", "estimator.BatchProcessor", "fp16_utils", "tools.extra"),
    *("WeightAverage", "save_checkpoint", "load_checkpoint", "prepare", "amp.init_trainer"),
]


def test_folders_and_names_are_there_after_the_import_of_the_package_alone():
    assert_runs(f"""
import os
import mpgluon

for name in {LATER}:  # each in a process of its own, where no other one was asked for
    if os.fork() == 0:
        assert name.partition(".")[0] in dir(mpgluon)
        eval("mpgluon." + name)
        os._exit(0)
    assert os.wait()[1] == 0, name
""")


def test_a_trainer_of_a_cast_network_has_masters_in_a_program_that_does_not_import_amp():
    assert_runs("""
import sys
import mpgluon
import mxnet as mx
from mxnet import autograd, gluon

net = gluon.nn.Dense(1, in_units=1, use_bias=False)
net.initialize(mx.init.One())
mpgluon.cast_block(net)
assert not {"mpgluon.amp", "mpgluon.trainer"} & set(sys.modules)
options = {"learning_rate": 2.0**-12, "multi_precision": True}
trainer = gluon.Trainer(net.collect_params(), "sgd", options)
for _ in range(4):  # each update alone is half of the last place of a float16 weight: lost
    with autograd.record():
        loss = net(mx.nd.ones((1, 1))).sum()
    loss.backward()
    trainer.step(1)
assert net.weight.data().asscalar() == 1 - 2**-10, net.weight.data()
assert "mpgluon.amp" not in sys.modules
""")


# Every name of MXNet's modules and of their classes, with the object behind it, before mpgluon.
WATCH = """
import sys
import numpy as np
np.bool, np.float, np.int = bool, float, int
import mxnet as mx
from mxnet import autograd, gluon

mx.nd.empty(1)  # with its first empty array, MXNet notes whether it was built for large ones
modules = [one for name, one in sys.modules.items() if name.split(".")[0] == "mxnet"]
values = [value for module in modules for value in vars(module).values()]
kinds = {one for one in values if isinstance(one, type) and one.__module__.startswith("mxnet.")}
BEFORE = {place: dict(vars(place)) for place in (*modules, *kinds)}
assert sum(map(len, BEFORE.values())) > 10_000

def replaced():
    return {
        f"{place.__name__}.{name}"
        for place, attributes in BEFORE.items()
        for name in attributes
        if vars(place).get(name, BEFORE) is not attributes[name]
    }

def added():
    return {
        f"{place.__name__}.{name}"
        for place, attributes in BEFORE.items()
        for name, value in vars(place).items()
        if name not in attributes and callable(value)
    }

def assert_is_own():
    assert not replaced() | added(), (replaced(), added())

import mpgluon
from mpgluon import amp
"""


def test_after_importing_and_using_it_every_name_of_mxnet_is_mxnets_own():
    assert_runs(f"""{WATCH}
import recipes.training

assert_is_own()

class Fails(gluon.nn.Dense):
    def hybrid_forward(self, F, *args, **kwargs):
        raise ArithmeticError

for prepare in (mpgluon.cast_block, amp.autocast):
    net = gluon.nn.Dense(2, in_units=3)
    net.initialize()
    prepare(net, "float16")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {{"multi_precision": True}})
    amp.init_trainer(trainer)
    with autograd.record():
        loss = net(mx.nd.ones((1, 3))).astype("float32").sum()
        with amp.scale_loss(loss, trainer) as scaled:
            scaled.backward()
    trainer.step(1)
    assert_is_own()

    net = Fails(2, in_units=3)
    net.initialize()
    prepare(net, "float16")
    for hybridize in (False, True):
        net.hybridize(hybridize)
        try:
            net(mx.nd.ones((1, 3)))
        except ArithmeticError:
            assert_is_own()
        else:
            raise AssertionError
""")


@pytest.mark.parametrize("hybridize", [False, True])
def test_while_a_block_computes_three_functions_are_exchanged_in_its_thread_only(hybridize):
    assert_runs(f"""{WATCH}
from threading import Thread

def by_name():
    # with numbers that float16 lacks: arrays, a gradient, a graph, and mx.np
    x = mx.nd.full((2, 2), 1 + 2**-12)
    x.attach_grad()
    with autograd.record():
        product = mx.nd.dot(x, x)
    product.backward()
    symbol = mx.sym.dot(mx.sym.var("x"), mx.sym.var("x"), name="product")
    joined = mx.np.tensordot(x.as_np_ndarray(), x.as_np_ndarray(), 1)
    arrays = (product, x.grad, joined)
    results = [(type(one).__name__, str(one.dtype), one.asnumpy().tolist()) for one in arrays]
    return [*results, symbol.tojson()]

class Watched(gluon.nn.Dense):
    def hybrid_forward(self, F, x, **parameters):
        result = super().hybrid_forward(F, x, **parameters)

        def elsewhere():
            in_thread.append(by_name())
            other(mx.nd.ones((1, 3)))  # begins and ends within this pass

        thread = Thread(target=elsewhere)
        thread.start()
        thread.join()
        exchanged.append(replaced())
        here.append(by_name())
        return result

expected, exchanged, in_thread, here = by_name(), [], [], []
net, other = Watched(2, in_units=3), gluon.nn.Dense(2, in_units=3)
for one in (net, other):
    one.initialize()
    mpgluon.cast_block(one)
net.hybridize({hybridize})
net(mx.nd.ones((1, 3))).wait_to_read()

assert exchanged == [{{
    "mxnet.ndarray.register._imperative_invoke",
    "mxnet.symbol.register._symbol_creator",
    "mxnet.ndarray.numpy._api_internal.tensordot",
}}], exchanged
assert in_thread == [expected], (in_thread, expected)
assert all(result != plain for result, plain in zip(here[0], expected)), here
assert_is_own()
assert by_name() == expected
""")
