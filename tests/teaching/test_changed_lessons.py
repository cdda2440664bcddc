"""A student changes a number of a lesson: the lesson goes on, and says which checks differ."""

import pytest

from scripts import build_notebooks

# Lesson; a piece of its source; the student's.
CHANGES = [
    ("00", "mx.random.seed(0)", "mx.random.seed(1)"),
    ("00", "TRAIN, TEST = (8, 4)", "TRAIN, TEST = (16, 8)"),
    ("00", "TUNING_EPOCHS = (8, 2, 2)", "TUNING_EPOCHS = (8, 1, 1)"),
    ("01", "np.random.default_rng(0).uniform(1", "np.random.default_rng(1).uniform(1"),
    ("01", "for _ in range(1000):", "for _ in range(2000):"),
    ("01", "significand_bits=3, exponent_bits=3", "significand_bits=4, exponent_bits=3"),
    ("02", "drawn = np.random.default_rng(0)", "drawn = np.random.default_rng(1)"),
    ("02", 'SGD = {"learning_rate": 0.0005}', 'SGD = {"learning_rate": 0.05}'),
    ("02", "cast_block(net)\n    net", 'cast_block(net, "bfloat16")\n    net'),
    ("03", "mx.random.seed(0)", "mx.random.seed(1)"),
    ("03", "IMAGES_PER_CLASS, EPOCHS = (8,", "IMAGES_PER_CLASS, EPOCHS = (4,"),
    ("03", '0.01 / weight, "momentum": 0.9}', '0.1 / weight, "momentum": 0.9}'),
    ("04", "mx.random.seed(0)", "mx.random.seed(1)"),
    ("04", '{"learning_rate": 0.02,', '{"learning_rate": 0.5,'),
    ("04", "cast_block(fp16_net)  #", 'cast_block(fp16_net, "bfloat16")  #'),
    ("05", "(10, 2, 0) if FAST", "(10, 2, 1) if FAST"),
    ("05", "TRAIN_PER_CLASS = (12, 8)", "TRAIN_PER_CLASS = (8, 4)"),
    ("05", "SEED = (10, 2, 0)", "SEED = (20, 1, 0)"),
    ("06", "make_sounds(32, seed=0)", "make_sounds(32, seed=1)"),
    ("06", "make_sounds(32, seed=0)", "make_sounds(64, seed=0)"),
    ("06", "cast_block(fp16_net)", 'cast_block(fp16_net, "bfloat16")'),
    ("07", "make_step(resnet18, size=64)", "make_step(resnet18, size=32)"),
    ("07", "size, rounds = (64, 3)", "size, rounds = (32, 5)"),
    ("07", "batch_sizes, size = ((2, 32), 64)", "batch_sizes, size = ((4, 16), 64)"),
    ("08", "random = np.random.default_rng(0)", "random = np.random.default_rng(1)"),
    ("08", "WORKERS = 512 if", "WORKERS = 1024 if"),
    ("08", '\noptions = {"learning_rate": 0.1,', '\noptions = {"learning_rate": 0.001,'),
    ("09", "mx.random.seed(0)  # the same", "mx.random.seed(1)  # the same"),
    ("09", "batches = cut(40)", "batches = cut(20)"),
    ("09", "def new_run(loss_scale=2.0**10", "def new_run(loss_scale=2.0**16"),
    ("10", "mx.random.seed(0)", "mx.random.seed(1)"),
    ("10", "IMAGES_PER_CLASS, EPOCHS = (12, 6)", "IMAGES_PER_CLASS, EPOCHS = (6, 6)"),
    ("10", 'optimizer="adam"', 'optimizer="sgd"'),
    ("11", "mx.random.seed(0)", "mx.random.seed(1)"),
    ("11", "IMAGES, SIDE, STEPS = 160, 24,", "IMAGES, SIDE, STEPS = 80, 32,"),
    ("11", '"adam", {"learning_rate": 0.002}', '"adam", {"learning_rate": 0.02}'),
]


def run_as_a_student(source):
    """Execute a source as a student's notebook, in the fast mode; return its error and text."""
    notebook = build_notebooks.read(source)
    for cell in notebook.cells:
        cell.source = build_notebooks.for_students(cell)
    error = build_notebooks.execute(notebook, fast=True)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return error, "".join(output.get("text", "") for output in outputs)


LESSON = """\
# %% tags=["parameters"]
FAST = False

# %% tags=["setup"]
import teaching

terms = [1, 2]

# %% tags=["claim"]
for term in terms:
    assert term < 2  # not of the second
assert sum(terms) == 3
assert (
    max(terms)
    > 2
)
last = terms[2]
assert last == 3

# %%
print("the end")
"""


@pytest.fixture
def lesson(tmp_path):
    (tmp_path / "lesson.py").write_text(LESSON, "utf-8")
    return tmp_path / "lesson.py"


def test_a_check_that_fails_stops_the_build(lesson):
    assert "AssertionError" in build_notebooks.execute(build_notebooks.read(lesson), fast=False)


def test_a_check_that_fails_is_a_note_for_a_student_and_the_lesson_goes_on(lesson):
    error, printed = run_as_a_student(lesson)
    assert not error
    assert printed.splitlines() == [
        "your numbers differ: term < 2",
        "your numbers differ: ( max(terms) > 2 )",
        "your numbers differ: last = terms[2]",
        "the rest of this check is left out (IndexError: list index out of range)",
        "the end",
    ]


@pytest.mark.slow  # each executes a lesson, in 5 to 60 seconds
@pytest.mark.parametrize(("lesson", "ours", "students"), CHANGES)
def test_a_lesson_goes_on_with_a_students_numbers(lesson, ours, students, tmp_path):
    (source,) = (build_notebooks.FOLDER / "source").glob(f"{lesson}_*.py")
    text = source.read_text("utf-8")
    assert text.count(ours) == 1
    changed = tmp_path / source.name
    changed.write_text(text.replace(ours, students), "utf-8")
    error, _ = run_as_a_student(changed)
    assert not error, error
