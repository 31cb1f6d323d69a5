"""Pages as HTML."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

from shardckpt.errors import StorageError
from shardckpt.pages.render import render_page, write_page
from tests.pages.render import HOSTILE

if TYPE_CHECKING:
    from pathlib import Path


class _Elements(HTMLParser):
    """The elements of a page, as a browser finds them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def _read_data(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_hostile_names_stay_text() -> None:
    """A key with tags, an end of the script and a place of the template adds no element, and comes back as it was."""
    data = {"keys": [HOSTILE], HOSTILE: {"n": HOSTILE}}
    page = render_page(HOSTILE, data)
    plain = render_page("c", {})
    assert [tag for tag, _ in _Elements(page).found] == [tag for tag, _ in _Elements(plain).found]
    assert _read_data(page) == data


def test_a_page_asks_no_server_and_runs_its_own_script_only() -> None:
    """No element names another resource, and the policy allows one script, by its digest."""
    page = render_page("c", {"a": 1})
    for tag, attributes in _Elements(page).found:
        assert not {"src", "href", "action", "data"} & attributes.keys(), tag
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|innerHTML|insertAdjacent|document\.write|eval\(", page)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; script-src 'sha256-{digest}'" in page


def test_a_page_that_cannot_be_written_is_an_error_with_its_path(tmp_path: Path) -> None:
    """A folder that does not exist is named."""
    with pytest.raises(StorageError, match=r"cannot write .*none.*page\.html"):
        write_page(tmp_path / "none" / "page.html", "c", {})


def test_a_path_that_is_no_text_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    """A title with a byte that no text has, as a path may, or with control characters, is written with escapes."""
    write_page(tmp_path / "page.html", os.fsdecode(b"caf\xe9"), {})
    assert r"<title>caf\udce9" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert r"<title>\x1b[2K\u202e&lt;" in render_page("\x1b[2K\u202e<", {})


def test_a_page_replaces_nothing_but_a_page(tmp_path: Path) -> None:
    """A file of a checkpoint that is named as the page stays, by a link too, and the error names it."""
    (tmp_path / "x.pt").write_bytes(b"PK values")
    (tmp_path / "link.html").symlink_to("x.pt")
    for name in ("x.pt", "link.html"):
        with pytest.raises(StorageError, match=rf"{name} exists and is no page.* give another place"):
            write_page(tmp_path / name, "c", {})
    assert (tmp_path / "x.pt").read_bytes() == b"PK values"
    for title in ("one", "two"):
        write_page(tmp_path / "page.html", title, {})
        assert f"<title>{title}" in (tmp_path / "page.html").read_text(encoding="utf-8")
