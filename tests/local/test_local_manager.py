from __future__ import annotations

import inspect
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardckpt.errors import CheckpointingException, NotACheckpointError, StorageError
from shardckpt.local import CliqueReplication, LocalCheckpointManager, TensorAwareStateDict, messages, save_local
from shardckpt.local.parts import PartId
from shardckpt.mapping import ShardedTensor
from tests import backends
from tests.backends import data_file
from tests.commit import owners
from tests.local.disks import (
    check_part,
    find_directory,
    flip_bit,
    get_rank,
    get_root,
    get_world_size,
    list_names,
    load_step,
    make_manager,
    make_part,
    make_state,
    read_contents,
    save_steps,
)
from tests.local.local_manager import MIB, latest_of
from tests.logs import collect_warnings
from tests.shared import shared_by_ranks

if TYPE_CHECKING:
    from tests.ranks import Failure, Ranks


@pytest.mark.parametrize(("world", "cliques"), [(1, None), (2, None), (2, (1, 2)), (4, (2, 2)), (4, (1, 4))])
def test_parts_and_copies_are_where_they_belong(
    ranks: Ranks, tmp_path: Path, world: int, cliques: tuple[int, int] | None
) -> None:
    """Each rank's disk has its part and those of its clique, copies bit for bit, and all load what was saved."""
    found = ranks.run(world, save_steps, str(tmp_path), cliques, [3])
    for rank, names in enumerate(found):
        jump, factor = cliques or (1, 1)
        clique = [r for r in range(world) if r // (jump * factor) == rank // (jump * factor) and (r - rank) % jump == 0]
        assert names == [(3, r) for r in clique]
        for other in clique:
            copy, original = (find_directory(tmp_path / f"node{r}", 3, other) for r in (rank, other))
            assert read_contents(copy) == read_contents(original)
    assert ranks.run(world, load_step, str(tmp_path), cliques, 3) == [[]] * world


def test_it_works_without_a_process_group(tmp_path: Path) -> None:
    """One process saves, finds and loads."""
    manager = LocalCheckpointManager(tmp_path / "deep" / "root", keep=2)
    assert manager.find_latest() is None
    with pytest.raises(NotACheckpointError, match="no local checkpoint on the disks of 1 ranks"):
        manager.load()
    for step in (1, 2, 3):
        manager.save(make_part(step), step)
    assert manager.find_latest() == 3
    check_part(manager.load(), 3)
    check_part(manager.load(2), 2)
    with pytest.raises(NotACheckpointError, match=r"of step 1 .*complete steps: 2, 3"):
        manager.load(1)


def test_numpys_numbers_are_steps(tmp_path: Path) -> None:
    """Steps and numbers of steps may come from an array."""
    manager = LocalCheckpointManager(tmp_path, keep=np.int64(2))  # type: ignore[arg-type]
    for step in np.arange(3):
        manager.save(make_part(int(step)), step)
    check_part(manager.load(np.int32(1)), 1)  # type: ignore[arg-type]
    assert manager.discard_after(np.int64(1)) == [2]  # type: ignore[arg-type]


def _follow_example(base: str, step: int) -> dict[str, Any]:
    document = inspect.getdoc(LocalCheckpointManager) or ""  # Python 3.13 takes the indentation itself
    example = inspect.cleandoc(document.partition("::\n")[2].partition("\nArgs:")[0])
    names: dict[str, Any] = {
        "LocalCheckpointManager": lambda _root, _cliques: make_manager(base),
        "CliqueReplication": dict,  # of 16 ranks
        "TensorAwareStateDict": TensorAwareStateDict,
        "sharded_state_dict": make_state(step),
        "cache": None,
        "step": step,
    }
    exec(example, names)
    return names.get("state_dict", {})


def test_the_example_restores_what_ranks_replicate(ranks: Ranks, tmp_path: Path) -> None:
    """The class's own: what one rank keeps for all is sent to the others."""
    assert ranks.run(2, _follow_example, str(tmp_path), 1) == [{}, {}]
    assert [found["step"] for found in ranks.run(2, _follow_example, str(tmp_path), 2)] == [1, 1]


_SMALL_MESSAGES = shared_by_ranks(partial(mock.patch.object, messages, "MESSAGE_BYTES", MIB + 12345))


def _in_small_messages(function: Any, *args: Any) -> Any:
    with _SMALL_MESSAGES():
        return function(*args)


@pytest.mark.parametrize("cliques", [(1, 2), pytest.param((1, 4), marks=pytest.mark.proof)])
def test_large_parts_travel_in_messages(ranks: Ranks, tmp_path: Path, cliques: tuple[int, int]) -> None:
    """Parts of many messages, of another number on each rank, arrive as they were, at first and after a loss."""
    sizes = 5 * MIB + 4 * 1001
    ranks.run(4, _in_small_messages, _save_uneven, str(tmp_path), cliques, sizes)
    for rank in range(4):
        for copy in (tmp_path / f"node{rank}").iterdir():
            owner = PartId.parse(copy.name)
            assert owner is not None
            assert read_contents(copy) == read_contents(tmp_path / f"node{owner.rank}" / copy.name)
    before = read_contents(find_directory(tmp_path / "node2", 1, 2))
    shutil.rmtree(tmp_path / "node2")
    ranks.run(4, _in_small_messages, _load_uneven, str(tmp_path), cliques, sizes)
    assert read_contents(find_directory(tmp_path / "node2", 1, 2)) == before


def _save_uneven(base: str, cliques: tuple[int, int], nbytes: int) -> None:
    make_manager(base, cliques).save(_uneven(nbytes), 1)


def _uneven(nbytes: int) -> TensorAwareStateDict:
    """Rank 0 has a few bytes, each further one some more MiB; the last tensor begins anywhere in its page."""
    rank = get_rank()
    small = ShardedTensor.from_rank_offsets(f"small{rank}", torch.arange(7 + rank))
    large = ShardedTensor.from_rank_offsets(f"large{rank}", torch.arange(rank * nbytes // 8))
    return TensorAwareStateDict.from_state_dict({"small": small, "large": large}, "atomic")[0]


def _load_uneven(base: str, cliques: tuple[int, int], nbytes: int) -> None:
    loaded = list(make_manager(base, cliques).load().tensors)
    for got, expected in zip(loaded, _uneven(nbytes).tensors, strict=True):
        assert torch.equal(got, expected)


def test_parts_of_different_saves_do_not_mix(ranks: Ranks, tmp_path: Path) -> None:
    """A disk that comes back with another save of the same step does not count as a part of this one."""
    ranks.run(2, save_steps, str(tmp_path), None, [7])
    shutil.move(tmp_path / "node1", tmp_path / "aside")
    shutil.rmtree(tmp_path / "node0")
    ranks.run(2, save_steps, str(tmp_path), None, [7])
    shutil.rmtree(tmp_path / "node1")
    shutil.move(tmp_path / "aside", tmp_path / "node1")
    assert [latest for latest, _ in ranks.run(2, latest_of, str(tmp_path))] == [None, None]


@backends.both_in_proof
@pytest.mark.parametrize("damage", ["bit", "cut", "missing", "record"])
def test_a_damaged_part_is_replaced_by_a_copy(ranks: Ranks, tmp_path: Path, damage: str) -> None:
    """A part that is damaged is named in a warning, loaded from another rank's disk, and whole afterwards."""
    ranks.run(2, save_steps, str(tmp_path), (1, 2), [1])
    mine = find_directory(tmp_path / "node1", 1, 1)
    before, file = read_contents(mine), mine / data_file(0)
    if damage == "bit":
        flip_bit(file)
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "missing":
        file.unlink()
    else:
        flip_bit(mine / "shardckpt.json")
    _, logged = ranks.run(2, load_step, str(tmp_path), (1, 2), 1)
    assert [text for text in logged if "rank 1 has its part from rank 0" in text and str(mine) in text]
    assert read_contents(mine) == before
    assert ranks.run(2, load_step, str(tmp_path), (1, 2), 1) == [[]] * 2


def test_a_damaged_file_does_not_count(ranks: Ranks, tmp_path: Path) -> None:
    """Without copies a step with a file that is cut is passed over, with a warning that names the file."""
    ranks.run(2, save_steps, str(tmp_path), None, [1, 2], 2)
    file = find_directory(tmp_path / "node1", 2, 1) / data_file(0)
    file.write_bytes(file.read_bytes()[:-1])
    (latest, logged), (other, _) = ranks.run(2, latest_of, str(tmp_path))
    assert (latest, other) == (1, 1)
    assert [text for text in logged if str(file) in text and "rank 1" in text]
    ranks.run(2, load_step, str(tmp_path), None, 1)


@backends.both_in_proof
def test_where_all_copies_are_damaged_the_step_before_is_taken(ranks: Ranks, tmp_path: Path) -> None:
    """The newest step that no copy makes whole is skipped with a warning; to ask for it is an error on all ranks."""
    ranks.run(2, save_steps, str(tmp_path), (1, 2), [1, 2], 2)
    for node in ("node0", "node1"):
        flip_bit(find_directory(tmp_path / node, 2, 0) / data_file(0))
    logged = ranks.run(2, load_step, str(tmp_path), (1, 2), 1)
    assert [text for text in logged[0] if "step 2 cannot be loaded" in text and "digest differs" in text]
    for outcome in ranks.outcomes(2, load_step, str(tmp_path), (1, 2), 2, 2):
        assert outcome.kind == "CorruptCheckpointError"
        assert "digest differs" in outcome.message


@pytest.mark.parametrize("keep", [1, 2])
def test_older_steps_go_and_foreign_names_stay(ranks: Ranks, tmp_path: Path, keep: int) -> None:
    """After a save so many steps stay as are to be kept, on every disk; what others have put there is not touched."""
    foreign = ["step-1", "step-1.old", "backup-step-1-0000000000000000-rank-0-of-2", ".step-1.shardckpt-staging-x"]
    for node in ("node0", "node1"):
        for name in foreign:
            (tmp_path / node / name).mkdir(parents=True)
            (tmp_path / node / name / "file").write_text(name)
        (tmp_path / node / f"step-0-{1:016x}-rank-0-of-2").write_text("a file")
        (tmp_path / node / f"step-0-{2:016x}-rank-0-of-2").symlink_to(tmp_path / node / "step-1")
    ranks.run(2, _saved_among_others, str(tmp_path), keep)
    for node in ("node0", "node1"):
        names = {path.name for path in (tmp_path / node).iterdir()}
        strange = {*foreign, f"step-0-{1:016x}-rank-0-of-2", f"step-0-{2:016x}-rank-0-of-2"}
        assert strange <= names
        parts = [PartId.parse(name) for name in names - strange]
        assert sorted((p.save.step, p.rank) for p in parts if p) == [(s, r) for s in range(4 - keep, 4) for r in (0, 1)]
        assert all((tmp_path / node / name / "file").read_text() == name for name in foreign)


def _saved_among_others(base: str, keep: int) -> None:
    manager = make_manager(base, (1, 2), keep)
    assert manager.find_latest() is None
    for step in (1, 2, 3):
        manager.save(make_part(step), step)
    assert manager.find_latest() == 3


def test_a_step_saved_again_takes_the_place_of_the_first(ranks: Ranks, tmp_path: Path) -> None:
    """After going back to an earlier step its next save replaces it, and later steps are left alone."""
    ranks.run(2, save_steps, str(tmp_path), (1, 2), [1, 2, 3], 3)
    names = ranks.run(2, _saved_again, str(tmp_path))
    assert names == [[(s, r) for s in (1, 2, 3) for r in (0, 1)]] * 2


def test_after_a_rewind_later_steps_are_said_and_can_be_discarded(ranks: Ranks, tmp_path: Path) -> None:
    """A save before a newer step warns once that a restart takes that one; discard_after removes it from all disks."""
    ranks.run(2, save_steps, str(tmp_path), (1, 2), [1, 9], 3)
    said = (
        "there are steps after 2, the newest is 9: a later load takes that one; manager.discard_after(2) removes them"
    )
    for rank, (refused, logged, gone, latest, names) in enumerate(ranks.run(2, _rewound, str(tmp_path))):
        assert "discard_after(0): no complete step up to it is on the disks" in refused
        assert [text for text in logged if "later load" in text] == ([f"local checkpoints: {said}"] if not rank else [])
        assert (gone, latest) == ([9], 3)
        assert names == [(step, part) for step in (1, 2, 3) for part in (0, 1)]


def test_later_steps_that_a_disk_keeps_are_an_error(tmp_path: Path) -> None:
    """What could not be removed is not called removed: a restart would load it."""
    manager = LocalCheckpointManager(tmp_path, keep=3)
    for step in (1, 9):
        manager.save(TensorAwareStateDict.from_state_dict({"step": step})[0], step)
    with (
        mock.patch("shardckpt.local.parts.make_tombstone", side_effect=OSError("read-only file system")),
        pytest.raises(StorageError, match=r"discard_after\(1\): parts of later steps could not be removed.*: 9;"),
    ):
        manager.discard_after(1)
    assert manager.find_latest() == 9
    assert manager.discard_after(1) == [9]


def _rewound(base: str) -> Any:
    manager = make_manager(base, (1, 2), 3)
    with pytest.raises(CheckpointingException) as refused:
        manager.discard_after(0)
    with collect_warnings() as logged:
        for step in (2, 3):
            manager.save(make_part(step), step)
    return str(refused.value), logged, manager.discard_after(3), manager.find_latest(), list_names(base)


def _saved_again(base: str) -> Any:
    manager = make_manager(base, (1, 2), 3)
    again = make_part(20)
    manager.save(again, 2)
    assert manager.find_latest() == 3
    check_part(manager.load(2), 20)
    return list_names(base)


def test_what_a_save_left_that_did_not_end_is_cleared(ranks: Ranks, tmp_path: Path) -> None:
    """Incomplete newer steps, and what dead saves and removals left, go with the next save if a complete step stays."""
    ranks.run(2, save_steps, str(tmp_path), None, [1, 9], 2)
    stray = find_directory(tmp_path / "node1", 9, 1)
    left = stray.with_name(f".{stray.name}.shardckpt-staging-{'0' * 32}")
    stray.rename(left)
    shutil.copytree(left, stray.with_name(f".{stray.name}.shardckpt-removed-{'0' * 32}"))
    for owner in (owners.dead(), owners.elsewhere()):  # the folder is this job's alone: nobody else has anything in it
        owners.leave(stray, owner)
    alive = owners.leave(stray, owners.living())
    assert [latest for latest, _ in ranks.run(2, latest_of, str(tmp_path))] == [1, 1]
    ranks.run(2, _save_beside, str(tmp_path), 2)
    assert [path.name for path in (tmp_path / "node1").iterdir() if path.name.startswith(".")] == [alive.name]
    alive.rename(alive.with_name(alive.name.replace(owners.living().text, owners.dead().text)))
    assert ranks.run(2, save_steps, str(tmp_path), None, [3], 2) == [[(2, r), (3, r)] for r in (0, 1)]


def _save_beside(base: str, step: int) -> None:
    make_manager(base, None, 2).save(make_part(step), step)


def test_parts_without_a_complete_step_stay(ranks: Ranks, tmp_path: Path) -> None:
    """While a disk is missing, the later steps of the others stay: it may be found again."""
    ranks.run(2, save_steps, str(tmp_path), None, [9])
    shutil.move(tmp_path / "node1", tmp_path / "aside")
    names = ranks.run(2, _saved_over, str(tmp_path))
    assert names == [[(2, 0), (9, 0)], [(2, 1)]]
    shutil.rmtree(tmp_path / "node1")
    shutil.move(tmp_path / "aside", tmp_path / "node1")
    assert [latest for latest, _ in ranks.run(2, latest_of, str(tmp_path))] == [9, 9]


def _saved_over(base: str) -> Any:
    make_manager(base).save(make_part(2), 2)
    return list_names(base)


def test_another_number_of_ranks_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Fewer or more ranks find nothing, are warned, and are told on loading where to go instead."""
    ranks.run(4, save_steps, str(tmp_path), None, [6])
    (latest, logged), _ = ranks.run(2, latest_of, str(tmp_path))
    assert latest is None
    assert logged == ["local checkpoints: step 6 was saved by 4 ranks, and there are 2: it is ignored"]
    for outcome in ranks.outcomes(2, load_step, str(tmp_path), None, 6):
        assert outcome.kind == "CannotLoadError"
        assert "step 6 was saved by 4 ranks, and there are 2" in outcome.message
        assert "dist_checkpointing.load()" in outcome.message
    assert ranks.run(2, save_steps, str(tmp_path), None, [7]) == [[(7, 0)], [(7, 1)]]


def _one_disk(base: str) -> None:
    manager = LocalCheckpointManager(base, CliqueReplication(1, 2))
    try:
        manager.save(make_part(1), 1)
    finally:
        assert manager.find_latest() is None
        assert not list(Path(base).iterdir())


def test_a_clique_on_one_disk_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Copies on the disk of the original are no copies: the error says what to give, and nothing stays."""
    for outcome in ranks.outcomes(2, _one_disk, str(tmp_path)):
        assert outcome.kind == "CheckpointingException"
        assert "have the same disk" in outcome.message


def _two_ranks_a_node(base: str) -> list[tuple[int, int]]:
    root = Path(base, f"node{get_rank() // 2}")
    manager = LocalCheckpointManager(root, CliqueReplication(2, 2))
    for step in (1, 2):
        manager.save(make_part(step), step)
    if get_rank() == 0:
        shutil.rmtree(root)
    assert manager.find_latest() == 2
    check_part(manager.load(), 2)
    found = [PartId.parse(path.name) for path in root.iterdir()]
    return sorted((part.save.step, part.rank) for part in found if part is not None)


def test_ranks_of_a_node_share_its_disk(ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks a node with one directory: each node has all parts, and gets those of its ranks back."""
    found = ranks.run(4, _two_ranks_a_node, str(tmp_path))
    assert found == [[(2, 0), (2, 1)]] * 2 + [[(2, r) for r in range(4)]] * 2


def _wrong(base: str, case: str) -> Any:
    rank, root = get_rank(), get_root(base)
    whole, hollow = make_part(1), make_part(1)
    hollow.pop_tensors()
    cases: dict[str, Any] = {
        "keep": lambda: LocalCheckpointManager(root, keep=0),
        "group": lambda: LocalCheckpointManager(root, CliqueReplication(1, 2), _alone()),
        "url": lambda: LocalCheckpointManager("s3://bucket/checkpoints"),
        "steps": lambda: LocalCheckpointManager(root).save(make_part(1), 1 + rank),
        "negative": lambda: LocalCheckpointManager(root).save(make_part(1), -rank),
        "load": lambda: LocalCheckpointManager(root).load(rank),
        "hollow": lambda: LocalCheckpointManager(root).save(hollow if rank else whole, 1),
    }
    return cases[case]()


def _alone() -> Any:
    """A group of this rank."""
    return [dist.new_group([rank]) for rank in range(get_world_size())][get_rank()]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("keep", "keep=0: expected an integer of at least 1"),
        ("group", "pass both the same process_group"),
        ("url", "takes a directory of this machine"),
        ("steps", "ranks disagree on step: 1 on rank 0, 2 on rank 1"),
        ("negative", "step=-1: expected an integer"),
        ("load", "ranks disagree on step: 0 on rank 0, 1 on rank 1"),
        ("hollow", "the tensors are out"),
    ],
)
def test_arguments_are_checked(ranks: Ranks, tmp_path: Path, case: str, expected: str) -> None:
    """What cannot be is an error on all ranks that says why, though only one has given it."""
    outcomes: list[Failure] = ranks.outcomes(2, _wrong, str(tmp_path), case)
    assert [expected in outcome.message for outcome in outcomes] == [True, True]


def test_what_is_no_part_is_named(tmp_path: Path) -> None:
    """What from_state_dict gives is a part and more: save says which of both it takes."""
    with pytest.raises(CheckpointingException, match="pass the first of the two values"):
        LocalCheckpointManager(tmp_path).save(TensorAwareStateDict.from_state_dict({"step": 1}), 1)  # type: ignore[arg-type]
    with pytest.raises(CheckpointingException, match="pass the first of the two values"):
        save_local({}, tmp_path / "part")  # type: ignore[arg-type]
    with pytest.raises(CheckpointingException, match="replication=2: expected a CliqueReplication"):
        LocalCheckpointManager(tmp_path, 2)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
