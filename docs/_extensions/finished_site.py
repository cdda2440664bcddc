"""What is wrong with the pages as they were written: links, pictures, and what they load.

Links to other sites are read, not followed: the build needs no network.
"""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Optional
from urllib.parse import SplitResult, unquote, urlsplit

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

_LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}


class Page(HTMLParser):
    """The links, anchors and pictures of one HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.pictures_without_text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, Optional[str]]]) -> None:
        """Note what a tag refers to."""
        found = {name: value or "" for name, value in attributes}
        self.anchors.update(found[name] for name in ("id", "name") if name in found)
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload"):
            self.loads.append(found["href"])
        elif tag in _LOADS and found.get(_LOADS[tag]):
            self.loads.append(found[_LOADS[tag]])
        if tag == "img" and not found.get("alt") and found.get("role") != "presentation":
            self.pictures_without_text.append(found.get("src", "")[:80])


def problems(site: Path) -> Iterator[str]:
    """Yield a sentence for each mistake in a folder of HTML pages."""
    pages = {path: Page(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        where = path.relative_to(site)
        for picture in page.pictures_without_text:
            yield f"{where}: a picture without a text alternative: {picture}"
        elsewhere = [target for target in page.loads if target.startswith(("http", "//"))]
        for target in elsewhere:
            yield f"{where}: loads {target} from another host"
        for target in page.links + [one for one in page.loads if one not in elsewhere]:
            wrong = _wrong(target, path, pages)
            if wrong:
                yield f"{where}: {target[:120]!r} {wrong}"


def _wrong(target: str, page: Path, pages: dict[Path, Page]) -> str:
    try:
        parts = urlsplit(target)
    except ValueError as error:
        return f"is not an address: {error}"
    if parts.scheme == "data":
        return ""
    if parts.scheme or parts.netloc:
        return "" if _is_address(parts) else "is not an address of a page"
    path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not path.is_file():
        return "is a link to a file that is not there"
    if parts.fragment and path in pages and unquote(parts.fragment) not in pages[path].anchors:
        return "is a link to a place that is not on that page"
    return ""


def _is_address(parts: SplitResult) -> bool:
    if parts.scheme == "mailto":
        return "@" in parts.path
    host = parts.hostname or ""
    return (
        parts.scheme in ("http", "https") and "." in host and not set(parts.geturl()) & set(" <>")
    )


def check(app: Sphinx, exception: Optional[Exception]) -> None:
    """Stop the build if a finished page is wrong."""
    if exception is None and app.builder.format == "html":
        found = list(problems(Path(app.outdir).resolve()))
        if found:
            raise ExtensionError("the pages have mistakes:\n" + "\n".join(found))


def setup(app: Sphinx) -> dict[str, bool]:
    """Check the pages once they are written."""
    app.connect("build-finished", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
