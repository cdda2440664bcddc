"""The web application behind ``mpgluon serve``, and its server; uploads are not kept."""

from __future__ import annotations

import io
import json
import logging
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

from mpgluon.errors import DataError
from mpgluon_tools.extras import extra
from mpgluon_tools.plots import FORMAT_LOOKS
from mpgluon_tools.serving.classifier import Classifier
from mpgluon_tools.serving.photographs import NotAPhotographError

with extra("serve"):
    import flask
    import waitress.channel  # type: ignore[import-untyped]
    from waitress.parser import HTTPRequestParser  # type: ignore[import-untyped]
    from waitress.utilities import RequestEntityTooLarge  # type: ignore[import-untyped]
    from werkzeug.exceptions import HTTPException

__all__ = ["MAX_REQUEST_BYTES", "create_app", "run_server"]

MAX_REQUEST_BYTES = 16 * 2**20
_MAX_CONNECTIONS = 500  # waitress waits in select(), which takes no file numbers above 1,023
_TOO_LARGE = f"the file is larger than {MAX_REQUEST_BYTES // 2**20} MiB; send a smaller copy of it"
_IDLE_SECONDS = 10  # browsers open connections in advance, and connect again without being asked
_PAGE = Path(__file__).parent / "page"
_MARKS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼"}  # of Matplotlib
_HEADERS = {
    # The page loads its own few files and shows the user's photograph; no more.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def create_app(
    classifier: Classifier, *, title: str, about: str, trusted_hosts: Optional[list[str]] = None
) -> flask.Flask:
    """Return the web application.

    Parameters
    ----------
    classifier : Classifier
    title, about : str
        The network's name, and a few words about it for the page.
    trusted_hosts : list of str, optional
        The names by which a browser may call this server; by default any.
    """
    app = flask.Flask("serve", template_folder=_PAGE, static_folder=_PAGE / "static")
    app.request_class = _Request
    app.config.update(MAX_CONTENT_LENGTH=MAX_REQUEST_BYTES, TRUSTED_HOSTS=trusted_hosts)

    @app.get("/")
    def page() -> str:
        return flask.render_template(
            "index.html",
            classifier=classifier,
            marks={name: _MARKS[look["marker"]] for name, look in FORMAT_LOOKS.items()},
            title=title,
            about=about,
            max_bytes=MAX_REQUEST_BYTES,
        )

    @app.get("/formats.css")
    def colours() -> flask.Response:
        """Return style rules that give each format the colour that it has in figures."""
        looks = FORMAT_LOOKS.items()
        rules = [f".{name} {{ --accent: {look['color']}; }}\n" for name, look in looks]
        return flask.Response("".join(rules), mimetype="text/css")

    @app.post("/classify")
    def classify() -> Any:
        """Answer an image file: the first one of a form, or else the whole body of the request."""
        if flask.request.mimetype == "multipart/form-data":
            photograph = next((file.read() for file in flask.request.files.values()), b"")
        else:
            photograph = flask.request.get_data(cache=False)
        if not photograph:
            return {"error": "the request has no image file, in a form or as its body"}, 400
        try:
            predictions = classifier(photograph)
        except NotAPhotographError as error:
            return {"error": str(error)}, 415
        except DataError as error:
            return {"error": str(error)}, 400
        return {"predictions": [asdict(prediction) for prediction in predictions]}

    @app.errorhandler(HTTPException)
    def in_json(error: HTTPException) -> Any:
        message = error.description
        if error.code == 413:
            message = _TOO_LARGE
        return {"error": message}, error.code

    @app.after_request
    def with_headers(response: flask.Response) -> flask.Response:
        response.headers.update(_HEADERS)
        return response

    return app


class _Request(flask.Request):
    """Keeps the files of a form in memory, not on the disk."""

    def _get_file_stream(self, *_: Any, **__: Any) -> io.BytesIO:
        return io.BytesIO()


class _TooLarge(RequestEntityTooLarge):
    """A refusal by waitress, before the application sees the request, in its words."""

    def to_response(self, _: Any = None) -> tuple[str, list[tuple[str, str]], bytes]:
        headers = [("Content-Type", "application/json")]
        return "413 Content Too Large", headers, json.dumps({"error": _TOO_LARGE}).encode()


class _Parser(HTTPRequestParser):
    error: Any

    def received(self, data: bytes) -> int:
        read: int = super().received(data)
        if isinstance(self.error, RequestEntityTooLarge):
            self.error = _TooLarge("")
        return read


class _Channel(waitress.channel.HTTPChannel):
    parser_class = _Parser


def run_server(app: flask.Flask, listening: socket.socket) -> None:
    """Answer requests on a socket until Ctrl-C."""
    # waitress warns of each request that waits for another; waiting is what requests do here.
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    server = waitress.create_server(
        app,
        sockets=[listening],
        max_request_body_size=MAX_REQUEST_BYTES,
        # Above this size a request would be written to a file.
        inbuf_overflow=2 * MAX_REQUEST_BYTES,
        # Above its limit, 100 by default, waitress lets new connections wait until old ones
        # end. By default it closes idle ones after 120 to 150 seconds.
        connection_limit=_MAX_CONNECTIONS,
        channel_timeout=_IDLE_SECONDS,
        cleanup_interval=1,
        ident=None,
    )
    server.channel_class = _Channel
    server.run()
