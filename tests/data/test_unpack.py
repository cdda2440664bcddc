"""Unpacking archives that are damaged, hostile, too large or killed on the way."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zipfile
from pathlib import Path

from mpgluon.errors import DataError

import pytest

from recipes.data.unpack import unpack_folder


def file_member(name, content=b"content"):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    return member, content


def other_member(name, kind, target=""):
    member = tarfile.TarInfo(name)
    member.type = kind
    member.linkname = target
    return member, b""


def packed(members):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        for member, data in members:
            tar.addfile(member, io.BytesIO(data))
    return content.getvalue()


def write_zip(folder, inner):
    """Return a zip file with the tar.gz, and a member that nobody should write."""
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "outer.zip", "w") as zipped:
        zipped.writestr("../../outside", b"hostile")
        zipped.writestr("folder/inner.tar.gz", inner)
    return folder / "outer.zip"


def unpack(archive, member="folder/inner.tar.gz", **options):
    options = {"folder": "tree", "max_bytes": 10**8, "max_members": 10**4, **options}
    return unpack_folder(archive, member, archive.parent / "tree", **options)


GOOD = [
    other_member("tree", tarfile.DIRTYPE),
    file_member("tree/a/1.jpg", b"one"),
    file_member("./tree/b/2.jpg", b"two"),
    file_member("._tree", b"a desktop's metadata"),
]


def everything_below(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


def refuses(tmp_path, inner, message, **options):
    """Assert that an archive is refused with a message, and that nothing is left."""
    archive = write_zip(tmp_path / "out", inner)
    before = everything_below(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        unpack(archive, **options)
    assert len(str(caught.value)) < 500
    assert everything_below(tmp_path) == before


def test_a_folder_is_unpacked_and_other_files_are_dropped(tmp_path):
    target = unpack(write_zip(tmp_path / "out", packed(GOOD)))
    names = ["outer.zip", "tree", "tree/a", "tree/a/1.jpg", "tree/b", "tree/b/2.jpg"]
    assert everything_below(tmp_path / "out") == names
    assert (target / "b/2.jpg").read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(
    "hostile",
    [
        file_member("../outside.jpg"),
        file_member("tree/../../../outside.jpg"),
        file_member("tree/nul\0"),
        other_member("tree/../../outside", tarfile.DIRTYPE),
        other_member("tree/link", tarfile.SYMTYPE, "/etc/passwd"),
        other_member("tree/link", tarfile.SYMTYPE, "a/1.jpg"),
        other_member("tree/link", tarfile.SYMTYPE, "../../outer.zip"),
        other_member("tree/link", tarfile.LNKTYPE, "../outer.zip"),
        other_member("tree/pipe", tarfile.FIFOTYPE),
        other_member("tree/device", tarfile.CHRTYPE),
    ],
    ids=lambda member: f"{member[0].name!r}-{member[0].type.decode()}",
)
def test_a_hostile_member_is_refused_and_nothing_is_left(tmp_path, hostile):
    if "\0" in hostile[0].name:
        hostile[0].pax_headers = {"path": hostile[0].name}
    refuses(tmp_path, packed([*GOOD, hostile]), "damaged or not the archive expected: .*fetch it")


def test_a_link_followed_by_a_file_through_it_writes_nothing_outside(tmp_path):
    (tmp_path / "outside").mkdir()
    link = other_member("tree/way", tarfile.SYMTYPE, str(tmp_path / "outside"))
    refuses(tmp_path, packed([link, file_member("tree/way/1.jpg")]), "'tree/way'")


SPARSE = other_member("tree/sparse", tarfile.REGTYPE)
SPARSE[0].pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(10**15)}


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (packed([file_member("tree/zeros", bytes(2 * 10**6))]), "more than 1,000,000 bytes"),
        (packed(GOOD) + gzip.compress(bytes(2 * 10**6)), "more than 1,000,000 bytes"),
        (packed([SPARSE]), "'tree/sparse' is neither a plain file nor a folder"),
        (packed(GOOD), "more than 3 files and folders"),
    ],
    ids=["zeros in a file", "zeros behind the end", "a file of nothing", "many files"],
)
def test_an_archive_beyond_the_limits_is_refused(tmp_path, inner, message):
    assert len(inner) < 20_000
    refuses(tmp_path, inner, message, max_bytes=10**6, max_members=3)


def folders_one_below_the_other(depth):
    names = ["/".join(["tree"] + ["d"] * below) for below in range(depth)]
    return [other_member(name, tarfile.DIRTYPE) for name in names]


@pytest.mark.parametrize(
    "members",
    [[file_member("tree/" + "d/" * 2000 + "1.jpg")], folders_one_below_the_other(2000)],
    ids=["in one name", "one by one"],
)
def test_an_archive_2000_folders_deep_is_refused_and_nothing_is_left(tmp_path, members):
    refuses(tmp_path, packed([*GOOD, *members]), "'tree/d/d/.* is more than 100 folders deep")


NOISE = packed([*GOOD, file_member("tree/c", os.urandom(50_000))])
FLIPPED = NOISE[:25_000] + bytes([NOISE[25_000] ^ 1]) + NOISE[25_001:]


@pytest.mark.parametrize(
    "damaged",
    [b"", NOISE[:10_000], NOISE[:-5], FLIPPED],
    ids=["empty", "cut early", "cut at the end", "a flipped bit"],
)
def test_a_damaged_archive_is_refused_and_nothing_is_left(tmp_path, damaged):
    refuses(tmp_path, damaged, r"outer\.zip is damaged .*; delete it and fetch it again")


def test_a_target_that_holds_something_is_not_overwritten(tmp_path):
    (tmp_path / "out/tree").mkdir(parents=True)
    (tmp_path / "out/tree/mine").write_text("mine")
    refuses(tmp_path, packed(GOOD), "cannot write")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_killed_unpacking_is_not_complete_and_the_next_one_clears_it(tmp_path, end_abruptly):
    archive = write_zip(tmp_path, packed([file_member(f"tree/a/{n}.jpg") for n in range(5)]))
    end_abruptly(
        "import tarfile\n"
        "from recipes.data.unpack import unpack_folder\n"
        "tarfile.TarFile.makefile = ending(tarfile.TarFile.makefile, 3)\n"
        "unpack_folder(*sys.argv[1:], folder='tree', max_bytes=10**6, max_members=1000)",
        *(archive, "folder/inner.tar.gz", tmp_path / "tree"),
    )
    assert sorted(os.listdir(tmp_path)) == [".tree.unpacking", "outer.zip"]
    (tmp_path / ".tree.unpacking" / "tree" / "stale").mkdir()
    unpack(archive)
    assert everything_below(tmp_path / "tree") == ["a", *(f"a/{n}.jpg" for n in range(5))]
    assert sorted(os.listdir(tmp_path)) == ["outer.zip", "tree"]
