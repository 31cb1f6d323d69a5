from __future__ import annotations

import pytest

from shardckpt.manifest import FileRecord, Record

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
