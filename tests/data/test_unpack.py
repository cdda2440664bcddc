"""Unpacking archives that are damaged, hostile, too large or killed on the way."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

from mpgluon.errors import DataError

import pytest

from recipes.data import unpack
from recipes.data.unpack import unpack_tar_folder, unpack_zip_member


def file_member(name, content=b"content"):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    return member, content


def other_member(name, kind, target=""):
    member = tarfile.TarInfo(name)
    member.type = kind
    member.linkname = target
    return member, None


def write_tar(path, members):
    with tarfile.open(path, "w:gz") as tar:
        for member, content in members:
            tar.addfile(member, None if content is None else io.BytesIO(content))
    return path


GOOD = [
    other_member("tree", tarfile.DIRTYPE),
    file_member("tree/a/1.jpg", b"one"),
    file_member("./tree/b/2.jpg", b"two"),
    file_member("._tree", b"a desktop's metadata"),
]


def everything_below(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


def test_a_folder_is_unpacked_and_what_lies_beside_it_is_dropped(tmp_path):
    archive = write_tar(tmp_path / "tree.tar.gz", GOOD)
    target = unpack_tar_folder(archive, tmp_path / "out" / "tree", folder="tree")
    assert everything_below(tmp_path / "out") == [
        "tree",
        "tree/a",
        "tree/a/1.jpg",
        "tree/b",
        "tree/b/2.jpg",
    ]
    assert (target / "b/2.jpg").read_bytes() == b"two"


@pytest.mark.parametrize(
    "hostile",
    [
        file_member("../outside.jpg"),
        file_member("tree/../../outside.jpg"),
        file_member("tree\\..\\..\\outside.jpg"),
        file_member("C:outside.jpg"),
        other_member("tree/../../outside", tarfile.DIRTYPE),
        other_member("tree/link", tarfile.SYMTYPE, "/etc/passwd"),
        other_member("tree/link", tarfile.SYMTYPE, "a/1.jpg"),
        other_member("tree/link", tarfile.LNKTYPE, "../../outside"),
        other_member("tree/link", tarfile.LNKTYPE, "tree/a/1.jpg"),
        other_member("tree/pipe", tarfile.FIFOTYPE),
        other_member("tree/device", tarfile.CHRTYPE),
        other_member("tree/device", tarfile.BLKTYPE),
    ],
    ids=lambda member: f"{member[0].name}-{member[0].type.decode()}",
)
def test_a_hostile_member_is_refused_by_name_and_nothing_is_left(tmp_path, hostile):
    archive = write_tar(tmp_path / "tree.tar.gz", [*GOOD, hostile])
    (tmp_path / "out").mkdir()
    before = everything_below(tmp_path)
    with pytest.raises(DataError, match="refused: its member") as caught:
        unpack_tar_folder(archive, tmp_path / "out" / "tree", folder="tree")
    assert repr(hostile[0].name) in str(caught.value)
    assert everything_below(tmp_path) == before


def test_an_absolute_path_is_refused(tmp_path):
    outside = tmp_path / "outside.jpg"
    archive = write_tar(tmp_path / "tree.tar.gz", [*GOOD, file_member(str(outside))])
    with pytest.raises(DataError, match="outside the target"):
        unpack_tar_folder(archive, tmp_path / "tree", folder="tree")
    assert not outside.exists()


def test_a_link_followed_by_a_file_through_it_writes_nothing_outside(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    link = other_member("tree/way", tarfile.SYMTYPE, str(outside))
    archive = write_tar(tmp_path / "tree.tar.gz", [link, file_member("tree/way/1.jpg")])
    with pytest.raises(DataError, match="'tree/way' is a link"):
        unpack_tar_folder(archive, tmp_path / "tree", folder="tree")
    assert os.listdir(outside) == []


def test_an_archive_that_unfolds_beyond_the_limit_is_refused(tmp_path):
    archive = write_tar(tmp_path / "tree.tar.gz", [file_member("tree/zeros", bytes(10_000_000))])
    assert archive.stat().st_size < 20_000
    with pytest.raises(DataError, match="more than 1,000,000 bytes when unpacked"):
        unpack_tar_folder(archive, tmp_path / "tree", folder="tree", max_bytes=1_000_000)
    assert os.listdir(tmp_path) == ["tree.tar.gz"]


def test_zeros_after_the_archive_count_towards_the_limit(tmp_path):
    archive = write_tar(tmp_path / "tree.tar.gz", GOOD)
    with gzip.open(archive, "ab") as file:
        file.write(bytes(10_000_000))
    with pytest.raises(DataError, match="more than 1,000,000 bytes"):
        unpack_tar_folder(archive, tmp_path / "tree", folder="tree", max_bytes=1_000_000)


def test_more_members_than_the_limit_are_refused(tmp_path):
    archive = write_tar(tmp_path / "tree.tar.gz", GOOD)
    with pytest.raises(DataError, match="more than 3 files and folders"):
        unpack_tar_folder(archive, tmp_path / "tree", folder="tree", max_members=3)
    assert os.listdir(tmp_path) == ["tree.tar.gz"]


def folders_one_below_the_other(depth):
    names = ["/".join(["tree"] + ["d"] * below) for below in range(depth)]
    return [other_member(name, tarfile.DIRTYPE) for name in names]


@pytest.mark.parametrize(
    "members",
    [[file_member("tree/" + "d/" * 2000 + "1.jpg")], folders_one_below_the_other(2000)],
    ids=["in one name", "one by one"],
)
def test_an_archive_2000_folders_deep_is_refused_and_nothing_is_left(tmp_path, members):
    archive = write_tar(tmp_path / "tree.tar.gz", [*GOOD, *members])
    with pytest.raises(DataError, match=r"its member 'tree/d/d/.* folders deep.* at most 100") as e:
        unpack_tar_folder(archive, tmp_path / "tree", folder="tree")
    assert len(str(e.value)) < 400
    assert os.listdir(tmp_path) == ["tree.tar.gz"]


def test_an_archive_100_folders_deep_is_unpacked(tmp_path):
    archive = write_tar(tmp_path / "tree.tar.gz", folders_one_below_the_other(100))
    unpack_tar_folder(archive, tmp_path / "tree", folder="tree")
    assert len(everything_below(tmp_path / "tree")) == 99


@pytest.mark.parametrize("kept", [0.2, 0.6, 0.999])
def test_a_truncated_archive_is_refused_and_nothing_is_left(tmp_path, kept):
    archive = write_tar(
        tmp_path / "tree.tar.gz", [*GOOD, file_member("tree/c", os.urandom(50_000))]
    )
    content = archive.read_bytes()
    archive.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(DataError, match="is damaged"):
        unpack_tar_folder(archive, tmp_path / "tree", folder="tree")
    assert os.listdir(tmp_path) == ["tree.tar.gz"]


def test_a_file_where_the_archive_needs_a_folder_is_damage(tmp_path):
    clash = [file_member("tree/a"), file_member("tree/a/1.jpg")]
    archive = write_tar(tmp_path / "tree.tar.gz", clash)
    with pytest.raises(DataError, match="is damaged"):
        unpack_tar_folder(archive, tmp_path / "tree", folder="tree")


def test_an_archive_without_the_folder_is_refused(tmp_path):
    archive = write_tar(tmp_path / "tree.tar.gz", [file_member("another/1.jpg")])
    with pytest.raises(DataError, match="has no folder tree"):
        unpack_tar_folder(archive, tmp_path / "tree", folder="tree")


def test_a_target_that_holds_something_is_not_overwritten(tmp_path):
    archive = write_tar(tmp_path / "tree.tar.gz", GOOD)
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/mine").write_text("mine")
    with pytest.raises(DataError, match="cannot write"):
        unpack_tar_folder(archive, tmp_path / "tree", folder="tree")
    assert everything_below(tmp_path / "tree") == ["mine"]


def test_a_disk_that_fills_up_while_unpacking_leaves_nothing(tmp_path, monkeypatch):
    archive = write_tar(tmp_path / "tree.tar.gz", GOOD)
    left = iter(range(1))

    def full(tar, member, staging, archive):
        if member.isreg() and next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(tar, member, staging, archive)

    real = unpack._extract_member
    monkeypatch.setattr(unpack, "_extract_member", full)
    with pytest.raises(DataError, match="the disk is full while writing"):
        unpack_tar_folder(archive, tmp_path / "tree", folder="tree")
    assert os.listdir(tmp_path) == ["tree.tar.gz"]


KILLED = """
import sys, time
from recipes.data import unpack
real = unpack._extract_member
def slow(*arguments):
    real(*arguments)
    print("one more", flush=True)
    time.sleep(0.2)
unpack._extract_member = slow
unpack.unpack_tar_folder(sys.argv[1], sys.argv[2], folder="tree")
"""


@pytest.mark.multiprocess
def test_a_killed_unpacking_is_not_complete_and_the_next_one_clears_it(tmp_path):
    archive = write_tar(
        tmp_path / "tree.tar.gz", [file_member(f"tree/a/{n}.jpg") for n in range(50)]
    )
    command = [sys.executable, "-c", KILLED, str(archive), str(tmp_path / "tree")]
    root = str(Path(unpack.__file__).parents[2])
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": root}
    )
    for _ in range(3):
        assert process.stdout.readline() == b"one more\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not (tmp_path / "tree").exists()
    assert (tmp_path / ".tree.unpacking").is_dir()
    (tmp_path / ".tree.unpacking" / "tree" / "stale").mkdir(parents=True)

    unpack_tar_folder(archive, tmp_path / "tree", folder="tree")
    assert everything_below(tmp_path / "tree") == sorted(["a", *(f"a/{n}.jpg" for n in range(50))])
    assert sorted(os.listdir(tmp_path)) == ["tree", "tree.tar.gz"]


CONTENT = b"the inner archive" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def zip_file(tmp_path):
    path = tmp_path / "outer.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("__MACOSX/._inner", b"junk")
        zipped.writestr("../../outside", b"hostile, and never touched")
        zipped.writestr("folder/inner", CONTENT)
    return path


def extract(archive, tmp_path, **options):
    options = {"size": len(CONTENT), "sha256": SHA256, **options}
    return unpack_zip_member(archive, "folder/inner", tmp_path / "out" / "inner", **options)


def test_one_member_of_a_zip_file_becomes_a_file(zip_file, tmp_path):
    assert extract(zip_file, tmp_path).read_bytes() == CONTENT
    assert everything_below(tmp_path) == ["out", "out/inner", "outer.zip"]


def test_a_member_that_is_there_is_verified_and_the_archive_not_opened(tmp_path):
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / "inner"
    path.write_bytes(CONTENT)
    before = path.stat()
    assert extract(tmp_path / "no.zip", tmp_path) == path
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    path.write_bytes(CONTENT[::-1])  # another file of that size is unpacked again
    with pytest.raises(DataError, match="No such file"):
        extract(tmp_path / "no.zip", tmp_path)


def test_a_member_with_a_wrong_hash_is_refused(zip_file, tmp_path):
    with pytest.raises(DataError, match=f"its sha256 is {SHA256} instead of"):
        extract(zip_file, tmp_path, sha256="0" * 64)
    assert os.listdir(tmp_path / "out") == []


def test_a_member_of_another_size_is_refused_before_it_is_written(zip_file, tmp_path):
    with pytest.raises(DataError, match="has 17,000 bytes instead of 5"):
        extract(zip_file, tmp_path, size=5)
    assert os.listdir(tmp_path / "out") == []


def test_a_zip_file_without_the_member_is_refused(zip_file, tmp_path):
    with pytest.raises(DataError, match="has no member folder/missing"):
        unpack_zip_member(zip_file, "folder/missing", tmp_path / "x", size=1, sha256=SHA256)


@pytest.mark.parametrize("kept", [0.2, 0.9])
def test_a_truncated_zip_file_is_refused(zip_file, tmp_path, kept):
    content = zip_file.read_bytes()
    zip_file.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(DataError, match=r"outer\.zip is damaged"):
        extract(zip_file, tmp_path)
    assert os.listdir(tmp_path / "out") == []


def test_a_zip_file_with_a_flipped_byte_is_refused(zip_file, tmp_path):
    content = bytearray(zip_file.read_bytes())
    content[content.index(b"folder/inner") + 40] ^= 0xFF
    zip_file.write_bytes(content)
    with pytest.raises(DataError, match=r"outer\.zip"):
        extract(zip_file, tmp_path)
    assert os.listdir(tmp_path / "out") == []


def test_a_missing_zip_file_is_reported(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        extract(tmp_path / "no.zip", tmp_path)


def test_the_limits_do_not_slow_a_large_archive_down(tmp_path):
    archive = write_tar(tmp_path / "t.tar.gz", [file_member("tree/a", bytes(30_000_000))])
    start = time.perf_counter()
    unpack_tar_folder(archive, tmp_path / "tree", folder="tree")
    assert time.perf_counter() - start < 10
