"""What a project gets that has shardckpt and pytest installed, and nothing else of ours."""

from __future__ import annotations

import subprocess
import sys


def test_the_plugin_imports_no_torch() -> None:
    """The plugin, which pytest imports in every project that has shardckpt installed, imports no torch."""
    code = "import sys, shardckpt.testing.plugin; assert not {'torch', 'hypothesis', 'fsspec'} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
