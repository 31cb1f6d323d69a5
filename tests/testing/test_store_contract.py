"""The contract of a store: right ones pass it, and wrong ones fail the test that is about their fault."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

import pytest

from shardckpt.plugins import get_plugin_manager
from shardckpt.plugins.stores import open_folder
from shardckpt.testing import StoreContract
from tests.tables import table
from tests.testing import own_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class TestOwn(StoreContract):
    """A directory."""

    plugin = own_store

    @pytest.fixture(autouse=True)
    def _place(self) -> Iterator[None]:
        with tempfile.TemporaryDirectory() as place:
            type(self).url = f"own://{place}"
            yield

    test_a_killed_upload = pytest.mark.ci(StoreContract.test_a_killed_upload)


@pytest.mark.usefixtures("own_stores")
@table(
    "scheme, test",
    [
        ("in-place", "test_an_object_appears_whole"),
        ("remembers", "test_an_upload_replaces_and_is_seen_at_once"),
        ("reads-all", "test_ranges"),
        ("loses", "test_folders"),
        ("hides", "test_an_upload_replaces_and_is_seen_at_once"),
    ],
)
def test_a_wrong_store_fails(scheme: str, test: str, tmp_path: Path) -> None:
    """The test about the fault fails, and passes with the right store."""
    (tmp_path / "files").mkdir()
    for each, is_right in (("own", True), (scheme, False)):
        folder = open_folder(f"{each}://{tmp_path}/{each}", get_plugin_manager())
        run = getattr(TestOwn(), test)
        if is_right:
            run(folder, tmp_path / "files")
            continue
        with pytest.raises((AssertionError, LookupError)):
            run(folder, tmp_path / "files")
