"""Serve a page on which to try a trained network.

    python scripts/serve.py runs/latest

Drop a photograph on it: the five likeliest categories appear, with their probabilities from the
network in FP32, float16 and bfloat16, and how long a forward pass of each takes. Nothing that is
sent is kept.
"""

from __future__ import annotations

import argparse
import ipaddress
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # recipes/ is not installed

from mpgluon.errors import DataError, MpgluonError
from mpgluon.tools.onnx import ServingMetadata
from mpgluon.tools.plots import FORMAT_LOOKS

import flask
import mxnet as mx
import waitress  # type: ignore[import-untyped]
from werkzeug.exceptions import HTTPException

from recipes.classify import Classifier, NotAPhotographError
from recipes.training.runs import open_run

MAX_REQUEST_BYTES = 16 * 2**20
_MAX_CONNECTIONS = 500  # waitress waits in select(), which takes no file numbers above 1,023
_IDLE_SECONDS = 10  # browsers open connections in advance, and connect again without being asked
_PAGE = Path(__file__).resolve().parent / "serve_page"
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


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Parse the command line, open the run, and serve until Ctrl-C."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "run", help="the folder of a run of train_caltech.py, or one of its checkpoints (.npz)"
    )
    parser.add_argument(
        "--dtype",
        action="append",
        choices=["float16", "bfloat16"],
        help="a 16-bit format; may be given twice, default: both",
    )
    parser.add_argument(
        "--host",
        type=ipaddress.IPv4Address,
        default="127.0.0.1",
        help="an IPv4 address of this machine, default: 127.0.0.1, reachable from it alone",
    )
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0 for any free one")
    options = parser.parse_args(arguments)
    local = options.host.is_loopback
    try:
        if not 0 <= options.port < 2**16:
            raise ValueError(f"--port must be from 0 to 65535, received {options.port}")
        run = open_run(options.run, mx.cpu())
        size = run.config.image_size
        dtypes = options.dtype or ["float16", "bfloat16"]
        classifier = Classifier(run.net, run.classes, image_size=size, dtype=dtypes)
        listening = socket.create_server((str(options.host), options.port))
    except (ValueError, OSError, MpgluonError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    app = create_app(
        classifier,
        title=run.config.model,
        about=f"after step {run.step:,}",
        # Against DNS rebinding: another site's name that resolves to this machine's address.
        trusted_hosts=[str(options.host), "localhost"] if local else None,
    )
    with listening:
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
        if not local:
            print(
                f"warning: anyone who can reach {options.host} can use this page; there is no "
                "password and no encryption",
                file=sys.stderr,
            )
        host, port = listening.getsockname()
        print(f"{run.config.model} of {run.checkpoint}")
        print(f"http://{host}:{port}/ (Ctrl-C ends it)", flush=True)
        server.run()
    return 0


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
    app.config.update(MAX_CONTENT_LENGTH=MAX_REQUEST_BYTES, TRUSTED_HOSTS=trusted_hosts)

    @app.get("/")
    def page() -> str:
        return flask.render_template(
            "index.html",
            classifier=classifier,
            marks={name: _MARKS[look["marker"]] for name, look in FORMAT_LOOKS.items()},
            title=title,
            about=about,
            centre_crop=ServingMetadata.centre_crop,
            max_bytes=MAX_REQUEST_BYTES,
        )

    @app.get("/formats.css")
    def colours() -> flask.Response:
        """Give what belongs to a format its colour, the one that it has in figures."""
        looks = FORMAT_LOOKS.items()
        rules = [f".{name} {{ --accent: {look['color']}; }}\n" for name, look in looks]
        return flask.Response("".join(rules), mimetype="text/css")

    @app.post("/classify")
    def classify() -> Any:
        """Answer the bytes of an image file, which are the whole body of the request."""
        photograph = flask.request.get_data(cache=False)
        if not photograph:
            return {"error": "the request is empty; its body must be an image file"}, 400
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
            message = f"the file is larger than {MAX_REQUEST_BYTES // 2**20} MiB"
        return {"error": message}, error.code

    @app.after_request
    def with_headers(response: flask.Response) -> flask.Response:
        response.headers.update(_HEADERS)
        return response

    return app


if __name__ == "__main__":
    sys.exit(main())
