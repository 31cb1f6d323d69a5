"""What an author reads of a contract that fails."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from shardckpt.testing.broken_promise import describe
from tests.readmes import READMES
from tests.tables import table
from tests.testing import own_store, wrong_strategies
from tests.testing.test_store_contract import TestOwn as OwnContract

if TYPE_CHECKING:
    from pathlib import Path


class _Raises(wrong_strategies.LoadBlocks):
    def read(self, *_: Any) -> bytes:
        raise KeyError("x")


def _fail(contract: Any, test: str, *arguments: Any) -> str:
    """What is reported of a contract's test that fails."""
    bound = getattr(contract, test)
    try:
        bound(*arguments)
    except (Exception, pytest.fail.Exception) as exc:  # noqa: BLE001 - the report is of any
        return describe(bound, exc)
    raise AssertionError(f"{test} passed")


@table(
    ("parts", "test", "said"),
    [
        (
            {"save_strategy": wrong_strategies.SaveDropsLast},
            "test_many_tensors",
            [
                "SaveDropsLast with LoadBlocks does not keep a promise, test_many_tensors",
                "promised:   A hundred tensors of one save come back, each under its own key.",
                "happened:   KeyMismatchError: In the state dict, not in the checkpoint",
                "checked at: .*/shardckpt/testing/contract/values.py:[0-9]+",
                "documented: shardckpt/testing/README.md, 'A contract for your strategy'",
            ],
        ),
        (
            {"load_strategy": _Raises},
            "test_many_tensors",
            ["happened:   RankFailedError: .*KeyError: 'x'", f"raised at:  {re.escape(__file__)}:[0-9]+, read"],
        ),
        (
            {"load_strategy": wrong_strategies.LoadFailsLate},
            "test_a_flipped_bit",
            ["happened:   bit [0-9]+ of rank_0.bin is flipped, and the load returned wrong values: .*: it is 0, not "],
        ),
        (
            {"save_strategy": wrong_strategies.SaveDeniesObjects},
            "test_objects_are_stored_or_refused",
            ["claimed:    supports_objects = True"],
        ),
    ],
)
def test_a_strategy_that_breaks_a_promise(parts: dict[str, Any], test: str, said: list[str], tmp_path: Path) -> None:
    """The report names the strategies, the promise, what happened, whose code raised, and the page."""
    contract = type("Contract", (wrong_strategies.Contract,), parts)()
    path = tmp_path / "checkpoints" / "c"
    path.parent.mkdir()
    with contract.subject.registered():
        if test == "test_a_flipped_bit":
            contract.save_version(path, 1)
        text = _fail(contract, test, path)
    for each in said:
        assert re.search(f"^{each}", text, re.MULTILINE), text


@pytest.mark.usefixtures("own_stores")
@table(
    ("scheme", "test", "said"),
    [
        (
            "remembers",
            "test_an_upload_replaces_and_is_seen_at_once",
            "{'object': 10} is expected, and it returned {'obj",
        ),
        ("reads-all", "test_ranges", "number of bytes of read(name, 0, 1): 1 is expected, and it returned 10496"),
        ("hides", "test_a_folder_without_objects", "FileNotFoundError is expected, and it raised LookupError: absent"),
        ("loses", "test_folders", "{'top': 3} is expected, and it returned {"),
    ],
)
def test_a_store_that_breaks_a_promise(scheme: str, test: str, said: str, tmp_path: Path) -> None:
    """The report says which call returned or raised what in the place of what, of which store, and the page."""
    (tmp_path / "files").mkdir()
    contract = type("Contract", (OwnContract,), {"url": f"{scheme}://{tmp_path}"})()
    folder = own_store.STORES[scheme](f"{scheme}://{tmp_path}/there")
    text = _fail(contract, test, folder, *([tmp_path / "files"] if scheme != "hides" else []))
    assert f"the store of '{scheme}://{tmp_path}' does not keep a promise, {test}" in text
    assert said in text
    assert "documented: shardckpt/storage/README.md" in text


def test_the_pages_have_the_sections() -> None:
    """The sections that a report names are there."""
    for contract in (wrong_strategies.Contract, OwnContract):
        for page, section in re.findall(r"(\S+), '([^']+)'", contract.contract_page):
            assert f"## {section}\n" in READMES[page]
