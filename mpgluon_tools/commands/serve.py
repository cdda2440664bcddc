"""Serve a page on which to try an image classifier.

    mpgluon serve mymodule:make_net --image-size 64 --class-names names.txt
    mpgluon serve resnet50_v2 --parameters resnet50.params
    mpgluon serve runs/latest

Drop a photograph on it: the five likeliest categories appear, with their probabilities from the
network in FP32, float16 and bfloat16, and how long a forward pass of each takes. Nothing that is
sent is kept.
"""

from __future__ import annotations

import argparse
import errno
import ipaddress
import os
import socket
import sys
from collections.abc import Callable

from mpgluon_tools.commands.arguments import add_network, add_preprocessing, add_zoo_network
from mpgluon_tools.progress import progress_line

__all__ = ["EPILOG", "add_arguments", "run"]

EPILOG = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_network(parser)
    add_zoo_network(parser)
    add_preprocessing(parser)
    parser.add_argument(
        "--dtype",
        action="append",
        choices=["float16", "bfloat16"],
        help="a 16-bit format; may be given twice, default: both",
    )
    parser.add_argument(
        "--host",
        type=_address,
        default="127.0.0.1",
        help="an IPv4 address of this machine, default: 127.0.0.1, reachable from it alone",
    )
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0 for any free one")


def run(options: argparse.Namespace, import_all_of_mpgluon: Callable[[], None]) -> int:
    """Open the network, and serve until Ctrl-C."""
    if not 0 <= options.port < 2**16:
        raise ValueError(f"--port must be from 0 to 65535, received {options.port}")
    with _listening(str(options.host), options.port) as listening:
        import_all_of_mpgluon()
        _serve(options, listening)
    return 0


def _address(text: str) -> ipaddress.IPv4Address:
    try:
        return ipaddress.IPv4Address("127.0.0.1" if text == "localhost" else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; it is like 192.0.2.1, or localhost") from error


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket at an address, before the network is opened, which takes longer.

    Raises
    ------
    ValueError
        If the address cannot be used.
    """
    try:
        return socket.create_server((host, port))
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        option = "--host, an address of this machine"
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            option = "--port, such as 0 for any free one"
        raise ValueError(
            f"cannot listen on {host}:{port}: {reason}; choose another {option}"
        ) from error


def _serve(options: argparse.Namespace, listening: socket.socket) -> None:
    from mpgluon_tools.commands.networks import open_network
    from mpgluon_tools.serving import page
    from mpgluon_tools.serving.classifier import Classifier

    import mxnet as mx

    with progress_line(2) as show:
        show("the network")
        opened = open_network(options, mx.cpu(), all_values=True)
        metadata = opened.metadata(options.image_size)
        show("the network in each format")
        dtypes = options.dtype or ["float16", "bfloat16"]
        size, classes = metadata.image_size, metadata.classes or ()
        classifier = Classifier(
            opened.net, classes, image_size=size, dtype=dtypes, **opened.preprocessing
        )
    local = options.host.is_loopback
    app = page.create_app(
        classifier,
        title=opened.name,
        about=" ".join(opened.about),
        # Against DNS rebinding: another site's name that resolves to this machine's address.
        trusted_hosts=[str(options.host), "localhost"] if local else None,
    )
    if not local:
        print(
            f"warning: anyone who can reach {options.host} can use this page; there is no "
            "password and no encryption",
            file=sys.stderr,
        )
    host, port = listening.getsockname()
    print(f"{opened.name}: {' '.join(opened.about)}")
    print(classifier.metadata.preprocessing)
    print(f"http://{host}:{port}/ (Ctrl-C ends it)", flush=True)
    page.run_server(app, listening)
