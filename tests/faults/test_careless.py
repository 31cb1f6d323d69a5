"""A strategy that loses a shard, or leaves files without digests, fails the save on every rank, and by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.engine.integrity import verify_integrity_manifest
from shardckpt.errors import CheckpointingException, PluginError, ShardingError
from shardckpt.mapping import ShardedTensor
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.plugins.resolver import read_manifest
from shardckpt.storage.reader import CheckpointReader
from shardckpt.strategy import SaveStrategy
from tests import backends
from tests.faults import careless
from tests.faults.careless import (
    MISDEEDS,
    Careless,
    Delegates,
    Drops,
    DropsAgain,
    DropsWork,
    Plain,
    Silent,
    new_folder,
    one,
)
from tests.remote.store import Store
from tests.states import rank_and_size
from tests.tables import in_proof

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store(tmp_path / "store")


KEYS = ("split", "flat", "whole", "scalar", "empty", "float8", "object")


def _refusals(folder: str, makes: dict[str, Any], keys: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    return {
        f"{name} {key}": careless.refusal("foreground", f"{folder}/{name}-{key}", make, key)
        for name, make in makes.items()
        for key in keys
    }


def _all_in_the_foreground(folder: str) -> dict[str, tuple[str, str]]:
    makes = {
        "prepare": Drops,
        "work": DropsWork,
        "delegate": Delegates,
        "wrapped": careless.wrapped(Drops),
        "wrapped work": careless.wrapped(DropsWork),
        "plain": Plain,
    }
    return _refusals(folder, makes, KEYS)


@pytest.mark.parametrize(
    ("backend", "world"),
    [
        ("torch_dist", 1),
        pytest.param("torch_dist", 2, marks=pytest.mark.ci),
        *in_proof(("torch_dist", 3), *(("safetensors", world) for world in (1, 2, 3))),
    ],
    indirect=["backend"],
    scope="module",
)
def test_a_shard_that_is_not_stored_is_named(ranks: Ranks, tmp_path: Path, world: int) -> None:
    """A strategy that loses a shard on one rank, of any kind and in any way, fails the save, and leaves nothing."""
    outcomes = ranks.run(world, _all_in_the_foreground, str(tmp_path))
    for case in outcomes[0]:
        kind, message = one([outcome[case] for outcome in outcomes])
        _, key = case.rsplit(" ", 1)
        assert kind in ("PluginError", "ShardingError"), (case, message)  # the second where only part of it is there
        assert f"{key!r}" in message, (case, message)
        others = set(KEYS) - {key}
        assert not [other for other in others if f"{other!r}" in message], (case, message)


@backends.both_in_proof
@pytest.mark.parametrize("way", ["foreground", "thread"])
def test_a_plan_that_is_used_again_is_compared_again(ranks: Ranks, tmp_path: Path, way: str) -> None:
    """A save of the same shards that is neither validated nor planned again still misses what it did not write."""
    for number, key in enumerate(("whole", "object", "split")):
        folder = new_folder(tmp_path, number)
        kind, message = one(ranks.run(2, careless.refusal, way, folder, DropsAgain, key, 2))
        assert (kind, f"{key!r}" in message) == ("PluginError", True), message


@backends.both_in_proof
def test_the_region_and_the_rank_are_named(ranks: Ranks, tmp_path: Path) -> None:
    """Of a tensor that is stored in part the error says which box is missing, and who had it."""
    _, message = one(ranks.run(3, careless.refusal, "foreground", str(tmp_path), DropsWork, "split"))
    assert "tensor 'split': rank 2 was given [4:6, 0:3], which no rank has stored" in message
    assert "careless.DropsWork has not stored the given shards" in message


def test_a_strategy_that_says_nothing_is_told_how(ranks: Ranks, tmp_path: Path) -> None:
    """A strategy without a word on what it stored does not commit: the error has the call that it lacks."""
    kind, message = one(ranks.run(2, careless.refusal, "foreground", str(tmp_path), Silent, ""))
    assert kind == "PluginError"
    assert "careless.Silent has not recorded which of" in message
    assert "context.writer.record_shards(shards)" in message


@pytest.mark.parametrize("way", ["foreground", "thread"])
def test_a_strategy_that_writes_no_file_is_refused(ranks: Ranks, tmp_path: Path, way: str) -> None:
    """A strategy that says it stored all, and writes no file on any rank, fails the save, and is told how to write."""
    kind, message = one(ranks.run(2, careless.refusal, way, str(tmp_path), careless.Fileless, ""))
    assert kind == "PluginError"
    assert "careless.Fileless has written no file on any rank" in message
    assert "context.writer" in message


def test_an_empty_state_may_have_no_file(tmp_path: Path) -> None:
    """Of a state without anything there is nothing to write; a value of the common state must be in some file."""
    dc.save({}, tmp_path / "empty", careless.Fileless())
    with pytest.raises(PluginError, match="has written no file"):
        dc.save({"step": 1}, tmp_path / "c", careless.Fileless())


@pytest.mark.parametrize(
    "shards", [ShardedTensor.from_rank_offsets("w", torch.ones(4)), ["w"], "w"], ids=["one", "keys", "key"]
)
def test_what_is_recorded_are_shards(tmp_path: Path, shards: Any) -> None:
    """One shard, or keys, in the place of shards: the error names the strategy and says what to give."""
    with pytest.raises(PluginError, match=r"careless.Plain calls record_shards with .*: give .*ShardedTensors"):
        dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}, tmp_path / "c", Plain(more=shards))


def test_what_was_not_given_is_refused(tmp_path: Path) -> None:
    """A strategy that says it stored a tensor of another name, or of another shape, does not commit."""
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(4))
    other = ShardedTensor.from_rank_offsets("v", torch.ones(4))
    with pytest.raises(PluginError, match="tensor 'v': rank 0 has stored it, and no rank was given it"):
        dc.save({"w": shard}, tmp_path / "c", Plain(more=[other]))
    longer = ShardedTensor.from_rank_offsets("w", torch.ones(5))
    with pytest.raises(PluginError, match=r"tensor 'w': .* global shape \(4,\), and stored with \(5,\)"):
        dc.save({"w": shard}, tmp_path / "c", Plain("w", more=[longer]))
    assert not list(tmp_path.iterdir())


def _cut_otherwise(folder: str) -> None:
    rank, world = rank_and_size()
    part = ShardedTensor.from_rank_offsets("w", torch.ones(6, 4), (0, rank, world))
    whole = torch.ones(6 * world, 4)
    if rank == 0:  # one rank stores all, by columns, and the first of them twice and in another dtype
        more = [ShardedTensor.from_rank_offsets("w", whole[:, c : c + 1], (1, c, 4)) for c in range(4)]
        more.append(ShardedTensor.from_rank_offsets("w", whole[:, :1].half(), (1, 0, 4)))
    else:
        more = []
    dc.save({"w": part}, f"{folder}/c", Plain("", more) if world == 1 else _Regrouping(more))


class _Regrouping(Plain):
    """Stores on one rank what all have."""

    def __init__(self, stored: Any) -> None:
        super().__init__()
        self._stored = stored

    def save(self, shards: Any, common: Any, context: Any) -> None:
        context.writer.write(f"{context.comm.rank}", b"values")
        context.writer.record_shards(self._stored)


def test_how_shards_are_cut_is_the_strategys_business(ranks: Ranks, tmp_path: Path) -> None:
    """Another rank may store a shard, cut in another way, in another dtype, or twice: nothing is missing."""
    ranks.run(2, _cut_otherwise, str(tmp_path))
    assert (tmp_path / "c" / "metadata.json").is_file()


@backends.both_in_proof
def test_parts_are_missed_without_validation_too(tmp_path: Path) -> None:
    """With validate_access_integrity=False the shards are compared all the same."""
    with pytest.raises((PluginError, ShardingError), match="'whole'"):
        dc.save(careless.state(), tmp_path / "c", DropsWork("whole"), validate_access_integrity=False)
    assert not list(tmp_path.iterdir())


#: Those that need no other process.
_OWN = [misdeed for misdeed in MISDEEDS if misdeed != "process"]


def _misdeeds(folder: str, way: str, misdeeds: list[str]) -> dict[str, tuple[str, str]]:
    found = {}
    for misdeed in misdeeds:
        found[misdeed] = careless.refusal(way, f"{folder}/{misdeed}", Careless, misdeed)
        if way == "foreground":
            wrapped = careless.wrapped(Careless)
            found[f"wrapped {misdeed}"] = careless.refusal(way, f"{folder}/wrapped-{misdeed}", wrapped, misdeed)
    return found


@pytest.mark.parametrize(
    ("way", "world", "misdeeds"),
    [
        ("foreground", 1, _OWN),
        *in_proof(("foreground", 3, [*MISDEEDS]), ("thread", 2, [*MISDEEDS])),
        pytest.param("process", 2, ["unfinished", "open"], marks=pytest.mark.ci),
    ],
    ids=["alone", "foreground", "thread", "process"],
)
def test_files_without_digests_fail_the_save(
    ranks: Ranks, tmp_path: Path, way: str, world: int, misdeeds: list[str]
) -> None:
    """Unfinished files, and whatever else lies there without digests, are an error on all ranks that names them."""
    outcomes = ranks.run(world, _misdeeds, str(tmp_path), way, misdeeds)
    for misdeed in outcomes[0]:
        _, message = one([outcome[misdeed] for outcome in outcomes])
        assert MISDEEDS[misdeed.removeprefix("wrapped ")][1].format(rank=world - 1) in message, misdeed


def test_files_that_name_the_rest_are_looked_at_too(ranks: Ranks, tmp_path: Path) -> None:
    """A file that ``finish`` of a prepared save began and did not finish fails the save, too."""
    for number, way in enumerate(("foreground", "thread")):
        folder = new_folder(tmp_path, number)
        kind, message = one(ranks.run(2, careless.refusal, way, folder, careless.finishing, ""))
        assert (kind, "begun and not finished: 'names'" in message) == ("StorageError", True)


def test_files_without_digests_are_not_uploaded(ranks: Ranks, store: Store) -> None:
    """A save to a URL is refused as one to a directory is, and leaves no object."""
    for misdeed in _OWN:
        (message,) = set(ranks.run(2, careless.url_refusal, store.url, misdeed))
        assert MISDEEDS[misdeed][1].format(rank=1) in message, misdeed
        assert store.names() == set()


class _Twice(Plain):
    def save(self, shards: Any, common: Any, context: Any) -> None:
        super().save(shards, common, context)
        context.writer.write("same", str(context.comm.rank).encode())


def _write_twice(url: str) -> str:
    with pytest.raises(CheckpointingException) as raised:
        dc.save(careless.state(), url, _Twice())
    return str(raised.value)


def test_objects_of_two_ranks_with_one_name_are_refused(ranks: Ranks, store: Store) -> None:
    """On a store, where the second would silently replace the first, files of one name are an error of all ranks."""
    (message,) = set(ranks.run(2, _write_twice, store.url))
    assert "recorded twice: 'same' by rank 0, 'same' by rank 1" in message
    assert store.names() == set()


class _Library(SaveStrategy):
    """Uses a library that writes its files itself."""

    backend, version = "torch_dist", 1

    def save(self, shards: Any, common: Any, context: Any) -> None:
        name = f"tensors-{context.comm.rank}.pt"
        torch.save({shard.key: shard.data for shard in shards}, context.writer.directory / name)
        context.writer.adopt(name, keys=len(shards))
        context.writer.record_shards(shards)


def _by_a_library(folder: str) -> None:
    rank, world = rank_and_size()
    shard = ShardedTensor.from_rank_offsets("w", torch.rand(300_000), (0, rank, world))
    dc.save({"w": shard}, f"{folder}/c", _Library(), verify_integrity=True)


def test_files_of_a_library_are_adopted(ranks: Ranks, tmp_path: Path) -> None:
    """A file that something else has written is in the checkpoint when it is adopted, with digests that are checked."""
    ranks.run(2, _by_a_library, str(tmp_path))
    directory = tmp_path / "c"
    verify_integrity_manifest(directory)
    manifest = read_manifest(directory, get_plugin_manager())
    names = ["tensors-0.pt", "tensors-1.pt"]
    assert [file.name for file in manifest.record.files] == names  # type: ignore[union-attr]
    with CheckpointReader(directory, manifest, verify=True) as reader:
        assert [reader.read(name) for name in names] == [(directory / name).read_bytes() for name in names]
    content = bytearray((directory / names[1]).read_bytes())
    content[-1] ^= 1
    (directory / names[1]).write_bytes(content)
    with (
        pytest.raises(CheckpointingException, match=r"tensors-1\.pt"),
        CheckpointReader(directory, manifest, verify=True) as reader,
    ):
        reader.read(names[1])
