"""The tests, or the targets of the Makefile, that a change asks for.

    python .ci/touched.py tests      # tests of what differs from the base, uncommitted changes too
    python .ci/touched.py targets    # the targets that .ci/run adds

The base is CI_BASE of the environment, or where the branch left origin/main; on main itself, the
last commit of more than six hours before its end. Where git cannot tell, and for a file that no row
knows, everything is asked for: of each slow test a few variants, or it would take 90 minutes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EVERYTHING = "everything"
_SECONDS = 6 * 60 * 60

INNER = "slow docs"  # the targets that see a change of the library's inside
LIBRARY = f"{INNER} test-clean"  # of a public name, the wheel or an extra
TOOL = f"{LIBRARY} notebooks-check"
RECORDED = "study/tests/test_page.py study/tests/test_quotes.py"  # numbers of pages and lessons

# The beginning of a path, its tests, and the targets that see it too. The first
# row that fits counts. "slow" stands for the slow tests of the same folders, "peers" for the tests
# that leave MXNet for PyTorch.
ROWS = (
    ("mpgluon/kernels/", "tests/kernels tests/test_kernels.py tests/graph", LIBRARY),
    ("mpgluon/formats/", "tests/formats", INNER),
    ("mpgluon/graph/", "tests/graph tests/cast", INNER),
    ("mpgluon/cast/", "tests/cast", INNER),
    ("mpgluon/updates/", "tests/updates", INNER),
    ("mpgluon/checkpoint/", "tests/test_checkpoint.py tests/test_checkpoint_average.py "
     "tests/test_edited_checkpoints.py", INNER),
    ("mpgluon/distributed/", "tests/distributed", INNER),
    ("mpgluon/base/", "tests/test_files.py tests/test_devices.py tests/test_copying_threads.py "
     "tests/test_cuda_libraries.py", INNER),
    ("mpgluon/", "tests/amp tests/test_contrib_amp.py tests/test_estimator.py "
     "tests/test_fp16_utils.py tests/test_import.py tests/test_preparation.py", LIBRARY),
    ("mpgluon_tools/commands/", "tests/commands", TOOL),
    ("mpgluon_tools/diagnostics/", "tests/diagnostics", TOOL),
    ("mpgluon_tools/recorder/", "tests/diagnostics", TOOL),
    ("mpgluon_tools/report/", "tests/diagnostics", TOOL),
    ("mpgluon_tools/deployment/torch_", "tests/deployment", f"{TOOL} peers"),
    ("mpgluon_tools/deployment/", "tests/deployment", TOOL),
    ("mpgluon_tools/onnx/", "tests/deployment", TOOL),
    ("mpgluon_tools/leaving/", "tests/deployment", f"{TOOL} peers"),
    ("mpgluon_tools/serving/", "tests/deployment tests/commands", LIBRARY),
    ("mpgluon_tools/", "tests/test_plots.py tests/test_tables.py tests/test_parameter_files.py "
     "tests/test_our_networks.py", TOOL),
    ("mpgluon_command.py", "tests/commands", "slow test-clean"),
    ("recipes/", "tests/training tests/data tests/weights tests/test_options.py",
     "slow docs test-clean"),
    ("scripts/build_wheel.py", "tests/scripts tests/test_release.py", LIBRARY),
    ("scripts/", "tests/scripts", "slow docs"),
    ("study/", "study/tests", "slow"),
    ("notebooks/", f"tests/teaching {RECORDED}", "docs-look notebooks-check"),
    ("docs/", f"tests/site {RECORDED}", "docs-look"),
    ("tests/site/", "tests/site", "docs-look"),
    ("tests/clean/", "", "test-clean"),
    ("tests/deployment/test_torch_", "tests/deployment", "slow peers"),
    ("tests/deployment/test_parity", "tests/deployment", "slow peers"),
    ("pyproject.toml", "tests/test_release.py", LIBRARY),
    ("data/", "tests/data", ""),
    (".ci/", "tests/test_touched.py", ""),
    ("environment.yml", "tests/test_release.py", ""),
    ("CITATION.cff", "tests/test_release.py", ""),
    ("MANIFEST.in", "tests/test_release.py", "slow test-clean"),
    (".github/", "", ""),
    (".gitignore", "", ""),
    ("Makefile", "tests/test_release.py", ""),
)  # fmt: skip


def row_of(path: str) -> tuple[list[str], list[str]]:
    """Return the tests and the targets of a path; ``[EVERYTHING]`` for one that no row knows."""
    for beginning, tests, targets in ROWS:
        if path.startswith(beginning):
            return tests.split(), targets.split()
    if path.endswith(".md") or ("/" not in path and path.isupper()):  # a page, LICENSE
        return ["tests/test_release.py", "tests/test_nine_questions.py"], ["docs-look"]
    parts = path.split("/")
    if parts[0] == "tests" and len(parts) > 2:
        return ["/".join(parts[:2])], ["slow"]
    if parts[0] == "tests" and parts[-1].startswith("test_"):
        return [path], ["slow"]
    if parts[0] == "tests" and path.endswith(".py"):  # a helper
        rows = [row_of(user) for user in _users_of(path)]  # none, if it was removed
        return [*chain(*(tests for tests, _ in rows))], [*chain(*(targets for _, targets in rows))]
    return [EVERYTHING], [EVERYTHING]


def _users_of(helper: str) -> Iterator[str]:
    """Yield the paths of the files with tests, and of helpers, that import a helper of tests/."""
    imports = re.compile(rf"^\s*(from|import) {Path(helper).stem}\b", re.MULTILINE)
    for folder in ("tests", "study/tests"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            if imports.search(file.read_text()):
                yield str(file.relative_to(ROOT))


def changed(*, is_committed: bool) -> list[str]:
    """Return the paths that a change touches, of a moved file both.

    Uncommitted changes belong to it, unless ``is_committed``. Where git cannot tell, the path is
    one that no row knows.
    """
    try:
        base = os.environ.get("CI_BASE") or _where_it_left_main()
        if not base and is_committed:
            (latest,) = _git("log", "-1", "--format=%ct")
            (base,) = _git("rev-list", "-1", f"--before={int(latest) - _SECONDS}", "HEAD")
        names = ("--name-only", "--no-renames")
        found = _git("diff", *names, base, "HEAD") if base else []
        if not is_committed:
            found += _git("diff", *names, "HEAD")
            found += _git("ls-files", "--others", "--exclude-standard")
    # git is missing, does not answer, or has no such commit
    except (OSError, subprocess.CalledProcessError, ValueError):
        return [EVERYTHING]
    return found


def _where_it_left_main() -> str:
    """Return the commit of origin/main that the branch begins at; nothing on main itself."""
    (head,) = _git("rev-parse", "HEAD")
    if not _git("branch", "--remotes", "--list", "origin/main"):
        return ""
    (base,) = _git("merge-base", "HEAD", "origin/main")
    return "" if base == head else base


def tests_of(paths: Iterable[str]) -> list[str]:
    """Return the tests of the paths, in order and once, of those that exist."""
    found = {test: None for path in paths for test in row_of(path)[0]}
    if EVERYTHING in found:
        return ["tests", "study/tests"]
    kept = [test for test in found if (ROOT / test).exists()]
    return [test for test in kept if not any(test.startswith(f"{other}/") for other in kept)]


def targets_of(paths: Iterable[str]) -> list[str]:
    """Return the targets of the paths; one with its variables, as arguments of make, is one."""
    paths = list(paths)
    found = {target for path in paths for target in row_of(path)[1]}
    if EVERYTHING in found:
        few = ["test-clean VARIANTS=few", "test-slow VARIANTS=few"]
        return ["notebooks-check", "docs-look", *few]
    if "docs-look" in found:  # which makes the site too
        found.discard("docs")
    targets = [target for target in ("notebooks-check", "docs", "docs-look") if target in found]
    if "test-clean" in found:
        targets.append("test-clean" if "pyproject.toml" in paths else "test-clean VARIANTS=few")
    if "slow" in found:
        slow = tests_of(path for path in paths if "slow" in row_of(path)[1])
        targets.append(f"test-slow VARIANTS=few FOLDERS={','.join(slow)}")
    if "peers" in found:
        targets.append("test WITH=peers PEER_TESTS=$(LEAVING)")  # a variable of make
    return targets


def _git(*arguments: str) -> list[str]:
    """Return the lines that git prints; a CalledProcessError where it has no answer."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if line]


def main() -> None:
    """Print the tests or targets that the command line asks for."""
    if sys.argv[1:] == ["tests"]:
        print("\n".join(tests_of(changed(is_committed=False))))
    elif sys.argv[1:] == ["targets"]:
        print("\n".join(targets_of(changed(is_committed=True))))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
