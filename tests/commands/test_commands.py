"""All commands: help, names of networks, missing extras, progress, width of tables."""

from __future__ import annotations

import io
import sys

from mpgluon_tools import commands
from mpgluon_tools.progress import progress_line
from mpgluon_tools.tables import Table

import pytest

LAST = {"diagnose": [], "export": [], "serve": ["--port=0"], "bench": ["--no-memory"]}


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "arguments", [["--help"], *([name, "--help"] for name in commands.COMMANDS)]
)
def test_help_needs_neither_mxnet_nor_an_extra(started, folder, arguments):
    for package in ("mxnet", "numpy", "PIL", "flask", "onnx", "jinja2", "matplotlib"):
        (folder / f"{package}.py").write_text("raise SystemExit('imported for --help')\n")
    done = started(*arguments, module="mpgluon_command")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: mpgluon ")


@pytest.mark.multiprocess
def test_python_m_mpgluon_is_the_same_command(started):
    done = started("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(f"\n  {name} " in done.stdout for name in commands.COMMANDS)


@pytest.mark.parametrize("arguments", [["dance"], ["--colour"], ["diagnose"], ["bench", "a", "b"]])
def test_a_command_line_that_cannot_be_parsed_shows_the_usage(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        commands.main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("usage: mpgluon ")


def test_without_a_command_the_commands_are_listed(capsys):
    assert commands.main([]) == 2
    assert "\n  doctor " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine:", "like package.module:function, without .py and without arguments; received"),
        ("mine.py:small", "for this file, mine:small"),
        ("mine", "received 'mine'; choose a function of this module: mine:small, mine:two, "),
        ("mine.py", "received 'mine.py'; choose a function of this module: mine:small, mine:two, "),
        ("./mine.py", "choose a function of this module: mine:small, mine:two, "),
        ("absent.py", "for this file, absent:function"),
        ("nowhere:small", "there is no module 'nowhere' in "),
        ("mine.below:small", "there is no module 'mine.below' in "),
        ("unimportable:net", "importing unimportable failed: No module named 'nothing_of_that"),
        ("mine:better", "mine.py has no function 'better'; write one that returns "),
        ("mine:better", "; it has mine:small, mine:two, mine:with_batch, mine:dense, mine:good, …"),
        ("mine:value", "has no function 'value'"),
        ("mine:with_argument", "mine:with_argument must take no arguments: missing a required"),
        ("mine:broken", "was called and failed: ZeroDivisionError: division by zero ("),
        ("mine:number", "mine:number returned int, not a HybridBlock"),
        ("mine:four", "mine:four returned int, int, int, int, not a HybridBlock"),
        ("mine:raw", "mine:raw must initialize its network: net.initialize()"),
    ],
)
@pytest.mark.parametrize("command", LAST)
def test_a_wrong_name_says_whether_module_function_or_call_failed(refused, command, name, message):
    assert message in refused(command, name, *LAST[command])


@pytest.mark.parametrize("command", ["diagnose", "bench"])
def test_a_network_that_takes_other_input_is_refused_with_the_option(refused, command):
    assert "Give --input-shape, once for each input" in refused(command, "mine:two")
    said = refused(command, "mine:two", "--input-shape=2,3")
    assert "the network does not work on input of shape (2, 3)" in said


@pytest.mark.parametrize("command", ["diagnose", "bench"])
def test_sizes_without_effect_are_refused(refused, command):
    said = refused(command, "mine:with_batch", "--batch-size=3", "--image-size=8")
    assert "mine:with_batch returns its own batch; leave out --image-size, --batch-size" in said
    said = refused(command, "mine:dense", "--input-shape=2,5", "--batch-size=3")
    assert "--input-shape has every size; leave out --batch-size" in said


def test_a_network_of_other_input_is_not_advised_to_use_an_option_that_the_page_lacks(refused):
    said = refused("serve", "mine:dense", "--image-size=8", "--port=0")
    assert "--image-size is their side" in said
    assert "--input-shape" not in said


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "--class-names names.txt cannot be read: No such file or directory; it is a text"),
        (b"\xff\xfe", "--class-names names.txt is not text in UTF-8"),
        (b"\xef\xbb\xbf", "--class-names names.txt has no name in line 1"),
        (b"cat\n \ndog\n", "--class-names names.txt has no name in line 2"),
    ],
)
@pytest.mark.parametrize("command", ["export", "serve", "diagnose"])
def test_a_file_of_names_that_cannot_be_used_is_named(refused, folder, command, content, message):
    if content is not None:
        (folder / "names.txt").write_bytes(content)
    arguments = [command, "mine:small", "--image-size=8", "--class-names=names.txt"]
    assert message in refused(*arguments, *LAST[command])


@pytest.mark.slow
def test_a_report_that_cannot_be_written_says_where(refused):
    options = ("--image-size=8", "--batch-size=2", "--output=absent/report.html")
    said = refused("diagnose", "mine:small", *options)
    assert "cannot write absent/report.html: No such file or directory; choose a folder" in said
    said = refused("diagnose", "mine:small", *options, "--output=/dev/full")
    assert "the disk is full while writing /dev/full" in said


@pytest.mark.parametrize("text", ["0,3", "a", "3;4", ""])
def test_a_shape_is_made_of_positive_integers(capsys, text):
    with pytest.raises(SystemExit):
        commands.main(["bench", "mine:two", f"--input-shape={text}"])
    assert "must be positive integers, the batch first, as in 8,35" in capsys.readouterr().err


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        ("diagnose", "jinja2", "report"),
        pytest.param("export", "onnx", "onnx", marks=pytest.mark.slow),
        pytest.param("serve", "flask", "serve", marks=pytest.mark.slow),
    ],
)
def test_a_missing_extra_is_named(started, folder, command, package, extra):
    (folder / f"{package}.py").write_text(
        f"raise ModuleNotFoundError(\"No module named '{package}'\", name='{package}')\n"
    )
    done = started(command, "mine:small", "--image-size=8")
    message = f"error: {package} is not installed; install it with pip install 'mpgluon[{extra}]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_of_a_terminal_that_is_cleared(monkeypatch):
    monkeypatch.setattr(sys, "stderr", _Terminal())
    with progress_line(2) as show:
        show("first")
        show("second")
    erase = "\r\033[K"
    assert sys.stderr.getvalue() == f"{erase}[#.] first ...{erase}[##] second ...{erase}"


def test_where_there_is_no_terminal_there_is_no_progress(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress_line(2) as show:
        show("first")
    assert sys.stderr.getvalue() == ""


TABLE = Table(
    ("layer", "product", "largest", "advice"),
    [("net_stage2_conv0_fwd", "FullyConnected", "1.25e+04", "outputs 30 -> 32; inputs 7 -> 8")] * 2,
)


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_fitted_table_has_lines_that_fit_and_every_character(width):
    text = TABLE.fitted(width)
    assert max(map(len, text.splitlines())) <= width
    characters = sorted("".join([*TABLE.headings, *(c for row in TABLE.rows for c in row)]))
    assert sorted("".join(text.split())) == [c for c in characters if c != " "]
    if width >= len(str(TABLE).splitlines()[1]):
        assert text == str(TABLE)


def test_words_and_numbers_of_a_fitted_table_stay_whole_where_they_can():
    words = TABLE.fitted(60).split()
    assert words.count("FullyConnected") == words.count("1.25e+04") == 2


@pytest.mark.multiprocess
def test_ctrl_c_ends_a_command_without_a_traceback(started, folder):
    (folder / "slow.py").write_text("def net():\n    raise KeyboardInterrupt\n")
    done = started("bench", "slow:net")
    assert (done.returncode, done.stderr) == (130, "stopped\n")


@pytest.mark.slow
def test_a_file_with_the_name_of_a_network_in_mxnet_does_not_hide_it(printed, folder):
    options = ("--image-size=32", "--classes=3", "--batch-size=1", "--rounds=1", "--no-memory")
    (folder / "resnet18_v1.py").write_text("def net():\n    pass\n")
    assert "resnet18_v1: a training step" in printed("bench", "resnet18_v1", *options)
