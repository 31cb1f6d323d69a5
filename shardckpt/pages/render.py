"""Render a page: its data goes into the template, which has all of its styles and scripts."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from shardckpt.errors import StorageError, escape_text
from shardckpt.storage.filesystem import wrap_os_errors

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

#: In JSON these stand in texts only, where an escape means the same: the rest cannot end the element.
_ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}
#: The beginning of a page.
_HEAD = b"<!DOCTYPE html>"
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def render_page(title: str, data: Mapping[str, Any]) -> str:
    """Return a page that shows the data.

    Names and values may be anything: they are escaped, the script sets them as text without control characters, and
    the page's policy lets no other script run, and nothing be loaded.
    """
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    script = _SCRIPT.search(template)
    digest = hashlib.sha256(script.group(1).encode() if script else b"").digest()
    filled = {
        "TITLE": html.escape(escape_text(title)),
        "SCRIPT_HASH": f"sha256-{base64.b64encode(digest).decode()}",
        "DATA": json.dumps(data, separators=(",", ":"), allow_nan=False).translate(_ESCAPES),
    }
    # in one pass: a key that is named like a placeholder of the template is not replaced
    return re.sub(r"\{\{(TITLE|SCRIPT_HASH|DATA)\}\}", lambda match: filled[match.group(1)], template)


def write_page(path: Path, title: str, data: Mapping[str, Any]) -> int:
    """Write a page, and return its size in bytes.

    A file at the path is replaced if it is a page; any other, such as one of the checkpoint, is a StorageError.
    """
    # a path may have bytes that are no text, which Python keeps as characters that UTF-8 cannot hold
    content = render_page(title, data).encode(errors="replace")
    with wrap_os_errors("write", path):
        if path.is_file() and path.stat().st_size and not _is_page(path):
            raise StorageError(f"{path} exists and is no page: it was not replaced; give another place for the page")
        path.write_bytes(content)
    return len(content)


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_HEAD)).upper() == _HEAD.upper()
