"""Build the notebooks from their sources: read, execute, normalise, write. Or check them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Optional

import jupytext
import nbformat as untyped_nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
PARAMETERS = "parameters"  # the tag of the cell that says FAST = False
TIMEOUT_S = 1800  # for one cell

# Cells that a reader need not see at first are folded: the tag of a cell in a source, the tag by
# which the site folds or leaves it out, and the name of the fold. Jupyter hides the same parts.
FOLDED = {
    PARAMETERS: ("remove-cell", ""),
    "setup": ("hide-input", "the set-up"),
    "plot": ("hide-input", "the code of the picture"),
    "claim": ("hide-cell", "the check of this claim"),
    "solution": ("hide-cell", "a solution"),
    "unseen": ("remove-cell", ""),
}

Notebook = Any
nbformat: Any = untyped_nbformat


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Parse the command line, and build or check each notebook."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="such as 01 or 01_sixteen_bits (default: all)")
    parser.add_argument("--fast", action="store_true", help="the same code on less data")
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing: execute, and compare sources with the notebooks as they are",
    )
    parser.add_argument(
        "--compare", action="store_true", help="compare only: write and execute nothing"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="how many to check at a time (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.jobs > 1 and not options.check:
        parser.error("--jobs needs --check: written notebooks have measured times in them")
    sources = sorted((FOLDER / "source").glob("*.py"))
    chosen = [s for s in sources if not options.names or s.stem.startswith(tuple(options.names))]
    if not chosen:
        print(f"error: there is no notebook {' '.join(options.names)}", file=sys.stderr)
        return 2
    chosen.sort(key=lambda source: -source.stat().st_size)  # the long ones first: none is left last
    failures = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for line, problem in pool.map(partial(_process, options), chosen):
            print(line, flush=True)
            if problem:
                failures += 1
                print(problem, file=sys.stderr)
    return 1 if failures else 0


def _process(options: argparse.Namespace, source: Path) -> tuple[str, str]:
    """Build or check one notebook; return a line about it, and what went wrong."""
    began = time.perf_counter()
    notebook = read(source)
    problem = differences(source, notebook) if options.check or options.compare else ""
    if not options.compare:
        problem = problem or execute(notebook, fast=options.fast)
    if not (problem or options.check or options.compare):
        nbformat.write(normalised(notebook), product_of(source))
    seconds = time.perf_counter() - began
    return f"{'FAILED' if problem else 'ok':6} {source.stem} ({seconds:.0f} s)", problem


def differences(source: Path, notebook: Notebook) -> str:
    """Compare a source with the present notebook; return the differences."""
    product = product_of(source)
    if not product.exists():
        return f"{product.name} is missing: make notebooks"
    written = nbformat.read(product, as_version=4)
    if [(c.cell_type, c.source) for c in written.cells] != [
        (c.cell_type, for_students(c)) for c in notebook.cells
    ]:
        return f"{product.name} is not what {source.name} says: make notebooks"
    code = [cell for cell in written.cells if cell.cell_type == "code"]
    if not any(cell.outputs for cell in code) or any(_failed(cell) for cell in code):
        return f"{product.name} has no outputs or an error among them: make notebooks"
    return ""


def read(source: Path) -> Notebook:
    """Return a source as a notebook without outputs."""
    notebook = jupytext.read(source, fmt="py:percent")
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02d}"  # the same in every build
        _fold(cell)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def _fold(cell: Notebook) -> None:
    """Give a cell the metadata by which the site and Jupyter fold it."""
    tags = cell.metadata.get("tags", [])
    for tag in FOLDED.keys() & set(tags):
        folding, name = FOLDED[tag]
        cell.metadata["tags"] = [*tags, folding]
        cell.metadata["jupyter"] = {"source_hidden": True}
        if tag == "solution":
            cell.metadata["jupyter"]["outputs_hidden"] = True
        if name:
            cell.metadata["mystnb"] = {
                "code_prompt_show": f"Show {name}",
                "code_prompt_hide": f"Hide {name}",
            }


def for_students(cell: Notebook) -> str:
    """Return a cell's source in which an assert that fails is a note, and stops no student."""
    asserts = cell.cell_type == "code" and "assert " in cell.source
    return f"%%checked\n{cell.source}" if asserts else str(cell.source)


def product_of(source: Path) -> Path:
    """Return where the notebook of a source is."""
    return FOLDER / f"{source.stem}.ipynb"


def execute(notebook: Notebook, *, fast: bool) -> str:
    """Run all cells in the notebooks' folder; return the error of the first that fails."""
    parameters = [c for c in notebook.cells if PARAMETERS in c.metadata.get("tags", [])]
    if len(parameters) != 1 or "FAST = False" not in parameters[0].source:
        return f"one cell, with the tag {PARAMETERS!r}, must say FAST = False"
    original = parameters[0].source
    if fast:
        parameters[0].source = original.replace("FAST = False", "FAST = True")
    client = NotebookClient(
        notebook, timeout=TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": FOLDER}}
    )
    try:
        client.execute()
    except CellExecutionError as error:
        return str(error)
    finally:
        parameters[0].source = original
    return ""


def normalised(notebook: Notebook) -> Notebook:
    """Return a notebook without times, with the pieces of a printed text joined, for students."""
    for cell in notebook.cells:
        cell.source = for_students(cell)
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        outputs: list[Any] = []
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stderr":
                continue  # progress bars, and warnings that differ from machine to machine
            last = outputs[-1] if outputs else None
            if last is not None and output.output_type == last.output_type == "stream":
                last.text += output.text
            else:
                outputs.append(output)
        cell.outputs = outputs
    return notebook


def _failed(cell: Notebook) -> bool:
    expected = "raises-exception" in cell.metadata.get("tags", [])
    return not expected and any(output.output_type == "error" for output in cell.outputs)


if __name__ == "__main__":
    sys.exit(main())
