"""Files that are complete or absent, whoever was killed before, and behind links."""

import errno
import os
import signal
import subprocess
import sys

from mpgluon.base.files import atomic_write

import pytest

WRITER = """
import pathlib, sys, time
from mpgluon.base.files import atomic_write
with atomic_write(pathlib.Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    sys.stdin.read(1)
"""


def start_writer(path):
    """Start a process that has written a half of a file, and waits for a byte."""
    pipe = subprocess.PIPE
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdin=pipe, stdout=pipe, text=True
    )
    assert writer.stdout.readline() == "writing\n"
    return writer


def write(path, content):
    with atomic_write(path) as file:
        file.write(content)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_next_write_removes_the_partial_file_of_a_killed_process(tmp_path):
    path = tmp_path / "run[1].npz"
    write(path, b"first")
    writer = start_writer(path)
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert names_in(tmp_path) == [f".{path.name}.{writer.pid}.part", path.name]
    assert path.read_bytes() == b"first"
    write(path, b"second")
    assert names_in(tmp_path) == [path.name]
    assert path.read_bytes() == b"second"


def test_the_file_of_a_process_that_is_writing_stays_and_is_completed(tmp_path):
    path = tmp_path / "run.npz"
    writer = start_writer(path)
    write(path, b"second")
    assert names_in(tmp_path) == [f".run.npz.{writer.pid}.part", "run.npz"]
    writer.communicate("x")
    assert writer.returncode == 0
    assert names_in(tmp_path) == ["run.npz"]
    assert path.read_bytes() == b"half"


def test_the_file_of_a_writer_on_another_machine_stays(tmp_path):
    # There, the process has a number that no process has here.
    path = tmp_path / "run.npz"
    writer = start_writer(path)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.communicate()
    elsewhere = tmp_path / f".run.npz.{ended.pid}.part"
    (tmp_path / f".run.npz.{writer.pid}.part").rename(elsewhere)
    write(path, b"second")
    assert elsewhere.read_bytes() == b"half"
    writer.kill()
    writer.communicate()
    write(path, b"third")
    assert names_in(tmp_path) == ["run.npz"]


def test_a_file_system_without_locks_is_written_and_parts_of_others_stay(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def unsupported(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.communicate()
    part = tmp_path / f".run.npz.{ended.pid}.part"
    part.write_bytes(b"half")
    monkeypatch.setattr(fcntl, "flock", unsupported)
    write(tmp_path / "run.npz", b"whole")
    assert (tmp_path / "run.npz").read_bytes() == b"whole"
    assert names_in(tmp_path) == [part.name, "run.npz"]


@pytest.mark.parametrize("existing", [True, False], ids=["a file", "a missing file"])
def test_a_link_stays_and_its_target_is_written(tmp_path, existing):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    target, link, second = folder / "target.npz", tmp_path / "link.npz", tmp_path / "second.npz"
    if existing:
        target.write_bytes(b"first")
    link.symlink_to(os.path.join("elsewhere", "target.npz"))
    second.symlink_to("link.npz")
    write(second, b"second")
    assert link.is_symlink()
    assert second.is_symlink()
    assert target.read_bytes() == link.read_bytes() == b"second"
    assert names_in(folder) == ["target.npz"]


def test_a_named_pipe_is_written_to_and_stays_as_a_device_would(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with atomic_write(pipe) as file:
        file.write(b"values")
    assert os.read(reader, 100) == b"values"
    os.close(reader)
    assert list(tmp_path.iterdir()) == [pipe]
    assert pipe.is_fifo()
