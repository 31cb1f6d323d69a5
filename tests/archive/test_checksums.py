"""The CRC-32 that archives have of their members: every reader of such archives compares it."""

from __future__ import annotations

import random
import zipfile
import zlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardckpt import CheckpointReader, CheckpointWriter, Migration, hookimpl
from shardckpt import dist_checkpointing as dc
from shardckpt.archive import Archive, read_payload
from shardckpt.archive.checksums import combine_crc32
from shardckpt.cli import main
from shardckpt.engine.integrity import save_integrity_manifest
from shardckpt.errors import CorruptCheckpointError
from shardckpt.maintenance import convert_checkpoint
from shardckpt.manifest import Manifest
from shardckpt.mapping import ShardedTensor
from tests.damage import flip
from tests.plugged import registered
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: What no other tensor of the sources has: bytes to find in their files.
VALUES = torch.arange(1000, dtype=torch.int64) + (1 << 40)
NEEDLE = (VALUES[500]).numpy().tobytes()
#: A storage of which a load reads parts: more than is read again to check it.
LARGE = torch.arange(300_000, dtype=torch.int64) + (1 << 41)
LARGE_NEEDLE = (LARGE[200_000]).numpy().tobytes()


def save_dcp(to: Path, **more: Any) -> Path:
    """Return the data file of a plain DCP folder."""
    dcp.save({"a": torch.ones(3), "w": VALUES, **more}, checkpoint_id=to, no_dist=True)
    return next(to.glob("*.distcp"))


def save_dcp_with_values(to: Path) -> Path:
    """Return the data file of a plain DCP folder in which the values are an object of their own."""
    dcp.save({"a": torch.ones(3), "w": torch.ones(3), "rng": [VALUES]}, checkpoint_id=to, no_dist=True)
    return next(to.glob("*.distcp"))


def save_file(to: Path) -> Path:
    """Return a file of torch.save."""
    torch.save({"model": {"w": VALUES, "t": torch.ones(4, 6).t()}, "step": 3}, to)
    return to


def save_strided_file(to: Path) -> Path:
    """Return a file of torch.save whose tensor is not contiguous."""
    torch.save({"w": VALUES.view(10, 100).t()}, to)
    return to


SOURCES: dict[str, Callable[[Path], Path]] = {
    "plain DCP": save_dcp,
    "an object of plain DCP": save_dcp_with_values,
    "a file": save_file,
    "a strided tensor of a file": save_strided_file,
}


@table("source", SOURCES)
def test_every_verb_names_a_flipped_bit(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """verify, convert and merge find one flipped bit of a tensor's values, name its file, and write nothing."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "old.pt"
    data = SOURCES[source](path)
    assert main(["verify", str(path)]) == 0
    assert "compared with the CRC-32" in capsys.readouterr().out
    flip(data, NEEDLE)
    assert main(["verify", str(path)]) == 1
    assert "CRC-32" in capsys.readouterr().out
    for verb in (
        ["convert", str(path), "new", "--to", "torch_dist"],
        ["convert", str(path), "new.pt", "--to", "torch"],
        ["merge", str(path), str(path), "new", "--to", "torch_dist"],
        *([] if path.is_file() or "object" in source else [["export", str(path), "new"]]),
    ):
        assert main(verb) == 2, verb
        said = capsys.readouterr().err
        assert "CRC-32" in said, verb
        assert data.name in said or source == "an object of plain DCP", said
        assert {each.name for each in tmp_path.iterdir()} == {"old.pt"}, verb


class _ToNext(Migration):
    backend, from_version, to_version = "torch_dist", 1, 2

    def migrate(self, reader: CheckpointReader, writer: CheckpointWriter) -> None:
        """Copy what has no digest."""
        for path in reader.directory.iterdir():
            writer.write(path.name, reader.read(path.name))


class _Plugin:
    @hookimpl
    def shardckpt_register(self, registry: Any) -> None:
        """Register."""
        registry.add(_ToNext)


def test_a_flipped_bit_is_not_migrated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before a migration of what other libraries wrote its archives are compared; of damaged ones nothing comes."""
    data = save_dcp(tmp_path / "old")
    flip(data, NEEDLE)
    with registered(_Plugin()):
        assert main(["migrate", str(tmp_path / "old"), str(tmp_path / "new")]) == 2
    assert "CRC-32" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["old"]


def test_a_flipped_bit_gets_no_digest(tmp_path: Path) -> None:
    """``save_integrity_manifest`` writes digests of what another library wrote if its archives are as they say."""
    data = save_dcp(tmp_path / "c")
    save_integrity_manifest(tmp_path / "c")
    (tmp_path / "c" / "integrity.json").unlink()
    flip(data, NEEDLE)
    with pytest.raises(CorruptCheckpointError, match=r"w: .*distcp at .* CRC-32"):
        save_integrity_manifest(tmp_path / "c")
    assert not (tmp_path / "c" / "integrity.json").exists()


def test_a_flipped_bit_that_is_read_in_parts_is_found(tmp_path: Path) -> None:
    """A conversion that stores a large tensor in several boxes finds the bit all the same."""
    path = tmp_path / "old.pt"
    large = torch.arange(3 << 20, dtype=torch.int64) + (1 << 41)
    torch.save({"w": large}, path)
    flip(path, large[2 << 20].numpy().tobytes())
    with pytest.raises(CorruptCheckpointError, match=r"w: .*old\.pt: bytes .* CRC-32"):
        convert_checkpoint(path, tmp_path / "new", "torch_dist", memory_budget="32MiB")
    assert not (tmp_path / "new").exists()


def test_a_load_names_a_flipped_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load compares every storage that it reads as a whole, and small ones of which it reads a part.

    With ``SHARDCKPT_VERIFY_READS=0`` it compares none.
    """
    data = save_dcp(tmp_path / "c", large=LARGE)
    flip(data, NEEDLE)
    flip(data, LARGE_NEEDLE)

    def load(key: str, value: torch.Tensor, **cut: Any) -> torch.Tensor:
        shard = ShardedTensor.from_rank_offsets(key, value, **cut)
        found: torch.Tensor = dc.load({key: shard}, tmp_path / "c", validate_access_integrity=False)[key]
        return found

    whole, half = torch.empty_like(VALUES), torch.empty(500, dtype=torch.int64)
    for key, value, axes in (
        ("w", whole, ()),
        ("w", half, ((0, 0, 2),)),
        ("w", half, ((0, 1, 2),)),
        ("large", torch.empty_like(LARGE), ()),
        ("large", torch.empty(2 * len(LARGE), dtype=torch.int64)[::2], ()),  # it goes through buffers
    ):
        shard = ShardedTensor.from_rank_offsets(key, value, *axes)
        with pytest.raises(CorruptCheckpointError, match=f"{key}: .*CRC-32"):
            dc.load({key: shard}, tmp_path / "c", validate_access_integrity=False)
    assert torch.equal(load("a", torch.empty(3)), torch.ones(3))
    monkeypatch.setenv("SHARDCKPT_VERIFY_READS", "0")
    assert not torch.equal(load("w", whole), VALUES)


def test_archives_without_crcs_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was written without (``set_crc32_options(False)``) is read, and verify says what it did not check."""
    torch.serialization.set_crc32_options(False)
    try:
        data = save_dcp(tmp_path / "c")
    finally:
        torch.serialization.set_crc32_options(True)
    assert main(["verify", str(tmp_path / "c")]) == 0
    assert "Not checked: their values" in capsys.readouterr().out
    flip(data, NEEDLE)
    assert main(["convert", str(tmp_path / "c"), str(tmp_path / "new"), "--to", "torch_dist"]) == 0


def test_a_converted_file_has_crcs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that a conversion writes has the CRC-32 of each tensor: other tools check them, and so does verify."""
    save_dcp(tmp_path / "c", more=[torch.ones(3), {"inner": torch.arange(7)}], empty=torch.empty(0))
    assert main(["convert", str(tmp_path / "c"), str(tmp_path / "new.pt"), "--to", "torch"]) == 0
    with zipfile.ZipFile(tmp_path / "new.pt") as archive:
        assert archive.testzip() is None
    assert torch.equal(torch.load(tmp_path / "new.pt")["w"], VALUES)
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "new.pt")]) == 0
    assert "1 of 1 file was compared with the CRC-32" in capsys.readouterr().out
    flip(tmp_path / "new.pt", NEEDLE)
    assert main(["verify", str(tmp_path / "new.pt")]) == 1


def test_listing_reads_no_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``ls`` of a file with a flipped bit in a tensor calls it whole: bytes are compared by verify."""
    flip(save_file(tmp_path / "a.pt"), NEEDLE)
    assert main(["ls", str(tmp_path)]) == 0
    assert "1 whole" in capsys.readouterr().out


def test_an_archive_is_read_in_blocks(tmp_path: Path) -> None:
    """Members of any size are compared a block of 1 MiB at a time; a storage that is read in pieces, by these."""
    torch.save({"w": LARGE}, tmp_path / "a.pt")
    sizes = []

    class Counted(CheckpointReader):
        def read_into(self, name: str, offset: int, buffer: memoryview, what: str) -> None:
            sizes.append(buffer.nbytes)
            super().read_into(name, offset, buffer, what)

    with Counted(tmp_path, Manifest(backend="torch_save", version=1)) as reader:
        archive = Archive.of_file(reader, "a.pt")
        archive.check_members(reader, "a.pt")
        assert max(sizes) == 1 << 20
        assert sum(sizes) == sum(member.size for member in archive.members.values())
        assert reader.has_checked_crcs("a.pt")
        payload = archive.describe()["w"].payload
        target = torch.empty(LARGE.shape, dtype=torch.float64)
        read_payload(reader, "a.pt", payload, (0,), target, "w")
        assert torch.equal(target, LARGE.double())


def test_crcs_of_pieces_are_combined() -> None:
    """The CRC-32 of two pieces gives that of both, whatever their sizes."""
    data = random.Random(0).randbytes(100_000)
    for cut in (0, 1, 7, 4096, 65_537, 99_999, 100_000):
        first, second = zlib.crc32(data[:cut]), zlib.crc32(data[cut:])
        assert combine_crc32(first, second, len(data) - cut) == zlib.crc32(data), cut
