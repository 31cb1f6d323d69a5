"""What stands at the target: refused and untouched, or replaced whole, with everyone else's files kept."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed import checkpoint as dcp

from shardckpt import dist_checkpointing
from shardckpt.errors import CheckpointingException, IncompleteCheckpointError, StorageError
from shardckpt.maintenance.verify import verify_checkpoint
from tests import backends
from tests.faults import samples
from tests.faults.overwrite import (
    NEW,
    OLD,
    Interruption,
    add_foreign,
    die_between_renames,
    no_exchange,
    overwrite,
    refuse_parent,
)
from tests.names import MARKERS
from tests.tables import in_proof, table
from tests.tree import GOLDEN

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.backends import Backend
    from tests.ranks import Ranks


def ours(ranks: int = 1) -> set[str]:
    """The files of a checkpoint in the format of the test."""
    chosen = backends.current()
    return {*chosen.shared, *map(chosen.data_file, range(ranks))}


def assert_replaced(target: Path, foreign: dict[str, bytes]) -> None:
    """The new values are there, other people's files too, and nothing else, neither at nor beside the target."""
    assert samples.differences(samples.load(target), NEW) == []
    found = samples.listing(target)
    assert found.keys() == {*ours(), *foreign, *(("latest",) if foreign else ())}
    assert {name: found[name] for name in foreign} == foreign
    if foreign:
        assert (target / "latest").readlink() == Path("notes.txt")
        assert (target / "run.sh").stat().st_mode & 0o777 == 0o755
        assert (target / "empty").is_dir()
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    results = verify_checkpoint(target)
    assert [result for result in results if result.fault] == []
    others = {result.name for result in results if result.foreign}
    assert others == {name.split("/")[0] for name in foreign} | ({"empty", "latest"} if foreign else set())


@backends.both_in_proof
@table("what", ["a checkpoint", "other files", "one empty directory"])
def test_refused_without_overwrite(tmp_path: Path, what: str) -> None:
    """A target that is not empty is refused with the way out, and stays as it is."""
    target = tmp_path / "ckpt"
    if what == "a checkpoint":
        samples.save(target, OLD)
    else:
        (target / "inner").mkdir(parents=True)
    if what == "other files":
        (target / "file").write_bytes(b"x")
    before = samples.listing(tmp_path)
    with pytest.raises(StorageError, match=f"{target} is not empty: .* overwrite=True"):
        samples.save(target, NEW)
    assert samples.listing(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_a_file_at_the_target(tmp_path: Path) -> None:
    """A file at the target is refused, with overwrite as well, and stays."""
    target = tmp_path / "ckpt"
    target.write_bytes(b"precious")
    for allowed in (False, True):
        with pytest.raises(StorageError, match=f"{target} exists and is not a directory"):
            dist_checkpointing.save(samples.state_dict(NEW), target, overwrite=allowed)
    assert target.read_bytes() == b"precious"


@backends.both_in_proof
@table("where", ["below nothing", "an empty directory", "behind a link"])
def test_where_a_target_may_be(tmp_path: Path, where: str) -> None:
    """Parents are made, an empty directory is taken without asking, and a link is followed and stays."""
    target = tmp_path / "runs" / "a" / "ckpt"
    if where == "an empty directory":
        target.mkdir(parents=True)
    if where == "behind a link":
        samples.save(target, OLD)
        (tmp_path / "link").symlink_to(target)
        overwrite(tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
    else:
        samples.save(target, NEW)
    assert_replaced(target, {})


def make_plain_dcp(target: Path) -> None:
    """Let torch.distributed.checkpoint write there."""
    dcp.save({"a": torch.ones(3), "b": 5}, checkpoint_id=target, no_dist=True)


def copy_golden(name: str) -> Callable[[Path], object]:
    """What makes a golden checkpoint a target."""
    return lambda target: shutil.copytree(GOLDEN / name, target, copy_function=shutil.copyfile)


#: What stands at a target.
STANDING: dict[str, Callable[[Path], object]] = {
    "ours": lambda target: samples.save(target, OLD),
    "plain DCP": make_plain_dcp,
    "nothing of a checkpoint": Path.mkdir,
    **{path.name: copy_golden(path.name) for path in sorted(GOLDEN.glob("mcore-*"))},
}


@backends.both_in_proof
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@table("what", STANDING)
def test_over_what_stands_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Our checkpoints, plain DCP's and every Megatron's go, with or without exchange; other files outlive them all."""
    target = tmp_path / "ckpt"
    STANDING[what](target)
    target.chmod(0o755)
    foreign = add_foreign(target)
    overwrite(target)
    assert_replaced(target, foreign)
    monkeypatch.setattr("shardckpt.commit.commit.exchange", no_exchange)
    samples.save(target, OLD, overwrite=True)
    overwrite(target)
    assert_replaced(target, foreign)


@backends.both
@table("name", ["index", "common", *sorted(MARKERS)])
@table("content", [b"", b"{}", b"\xff\x00"])
def test_over_a_damaged_checkpoint(tmp_path: Path, backend: Backend, name: str, content: bytes) -> None:
    """A checkpoint that cannot be read any more can be overwritten all the same."""
    target = tmp_path / "ckpt"
    samples.save(target, OLD)
    name = {"index": backend.index, "common": backend.common}.get(name, name)
    (target / name).write_bytes(content)
    overwrite(target)
    assert_replaced(target, {})


@backends.both_in_proof
@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4), *in_proof((3, 2))])
def test_other_number_of_ranks(ranks: Ranks, tmp_path: Path, before: int, after: int) -> None:
    """No file of more ranks is left from the old checkpoint, and its values are not."""
    target = tmp_path / "ckpt"
    ranks.run(before, samples.save, str(target), OLD)
    ranks.run(after, partial(samples.save, overwrite=True), str(target), NEW)
    assert samples.listing(target).keys() == ours(after)
    assert samples.differences(samples.load(target), NEW) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere: permissions do not stop it")
def test_parent_without_permission(tmp_path: Path) -> None:
    """A parent that is not ours to write is an error that names path and reason."""
    parent = tmp_path / "parent"
    parent.mkdir(mode=0o555)
    refuse_parent(parent, "EACCES")


@backends.both_in_proof
def test_second_rename_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without exchange, a failure between the two renames puts the old checkpoint back."""
    monkeypatch.setattr("shardckpt.commit.commit.exchange", no_exchange)
    target = tmp_path / "ckpt"
    samples.save(target, OLD)
    rename = os.rename

    def failing(source: Path, destination: Path) -> None:
        if destination == target and "staging" in Path(source).name:
            raise OSError(5, "Input/output error")
        rename(source, destination)

    monkeypatch.setattr("os.rename", failing)
    with pytest.raises(StorageError, match=rf"cannot replace {target}: Input/output error \(EIO\)"):
        overwrite(target)
    assert samples.differences(samples.load(target), OLD) == []
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


@backends.both_in_proof
@pytest.mark.usefixtures("no_pauses")
def test_crash_between_the_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without exchange, a process that dies between the two renames leaves what every query names, with the way out."""
    monkeypatch.setattr("shardckpt.commit.commit.exchange", no_exchange)
    target = tmp_path / "ckpt"
    samples.save(target, OLD)
    die_between_renames(target, overwrite)
    (aside,) = tmp_path.glob(".ckpt.shardckpt-replaced-*")
    for query in (samples.load, verify_checkpoint, dist_checkpointing.load_plain_tensors):
        with pytest.raises(
            IncompleteCheckpointError, match=f"interrupted; a complete checkpoint is at {aside}: rename it"
        ):
            query(target)
    aside.rename(target)
    assert samples.differences(samples.load(target), OLD) == []
    overwrite(target)
    assert samples.differences(samples.load(target), NEW) == []


@backends.both_in_proof
@table("exchanges", [True, False])
@table("error", [KeyboardInterrupt, StorageError])
@table("after", [False, True])
def test_an_overwrite_that_ends_at_any_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool, error: type[BaseException], after: bool
) -> None:
    """Whatever call of an overwrite fails or is interrupted: the target is whole, and no only copy is removed."""
    ends = 0
    for number in range(1, 20):
        target = tmp_path / str(number) / "ckpt"
        samples.save(target, OLD)
        stop = Interruption(error("stop"), number, after)
        with stop.in_overwrites(monkeypatch, target, exchanges=exchanges):
            try:
                overwrite(target)
            except (error, CheckpointingException) as exc:
                message = str(exc)
            else:
                message = ""
        if len(stop.calls) < number:
            ends = number
            break
        found = samples.load(target)
        if not samples.differences(found, OLD):
            assert [path.name for path in target.parent.iterdir()] == ["ckpt"]
            continue
        assert samples.differences(found, NEW) == []
        if stop.calls[-1] == "sync parent" or "sync parent" not in stop.calls:  # perhaps not durable
            (aside,) = target.parent.glob(".ckpt.shardckpt-replaced-*")
            assert error is KeyboardInterrupt or (f"{target} is the new" in message and str(aside) in message)
            shutil.rmtree(target)
            aside.rename(target)
            assert samples.differences(samples.load(target), OLD) == []
    assert ends > len(["sync", "rename", "exchange", "sync parent"])


@backends.both_in_proof
def test_staging_is_no_checkpoint(tmp_path: Path) -> None:
    """A staging directory, even a complete one, is not loaded as a checkpoint."""
    dist_checkpointing.save(samples.state_dict(OLD), tmp_path / "ckpt")
    staging = tmp_path / ".ckpt.shardckpt-staging-0123"
    (tmp_path / "ckpt").rename(staging)
    with pytest.raises(IncompleteCheckpointError, match="staging directory of a save that was not committed"):
        samples.load(staging)
    with pytest.raises(IncompleteCheckpointError, match=f"did not end; .* {staging}, .* save again"):
        samples.load(tmp_path / "ckpt")
    with pytest.raises(CheckpointingException):
        dist_checkpointing.load_common_state_dict(staging)
