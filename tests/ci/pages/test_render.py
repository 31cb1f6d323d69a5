"""Pages as HTML."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from shardckpt.pages.render import render_page


@pytest.mark.skipif(shutil.which("node") is None, reason="no node is installed")
def test_a_page_shows_no_control_characters() -> None:
    """Its script escapes what controls terminals, or turns the direction of text, in names and values alike."""
    page = render_page("c", {})
    found = [re.search(rf"^const {name} = .*$", page, re.MULTILINE) for name in ("shown", "revive")]
    lines = "\n".join(match[0] for match in found if match is not None)
    data = json.dumps({"a\x1b": ["b\u202e\r", {"c\x9b": "d\n", "n": None, "x": 1.5}]})
    code = f"{lines}\nconsole.log(JSON.stringify(JSON.parse({json.dumps(data)}, revive)))"
    done = subprocess.run(["node", "-e", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == {r"a\u001b": [r"b\u202e\u000d", {r"c\u009b": "d\n", "n": None, "x": 1.5}]}
