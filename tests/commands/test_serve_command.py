"""The page to try a network on: its answers, its refusals, and the page itself in Chromium."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import Any

import mpgluon_tools.serving.page as page_of_server
from mpgluon_tools import commands
from mpgluon_tools.serving.classifier import Classifier
from mpgluon_tools.serving.page import create_app

import numpy as np
import pytest
import requests
from browser import EXECUTABLE, Browser
from markupsafe import escape
from PIL import Image, ImageDraw

LIMIT = 16 * 2**20
FORMATS = ["float32", "float16", "bfloat16"]
TEXT = b"no photograph"
OF_CURL = {"Content-Type": "application/x-www-form-urlencoded"}  # of curl --data-binary

# Runs the command, and says on stderr which files are opened to be written.
WATCHED = """
import os, sys
from mpgluon_tools import commands

def watch(event, arguments):
    if event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        os.write(2, f"opened to write: {arguments[0]}\\n".encode())

sys.addaudithook(watch)
commands.main()
"""
NETWORK = """
import mxnet as mx
from mxnet.gluon import nn

def classifier():
    mx.random.seed(0)
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3, in_channels=3), nn.GlobalAvgPool2D(), nn.Dense(10, in_units=8))
    net.initialize(mx.init.Xavier(magnitude=20))
    return net

def mean_colour():
    net = nn.HybridSequential()
    net.add(nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(3, use_bias=False, in_units=3))
    net.initialize()
    net[2].weight.set_data(mx.nd.eye(3))
    return net
"""
SERVED = ["serve", "served_network:classifier", "--image-size=32", "--class-names=names.txt"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with a network, the names of its categories, and photographs."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "served_network.py").write_text(NETWORK)
    (folder / "names.txt").write_text("".join(f"category {i}\n" for i in range(10)))
    for number in range(2):
        image = Image.new("RGB", (90, 70), ("teal", "gold")[number])
        ImageDraw.Draw(image).ellipse((20, 10, 60, 50), fill="navy")
        image.save(folder / f"{number}.jpg")
    return folder


@pytest.fixture(scope="module")
def classifier(place):
    names: dict[str, Any] = {}
    exec(NETWORK, names)
    categories = (place / "names.txt").read_text().splitlines()
    dtypes = ("float16", "bfloat16")
    return Classifier(names["classifier"](), categories, image_size=32, dtype=dtypes)


@pytest.fixture(scope="module")
def app(classifier):
    return create_app(classifier, title="net <1>", about="untrained")


@pytest.fixture
def client(app):
    return app.test_client()


@pytest.fixture(scope="module")
def images(place):
    """Return paths of JPEG files."""
    return sorted(place.glob("*.jpg"))


@pytest.fixture
def in_place(place, monkeypatch):
    """Stand in the folder of the network."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield place
    sys.modules.pop("served_network", None)


def test_a_port_in_use_and_another_machines_address_are_named_with_the_option(refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused("serve", "nothing:at_all", f"--port={port}")
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in said
    assert said.endswith("choose another --port, such as 0 for any free one\n")
    said = refused("serve", "nothing:at_all", "--host=192.0.2.1", "--port=0")
    assert "cannot listen on 192.0.2.1:0: Cannot assign requested address" in said
    assert said.endswith("choose another --host, an address of this machine\n")


def test_an_answer_is_what_the_classifier_says(client, classifier, images):
    photograph = images[0].read_bytes()
    response = client.post("/classify", data=photograph)
    assert (response.status_code, response.mimetype) == (200, "application/json")
    expected = classifier(photograph)
    assert [found["dtype"] for found in response.json["predictions"]] == FORMATS
    for found, prediction in zip(response.json["predictions"], expected):
        assert found["latency_ms"] > 0
        assert prediction.calls == min(25, found["calls"] + 5)  # all tests share the classifier
        assert found["arithmetic"] == classifier.arithmetic[found["dtype"]]
        assert len(found["guesses"]) == 5
        for name in ("guesses", "others"):
            assert [tuple(guess.values()) for guess in found[name]] == [
                (guess.category, guess.probability) for guess in getattr(prediction, name)
            ]


def test_a_form_is_answered_as_its_file_and_kept_in_memory(server, images):
    large = BytesIO()  # of 1 MB: werkzeug would write it to a file, which the fixture would see
    noise = np.random.RandomState(0).randint(0, 256, (600, 600, 3)).astype(np.uint8)
    Image.fromarray(noise).save(large, "png")
    for photograph in (images[0].read_bytes(), large.getvalue()):
        as_form, as_body = (
            requests.post(f"{server}classify", timeout=60, **body).json()["predictions"][0]
            for body in ({"files": {"photo": photograph}}, {"data": photograph, "headers": OF_CURL})
        )
        assert as_form["guesses"] == as_body["guesses"]
    empty = requests.post(f"{server}classify", timeout=60, files={"word": (None, "no file")})
    assert (empty.status_code, "no image file" in empty.json()["error"]) == (400, True)


def cut_short(images) -> bytes:
    return images[0].read_bytes()[:300]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "the request has no image file, in a form or as its body"),
        (TEXT, 415, "formats are JPEG, PNG, WEBP"),
        (cut_short, 400, "damaged or cut short"),
        (bytes(LIMIT), 415, "cannot read this image"),
        (bytes(LIMIT + 1), 413, "the file is larger than 16 MiB; send a smaller copy of it"),
        ({"word": "not a file"}, 415, "cannot read this image"),
        ({"file": (BytesIO(TEXT), "text.jpg")}, 415, "formats are JPEG, PNG, WEBP"),
    ],
    ids=["nothing", "text", "cut short", "largest", "too large", "a form's word", "a form's text"],
)
def test_other_files_than_photographs_get_a_status_and_a_sentence(
    client, images, body, status, message
):
    response = client.post("/classify", data=body(images) if callable(body) else body)
    assert response.status_code == status
    assert list(response.json) == ["error"]
    assert message in response.json["error"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 200), ("GET", "/formats.css", 200), ("GET", "/static/page.js", 200),
        ("GET", "/static/page.css", 200), ("GET", "/static/icon.svg", 200),
        ("GET", "/static/../../page.py", 404), ("GET", "/static/../index.html", 404),
        ("GET", "/nothing", 404), ("GET", "/classify", 405), ("POST", "/classify", 400),
    ],
)  # fmt: skip
def test_every_response_forbids_what_the_page_does_not_need(client, method, path, status):
    response = client.open(path, method=method, buffered=True)
    assert response.status_code == status
    policy = response.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; ")
    assert "unsafe" not in policy
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Cache-Control"] == "no-store"
    assert status == 200 or response.json["error"]


def test_only_trusted_names_of_the_host_are_answered(classifier, images):
    app = create_app(classifier, title="", about="", trusted_hosts=["127.0.0.1", "localhost"])
    client, body = app.test_client(), images[0].read_bytes()
    for base, status in [
        ("http://127.0.0.1:8000", 200),
        ("http://localhost:8000", 200),
        ("http://attacker.example:8000", 400),
    ]:
        assert client.get("/", base_url=base).status_code == status
        assert client.post("/classify", data=body, base_url=base).status_code == status


@pytest.mark.parametrize(
    ("arguments", "dtypes"),
    [
        ([], ["float16", "bfloat16"]),
        (["--dtype", "float16"], ["float16"]),
        (["--dtype", "bfloat16"], ["bfloat16"]),
        (["--dtype", "bfloat16", "--dtype", "float16"], ["bfloat16", "float16"]),
        (["--dtype", "float16", "--dtype", "float16"], ["float16"]),
    ],
)
@pytest.mark.usefixtures("in_place")
def test_the_page_shows_fp32_and_the_formats_that_were_asked_for(monkeypatch, arguments, dtypes):
    shown = []

    def create_server(app, **_):
        page = app.test_client().get("/", base_url="http://127.0.0.1").text
        shown.extend(re.findall(r'<th scope="col" id="(\w+)" class="\1">', page))
        return _NoServer()

    monkeypatch.setattr(page_of_server.waitress, "create_server", create_server)
    assert commands.main([*SERVED, "--port", "0", *arguments]) == 0
    assert shown == ["float32", *dtypes]


class _NoServer:
    """Takes the place of a server, and returns at once."""

    def run(self):
        pass


@pytest.mark.parametrize(
    ("arguments", "host", "warned"),
    [
        ([], "127.0.0.1", False),
        (["--host", "127.0.0.2", "--dtype", "float16"], "127.0.0.2", False),
        (["--host", "0.0.0.0"], "0.0.0.0", True),
        (["--host", "localhost"], "127.0.0.1", False),
    ],
)
@pytest.mark.usefixtures("in_place")
def test_an_address_that_others_reach_is_warned_of(capsys, monkeypatch, arguments, host, warned):
    asked = {}

    def create_server(app, **options):
        (listening,) = options["sockets"]
        asked.update(address=listening.getsockname(), trusted=app.config["TRUSTED_HOSTS"])
        return _NoServer()

    monkeypatch.setattr(page_of_server.waitress, "create_server", create_server)
    assert commands.main([*SERVED, "--port", "0", *arguments]) == 0
    out, err = capsys.readouterr()
    assert "served_network:classifier: HybridSequential from served_network:classifier." in out
    assert asked["address"][0] == host
    assert "http://{}:{}/ (Ctrl-C ends it)".format(*asked["address"]) in out
    assert ("warning: anyone who can reach" in err) == warned
    assert (asked["trusted"] is None) == warned


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "65536"], "must be from 0 to 65535, received 65536"),
        (["--port", "{taken}"], "in use"),
        (["--class-names", "nowhere.txt"], "nowhere.txt"),
        (["--class-names", "two.txt"], "the network has 10 logits, but classes names 2"),
    ],
)
def test_bad_input_gets_one_line_and_status_2(in_place, capsys, arguments, message):
    (in_place / "two.txt").write_text("cat\ndog\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert commands.main([*SERVED, *(one.format(taken=port) for one in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.usefixtures("in_place")
def test_without_names_the_categories_are_numbers(monkeypatch):
    shown = []

    def create_server(app, **_):
        body = Path("0.jpg").read_bytes()
        answer = app.test_client().post("/classify", data=body, base_url="http://127.0.0.1")
        shown.extend(guess["category"] for guess in answer.json["predictions"][0]["guesses"])
        return _NoServer()

    monkeypatch.setattr(page_of_server.waitress, "create_server", create_server)
    assert commands.main([*SERVED[:3], "--port=0", "--dtype=float16"]) == 0
    assert len(set(shown) & set(map(str, range(10)))) == 5


@pytest.mark.parametrize(
    ("options", "mean", "std", "crop"),
    [
        ([], (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 0.875),
        (["--crop=0.5", "--std=1,1,1"], (0.485, 0.456, 0.406), (1, 1, 1), 0.5),
        (["--mean=0.5,0,0.25", "--std=0.1,0.2,0.4"], (0.5, 0, 0.25), (0.1, 0.2, 0.4), 0.875),
        (["--mean=none", "--std=none", "--crop=none"], (0, 0, 0), [1 / 255] * 3, 1),
    ],
)
@pytest.mark.usefixtures("in_place")
def test_photographs_are_prepared_as_the_options_and_the_page_say(
    capsys, monkeypatch, options, mean, std, crop
):
    side, file = round(16 * crop), BytesIO()  # of the size that the network takes: no resizing
    left, top = (20 - side) // 2, (16 - side) // 2
    pixels = np.random.RandomState(0).randint(0, 256, (16, 20, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(file, "png")
    answers = []

    def create_server(app, **_):
        client, to = app.test_client(), {"base_url": "http://127.0.0.1"}
        answers.append(client.get("/", **to).text)
        answers.append(client.post("/classify", data=file.getvalue(), **to).json)
        return _NoServer()

    monkeypatch.setattr(page_of_server.waitress, "create_server", create_server)
    arguments = ["served_network:mean_colour", f"--image-size={side}", "--port=0"]
    assert commands.main(["serve", *arguments, *options]) == 0
    first, said, _ = capsys.readouterr().out.splitlines()
    page, answer = answers
    about = first.partition(": ")[2]
    assert f"{escape(about)}<br>\n      {escape(said)}" in page
    assert f'data-centre-crop="{float(crop)}"' in page
    assert ("assumed" in about) == (len(options) < 3)
    weights = np.exp((pixels[top : top + side, left : left + side].mean((0, 1)) / 255 - mean) / std)
    expected = dict(zip("012", weights / weights.sum()))
    guesses = {one["category"]: one["probability"] for one in answer["predictions"][0]["guesses"]}
    # A mean of 256 terms up to 255 in FP32 is within 256 * 255 * 2^-24 = 0.004; two logits each.
    assert guesses == pytest.approx(expected, rel=0.01)


@pytest.fixture(scope="module")
def server(place, tmp_path_factory):
    """Yield the address of a running server, which must not open a file to write to it."""
    log = tmp_path_factory.mktemp("server") / "stderr"
    command = [sys.executable, "-W", "ignore", "-c", WATCHED, *SERVED, "--port", "0"]
    with open(log, "wb") as stderr:
        pipes = {"stdout": subprocess.PIPE, "stderr": stderr}
        process = subprocess.Popen(command, cwd=place, text=True, **pipes)
    try:
        lines = [process.stdout.readline() for _ in range(3)]
        found = re.match(r"(http://127\.0\.0\.1:\d+/) \(Ctrl-C ends it\)", lines[2])
        assert found, [*lines, log.read_text()]
        said = log.stat().st_size
        yield found[1]
        assert log.read_bytes()[said:] == b""
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


def test_a_large_request_is_answered_and_too_large_a_one_refused(server):
    # Past 512 KiB waitress would go on in a file, which the fixture would see.
    body = os.urandom(4 * 2**20)
    assert requests.post(f"{server}classify", data=body, timeout=60).status_code == 415
    # waitress refuses by the length in a request's header, before its body arrives.
    address = server.split("/")[2].split(":")
    with socket.create_connection((address[0], int(address[1])), timeout=60) as connection:
        head = f"POST /classify HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {LIMIT + 1}\r\n\r\n"
        connection.sendall(head.encode())
        answer = connection.makefile("rb").read().decode()
    assert answer.startswith("HTTP/1.1 413")
    assert "larger than 16 MiB" in json.loads(answer.partition("\r\n\r\n")[2])["error"]


def test_requests_that_wait_for_others_are_answered_without_a_warning(server, images):
    def status(body):
        return requests.post(f"{server}classify", data=body, timeout=60).status_code

    with ThreadPoolExecutor(max_workers=24) as clients:
        assert set(clients.map(status, [images[0].read_bytes()] * 24)) == {200}


@pytest.fixture
def idle(server):
    """Yield 300 connections, on each of which half a request was sent."""
    _, host, port = re.split("//|:", server.rstrip("/"))[-3:]
    with ExitStack() as connections:
        opened = [
            connections.enter_context(socket.create_connection((host, int(port)), timeout=60))
            for _ in range(300)
        ]
        for connection in opened:
            connection.sendall(b"POST /classify HTTP/1.1\r\n")
        yield opened


@pytest.mark.usefixtures("idle")
def test_a_photograph_is_answered_in_two_seconds_with_300_idle_connections_open(server, images):
    start = time.monotonic()
    response = requests.post(f"{server}classify", data=images[0].read_bytes(), timeout=60)
    assert time.monotonic() - start < 2
    assert response.status_code == 200


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if EXECUTABLE is None:
        pytest.skip("there is no chromium or google-chrome to open the page in")
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def page(browser, server):
    browser.events.clear()
    browser.open(server)
    return browser


def table_of(page) -> dict[str, list[str]]:
    """Return the cells of each row of the table: probabilities, their differences from FP32."""
    page.wait_for("document.querySelectorAll('tbody tr').length >= 5")
    rows = page.evaluate(
        """Array.from(document.querySelectorAll('tbody tr'), (row) =>
            Array.from(row.cells, (cell) => cell.innerText.split('\\n').join(' ')))"""
    )
    return {category: cells for category, *cells in rows}


def answer_of(server, photograph: Path) -> dict[str, list[str]]:
    """Return the expected cells of the table."""
    response = requests.post(f"{server}classify", data=photograph.read_bytes(), timeout=60)
    predictions = response.json()["predictions"]
    probabilities = [
        {one["category"]: one["probability"] for one in (*found["guesses"], *found["others"])}
        for found in predictions
    ]
    guessed = [one["category"] for found in predictions for one in found["guesses"]]
    rows = {}
    for category in dict.fromkeys(guessed):
        fp32, *others = (100 * found[category] for found in probabilities)
        cells = [f"{fp32:.2f} %"]
        for other in others:
            difference = re.sub(r"[+-](?=0\.00)", "±", f"{other - fp32:+.2f}")
            cells.append(f"{other:.2f} % {difference}".replace("-", "\N{MINUS SIGN}"))
        rows[category] = cells
    return rows


def text_of(page, element: str) -> str:
    return page.evaluate(f"document.getElementById('{element}').innerText")


def assert_nothing_went_wrong(page, server):
    """No error in the console, nothing that the policy blocked, and nothing from elsewhere."""
    for event in page.events:
        assert event["method"] not in ("Log.entryAdded", "Runtime.exceptionThrown"), event
        if event["method"] == "Network.requestWillBeSent":
            assert event["params"]["request"]["url"].startswith((server, f"blob:{server}"))


def test_a_photograph_that_is_chosen_is_shown_with_all_answers(page, server, caltech101_mini):
    photograph = caltech101_mini / "101_ObjectCategories" / "ketch" / "image_0055.jpg"
    page.choose_file("#file", photograph)
    assert table_of(page) == answer_of(server, photograph)
    assert re.search("All say|They disagree", text_of(page, "summary"))
    times = page.evaluate(
        "Array.from(document.querySelectorAll('.latency'), (one) => one.innerText)"
    )
    assert len(times) == 3
    assert all(re.fullmatch(r"\d+\.\d ms", time) for time in times)
    assert text_of(page, "calls") in ("5", "10", "15", "20", "25")
    assert page.evaluate("document.getElementById('preview').alt") == photograph.name
    page.wait_for("document.getElementById('crop').offsetWidth > 0")
    with Image.open(photograph) as image:
        width, height = image.size
    shape = page.evaluate(
        """(() => {
            const [crop, frame] = ['crop', 'frame'].map((id) => document.getElementById(id));
            return [crop.offsetWidth, crop.offsetHeight, frame.offsetWidth, frame.offsetHeight];
        })()"""
    )
    # Boxes in a browser begin and end at whole pixels.
    side = 224 / 256 * min(width, height) * shape[2] / width
    assert shape == pytest.approx([side, side, shape[2], shape[2] * height / width], abs=1)
    assert_nothing_went_wrong(page, server)


@pytest.mark.parametrize("width", [400, 1400])
def test_the_page_fits_into_narrow_and_wide_windows(page, images, width):
    with page.window(width):
        page.choose_file("#file", images[0])
        table_of(page)
        inside, cells = page.evaluate(
            """[
                document.documentElement.scrollWidth <= innerWidth,
                Array.from(document.querySelectorAll('td, thead th + th'), (cell) =>
                    cell.scrollWidth <= cell.clientWidth && cell.clientWidth > 80),
            ]"""
        )
        assert inside
        assert len(cells) >= 3 * 6
        assert all(cells)


def test_names_of_files_are_text_and_not_markup(page, images, tmp_path):
    hostile = tmp_path / "<img src=x onerror=document.title='taken'>.jpg"
    hostile.write_bytes(images[0].read_bytes())
    page.choose_file("#file", hostile)
    table_of(page)
    assert page.evaluate("document.getElementById('preview').alt") == hostile.name
    assert page.evaluate("document.querySelectorAll('img').length") == 1
    assert page.evaluate("document.title") == "served_network:classifier in 32 and 16 bits"
