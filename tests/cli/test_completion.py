"""The scripts that complete the command, without a shell to run them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import pytest

from shardckpt import hookimpl
from shardckpt.cli import main
from tests.plugged import registered

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def _quantize() -> Iterator[None]:
    """A plugin with a verb, one of whose options no help shows."""

    class Plugin:
        @hookimpl
        def shardckpt_commands(self, subparsers: Any) -> None:
            verb = subparsers.add_parser("quantize", help="write 100%% of it in int8", aliases=["q"])
            verb.add_argument("--share", type=float, default=0.5, help="of the rows (%(default)s, 100%% at most)")
            verb.add_argument("--internal", choices=("one", "two"), help=argparse.SUPPRESS)
            subparsers.add_parser("debug-dump", aliases=["dd-internal"], help=argparse.SUPPRESS)

    with registered(Plugin()):
        yield


@pytest.mark.usefixtures("_quantize")
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_what_no_help_shows_is_not_offered(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Hidden verbs and options are left out, and descriptions are what the help shows."""
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert not any(word in script for word in ("debug-dump", "internal", "SUPPRESS", "%%", "%("))
    assert all(word in script for word in ("quantize", "share"))
    if shell == "fish":
        assert "'of the rows (0.5, 100% at most)'" in script
        assert script.count("'write 100% of it in int8'") == 2  # under both names
