from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from shardckpt import dist_checkpointing as dc
from shardckpt.manifest import FileRecord, Record

if TYPE_CHECKING:
    from pathlib import Path

RECORD = Record(
    save_id="0123",
    backend="npy",
    version=2,
    reader="shardckpt-npy 2.0",
    writer={"shardckpt": "0.1.0"},
    world_size=4,
    digest_algorithm="crc32",
    files=(FileRecord(name="a.npy", size=3, rank=1, keys=1, digest="00", segments="eJw="),),
)


def test_a_record_comes_back_as_it_was() -> None:
    """What is dumped is parsed to the same, its digest set."""
    parsed = Record.parse(RECORD.dump())
    assert parsed.model_copy(update={"self_digest": RECORD.self_digest}) == RECORD
    assert parsed.self_digest != RECORD.self_digest


@pytest.mark.parametrize("mask", [1, 16, 32])
def test_any_changed_byte_is_noticed(mask: int) -> None:
    """The file carries its own digest: no byte of it can change unseen, white space included."""
    data = RECORD.dump()
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= mask
        with pytest.raises(ValueError, match=r"\w"):
            Record.parse(bytes(changed))


@pytest.mark.parametrize(
    "content",
    [{"kind": "reshardable", "versions": [1, 2.5, None, True]}, ["plain"], "0" * 64, {"self_digest": "0" * 64}],
    ids=str,
)
def test_content_metadata_is_read_without_unpickling(tmp_path: Path, content: Any) -> None:
    """What JSON can say stands in shardckpt.json, and is found there though the pickle beside it is gone."""
    dc.save({"a": 1}, tmp_path / "c", content_metadata=content)
    assert dc.load_common_state_dict(tmp_path / "c")["content_metadata"] == content
    (tmp_path / "c" / "common.pt").unlink()
    assert dc.load_content_metadata(tmp_path / "c") == content


@pytest.mark.parametrize("content", [{"sizes": (1, 2)}, {3: "three"}, {"nan": float("nan")}], ids=str)
def test_content_metadata_that_json_would_change_is_pickled(tmp_path: Path, content: Any) -> None:
    """A tuple comes back as a tuple, an integer key as an integer: such values are read from the common state."""
    dc.save({"a": 1}, tmp_path / "c", content_metadata=content)
    assert repr(dc.load_content_metadata(tmp_path / "c")) == repr(content)
