from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt.errors import CorruptCheckpointError, NotACheckpointError
from shardckpt.huggingface import huggingface_index, save_state_dict
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


def _write(folder: Path, header: Any, data: bytes = b"\0" * 8, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    (folder / "model.safetensors").write_bytes(size.to_bytes(8, "little") + text + data)
    return folder


def test_the_index_is_what_the_headers_say(tmp_path: Path) -> None:
    """Names, dtypes and shapes as torch has them, of packed dtypes too; one that torch has not is None."""
    packed = torch.zeros(4, 6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    save_state_dict({"p": packed, "s": torch.tensor(1.0)}, tmp_path / "model.safetensors")
    assert huggingface_index(tmp_path) == {"p": (torch.float4_e2m1fn_x2, (4, 6)), "s": (torch.float32, ())}
    _write(tmp_path, {"x": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}})
    assert huggingface_index(tmp_path) == {"x": (None, (4,))}


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@table(
    "entry",
    [
        {**GOOD, "shape": [3]},
        {**GOOD, "shape": [-2]},
        {**GOOD, "shape": [2.0]},
        {**GOOD, "shape": "2"},
        {**GOOD, "data_offsets": [8, 16]},
        {**GOOD, "data_offsets": [8, 0]},
        {**GOOD, "data_offsets": [0]},
        {**GOOD, "data_offsets": [True, 8]},
        {**GOOD, "dtype": 7},
        {"dtype": "F32"},
        [1],
        None,
    ],
    ids=str,
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path, entry: Any) -> None:
    """Shapes, dtypes and offsets that do not fit each other or the file are damage, found before memory is taken."""
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors: its header is damaged"):
        huggingface_index(_write(tmp_path, {"w": entry}))


_ENTRY = json.dumps(GOOD).encode()


@table(
    "header",
    [b"", b"[]", b"{", b"\xff", b"[" * 100000, b"7", b'{"w": %b, "w": %b}' % (_ENTRY, _ENTRY)],
    ids=["none", "list", "cut", "no text", "deep", "number", "a name twice"],
)
def test_a_header_that_is_none_is_refused(tmp_path: Path, header: bytes) -> None:
    """Bytes that are no JSON object are damage, whatever they are."""
    with pytest.raises(CorruptCheckpointError, match="is damaged"):
        huggingface_index(_write(tmp_path, header))


@table("length", [1 << 40, (1 << 64) - 1, 200])
def test_a_length_beyond_the_file_is_refused(tmp_path: Path, length: int) -> None:
    """No memory is taken for a header that cannot be there."""
    with pytest.raises(CorruptCheckpointError, match="not a safetensors file, or is cut short"):
        huggingface_index(_write(tmp_path, {"w": GOOD}, length=length))


def test_files_that_are_cut_short_or_missing_are_named(tmp_path: Path) -> None:
    """A truncated file, a missing file, an index that lies: each says which file and what is wrong."""
    save_state_dict({"a": torch.ones(4)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    for size in (0, 5, 20, len(whole) - 1):
        (tmp_path / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
            huggingface_index(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(NotACheckpointError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        huggingface_index(tmp_path)
    with pytest.raises(NotACheckpointError, match="no directory"):
        huggingface_index(tmp_path / "nowhere")


def _index(folder: Path, weight_map: Any) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_an_index_is_held_to_its_files(tmp_path: Path) -> None:
    """Tensors that a file lacks, that two files have, and files outside the folder are refused by name."""
    save_state_dict({"a": torch.ones(1), "b": torch.ones(2)}, tmp_path / "one.safetensors")
    save_state_dict({"b": torch.ones(3), "c": torch.ones(4)}, tmp_path / "two.safetensors")
    named = {"a": "one.safetensors", "c": "two.safetensors"}
    found = huggingface_index(_index(tmp_path, {**named, "b": "two.safetensors"}))
    assert {name: shape for name, (_, shape) in found.items()} == {"a": (1,), "b": (3,), "c": (4,)}
    with pytest.raises(CorruptCheckpointError, match=r"one\.safetensors and two\.safetensors both have 'b'"):
        huggingface_index(_index(tmp_path, named))
    with pytest.raises(CorruptCheckpointError, match=r"'c' is in one\.safetensors, which does not have it"):
        huggingface_index(_index(tmp_path, {**named, "b": "two.safetensors", "c": "one.safetensors"}))
    for wrong in ({"a": "../one.safetensors"}, {"a": "/etc/passwd"}):
        with pytest.raises(CorruptCheckpointError, match="is not allowed"):
            huggingface_index(_index(tmp_path, wrong))
    for wrong in ({}, [], {"a": 3}, None):
        with pytest.raises(CorruptCheckpointError, match="no weight_map"):
            huggingface_index(_index(tmp_path, wrong))
