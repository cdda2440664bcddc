"""Arguments that several commands take."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Sequence

__all__ = [
    "add_classes",
    "add_image_size",
    "add_input_shape",
    "add_network",
    "add_preprocessing",
    "add_zoo_network",
    "positive",
    "refuse_given",
    "shape",
    "width",
]

_NETWORK = (
    "module:function, a function without arguments that returns an initialized network{returns}; "
    "the name of an image classifier in MXNet's or gluoncv's model zoo (extra zoo); or, with "
    "the extra recipes, the folder of a run of finetune or train_caltech.py, or one of its "
    "checkpoints (.npz)"
)


def positive(text: str) -> int:
    """Return a positive integer of a command line; ``type=positive`` in argparse.

    Raises
    ------
    ArgumentTypeError
        If it is less than 1.
    """
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, received {text}")
    return number


def shape(text: str) -> tuple[int, ...]:
    """Return the shape of an input, as in ``8,35``.

    Raises
    ------
    ArgumentTypeError
        If it is not made of positive integers.
    """
    try:
        return tuple(positive(size) for size in text.strip("()").split(","))
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(
            f"must be positive integers, the batch first, as in 8,35; received {text!r}"
        ) from None


def _shares(count: int, none: float, *, zero: bool = False) -> Callable[[str], tuple[float, ...]]:
    """Return a function that reads ``count`` numbers up to 1; "none" means ``none`` for each."""

    def read(text: str) -> tuple[float, ...]:
        try:
            numbers = tuple(map(float, text.split(","))) if text != "none" else (none,) * count
        except ValueError:
            numbers = ()
        if len(numbers) != count or not all(0 < x <= 1 or (zero and x == 0) for x in numbers):
            many = "a number" if count == 1 else f"{count} numbers separated by commas, each"
            least = "from 0" if zero else "above 0"
            raise argparse.ArgumentTypeError(
                f"must be {many} {least} to 1, or none; received {text!r}"
            )
        return numbers

    return read


def refuse_given(options: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raise ValueError if options without effect were given, and say why they have none.

    Parameters
    ----------
    options : Namespace
        Of :func:`mpgluon_tools.commands.parser_of`.
    names : sequence of str
        Attributes of the options; some may belong to other commands.
    why : str
        The beginning of the message.
    """
    given = [
        f"--{name.replace('_', '-')}"
        for name in names
        if getattr(options, name, None) != options.default_of(name)
    ]
    if given:
        raise ValueError(f"{why}; leave out {', '.join(given)}")


def width() -> int:
    """Return how many characters a line of a table may have."""
    return max(40, shutil.get_terminal_size().columns)


def add_network(parser: argparse.ArgumentParser, *, returns: str = "") -> None:
    """Add the argument that names the network."""
    parser.add_argument("network", help=_NETWORK.format(returns=returns))


def add_zoo_network(parser: argparse.ArgumentParser) -> None:
    """Add the options of a network of a model zoo."""
    parser.add_argument(
        "--parameters",
        metavar="FILE",
        help="a .params file to load; with the extra recipes a state dict of PyTorch too",
    )
    add_classes(parser)
    parser.add_argument(
        "--class-names", metavar="FILE", help="a text file, one name in each line, for --classes"
    )
    add_image_size(parser)


def add_classes(parser: argparse.ArgumentParser) -> None:
    """Add the option for the number of categories."""
    parser.add_argument(
        "--classes",
        type=positive,
        default=1000,
        help="of a network of a model zoo (default: %(default)s)",
    )


def add_image_size(parser: argparse.ArgumentParser) -> None:
    """Add the option for the side of images."""
    parser.add_argument(
        "--image-size",
        type=positive,
        default=224,
        help="pixels; not for a run (default: %(default)s)",
    )


def add_preprocessing(parser: argparse.ArgumentParser) -> None:
    """Add the options for how photographs become the network's input."""
    parser.add_argument(
        "--mean",
        type=_shares(3, 0.0, zero=True),
        metavar="R,G,B",
        help="means of red, green and blue to subtract, of levels from 0 to 1 (divide a mean of "
        "levels up to 255 by 255); none: nothing (default: ImageNet's, 0.485,0.456,0.406)",
    )
    parser.add_argument(
        "--std",
        type=_shares(3, 1 / 255),
        metavar="R,G,B",
        help="numbers to divide them by then, of levels from 0 to 1; none: 1/255, so that with "
        "--mean none the network takes values from 0 to 255, and with --std 1,1,1 from 0 to 1 "
        "(default: ImageNet's, 0.229,0.224,0.225)",
    )
    parser.add_argument(
        "--crop",
        type=lambda text: _shares(1, 1.0)(text)[0],
        metavar="SHARE",
        help="the central square's side as a share of the photograph's shorter side; none: 1 "
        "(default: 0.875)",
    )


def add_input_shape(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Add the option for inputs that are not images."""
    parser.add_argument(
        "--input-shape",
        type=shape,
        action="append",
        metavar="SIZES",
        help="of a network whose input is not images, the batch first, as in 8,35; once for each "
        f"input; {meaning}",
    )
