"""Fixtures of the live figures: their scripts, kernels in Node, and a page in Chromium."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from browser import EXECUTABLE, Browser

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "_extensions"))

NODE = shutil.which("node")
PAGE = """<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>figures</title>
<link rel="stylesheet" href="live.css"><main>{figures}</main>{scripts}</html>"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Return a folder with the scripts and a page with all figures."""
    import live_figures

    folder = tmp_path_factory.mktemp("live")
    live_figures.compile_kernels(folder / "kernels.wasm")
    script = live_figures.kernels_script((folder / "kernels.wasm").read_bytes())
    (folder / "kernels.js").write_text(script)
    for source in live_figures.SOURCES.glob("*.[jc]s*"):
        (folder / source.name).write_text(source.read_text())
    figures = "".join(f'<div class="live" data-figure="{n}"></div>' for n in live_figures.FIGURES)
    names = live_figures.scripts_of(live_figures.FIGURES)
    scripts = "".join(f'<script src="{name}"></script>' for name in names)
    (folder / "page.html").write_text(PAGE.format(figures=figures, scripts=scripts))
    return folder


@pytest.fixture
def computed(folder, tmp_path):
    """Return a function that runs lines of JavaScript on an array of FP32 numbers ``given``."""
    if NODE is None:
        pytest.skip("needs node, which runs the kernels")

    def run(given, lines):
        (tmp_path / "given").write_bytes(np.ascontiguousarray(given, np.float32).tobytes())
        scripts = [(folder / name).read_text() for name in ("kernels.js", "live.js")]
        program = f"""{"".join(scripts)}
const fs = require("fs");
const bytes = fs.readFileSync({str(tmp_path / "given")!r});
const given = new Float32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4);
const results = [];
{lines}
fs.writeFileSync({str(tmp_path / "results")!r}, Buffer.from(Float32Array.from(results).buffer));
"""
        (tmp_path / "program.js").write_text(program)
        done = subprocess.run(
            [NODE, tmp_path / "program.js"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return np.frombuffer((tmp_path / "results").read_bytes(), np.float32)

    return run


@pytest.fixture
def browser(folder, tmp_path):
    import live_figures

    if EXECUTABLE is None:
        pytest.skip("needs chromium or google-chrome, which opens the page")
    with Browser(tmp_path / "profile") as browser:
        browser.open((folder / "page.html").as_uri())
        ready = "document.querySelectorAll('.live.ready').length"
        browser.wait_for(f"{ready} === {len(live_figures.FIGURES)}")
        yield browser
        logged = [e for e in browser.events if e.get("method") in ("Log.entryAdded",)]
        assert logged == []
