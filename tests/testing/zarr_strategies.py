"""The strategies of tests/plugins/zarr_v3, imported when a test needs them: zarr 3 needs Python 3.11."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardckpt import LoadStrategy, SaveStrategy


def make_saver() -> SaveStrategy:
    """A writer of (zarr3, 1)."""
    from shardckpt_zarr3.save import Zarr3SaveStrategy

    return Zarr3SaveStrategy()


def make_loader() -> LoadStrategy:
    """A reader of (zarr3, 1)."""
    from shardckpt_zarr3.load import Zarr3LoadStrategy

    return Zarr3LoadStrategy()
