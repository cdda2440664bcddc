"""The downloader, over real HTTP on loopback."""

from __future__ import annotations

import hashlib
import os

from mpgluon.errors import DataError

import numpy as np
import pooch
import pytest

from recipes.data.download import download

BODY = np.random.Generator(np.random.PCG64(7)).bytes(1_000_000)
SHA256 = hashlib.sha256(BODY).hexdigest()


def fetch(url, path, **options):
    return download(url, path, **{"size": len(BODY), "sha256": SHA256, **options})


def test_a_file_arrives_whole_in_a_folder_that_did_not_exist(serve, tmp_path):
    path = tmp_path / "new" / "file.bin"
    assert fetch(serve(BODY).url, path) == path
    assert path.read_bytes() == BODY
    assert os.listdir(path.parent) == ["file.bin"]


@pytest.mark.parametrize("body", [BODY[::-1], BODY[:-1], BODY + b"more"])
def test_another_file_is_refused_and_nothing_is_kept(serve, tmp_path, body):
    server = serve(body)
    server.declares_length = len(body) == len(BODY)
    with pytest.raises(DataError, match=f"expected sha256:{SHA256} but got ") as caught:
        fetch(server.url, tmp_path / "file.bin")
    assert hashlib.sha256(body).hexdigest() in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("status", [403, 404, 500, 503])
def test_a_server_that_refuses_is_reported_with_its_status_and_what_to_do(serve, tmp_path, status):
    server = serve(BODY)
    server.statuses = [status]
    with pytest.raises(DataError, match=rf"cannot fetch {server.url} \({status} .* place it at "):
        fetch(server.url, tmp_path / "file.bin")
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_a_full_disk_is_reported_and_nothing_is_kept(serve, tmp_path, monkeypatch):
    def on_full_disk(_name, mode):
        return open("/dev/full", mode.replace("+", ""))

    monkeypatch.setattr(pooch.downloaders, "open", on_full_disk, raising=False)
    with pytest.raises(DataError, match=r"the disk is full while writing .*: free some space"):
        fetch(serve(BODY).url, tmp_path / "file.bin")
    assert os.listdir(tmp_path) == []


@pytest.mark.multiprocess
def test_a_killed_download_is_not_complete_and_the_next_one_clears_it(
    serve, tmp_path, end_abruptly
):
    server, path = serve(BODY), tmp_path / "file.bin"
    end_abruptly(
        "from recipes.data.download import download\n"
        "os.replace = ending(os.replace, 0)\n"
        "download(sys.argv[1], sys.argv[2], size=int(sys.argv[3]), sha256=sys.argv[4])",
        *(server.url, path, len(BODY), SHA256),
    )
    assert os.listdir(tmp_path) == [".file.bin.download"]
    fetch(server.url, path)
    assert os.listdir(tmp_path) == ["file.bin"]
    assert path.read_bytes() == BODY


def test_a_wrong_file_in_the_place_is_named(serve, tmp_path):
    path = tmp_path / "archive.zip"
    path.write_bytes(b"junk")
    server = serve(BODY)
    server.statuses = [404]
    with pytest.raises(DataError, match=r"the file there has 4 bytes in place of 1,000,000"):
        fetch(server.url, path)
    assert path.read_bytes() == b"junk"
