"""The tests and targets that a change asks for: every file has an answer."""

import subprocess
from pathlib import Path

import pytest
from helpers import module_from

ROOT = Path(__file__).resolve().parents[1]
touched = module_from(ROOT / ".ci" / "touched.py")

RECORDED = ["study/tests/test_page.py", "study/tests/test_quotes.py"]
# Whose change can make any test fail.
EVERYWHERE = {
    *("conftest.py", "requirements/dev.txt", "requirements/docs.txt"),
    "requirements/constraints.in",
}


def test_every_file_has_a_row_or_asks_for_everything():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("these files are not a git checkout")
    unknown = {one for one in listed.stdout.split() if touched.EVERYTHING in touched.row_of(one)[0]}
    assert unknown <= EVERYWHERE


def test_the_tests_of_every_row_exist():
    tests = {test for _, row, _ in touched.ROWS for test in row.split()}
    assert {test for test in tests if not (ROOT / test).exists()} == set()


@pytest.mark.parametrize(
    ("paths", "tests", "targets"),
    [
        (["mpgluon/cast/plan.py", "tests/cast/test_block.py"], ["tests/cast"],
         ["docs", "test-slow VARIANTS=few FOLDERS=tests/cast"]),
        (["mpgluon/kernels/flags.h"], ["tests/kernels", "tests/test_kernels.py", "tests/graph"],
         ["docs", "test-clean VARIANTS=few",
          "test-slow VARIANTS=few FOLDERS=tests/kernels,tests/test_kernels.py,tests/graph"]),
        (["tests/clean/every_name.py"], [], ["test-clean VARIANTS=few"]),
        (["tests/deployment/test_parity.py"], ["tests/deployment"],
         ["test-slow VARIANTS=few FOLDERS=tests/deployment",
          "test WITH=peers PEER_TESTS=$(LEAVING)"]),
        *(([f"mpgluon_tools/{path}.py"], ["tests/deployment"],
         ["notebooks-check", "docs", "test-clean VARIANTS=few",
          "test-slow VARIANTS=few FOLDERS=tests/deployment",
          "test WITH=peers PEER_TESTS=$(LEAVING)"])
          for path in ("leaving/parity", "deployment/torch_export")),
        (["pyproject.toml", "docs/gpu.md"],
         ["tests/test_release.py", "tests/site", *RECORDED],
         ["docs-look", "test-clean", "test-slow VARIANTS=few FOLDERS=tests/test_release.py"]),
        (["docs/gpu.md"], ["tests/site", *RECORDED], ["docs-look"]),
        (["study/results/a.json", "study/benchmarks/race.py"], ["study/tests"],
         ["test-slow VARIANTS=few FOLDERS=study/tests"]),
        (["README.md", "conftest.py"], ["tests", "study/tests"],
         ["notebooks-check", "docs-look", "test-clean VARIANTS=few", "test-slow VARIANTS=few"]),
        (["tests/numerics_runs.py"], ["tests/commands", "tests/diagnostics"],
         ["test-slow VARIANTS=few FOLDERS=tests/commands,tests/diagnostics"]),
        (["tests/was_removed.py"], [], []),
        (["tests/browser.py"], ["tests/commands", "tests/diagnostics", "tests/site"],
         ["docs-look",
          "test-slow VARIANTS=few FOLDERS=tests/commands,tests/diagnostics,tests/site"]),
        (["notebooks/source/00.py"], ["tests/teaching", *RECORDED],
         ["notebooks-check", "docs-look"]),
    ],
)  # fmt: skip
def test_a_change_asks_for_its_tests_and_targets(paths, tests, targets):
    assert touched.tests_of(paths) == tests
    assert touched.targets_of(paths) == targets


def test_on_main_a_change_made_and_undone_within_six_hours_asks_for_nothing(monkeypatch, tmp_path):
    monkeypatch.delenv("CI_BASE", raising=False)
    monkeypatch.setattr(touched, "ROOT", tmp_path)
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    touched._git("init", "--quiet", "--initial-branch=main")
    for hour, text in ((1, "old"), (4, "new"), (8, "old")):
        (tmp_path / "conftest.py").write_text(text)
        (tmp_path / f"{hour}.md").touch()
        touched._git("add", ".")
        monkeypatch.setenv("GIT_COMMITTER_DATE", f"2026-01-01T{hour:02}:00:00 +0000")
        assert touched.changed(is_committed=True) == [touched.EVERYTHING]  # nothing to compare with
        touched._git(*who, "commit", "--quiet", "--message", text)
    assert touched.changed(is_committed=True) == ["4.md", "8.md"]


@pytest.mark.parametrize("is_committed", [True, False])
def test_where_git_cannot_tell_everything_is_asked_for(monkeypatch, is_committed):
    monkeypatch.setenv("CI_BASE", "0" * 40)  # of a branch that is new
    assert touched.changed(is_committed=is_committed) == [touched.EVERYTHING]
    monkeypatch.setenv("PATH", "")
    assert touched.changed(is_committed=is_committed) == [touched.EVERYTHING]
