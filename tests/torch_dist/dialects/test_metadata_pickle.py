from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import TensorProperties

from shardckpt.archive.unpickle import load_metadata
from shardckpt.chunks import Chunk, Item, StoredTensor
from shardckpt.planning.boxes import Box
from shardckpt_torch_dist.dialects import metadata_pickle
from shardckpt_torch_dist.dialects.metadata_pickle import encode_metadata
from tests.property.search import drawn, for_all
from tests.torch_dist.dialects.metadata_pickle import FILE, check_equal, stock
from tests.torch_dist.indexes import INDEXES, index_of

if TYPE_CHECKING:
    from shardckpt_torch_dist.dialects.stored import StoredIndex


def plain(record: Any) -> Any:
    """Attributes of an inert record, and of those that it holds."""
    if isinstance(record, dict):
        return {key if isinstance(key, str) else str(plain(key)): plain(value) for key, value in record.items()}
    if isinstance(record, list):
        return [plain(value) for value in record]
    if type(record) in (str, int, type(None), torch.Size, torch.dtype):
        return record
    return {name: plain(value) for name, value in vars(record).items()}


@drawn(30)
@pytest.mark.parametrize("window", [1, 3, 1 << 15])
def test_it_is_what_pickle_makes_of_the_objects(window: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is stored, a plain pickle.load gives objects equal to DCP's own."""
    monkeypatch.setattr(metadata_pickle, "_WINDOW", window)

    def check(case: tuple[StoredIndex, str]) -> None:
        check_equal(pickle.loads(encode_metadata(*case)), stock(*case))

    for_all(st.tuples(INDEXES, st.text(max_size=4)), count, check)


@drawn(40)
def test_the_guarded_reader_reads_the_same(count: int) -> None:
    """Our reader with its allow-list finds in it what it finds in the pickle of DCP's own objects."""

    def check(index: StoredIndex) -> None:
        wanted = load_metadata(pickle.dumps(stock(index, "id"), protocol=4), "stock")
        assert plain(load_metadata(encode_metadata(index, "id"), "ours")) == plain(wanted)

    for_all(INDEXES, count, check)


def test_an_empty_checkpoint() -> None:
    """Of nothing there is metadata, too."""
    index = index_of({}, {})
    check_equal(pickle.loads(encode_metadata(index, "id")), stock(index, "id"))


def test_older_releases_of_torch_can_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch pickles more fields of a tensor's properties, as 2.15 does, the bytes are those of older ones."""
    index = index_of(
        {"a": StoredTensor(torch.float32, (9,), {(0,): Chunk(Box((0,), (9,)), Item(FILE, 0, 600), 0, 9)})}, {}
    )
    before = encode_metadata(index, "id")
    fields = TensorProperties(torch.float32).__getstate__()[:5]  # type: ignore[attr-defined]
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda _: (*fields, None))
    assert encode_metadata(index, "id") == before


def test_names_are_said_once() -> None:
    """A chunk costs bytes for its numbers, not for names."""
    rows = {(n, 0): Chunk(Box((n, 0), (1, 9)), Item(FILE, n * 600, 600), 0, 9) for n in range(1000)}
    index = index_of({"key" * 100: StoredTensor(torch.float32, (1000, 9), rows)}, {})
    pickled = encode_metadata(index, "id")
    assert pickled.count(b"key" * 100) == pickled.count(FILE.encode()) == 1
    assert len(pickled) < 1000 * 150 + 2000
