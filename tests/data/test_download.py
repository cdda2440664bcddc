"""The downloader, over real HTTP on loopback."""

from __future__ import annotations

import errno
import hashlib
import logging
import os

from mpgluon.errors import DataError

import numpy as np
import pytest

from recipes.data import download as download_module
from recipes.data.download import download

BODY = np.random.Generator(np.random.PCG64(7)).bytes(3_000_000)
CHUNK = 2**16  # what is read at a time; a break within it loses it
SHA256 = hashlib.sha256(BODY).hexdigest()


def fetch(server, path, **options):
    options = {"size": len(BODY), "sha256": SHA256, "backoff_s": 0.0, **options}
    return download(server.url, path, **options)


def test_a_file_arrives_whole_in_a_folder_that_did_not_exist(serve, tmp_path):
    server = serve(BODY)
    path = tmp_path / "new" / "file.bin"
    assert fetch(server, path) == path
    assert path.read_bytes() == BODY
    assert os.listdir(path.parent) == ["file.bin"]
    assert server.requests == [None]


def test_a_file_that_is_there_is_verified_and_not_fetched_again(serve, tmp_path):
    server = serve(BODY)
    (tmp_path / "file.bin").write_bytes(BODY)
    fetch(server, tmp_path / "file.bin")
    assert server.requests == []


def test_a_wrong_file_of_the_right_size_is_replaced_and_that_is_logged(serve, tmp_path, caplog):
    server = serve(BODY)
    path = tmp_path / "file.bin"
    path.write_bytes(bytes(len(BODY)))
    with caplog.at_level(logging.WARNING):
        fetch(server, path)
    assert path.read_bytes() == BODY
    assert "file.bin is not the file expected there" in caplog.text


def test_a_broken_connection_is_continued_within_the_call(serve, tmp_path):
    server = serve(BODY)
    server.cut_after = [16 * CHUNK]
    fetch(server, tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == BODY
    assert server.requests == [None, f"bytes={16 * CHUNK}-"]


def test_an_interrupted_download_is_continued_by_the_next_call(serve, tmp_path):
    server = serve(BODY)
    server.cut_after = [19 * CHUNK]
    with pytest.raises(DataError, match=r"1,245,184 of 3,000,000 bytes are kept in .*\.part"):
        fetch(server, tmp_path / "file.bin", attempts=1)
    assert not (tmp_path / "file.bin").exists()
    fetch(server, tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == BODY
    assert server.requests == [None, "bytes=1245184-"]


def test_a_part_that_was_whole_when_the_process_died_needs_no_server(serve, tmp_path):
    server = serve(BODY)
    (tmp_path / "file.bin.part").write_bytes(BODY)
    fetch(server, tmp_path / "file.bin")
    assert server.requests == []
    assert os.listdir(tmp_path) == ["file.bin"]


def test_a_part_longer_than_the_file_is_dropped(serve, tmp_path):
    server = serve(BODY)
    (tmp_path / "file.bin.part").write_bytes(BODY + b"more")
    fetch(server, tmp_path / "file.bin")
    assert server.requests == [None]


def test_a_server_that_ignores_range_makes_it_start_over(serve, tmp_path):
    server = serve(BODY)
    server.honours_range = False
    (tmp_path / "file.bin.part").write_bytes(b"x" * 1000)
    fetch(server, tmp_path / "file.bin")
    assert server.requests == ["bytes=1000-"]
    assert (tmp_path / "file.bin").read_bytes() == BODY


def test_a_server_that_refuses_the_range_makes_it_start_over(serve, tmp_path):
    server = serve(BODY)
    server.statuses = [416]
    (tmp_path / "file.bin.part").write_bytes(BODY[:1000])
    fetch(server, tmp_path / "file.bin")
    assert server.requests == ["bytes=1000-", None]


def test_a_server_that_continues_at_another_place_makes_it_start_over(serve, tmp_path):
    server = serve(BODY)
    server.shift = -10
    (tmp_path / "file.bin.part").write_bytes(BODY[:1000])
    fetch(server, tmp_path / "file.bin")
    assert server.requests == ["bytes=1000-", None]
    assert (tmp_path / "file.bin").read_bytes() == BODY


def test_a_wrong_hash_is_refused_and_nothing_is_kept(serve, tmp_path):
    server = serve(BODY)
    with pytest.raises(DataError, match=f"its sha256 is {SHA256} instead of {'0' * 64}"):
        fetch(server, tmp_path / "file.bin", sha256="0" * 64)
    assert os.listdir(tmp_path) == []


def test_a_damaged_part_is_found_by_the_hash_and_the_next_call_is_right(serve, tmp_path):
    server = serve(BODY)
    (tmp_path / "file.bin.part").write_bytes(b"x" * 1000)
    with pytest.raises(DataError, match="Nothing was kept; run the same command again"):
        fetch(server, tmp_path / "file.bin")
    fetch(server, tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == BODY


def test_a_server_that_offers_another_length_is_refused_at_once(serve, tmp_path):
    server = serve(BODY[:-1])
    with pytest.raises(DataError, match="offers 2,999,999 bytes instead of 3,000,000"):
        fetch(server, tmp_path / "file.bin")
    assert server.requests == [None]
    assert not (tmp_path / "file.bin").exists()


def test_a_short_body_of_undeclared_length_is_never_taken_for_the_file(serve, tmp_path):
    server = serve(BODY[:-1])
    server.declares_length = False
    with pytest.raises(DataError, match="in 2 attempts"):
        fetch(server, tmp_path / "file.bin", attempts=2)
    assert not (tmp_path / "file.bin").exists()


def test_a_body_longer_than_the_file_is_refused(serve, tmp_path):
    server = serve(BODY + b"more")
    server.declares_length = False
    with pytest.raises(DataError, match="longer than 3,000,000 bytes"):
        fetch(server, tmp_path / "file.bin")
    assert os.listdir(tmp_path) == []


def test_server_errors_are_tried_again(serve, tmp_path):
    server = serve(BODY)
    server.statuses = [500, 503, 429]
    fetch(server, tmp_path / "file.bin")
    assert len(server.requests) == 4


def test_a_server_that_keeps_failing_is_reported_with_its_status(serve, tmp_path):
    server = serve(BODY)
    server.statuses = [500] * 9
    with pytest.raises(DataError, match="in 4 attempts: the server answered HTTP 500"):
        fetch(server, tmp_path / "file.bin")
    assert len(server.requests) == 4


def test_a_missing_file_is_reported_at_the_first_attempt(serve, tmp_path):
    server = serve(BODY)
    server.statuses = [404]
    with pytest.raises(DataError, match="the server answered HTTP 404"):
        fetch(server, tmp_path / "file.bin")
    assert len(server.requests) == 1


def test_no_server_at_all_is_reported_with_advice(serve, tmp_path):
    server = serve(BODY)
    server.url = "http://127.0.0.1:1/file"
    with pytest.raises(DataError, match="check the network and run the same command again"):
        fetch(server, tmp_path / "file.bin")


def test_an_address_that_is_none_is_reported(serve, tmp_path):
    server = serve(BODY)
    server.url = "no-address"
    with pytest.raises(DataError, match="check the address"):
        fetch(server, tmp_path / "file.bin")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_a_disk_that_is_full_from_the_start_is_reported(serve, tmp_path):
    server = serve(BODY)
    (tmp_path / "file.bin.part").symlink_to("/dev/full")
    with pytest.raises(DataError, match=r"the disk is full while writing .*: free some space"):
        fetch(server, tmp_path / "file.bin")
    assert not (tmp_path / "file.bin").exists()


def test_a_disk_that_fills_up_on_the_way_loses_nothing(serve, tmp_path, monkeypatch):
    server = serve(BODY)
    real_write = download_module._write_all
    capacity = 1_500_000

    def write(file, chunk):
        room = capacity - file.tell()
        real_write(file, chunk[:room])
        if room < len(chunk):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(download_module, "_write_all", write)
    with pytest.raises(DataError, match="it continues where it stopped"):
        fetch(server, tmp_path / "file.bin")
    monkeypatch.setattr(download_module, "_write_all", real_write)
    fetch(server, tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == BODY
    assert server.requests == [None, "bytes=1500000-"]


def test_a_write_that_takes_only_a_part_is_continued():
    class Slow:
        taken = b""

        def write(self, view):
            self.taken += bytes(view[:3])
            return min(3, len(view))

    file = Slow()
    download_module._write_all(file, b"0123456789")
    assert file.taken == b"0123456789"


def test_a_folder_that_cannot_be_made_is_reported(serve, tmp_path):
    server = serve(BODY)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="choose a folder that can be written"):
        fetch(server, tmp_path / "file" / "file.bin")


def test_a_size_or_a_count_of_attempts_below_one_is_refused(tmp_path):
    with pytest.raises(ValueError, match="size must be at least 1, received 0"):
        download("http://127.0.0.1/", tmp_path / "x", size=0, sha256=SHA256)
    with pytest.raises(ValueError, match="attempts must be at least 1, received 0"):
        download("http://127.0.0.1/", tmp_path / "x", size=1, sha256=SHA256, attempts=0)


def test_the_progress_bar_counts_what_was_there_before(serve, tmp_path, capsys):
    server = serve(BODY)
    server.cut_after = [2_000_000]
    fetch(server, tmp_path / "file.bin", progress=True)
    last = capsys.readouterr().err.split("\r")[-1]
    assert "3.00M/3.00M" in last


def test_without_progress_nothing_is_printed(serve, tmp_path, capfd):
    fetch(serve(BODY), tmp_path / "file.bin")
    assert capfd.readouterr() == ("", "")
