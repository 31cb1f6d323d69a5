from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch

from shardckpt.errors import CorruptCheckpointError
from shardckpt.storage.columns import Columns, PackedColumns, pack_columns
from tests.tables import table


def test_columns_come_back_as_they_were() -> None:
    """Integers of any size and shape, and any text, are what they were; what is written is valid safetensors."""
    columns = {
        "none": torch.empty(0, 3, dtype=torch.int64),
        "bytes": torch.tensor([0, 255]),
        "wide": torch.tensor([[1, 2], [3, 1 << 62]]),
        "texts": ["", "a/b", 'q"\\', "ключ", "\ud800"],
    }
    data = pack_columns(columns)
    found = Columns(data, "here")
    for name in ("none", "bytes", "wide"):
        assert torch.equal(found.integers(name), columns[name])  # type: ignore[arg-type]
    assert found.texts("texts") == columns["texts"]
    assert {name: t.dtype for name, t in safetensors.torch.load(data).items() if name != "texts"} == {
        "none": torch.uint8,
        "bytes": torch.uint8,
        "wide": torch.int64,
    }


@table("cut", [0, 4, 9, 40, -1])
def test_a_cut_table_is_refused(cut: int) -> None:
    """Bytes that are no table are an error that names their source, not a crash."""
    data = pack_columns({"a": torch.arange(20), "b": ["x"]})
    with pytest.raises(CorruptCheckpointError, match="here"):
        Columns(data[:cut], "here")


def test_columns_of_another_kind_are_refused() -> None:
    """A column that is missing, no integers, has negative ones, or is no list of text is named."""
    found = Columns(
        safetensors.torch.save(
            {
                "f": torch.ones(2),
                "n": torch.tensor([1, -2]),
                "j": torch.tensor(list(json.dumps({}).encode()), dtype=torch.uint8),
            }
        ),
        "here",
    )
    with pytest.raises(CorruptCheckpointError, match="'absent'"):
        found.integers("absent")
    with pytest.raises(CorruptCheckpointError, match="'f'"):
        found.integers("f")
    with pytest.raises(CorruptCheckpointError, match="'n' has -2"):
        found.integers("n")
    with pytest.raises(CorruptCheckpointError, match="'j'"):
        found.texts("j")


def test_packed_columns_get_any_metadata() -> None:
    """Columns that were packed once are the same file as when they are packed with their metadata at once."""
    columns = {"a": torch.arange(300), "b": ["x", "y"], "c": torch.tensor([[1], [2]])}
    packed = PackedColumns.pack(columns)
    for metadata in (None, {}, {"id": "1"}, {"id": "22", "more": "ключ"}):
        assert packed.to_bytes(metadata) == pack_columns(columns, metadata)
        assert Columns(packed.to_bytes(metadata), "here").metadata == (metadata or {})
