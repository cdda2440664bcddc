"""docs/migration.md: our side of every pair of blocks runs, and does as the page says."""

import ast
import difflib
import inspect
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Callable, NamedTuple

import mpgluon
from mpgluon import amp, fp16_utils
from mpgluon.base.migration import INSTEAD
from mpgluon.trainer import networks

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.contrib.amp import amp as contrib_amp
from mxnet.contrib.amp.loss_scaler import LossScaler
from mxnet.gluon import nn

PAGE = Path(__file__).resolve().parents[1] / "docs" / "migration.md"
BATCHES, BATCH_SIZE, CLASSES = 24, 8, 3
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()

Namespace = dict[str, Any]


class Block(NamedTuple):
    """One block of code on the page."""

    section: str
    side: str  # "There" or "Here": the last of these words in the paragraph before it
    code: str


def blocks() -> list[Block]:
    found, section, paragraph = [], "", ""
    for part in re.split(r"^(## [^\n]*|```python\n.*?^```)$", PAGE.read_text(), flags=re.M | re.S):
        if part.startswith("## "):
            section = part.removeprefix("## ")
        elif part.startswith("```python"):
            code = part.removeprefix("```python\n").removesuffix("```")
            found.append(Block(section, re.findall(r"\b(There|Here)\b", paragraph)[-1], code))
        else:
            paragraph = part.strip().rpartition("\n\n")[2]
    return found


OURS: dict[str, list[str]] = {}
for _block in blocks():
    if _block.side == "Here":
        OURS.setdefault(_block.section, []).append(_block.code)


def make_net():
    mx.random.seed(0)
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3, in_channels=1), nn.BatchNorm(in_channels=4), nn.Activation("relu"))
    net.add(nn.Flatten(), nn.Dense(CLASSES, in_units=4 * 4 * 4))
    net.initialize(mx.init.Xavier())
    return net


def make_batches():
    """Return images whose class shows as a bright third."""
    random = np.random.default_rng(0)
    for _ in range(BATCHES):
        labels = random.integers(0, CLASSES, BATCH_SIZE)
        images = 0.1 * random.standard_normal((BATCH_SIZE, 1, 6, 6))
        for image, label in zip(images, labels):
            image[0, 2 * label : 2 * label + 2] += 1
        yield mx.nd.array(images), mx.nd.array(labels, dtype="int32")


class Joined(gluon.data.Dataset):
    """The images and labels of batches, one by one."""

    def __init__(self, batches):
        self._pairs = [pair for images, labels in batches for pair in zip(images, labels)]

    def __len__(self):
        return len(self._pairs)

    def __getitem__(self, index):
        image, label = self._pairs[index]
        return image, label.asscalar()


def recorded(function, calls):
    def call(*args, **kwargs):
        calls.append(function.__name__)
        return function(*args, **kwargs)

    return call


@pytest.fixture
def namespace(tmp_path, monkeypatch) -> Namespace:
    """Return the names that the page assumes, and a record of some calls that leave no trace."""
    calls: list[str] = []
    monkeypatch.setattr(networks, "_requested", None)  # amp.init is for the whole process
    for module, name in ((amp, "clip_global_norm"), (mpgluon, "cast_block")):
        monkeypatch.setattr(module, name, recorded(getattr(module, name), calls))
    names: Namespace = {
        "make_net": make_net,
        "batches": (batches := list(make_batches())),
        "train_data": gluon.data.DataLoader(Joined(batches), BATCH_SIZE),
        "loss_fn": LOSS,
        "path": str(tmp_path / "file"),
        "calls": calls,
    }
    exec(OURS[""][0], names)
    return names


def formats(net) -> set[str]:
    """Return the formats of all parameters but BatchNorm's."""
    return {np.dtype(net[index].weight.dtype).name for index in (0, 4)}


def values(net):
    return [parameter.data().asnumpy() for parameter in net.collect_params().values()]


def trained(net):
    return [p for p in net.collect_params().values() if p.grad_req != "null"]


def backward(net, trainer, images, labels, factor=1.0):
    with autograd.record():
        loss = LOSS(net(images), labels) * factor
        with amp.scale_loss(loss, trainer) as scaled_loss:
            autograd.backward(scaled_loss)


def mean_loss(net, names) -> float:
    losses = [LOSS(net(images), labels).mean().asscalar() for images, labels in names["batches"]]
    return float(np.mean(losses))


def assert_trained(net, names) -> None:
    """Guessing would have a loss of log 3, about 1.1; the network as it began has more."""
    assert mean_loss(net, names) < 0.5 < 1 < mean_loss(make_net(), names)


def assert_computes_in_float16(net, names) -> None:
    """The last layer rounds its result to float16, which an FP32 network does not."""
    logits = net(names["batches"][0][0]).asnumpy()
    assert logits.dtype == np.float32
    assert (logits == logits.astype(np.float16)).all()


def assert_scaled(names, first_scale=2.0**16) -> None:
    """The scale has fallen once for each skipped step; no run is long enough for it to grow."""
    trainer = names["trainer"]
    assert amp.skipped_steps(trainer) < BATCHES / 4
    assert amp.loss_scale(trainer) == first_scale / 2 ** amp.skipped_steps(trainer)


# --- one check for each block of ours, in the page's order ------------------------------------


def check_the_imports(names):
    assert names["amp"] is amp
    assert {"mpgluon", "autograd", "gluon"} < names.keys()


def check_the_loss_scale(names):
    assert names["loss_scale"].scale == 2.0**15
    assert names["loss_scale"].growth_interval == 1000
    with pytest.raises(ValueError, match="power of two"):
        mpgluon.DynamicLossScale(init_scale=1000)
    assert inspect.signature(amp.init_trainer).parameters["max_consecutive_skips"].default == 2000


def check_a_scale_below_1(names):
    loss_scale = names["loss_scale"]
    while loss_scale.can_shrink:
        loss_scale.update(False)
    assert loss_scale.scale == 2.0**-10


def check_training(names, parameters="float32", first_scale=2.0**16):
    """Check what most blocks leave: FP16 computes, the scale follows the rule, the loss falls."""
    assert_computes_in_float16(names["net"], names)
    assert formats(names["net"]) == {parameters}
    assert_scaled(names, first_scale)
    assert_trained(names["net"], names)


def check_apex_o2(names):
    check_training(names, "float16")
    assert names["net"][1].gamma.dtype == np.float32
    assert 0 < names["norm"] < np.inf
    rounded = names["net"][4].weight.data().asnumpy()
    mpgluon.restore(names["net"])
    masters = names["net"][4].weight.data().asnumpy()
    assert (masters != rounded).mean() > 0.9
    assert (masters.astype(np.float16) == rounded).all()


def check_two_optimizers(names):
    assert_computes_in_float16(names["net"], names)
    assert_trained(names["net"], names)
    skipped, scales = (
        {question(trainer) for trainer in names["trainers"]}
        for question in (amp.skipped_steps, amp.loss_scale)
    )
    assert len(skipped) == len(scales) == 1
    assert scales == {2.0**16 / 2 ** skipped.pop()}
    images, labels = names["batches"][0]
    backward(names["net"], names["trainers"], images, labels)
    names["net"][-1].weight.grad()[0, 0] = np.inf
    for trainer in names["trainers"]:
        trainer.step(BATCH_SIZE)
    assert all(amp.step_was_skipped(trainer) for trainer in names["trainers"])
    assert {amp.loss_scale(trainer) for trainer in names["trainers"]} == {scales.pop() / 2}


def check_apex_o3(names):
    assert_computes_in_float16(names["net"], names)
    assert formats(names["net"]) == {"float16"}
    assert_trained(names["net"], names)
    with pytest.raises(mpgluon.TrainerStateError, match="no loss scale"):
        amp.loss_scale(names["trainer"])
    rounded = names["net"][4].weight.data().asnumpy()
    mpgluon.restore(names["net"])
    assert (names["net"][4].weight.data().asnumpy() == rounded).all()  # there were no masters


def check_accumulation(names):
    assert_computes_in_float16(names["net"], names)
    assert formats(names["net"]) == {"float32"}
    assert all(parameter.grad_req == "add" for parameter in names["trained"])
    steps = BATCHES // 4
    made = names["trainer"].optimizer.num_update
    assert 0 < made == steps - amp.skipped_steps(names["trainer"])
    assert_scaled(names)
    assert all(not p.grad().asnumpy().any() for p in names["trained"])
    # Each update moved the weights by 0.1 times a gradient of norm 1 at most, but for FP32's
    # rounding; BatchNorm's statistics have no gradients and are left out.
    before = [p.data().asnumpy() for p in trained(make_net())]
    after = [p.data().asnumpy() for p in trained(names["net"])]
    moved = np.sqrt(sum(((one - other) ** 2).sum() for one, other in zip(before, after)))
    assert 0 < moved <= 0.1 * made * (1 + 1e-5)


def check_keep_fp32(names):
    assert names["net"][-1].name in names["report"].kept_fp32
    logits = names["logits"].asnumpy()
    assert logits.dtype == np.float32
    assert (logits != logits.astype(np.float16)).any()


def check_operators(names):
    assert names["report"].operators_fp32 == ("FullyConnected", "0:Convolution")
    assert names["report"].operators_16 == ("softmax",)
    logits = names["logits"].asnumpy()
    assert (logits != logits.astype(np.float16)).any()


def check_two_losses(names):
    check_training(names)
    # The second loss counts: without it logits become larger.
    images = names["batches"][0][0]
    without = make_net()
    amp.autocast(without, "float16")
    trainer = gluon.Trainer(without.collect_params(), "sgd", {"learning_rate": 0.1})
    amp.init_trainer(trainer)
    for batch_images, labels in names["batches"]:
        backward(without, trainer, batch_images, labels)
        trainer.step(BATCH_SIZE)
    assert (without(images) ** 2).mean() > (names["net"](images) ** 2).mean()


def check_two_networks(names):
    for net in names["nets"]:
        assert_computes_in_float16(net, names)
        assert_trained(net, names)
    scales = [amp.loss_scale(trainer) for trainer in names["trainers"]]
    images, labels = names["batches"][0]
    for number, (net, trainer) in enumerate(zip(names["nets"], names["trainers"])):
        backward(net, trainer, images, labels, factor=1 if number else np.inf)
        trainer.step(BATCH_SIZE)
    assert [amp.loss_scale(trainer) for trainer in names["trainers"]] == [scales[0] / 2, scales[1]]


def check_checkpoint(names):
    assert names["extra"] == {"epoch": 3}
    before, scale = values(names["net"]), amp.loss_scale(names["trainer"])
    images, labels = names["batches"][0]
    backward(names["net"], names["trainer"], images, labels)
    names["trainer"].step(BATCH_SIZE)
    assert not all((one == other).all() for one, other in zip(values(names["net"]), before))
    mpgluon.load_checkpoint(names["path"], names["net"], names["trainer"])
    assert all((one == other).all() for one, other in zip(values(names["net"]), before))
    assert amp.loss_scale(names["trainer"]) == scale


def check_keras(names):
    check_training(names, first_scale=2.0**15)
    assert names["calls"] == BATCHES * ["clip_global_norm"]


def check_graph_rewrite(names):
    assert_computes_in_float16(names["net"], names)
    assert formats(names["net"]) == {"float32"}
    assert amp.loss_scale(names["trainer"]) == 2.0**16


def check_storage_getter(names):
    assert_computes_in_float16(names["net"], names)
    assert formats(names["net"]) == {"float32"}
    assert amp.loss_scale(names["trainer"]) == 128
    assert 0 < names["norm"] < np.inf
    assert_trained(names["net"], names)


def check_paddle(names):
    assert names["calls"] == ["cast_block"] + BATCHES * ["clip_global_norm"]
    assert_scaled(names)
    assert formats(names["net"]) == {"float32"}
    assert_trained(names["net"], names)
    assert {array.dtype for array in mx.nd.load(names["path"]).values()} == {np.float32}


def check_contrib(names):
    check_training(names)
    assert names["amp"] is amp


CHECKS: dict[str, list[Callable[[Namespace], None]]] = {
    "": [check_the_imports],
    "What differs by default": [check_the_loss_scale, check_a_scale_below_1],
    "From Apex": [check_apex_o2, check_two_optimizers, check_apex_o3],
    "From torch.amp": [
        *(check_accumulation, check_keep_fp32, check_operators, check_two_losses),
        *(check_two_networks, check_checkpoint),
    ],
    "From TensorFlow": [check_keras, check_graph_rewrite, check_storage_getter],
    "From Paddle": [check_paddle],
    "From mxnet.contrib.amp": [check_contrib],
    "With an Estimator": [check_training],
}


def test_every_block_of_ours_has_a_check():
    assert list(map(len, OURS.values())) == [len(CHECKS[section]) for section in OURS]
    assert OURS.keys() == CHECKS.keys()


@pytest.mark.parametrize("section", CHECKS)
def test_our_blocks_do_what_the_page_says(section, namespace):
    for code, check in zip(OURS[section], CHECKS[section]):
        warns = pytest.warns(UserWarning, match="Accumulating with float16")
        with warns if check is check_apex_o3 else nullcontext():
            exec(code, namespace)
        check(namespace)


def test_blocks_of_other_frameworks_are_python():
    theirs = [block for block in blocks() if block.side == "There"]
    assert {block.section for block in theirs} == {s for s in CHECKS if s.startswith("From ")}
    for block in theirs:
        ast.parse(block.code)


def test_only_the_import_changes_for_a_user_of_contrib_amp():
    there, here = (
        block.code.splitlines() for block in blocks() if block.section == "From mxnet.contrib.amp"
    )
    changed = [line for line in difflib.ndiff(there, here) if line[0] in "+-" and line[2:].strip()]
    assert sorted(changed) == ["+ from mpgluon import amp", "- from mxnet.contrib import amp"]


def defaults(name: str) -> list[str]:
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in row.strip("|").split("|")[1:]]


def power(number: float) -> str:
    return f"2^{int(np.log2(number))}" if number > 1 else f"{number:g}"


def test_the_defaults_are_those_of_the_loss_scales():
    ours, theirs = mpgluon.DynamicLossScale(), LossScaler()
    assert (ours.growth_factor, ours.backoff_factor) == (2, 0.5)
    scales = (power(ours.min_scale), power(ours.max_scale))
    interval = f"{ours.growth_interval} steps"
    assert defaults("`mpgluon`") == [power(ours.scale), interval, "1 overflow", *scales]
    first, interval, _, least, largest = defaults("`mxnet.contrib.amp`")
    assert first == power(theirs.loss_scale)
    assert interval == f"{theirs._scale_seq_len} steps"
    assert (least, largest) == ("none", power(theirs._max_loss_scale))


def test_every_name_of_ours_in_the_tables_exists():
    modules = {"amp": amp, "mpgluon": mpgluon, "fp16_utils": fp16_utils}
    cells = [row.strip("|").split("|")[-1] for row in PAGE.read_text().splitlines() if "|" in row]
    names = re.findall(r"\b(?<![.\w])(amp|mpgluon|fp16_utils)\.(\w+)", " ".join(cells))
    assert len(names) > 30
    for module, name in names:
        assert hasattr(modules[module], name), f"{module}.{name}"


# --- what does not exist here says what to write instead -----------------------------------------

FRAMEWORKS = ("Apex", "torch", "Keras", "Paddle", "contrib.amp")
# Called on the left as well, and nobody looks for them in a module for mixed precision.
ELSEWHERE = {"Dense", "compile", "inner", "grad"}
OPTION = re.compile(r"\w+=.*|\"\w+\"|opt_level")


class Row(NamedTuple):
    """A row of a table of the page that has another library on its left."""

    spans: list[str]  # of code, on the left
    ours: str  # as it would be printed

    @property
    def names(self) -> set[str]:
        """The functions, methods and attributes that the left side begins with."""
        called = (re.match(r"(?:with )?(?:\w+\.)*(\w+)(?=\()|\w+\.(\w+)$", s) for s in self.spans)
        return {one[1] or one[2] for one in called if one} - ELSEWHERE


def rows() -> list[Row]:
    found = []
    for table in re.findall(
        r"^\| ([^|]+) \| here \|\n\|[-|]+\n((?:\|.*\n)+)", PAGE.read_text(), re.M
    ):
        if table[0] in FRAMEWORKS:
            for line in table[1].splitlines():
                theirs, ours = line.strip("| ").split(" | ")
                ours = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", ours.replace("`", ""))
                found.append(Row(re.findall(r"`([^`]*)`", theirs), ours))
    return found


def test_every_table_of_another_library_is_read():
    titles = re.findall(r"^\| ([^|]+) \| here \|$", PAGE.read_text(), re.M)
    assert sorted({*titles} - {"`opt_level`"}) == sorted(FRAMEWORKS)
    assert len(rows()) > 50


@pytest.mark.parametrize("row", rows(), ids=lambda row: "; ".join(row.spans) or row.ours)
def test_each_name_on_the_left_exists_or_says_what_is_on_the_right(row):
    if not row.names:  # options of what other rows name, or words
        assert all(OPTION.fullmatch(s) or set(re.findall(r"\w+", s)) & ELSEWHERE for s in row.spans)
    for name in row.names - vars(amp).keys() - set(contrib_amp.__all__):
        assert not hasattr(amp, name)
        with pytest.raises(AttributeError, match=f"mpgluon.amp has no {name}; instead: ") as error:
            getattr(amp, name)
        assert any(other.ours in str(error.value) for other in rows() if name in other.names)


def test_every_answer_for_a_missing_name_is_on_the_page():
    on_the_page = set().union(*(row.names for row in rows()))
    assert on_the_page >= set(INSTEAD)
    assert not any(name in vars(amp) for name in INSTEAD)


def test_every_name_of_contrib_amp_exists_or_has_an_answer():
    for name in contrib_amp.__all__:
        assert hasattr(amp, name), name


def test_a_name_that_no_library_has_is_missing_as_usual():
    with pytest.raises(AttributeError, match=r"'mpgluon\.amp' has no attribute 'nonsense'"):
        amp.nonsense  # noqa: B018 - the access is the test
    assert not hasattr(amp, "__path__")


def test_the_loss_scale_reaches_an_operator_that_is_output_and_loss():
    class Output(nn.HybridBlock):
        def hybrid_forward(self, F, x, labels):
            return F.SoftmaxOutput(x, labels)

    moved = {}
    for scale in (1, 1024):
        layer = nn.Dense(3, in_units=4, weight_initializer="ones")
        layer.initialize()
        trainer = gluon.Trainer(layer.collect_params(), "sgd", {"learning_rate": 1.0})
        amp.init_trainer(trainer, scale)
        with autograd.record():
            output = Output()(layer(mx.nd.ones((2, 4))), mx.nd.array([0, 1]))
            with amp.scale_loss(output, trainer) as scaled:
                autograd.backward(scaled)
        trainer.step(2)
        moved[scale] = layer.bias.data().asnumpy()
    assert moved[1].any()
    np.testing.assert_array_equal(moved[1024], moved[1])
