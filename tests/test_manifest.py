from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import CorruptCheckpointError, VersionTooNewError
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


def _named(*names: str, **fields: Any) -> bytes:
    """A record of files with these names, with a right digest, whatever they are."""
    files = [RECORD.files[0].model_dump() | {"name": name} for name in names]
    text = json.dumps({**RECORD.model_dump(), "files": files, **fields}).encode()
    return text.replace(b"0" * 64, hashlib.sha256(text).hexdigest().encode())


@pytest.mark.parametrize(
    "names",
    [
        ["../x"],
        ["a/../b"],
        ["/etc/passwd"],
        ["a//b"],
        ["a/"],
        ["."],
        [".."],
        ["a\\b"],
        ["a\u0000b"],
        ["C:/x"],
        ["a/b\n"],
        ["x" * 256],
        ["/".join("a" * 33)],
        ["a", "a/b"],
        ["a/b/c", "a/b"],
    ],
)
def test_a_record_with_names_that_no_save_writes_is_refused(tmp_path: Path, names: list[str]) -> None:
    """Whatever its digest, a record whose names lead elsewhere, or are of files and folders, is damage to a load."""
    with pytest.raises(ValueError, match=r"letters, digits|file, and of a folder"):
        Record.parse(_named(*names))
    for number in (1, 2):
        (tmp_path / "metadata.json").write_text('{"sharded_backend": "npy", "sharded_backend_version": 2}')
        (tmp_path / "shardckpt.json").write_bytes(_named(*names, format=number))
        with pytest.raises(CorruptCheckpointError, match=r"shardckpt.json is damaged: "):
            dc.load({}, tmp_path)


def test_only_files_in_folders_need_format_2() -> None:
    """A record of files without folders stays one of format 1, which older releases read; the other has format 2."""
    for name, version in (("a.npy", 1), ("c/0/a.npy", 2)):
        file = RECORD.files[0].model_copy(update={"name": name})
        data = RECORD.model_copy(update={"files": (file,)}).dump()
        assert json.loads(data)["format"] == version
        parsed = Record.parse(data)
        assert (parsed.format, parsed.files) == (version, (file,))
        assert Record.parse(parsed.dump()) == parsed


def test_a_format_of_a_later_release_says_what_to_upgrade(tmp_path: Path) -> None:
    """A record in a format that is not known is no damage: the error says its number and what to upgrade to."""
    content = _named("a", "a/b", format=4, writer={"shardckpt": "7.1"}, world_size="many")
    with pytest.raises(VersionTooNewError, match=r"has format 4, .* up to 3: upgrade shardckpt to 7\.1 or newer"):
        Record.parse(content)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "npy", "sharded_backend_version": 2}')
    (tmp_path / "shardckpt.json").write_bytes(content)
    with pytest.raises(VersionTooNewError, match=rf"^{tmp_path}: shardckpt.json has format 4"):
        dc.load({}, tmp_path)


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
