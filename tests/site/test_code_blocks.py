"""Every Python block of the documentation runs, with the page's output; commands parse.

docs/migration.md has a test of its own, tests/test_migration.py, which checks what its blocks do.
"""

from __future__ import annotations

import codeop
import contextlib
import io
import logging
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional

import mpgluon
from mpgluon import amp
from mpgluon.tools.onnx import ServingMetadata, export_onnx
from mpgluon_tools.commands import COMMANDS

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn
from PIL import Image

from recipes.training import TrainingConfig, train

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_extensions"))
from parsers import parser_of  # noqa: E402 - with the site's configuration

PAGES = sorted(
    path
    for folder, pattern in (
        (ROOT, "*.md"),
        (ROOT / "docs", "**/*.md"),
        (ROOT / "notebooks", "*.md"),
        (ROOT / "data", "*.md"),
    )
    for path in folder.glob(pattern)
    # Whose code has tests of its own: test_migration.py, third_party/test_d2l.py.
    if path.name not in ("migration.md", "d2l.md")
)
MACHINE = "<!-- output of a machine -->"  # before an output that differs from machine to machine
SHELL = ("", "bash", "shell", "console")


class Fence(NamedTuple):
    """A fenced block of a page."""

    language: str
    text: str
    line: int  # of its first line of text
    before: str  # the text between it and the fence before it


class Block(NamedTuple):
    """A block of Python on a page, and its output according to the page."""

    code: str
    line: int
    output: Optional[str]  # None: the page does not say, or it depends on the machine


def fences_of(text: str) -> list[Fence]:
    found, before, inside, language = [], [], None, ""
    for number, line in enumerate(text.splitlines(), start=1):
        if inside is None and line.startswith("```"):
            inside, language = [], line[3:].strip()
        elif inside is not None and line == "```":
            content = "".join(f"{one}\n" for one in inside)
            found.append(Fence(language, content, number - len(inside), "\n".join(before).strip()))
            before, inside = [], None
        else:
            (before if inside is None else inside).append(line)
    assert inside is None, "a block is not closed"
    return found


def sides_of(diff: str) -> list[str]:
    """Return the program before a diff, and after it."""
    lines = diff.splitlines()
    kept = ([line for line in lines if line[:1] in ("", " ", side)] for side in "-+")
    return ["".join(f"{line[1:]}\n" for line in side) for side in kept]


def blocks_of(text: str) -> list[Block]:
    """Return the blocks of Python; a ``text`` block right after one is its output.

    A ``diff`` is two of them.
    """
    found: list[Block] = []
    fences = fences_of(text)
    for fence, after in zip(fences, [*fences[1:], None]):
        if fence.language == "python":
            shown = after is not None and after.language == "text" and not after.before
            found.append(Block(fence.text, fence.line, after.text if shown else None))
        elif fence.language == "diff":
            found += [Block(side, fence.line, None) for side in sides_of(fence.text)]
    return found


def with_python() -> list[Path]:
    return [path for path in PAGES if blocks_of(path.read_text("utf-8"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def make_net():
    mx.random.seed(0)
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3, in_channels=3), nn.BatchNorm(in_channels=4), nn.Activation("relu"))
    net.add(nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(10, in_units=4))
    net.initialize(mx.init.Xavier())
    return net


def names_of_a_reader() -> dict[str, Any]:
    """Return the names that a page takes for granted: a network, its data, a scaled Trainer."""
    random = np.random.default_rng(0)
    batches = [
        (
            mx.nd.array(random.standard_normal((8, 3, 8, 8))),
            mx.nd.array(random.integers(0, 10, 8), dtype="int32"),
        )
        for _ in range(4)
    ]
    net = make_net()
    mpgluon.cast_block(net)
    options = {"learning_rate": 0.01, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "sgd", dict(options))
    amp.init_trainer(trainer)
    return {
        **{"__name__": "a_page", "mx": mx, "np": np, "autograd": autograd, "gluon": gluon},
        **{"nn": nn, "mpgluon": mpgluon, "amp": amp, "make_net": make_net, "net": net},
        **{"options": options, "trainer": trainer, "batches": batches, "loader": batches},
        **{"images": batches[0][0], "labels": batches[0][1], "batch_size": 8},
        "loss_fn": gluon.loss.SoftmaxCrossEntropyLoss(),
        "evaluate": lambda net: [net(images) for images, _ in batches],
    }


def files_to_serve(net) -> None:
    """Write the photograph and the ONNX file that a page opens."""
    Image.new("RGB", (12, 10), "teal").save("photograph.jpg")
    names = tuple(f"class {number}" for number in range(10))
    export_onnx(net, "net.onnx", ServingMetadata("a network", image_size=8, classes=names))


def run_of_photographs() -> None:
    """Write the folder of a run that a page opens."""
    small = {"dataset": "shapes", "classes": 10, "images_per_class": 2, "train_per_class": 1}
    sizes = {"model": "cifar_resnet20_v1", "image_size": 32, "batch_size": 10, "epochs": 1}
    options = {"data_dir": "data", "output_dir": "runs/finetune", "workers": 0, "warmup_epochs": 0}
    train(TrainingConfig(dtype="float16", **small, **sizes, **options))
    Image.new("RGB", (40, 32), "teal").save("photograph.jpg")


def run(block: Block, page: str, names: dict[str, Any]) -> str:
    """Execute a block; return its output."""
    printed = io.StringIO()
    code = compile("\n" * (block.line - 1) + block.code, page, "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    return printed.getvalue()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * (page.name == "detection.md"))
        for page in with_python()
    ],
    ids=name_of,
)
def test_each_block_runs_and_prints_what_the_page_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("mpgluon"), "disabled", True)
    monkeypatch.setitem(sys.modules, "mymodule", SimpleNamespace(make_net=make_net))
    if not mx.context.num_gpus():
        monkeypatch.setattr(mx, "gpu", mx.cpu)
    names = names_of_a_reader()
    if "onnxruntime" in page.read_text("utf-8"):
        files_to_serve(make_net())
    if "load_classifier" in page.read_text("utf-8"):
        run_of_photographs()
    for block in blocks_of(page.read_text("utf-8")):
        printed = run(block, name_of(page), names)
        if block.output is not None:
            assert printed.rstrip() == block.output.rstrip(), f"{name_of(page)}:{block.line}"


def commands() -> list[tuple[str, str, list[str]]]:
    """Return page, script (or ``mpgluon X``) and arguments of each command of the pages."""
    found = []
    for page in [*PAGES, ROOT / "docs" / "migration.md", ROOT / "docs" / "how-to" / "d2l.md"]:
        for fence in fences_of(page.read_text("utf-8")):
            for line in fence.text.replace("\\\n", " ").splitlines():
                command = re.search(r"python scripts/(\w+)\.py(.*)|^(mpgluon \w+)(.*)", line)
                if command and fence.language in SHELL:
                    name, rest = command[1] or command[3], command[2] or command[4] or ""
                    rest = rest.replace('"$@"', "")  # a script's own arguments
                    found.append((name_of(page), name, shlex.split(rest, comments=True)))
    return found


@pytest.mark.parametrize(("page", "script", "arguments"), commands())
def test_each_command_of_the_pages_is_one_that_its_script_takes(page, script, arguments):
    assert len(commands()) > 20
    assert parser_of(script).parse_args(arguments), page


def test_pages_with_commands_were_found():
    assert len(commands()) > 20
    assert "docs/start.md" in {page for page, _, _ in commands()}
    used = {name for _, name, _ in commands() if name.startswith("mpgluon ")}
    assert used == {f"mpgluon {name}" for name in COMMANDS}


def test_only_an_output_right_after_its_block_is_compared_and_a_diff_is_two_blocks():
    page = "\n".join(
        [
            *("```python", "print(1)", "```", "", "```text", "1", "```", "words"),
            *("```python", "print(2)", "```", "", MACHINE, "```text", "2 on mine", "```"),
            *("```python", "pass", "```", "", "```", "ls", "```"),
            *("```diff", " x = 1", "-y = x", "+y = 2", "", " x + y", "```"),
        ]
    )
    assert blocks_of(page) == [
        Block("print(1)\n", 2, "1\n"),
        Block("print(2)\n", 10, None),
        Block("pass\n", 18, None),
        Block("x = 1\ny = x\n\nx + y\n", 25, None),
        Block("x = 1\ny = 2\n\nx + y\n", 25, None),
    ]


@pytest.mark.parametrize("path", with_python(), ids=name_of)
def test_a_block_can_be_pasted_into_an_interactive_python(path):
    for block in blocks_of(path.read_text("utf-8")):
        if re.search(r"^class ", block.code, re.MULTILINE):
            continue  # its methods are apart: for a notebook or a file
        lines: list[str] = []
        for line in [*block.code.splitlines(), ""]:
            lines.append(line)
            if codeop.compile_command("\n".join(lines)) is not None:
                lines = []
        assert not any(lines), f"line {block.line}: a statement does not end"
