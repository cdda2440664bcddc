"""Caltech 101: the manifest, the download of a small stand-in archive, and its tree."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import tarfile
import zipfile
from pathlib import Path

from mpgluon.errors import DataError

import pytest
from helpers import module_from
from PIL import Image

from recipes.data.caltech101 import (
    CALTECH101,
    Archive,
    ArchiveFile,
    download_caltech101,
    find_tree,
    list_images,
)

ROOT = Path(__file__).resolve().parents[2]


def jpeg():
    content = io.BytesIO()
    Image.new("RGB", (30, 20), "red").save(content, "JPEG")
    return content.getvalue()


def described(name, content):
    return ArchiveFile(
        name=name,
        size=len(content),
        md5=hashlib.md5(content).hexdigest(),
        sha256=hashlib.sha256(content).hexdigest(),
    )


def make_tar():
    """Return a tar.gz with the real one's oddities."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        for name in (
            "ant/image_0001.jpg",
            "ant/image_0002.jpg",
            "Zebra/image_0001.jpg",
            "BACKGROUND_Google/image_0001.jpg",
            "BACKGROUND_Google/tmp",
        ):
            member = tarfile.TarInfo(f"101_ObjectCategories/{name}")
            member.size = len(jpeg())
            tar.addfile(member, io.BytesIO(jpeg()))
    return content.getvalue()


def make_zip(inner):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as zipped:
        zipped.writestr("caltech-101/101_ObjectCategories.tar.gz", inner)
        zipped.writestr("caltech-101/Annotations.tar", b"not used")
        zipped.writestr("__MACOSX/caltech-101/._101_ObjectCategories.tar.gz", b"junk")
    return content.getvalue()


@pytest.fixture
def published(serve):
    """Publish an archive; return the server and the archive's description."""
    inner = make_tar()
    outer = make_zip(inner)
    server = serve(outer)
    archive = Archive(
        url=server.url,
        outer=described("caltech-101.zip", outer),
        inner=described("caltech-101/101_ObjectCategories.tar.gz", inner),
        contents=CALTECH101.contents,
    )
    return server, archive


def test_the_archive_is_the_published_one(caltech101_mini):
    published = (caltech101_mini / "README.md").read_text()
    assert CALTECH101.url in published
    for file in (CALTECH101.outer, CALTECH101.inner):
        [row] = [
            line
            for line in published.splitlines()
            if f"`{file.name}` from" in line or f"`{file.name}` |" in line
        ]
        assert f"| {file.size:,} | `{file.md5}` | `{file.sha256}` |" in row


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong hash"])
def test_an_archive_placed_by_hand_is_verified_and_not_fetched(published, tmp_path, wrong):
    server, archive = published
    (tmp_path / "caltech-101.zip").write_bytes(server.body)
    if wrong:
        outer = dataclasses.replace(archive.outer, sha256="0" * 64)
        archive = dataclasses.replace(archive, outer=outer)
        with pytest.raises(DataError, match="does not match the known hash"):
            download_caltech101(tmp_path, archive=archive)
        assert not (tmp_path / "101_ObjectCategories").exists()
    else:
        download_caltech101(tmp_path, archive=archive)
        assert server.requests == 0


def put_image(folder):
    folder.mkdir(parents=True)
    (folder / "image_0001.jpg").write_bytes(jpeg())


def test_the_tree_is_found_in_its_three_places(tmp_path):
    inside = tmp_path / "one" / "101_ObjectCategories"
    nested = tmp_path / "two" / "caltech-101" / "101_ObjectCategories"
    renamed = tmp_path / "three" / "my_photographs"
    for tree in (inside, nested, renamed):
        put_image(tree / "ant")
    assert (find_tree(tmp_path / "one"), find_tree(inside)) == (inside, inside)
    assert find_tree(tmp_path / "two") == nested
    assert find_tree(renamed) == renamed


def test_a_missing_tree_is_an_error_that_says_how_to_get_either(tmp_path):
    data = tmp_path / "my data"
    (data / "101_ObjectCategories").mkdir(parents=True)
    advice = rf"python scripts/download_caltech\.py --data-dir '{data}'`, .* --dataset shapes"
    with pytest.raises(DataError, match=advice):
        find_tree(data)
    with pytest.raises(DataError, match="is not in missing"):
        find_tree("missing")


@pytest.fixture
def script():
    return module_from(ROOT / "scripts" / "download_caltech.py")


def test_the_script_fetches_the_tree_and_prints_where_it_is(
    script, published, tmp_path, monkeypatch, capsys
):
    def download_small(data_dir, **options):
        return download_caltech101(data_dir, archive=published[1], **options)

    monkeypatch.setattr(script, "download_caltech101", download_small)
    assert script.main(["--data-dir", str(tmp_path)]) == 0
    tree = tmp_path / "101_ObjectCategories"
    output = capsys.readouterr()
    assert output.out == f"Caltech 101 is in {tree}: 3 images, 2 categories\n"
    assert "%" not in output.err  # progress bars are for terminals
    assert "warning: the archive has 8,677 in its categories" in output.err
    assert sorted(os.listdir(tmp_path)) == [".caltech101.lock", "101_ObjectCategories"]
    folder = list_images(tree)
    assert (folder.classes, folder.labels.tolist()) == (("Zebra", "ant"), [0, 1, 1])


def test_the_scripts_error_is_one_line_and_status_2(script, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    assert script.main(["--data-dir", str(tmp_path / "file" / "data")]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: cannot write")
    assert output.err.count("\n") == 1
