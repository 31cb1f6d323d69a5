from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.dist_checkpointing import ShardedTensor
from shardckpt.engine.integrity import save_integrity_manifest, verify_integrity_manifest
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, StorageError
from shardckpt.maintenance.verify import verify_checkpoint
from shardckpt.manifest.names import INTEGRITY_LIMIT
from shardckpt.storage.memory_budget import REQUEST_BYTES
from shardckpt.storage.open_files import OpenFile, OpenFiles
from tests import backends
from tests.damage import flip
from tests.names import MARKERS
from tests.resources import list_open
from tests.states import error_of
from tests.tables import in_proof, table
from tests.tree import GOLDEN

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.backends import Backend
    from tests.ranks import Ranks

VERSIONS = ("0.9.0", "0.12.3", "0.13.1", "0.16.1", "0.17.0rc0", "0.20.0")
KEY = "decoder.final_layernorm.weight"
FILE = "__3_0.distcp"
#: Elements of a tensor that takes more than two blocks of a whole read.
LARGE = REQUEST_BYTES // 2 + 12345


def hashes(path: Path) -> dict[str, str]:
    """SHA-256 of every regular file of a directory but ``integrity.json``, by hashlib alone."""
    files = [file for file in path.iterdir() if file.is_file() and file.name != "integrity.json"]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def megatrons(path: Path) -> Path:
    """Write ``integrity.json`` as Megatron does."""
    (path / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": hashes(path)}))
    return path


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A checkpoint as Megatron 0.18 leaves one behind: with ``integrity.json`` beside its files."""
    return megatrons(Path(shutil.copytree(GOLDEN / "mcore-0.17.0rc0", tmp_path / "ckpt")))


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A checkpoint of ours that has no ``integrity.json``."""
    dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.arange(100.0))}, tmp_path / "ours")
    return tmp_path / "ours"


def load(path: Path, key: str = KEY, size: int = 5) -> torch.Tensor:
    """A tensor, after the whole checkpoint has been verified."""
    wanted = {"t": ShardedTensor.from_rank_offsets(key, torch.full((size,), -1.0))}
    return dc.load(wanted, path, verify_integrity=True)["t"]  # type: ignore[no-any-return]


@table("version", VERSIONS)
def test_an_integrity_json_of_megatron(tmp_path: Path, version: str) -> None:
    """One in Megatron's form, beside any dialect, is verified by a load, by its own function and by the command."""
    path = megatrons(Path(shutil.copytree(GOLDEN / f"mcore-{version}", tmp_path / "ckpt")))
    assert load(path).tolist() == [0, 1, 2, 3, 4]
    verify_integrity_manifest(path)
    assert main(["verify", str(path)]) == 0


def _link(path: Path) -> None:
    (path / "__1_0.distcp").rename(path.parent / "elsewhere")
    (path / "__1_0.distcp").symlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (
            lambda path: flip(path / FILE),
            "the SHA-256 of {path}/__3_0.distcp is {found}, integrity.json has {expected}",
        ),
        (lambda path: (path / FILE).write_bytes((path / FILE).read_bytes()[:-1]), "__3_0.distcp: the SHA-256 of "),
        (
            lambda path: (path / "metadata.json").write_text((path / "metadata.json").read_text() + "\n"),
            "metadata.json: the SHA-256 of ",
        ),
        (lambda path: (path / "__1_0.distcp").unlink(), "__1_0.distcp: cannot open .*__1_0.distcp: No such file"),
        (_link, "__1_0.distcp: cannot open .*: it is a symbolic link"),
    ],
    ids=["altered", "cut", "grown", "lost", "link"],
)
def test_damage_of_a_foreign_checkpoint(golden: Path, damage: Callable[[Path], object], text: str) -> None:
    """An altered, cut, grown or missing file is named, with what was found and expected, though nobody loads it."""
    damage(golden)
    expected = json.loads((golden / "integrity.json").read_text())["files"][FILE]
    text = text.format(path=golden, found=hashes(golden).get(FILE), expected=expected)
    destination = torch.full((5,), -1.0)
    wanted = {"t": ShardedTensor.from_rank_offsets(KEY, destination)}
    with pytest.raises(CorruptCheckpointError, match=text):
        dc.load(wanted, golden, verify_integrity=True)
    assert destination.eq(-1).all()
    with pytest.raises(CorruptCheckpointError, match=text):
        verify_integrity_manifest(golden)
    assert len([result for result in verify_checkpoint(golden) if result.fault]) == 1
    assert main(["verify", str(golden)]) == 1


def test_every_bad_file_is_named(golden: Path) -> None:
    """Several faults are one error that has them all, and says how many files were checked."""
    for name in (".metadata", "__0_0.distcp", "common.pt"):
        flip(golden / name)
    (golden / "__2_0.distcp").unlink()
    with pytest.raises(CorruptCheckpointError, match="4 of 7 files not as written") as caught:
        verify_integrity_manifest(golden)
    lines = str(caught.value).splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == [".metadata", "__0_0.distcp", "__2_0.distcp", "common.pt"]


def test_files_that_were_added_later(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that ``integrity.json`` does not name is nobody's fault, and the command lists it."""
    (golden / "tokenizer.json").write_text("{}")
    assert load(golden).tolist() == [0, 1, 2, 3, 4]
    assert main(["verify", str(golden)]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "tokenizer.json" in line]
    assert "not a file of this checkpoint" in row


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"algorithm": "md5", "files": {"common.pt": "00"}}', "its digests are 'md5', and this release checks"),
        ('{"algorithm": "sha256", "files": {}}', "is damaged"),
        ('{"algorithm": "sha256"}', "is damaged"),
        ('{"algorithm": "sha256", "files": {"../ckpt/common.pt": "00"}}', "is damaged"),
        ('{"algorithm": "sha256", "files": {"/etc/passwd": "00"}}', "is damaged"),
        ('{"algorithm": "sha256", "files": {"a/../b": "00"}}', "is damaged"),
        ('{"algorithm": "sha256", "files": {"..": "00"}}', "is damaged"),
        ('{"algorithm": "sha256", "files": {"common.pt": 5}}', "is damaged"),
        ("[" * 100_000, "is damaged"),
        ("", "is damaged"),
    ],
)
def test_an_integrity_json_that_cannot_be_one(golden: Path, content: str, text: str) -> None:
    """Unknown digests, names that leave the directory and what is no such JSON are refused by name, before any read."""
    (golden / "integrity.json").write_text(content)
    for check in (load, verify_integrity_manifest, verify_checkpoint):
        with pytest.raises(CorruptCheckpointError, match=r"integrity\.json") as caught:
            check(golden)
        assert text in str(caught.value)


def test_an_integrity_json_that_is_too_large(golden: Path) -> None:
    """A file above the limit is refused before memory is taken for it."""
    with (golden / "integrity.json").open("r+b") as file:
        file.truncate(INTEGRITY_LIMIT + 1)
    with pytest.raises(CorruptCheckpointError, match=f"integrity.json has {INTEGRITY_LIMIT + 1} bytes, more than"):
        verify_integrity_manifest(golden)


def test_without_any_digests(golden: Path) -> None:
    """A checkpoint that was saved without digests cannot be verified: the error says so and what to do."""
    (golden / "integrity.json").unlink()
    with pytest.raises(
        CheckpointingException, match=r"neither shardckpt\.json nor integrity\.json.*without verify_int"
    ):
        load(golden)
    with pytest.raises(CheckpointingException, match=r"has no integrity\.json: save with verify_integrity=True"):
        verify_integrity_manifest(golden)


@backends.both
def test_our_own_digests_are_enough(ours: Path, backend: Backend) -> None:
    """A checkpoint of ours is verified as a whole without ``integrity.json``: bytes that nobody loads, too."""
    assert load(ours, "w", 100).tolist() == list(range(100))
    flip(ours / backend.common)
    count = 1 + len(backend.shared - MARKERS)
    with pytest.raises(
        CorruptCheckpointError, match=rf"1 of {count} files not .*\n  {backend.common}: .* \(digest differs\)"
    ):
        load(ours, "w", 100)


@backends.both
def test_both_digests_count(ours: Path) -> None:
    """Where both are there, either finds a fault; the one in ``integrity.json`` covers the JSON files too."""
    megatrons(ours)
    assert load(ours, "w", 100).tolist() == list(range(100))
    flip(ours / backends.data_file(0))
    with pytest.raises(CorruptCheckpointError, match=rf"{backends.data_file(0)}: .*digest differs"):
        load(ours, "w", 100)
    flip(ours / backends.data_file(0))
    content = json.loads((ours / "integrity.json").read_text())
    content["files"]["metadata.json"] = "0" * 64
    (ours / "integrity.json").write_text(json.dumps(content))
    with pytest.raises(CorruptCheckpointError, match=r"metadata.json: the SHA-256 of .*, integrity.json has 0000"):
        load(ours, "w", 100)


def test_the_manifest_of_an_existing_checkpoint(ours: Path, golden: Path) -> None:
    """Written over every regular file, and again over a changed directory; Megatron's form, nothing else beside it."""
    for path in (ours, golden):
        (path / "tokenizer.json").write_text("{}")
        (path / "logs").mkdir(exist_ok=True)
        before = {file.name for file in path.iterdir()}
        for _ in range(2):
            save_integrity_manifest(path)
            found = json.loads((path / "integrity.json").read_text())
            assert found == {"algorithm": "sha256", "files": hashes(path)}
            verify_integrity_manifest(path)
            (path / "tokenizer.json").write_text("{ }")
        assert {file.name for file in path.iterdir()} == before | {"integrity.json"}


@backends.both_in_proof
def test_no_manifest_over_damage(ours: Path) -> None:
    """What our own digests know to be damaged gets no SHA-256 that says otherwise."""
    flip(ours / backends.data_file(0))
    with pytest.raises(CorruptCheckpointError, match=rf"{backends.data_file(0)} .*digest differs"):
        save_integrity_manifest(ours)
    assert not (ours / "integrity.json").exists()


def test_no_manifest_over_names_that_none_may_have(golden: Path) -> None:
    """A file whose name no checkpoint's file may have is named; it would be refused by every reader."""
    (golden / "my notes.txt").write_text("")
    with pytest.raises(CorruptCheckpointError, match=r"file name 'my notes\.txt' is not allowed"):
        save_integrity_manifest(golden)


def test_a_manifest_is_there_whole_or_not(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing disk leaves the old ``integrity.json``, and what it left beside it is no reason to fail later."""

    def failing(_: int) -> None:
        raise OSError(5, "Input/output error")

    (golden / "tokenizer.json").write_text("{}")
    before = (golden / "integrity.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", failing)
        with pytest.raises(StorageError, match=r"integrity\.json"):
            save_integrity_manifest(golden)
    assert (golden / "integrity.json").read_bytes() == before
    save_integrity_manifest(golden)
    assert json.loads((golden / "integrity.json").read_text())["files"] == hashes(golden)


def _shard(rank: int, world: int, size: int) -> dict[str, Any]:
    values = torch.arange(size, dtype=torch.float32).chunk(world)[rank]
    return {"w": ShardedTensor.from_rank_offsets("w", values.clone(), (0, rank, world)), "iteration": 3}


def _save(path: str, size: int = 1200) -> None:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    dc.save(_shard(rank, world, size), path, verify_integrity=True)


def _load(path: str, size: int = 1200) -> tuple[str, list[float]]:
    """Text of the error, or the values, on this rank."""
    wanted = _shard(dist.get_rank(), dist.get_world_size(), size)
    wanted["w"].data.fill_(-1)
    try:
        dc.load(wanted, path, verify_integrity=True)
    except CheckpointingException as exc:
        return f"{type(exc).__name__}: {exc}", wanted["w"].data.unique().tolist()
    return "", wanted["w"].data.tolist()


@backends.both_in_proof
@pytest.mark.parametrize("world", [2, *in_proof(1, 4)])
def test_saved_while_written(ranks: Ranks, tmp_path: Path, world: int) -> None:
    """save(verify_integrity=True) leaves what hashlib finds in the files, of every rank, and all ranks verify it."""
    path = tmp_path / "ckpt"
    ranks.run(world, _save, str(path))
    found = json.loads((path / "integrity.json").read_text())
    assert found == {"algorithm": "sha256", "files": hashes(path)}
    assert found["files"].keys() >= {*backends.current().shared, backends.data_file(world - 1)}
    for loaders in (world, 3):
        values = ranks.run(loaders, _load, str(path))
        assert [fault for fault, _ in values] == [""] * loaders
        assert [value for _, part in values for value in part] == list(range(1200))


@backends.both_in_proof
def test_saved_without_a_process_group(tmp_path: Path) -> None:
    """One process alone, with files larger than a block: hashed while written, verified block by block."""
    path = tmp_path / "ckpt"
    _save(str(path), LARGE)
    assert json.loads((path / "integrity.json").read_text())["files"] == hashes(path)
    verify_integrity_manifest(path)
    (path / "shardckpt.json").unlink()
    verify_integrity_manifest(megatrons(path))
    flip(path / backends.data_file(0), 2 * REQUEST_BYTES + 7)
    with pytest.raises(CorruptCheckpointError, match=backends.data_file(0)):
        verify_integrity_manifest(path)


@backends.both_in_proof
def test_a_save_without_it_leaves_no_stale_one(ours: Path) -> None:
    """An overwrite takes the old save's ``integrity.json`` away, or renews it; the default is not to write one."""
    assert not (ours / "integrity.json").exists()
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(100))}
    for verify in (True, False, True):
        dc.save(state, ours, overwrite=True, verify_integrity=verify)
        assert (ours / "integrity.json").exists() == verify
        assert main(["verify", str(ours)]) == 0


@backends.both_in_proof
def test_errors_are_the_same_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Whichever rank reads the bad files, all raise one error that names all of them, before memory is touched."""
    path = tmp_path / "ckpt"
    ranks.run(4, _save, str(path))
    for name in (backends.data_file(1), backends.data_file(2), "metadata.json"):
        with (path / name).open("ab") as file:
            file.write(b" ")
    outcomes = ranks.run(4, _load, str(path))
    assert len({fault for fault, _ in outcomes}) == 1
    fault = outcomes[0][0]
    assert f"3 of {len(backends.current().shared) + 4} files not as written" in fault
    assert all(f"\n  {name}: " in fault for name in (backends.data_file(1), backends.data_file(2), "metadata.json"))
    assert [values for _, values in outcomes] == [[-1.0]] * 4
    (path / "integrity.json").write_text("{")
    outcomes = ranks.run(3, _load, str(path))
    assert len({fault for fault, _ in outcomes}) == 1
    assert "integrity.json is damaged" in outcomes[0][0]


def _disagree(path: str) -> None:
    dc.load({}, path, verify_integrity=dist.get_rank() == 0)


def test_ranks_that_disagree(ranks: Ranks, ours: Path) -> None:
    """A flag that is not the same on every rank is an error, not a hang."""
    ((_, text),) = {*ranks.run(2, error_of, _disagree, str(ours))}
    assert "ranks disagree on verify_integrity: True on rank 0, False on rank 1" in text


def test_megatrons_positions(golden: Path) -> None:
    """verify_integrity stands where Megatron has it in the list of arguments of load."""
    flip(golden / "__3_0.distcp")
    with pytest.raises(CorruptCheckpointError, match=r"__3_0\.distcp"):
        dc.load({}, golden, None, True, "assume_ok_unexpected", True, None)


def test_more_files_than_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are open only while they are read: a checkpoint of many ranks is verified by one process."""
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    for number in range(150):
        (tmp_path / "ckpt" / f"__{number}_1.distcp").write_bytes(bytes(number))
    save_integrity_manifest(tmp_path / "ckpt")
    open_file, counts = OpenFiles.open_unshared, []

    def counting(self: OpenFiles, name: str) -> OpenFile:
        file = open_file(self, name)
        counts.append(len(list_open(tmp_path)))
        return file

    monkeypatch.setattr(OpenFiles, "open_unshared", counting)
    verify_integrity_manifest(tmp_path / "ckpt")
    assert len(counts) > 150
    assert max(counts) < 50
