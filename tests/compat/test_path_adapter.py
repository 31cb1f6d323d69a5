from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as ours
from shardckpt.archive import encode_object
from shardckpt.compat.megatron import dist_checkpointing as dc
from shardckpt.compat.megatron.dist_checkpointing import serialization, validation
from shardckpt.compat.megatron.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from shardckpt.compat.megatron.dist_checkpointing.strategies import base, fully_parallel
from shardckpt.compat.megatron.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from shardckpt.compat.megatron.path_adapter import adapt_loader
from shardckpt.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    KeyMismatchError,
    PluginError,
    StorageError,
    StrategyMismatchError,
    UnknownBackendError,
    UnsafePickleError,
    VersionTooNewError,
)
from shardckpt.plugins import StrategyRegistry
from tests.damage import flip
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


class _Save(base.SaveShardedStrategy):
    """A file a tensor; a subclass or a test may do more."""

    def __init__(self, version: int = 1) -> None:
        super().__init__("files", version)

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        for shard in sharded_state_dict.values():
            if is_main_replica(shard.replica_id):
                torch.save(shard.data, checkpoint_dir / f"{shard.key}.pt")


class _Load(base.LoadShardedStrategy):
    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        return {name: torch.load(checkpoint_dir / f"{shard.key}.pt") for name, shard in sharded_state_dict.items()}

    def load_tensors_metadata(self, checkpoint_dir: Any) -> Any:
        raise NotImplementedError


class _TakesObjects(_Save):
    can_handle_sharded_objects = True  # type: ignore[assignment]


class _LoadsObjects(_Load):
    can_handle_sharded_objects = True  # type: ignore[assignment]


def _tensor(value: float = 1.0) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("w", torch.full((4,), value))


def _wanted() -> dict[str, Any]:
    return {"w": _tensor().without_data()}


def _register(load: Any = None, save: Any = None) -> None:
    base.register_default_strategy(base.StrategyAction.SAVE_SHARDED, "files", 1, save or _Save())
    base.register_default_strategy(base.StrategyAction.LOAD_SHARDED, "files", 1, load or _Load())


def test_the_gate_names_the_users_class(tmp_path: Path) -> None:
    """A version that the registered strategy does not read is said with that strategy, not with what holds it."""
    _register()
    dc.save({"w": _tensor()}, tmp_path / "c", _Save(2))
    with pytest.raises(VersionTooNewError, match=r"\(_Load\) reads version 1"):
        dc.load(_wanted(), tmp_path / "c")


@table("odd", ['{"tensors": {}, "tensors": {}}', '{"tensors": {"w": {"shape": ["2"], "dtype": "x"}}}'])
def test_an_index_is_parsed_strictly(tmp_path: Path, odd: str) -> None:
    """What says a key twice, or a text for a size, is damage, also where no digest says so."""
    dc.save({"w": _tensor(), "step": 3}, tmp_path / "c", _Save())
    (tmp_path / "c" / "shardckpt.json").unlink()
    (tmp_path / "c" / "shardckpt_index.json").write_text(odd)
    with pytest.raises(CorruptCheckpointError, match=r"shardckpt_index\.json is damaged"):
        serialization.load_sharded_metadata(tmp_path / "c", _Load())


def test_what_it_wrote_is_recorded_and_checked(tmp_path: Path) -> None:
    """Every file, in folders too, is recorded, replaced by the next save, and compared before the strategy reads it."""

    class Unused(_Load):
        def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
            raise AssertionError("it was called")

    class Deep(_Save):
        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            super().save(sharded_state_dict, checkpoint_dir)
            for number in range(int(sharded_state_dict["w"].data[0])):
                folder = checkpoint_dir / "zarr" / "w" / str(number)
                folder.mkdir(parents=True)
                (folder / "chunk").write_bytes(b"x" * number)

    for value in (3.0, 2.0):
        dc.save({"w": _tensor(value)}, tmp_path / "c", Deep())
    record = json.loads((tmp_path / "c" / "shardckpt.json").read_text())
    sizes = {file["name"]: file["size"] for file in record["files"]}
    assert set(sizes) == {"w.pt", "common.pt", "shardckpt_index.json", "zarr/w/0/chunk", "zarr/w/1/chunk"}
    assert sizes == {name: (tmp_path / "c" / name).stat().st_size for name in sizes}
    assert json.loads((tmp_path / "c" / "metadata.json").read_text())["sharded_backend"] == "files"
    assert not (tmp_path / "c" / "zarr" / "w" / "2").exists()
    assert dc.load(_wanted(), tmp_path / "c", _Load())["w"].tolist() == [2.0] * 4
    for name in ("zarr/w/1/chunk", "w.pt"):
        flip(tmp_path / "c" / name)
        with pytest.raises(CorruptCheckpointError, match=name):
            dc.load(_wanted(), tmp_path / "c", Unused())


def test_the_gate_finds_it_by_metadata_json(tmp_path: Path) -> None:
    """A load without a strategy takes the one that is registered for the checkpoint's format, or names what lacks."""
    _register()
    dc.save({"w": _tensor(2.0), "step": 3}, tmp_path / "c", ("files", 1))
    for load in (dc.load, ours.load):
        loaded = load(_wanted(), tmp_path / "c")
        assert (loaded["w"].tolist(), loaded["step"]) == ([2.0] * 4, 3)
    dc.save({"w": _tensor()}, tmp_path / "newer", _Save(2))
    with pytest.raises(VersionTooNewError, match="'files' checkpoint of version 2"):
        dc.load(_wanted(), tmp_path / "newer")


def test_an_unregistered_strategy_is_named(tmp_path: Path) -> None:
    """Without a registered strategy the load says which backend it lacks; passed as sharded_strategy it loads."""
    dc.save({"w": _tensor(2.0), "step": 3}, tmp_path / "c", _Save())
    with pytest.raises(UnknownBackendError, match="'files'"):
        dc.load(_wanted(), tmp_path / "c")
    loader = _Load()
    assert dc.load(_wanted(), tmp_path / "c", loader)["w"].tolist() == [2.0] * 4
    assert set(dc.load_tensors_metadata(tmp_path / "c", loader)) == {"w"}
    assert serialization.load_sharded_metadata(tmp_path / "c", loader)["w"].global_shape == (4,)
    assert validation.verify_checkpoint_and_load_strategy(tmp_path / "c", loader) == (loader, loader)


def test_a_registered_strategy_is_the_users_own(tmp_path: Path) -> None:
    """What was registered is found again, itself; it also loads the common state by path."""
    saver, loader = _Save(), _Load()
    _register(loader, saver)
    assert base.get_default_strategy(base.StrategyAction.SAVE_SHARDED, "files", 1) is saver
    assert base.get_default_strategy(base.StrategyAction.LOAD_SHARDED, "files", 1) is loader
    dc.save({"w": _tensor(), "step": 3}, tmp_path / "c", saver)
    found = serialization.get_default_load_sharded_strategy(tmp_path / "c")
    assert found is loader
    assert found.load_common(tmp_path / "c") == {"step": 3}
    assert dc.load(_wanted(), tmp_path / "c", found, found)["step"] == 3


def test_its_own_checks_are_asked(tmp_path: Path) -> None:
    """What check_backend_compatibility or check_version_compatibility raises is the reason of the refusal."""

    class Picky(_Load):
        def check_version_compatibility(self, loaded_version: int) -> None:
            raise ValueError(f"no {loaded_version} for me")

    dc.save({"w": _tensor()}, tmp_path / "c", _Save())
    with pytest.raises(StrategyMismatchError, match=r"Picky.*ValueError: no 1 for me"):
        dc.load(_wanted(), tmp_path / "c", Picky())


def test_objects_it_does_not_take_are_stored_beside(tmp_path: Path) -> None:
    """ShardedObjects are stored and loaded, by allow-listed pickles, where the strategy does not handle them."""
    objects = [ShardedObject("rng", {"seed": n}, (2,), (n,)) for n in range(2)]
    dc.save({"w": _tensor(), "o": objects}, tmp_path / "c", _Save())
    assert (tmp_path / "c" / "objects_0.pt").exists()
    wanted = {**_wanted(), "o": [one.without_data() for one in reversed(objects)]}
    loaded = dc.load(wanted, tmp_path / "c", _Load())
    assert loaded["o"] == [{"seed": 1}, {"seed": 0}]
    found = serialization.load_sharded_metadata(tmp_path / "c", _Load())
    assert set(found) == {"w", "rng/shard_0_2", "rng/shard_1_2"}
    with pytest.raises(UnsafePickleError, match="objects"):
        dc.save({"o": ShardedObject("o", _Save(), (1,), (0,))}, tmp_path / "d", _Save())
    assert not (tmp_path / "d").exists()


def test_objects_that_it_takes_are_its_own(tmp_path: Path) -> None:
    """A strategy that handles objects gets them with the tensors."""
    dc.save({"w": _tensor(), "o": ShardedObject("o", 7, (1,), (0,))}, tmp_path / "c", _TakesObjects())
    assert not (tmp_path / "c" / "objects_0.pt").exists()
    wanted = {**_wanted(), "o": ShardedObject("o", None, (1,), (0,))}
    assert dc.load(wanted, tmp_path / "c", _LoadsObjects())["o"] == 7


def test_a_shape_of_numpys_integers_is_indexed(tmp_path: Path) -> None:
    """Ranks and numbers of fragments may be numpy's, as for our own strategies."""
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(4), (0, np.int64(0), np.int64(1)))
    dc.save({"w": shard}, tmp_path / "c", _Save())
    assert dc.load(_wanted(), tmp_path / "c", _Load())["w"].tolist() == [1.0] * 4


def test_the_callers_shards_stay_as_they_are(tmp_path: Path) -> None:
    """A strategy may change the descriptions that it gets: they are copies."""

    class Careless(_Save):
        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            super().save(sharded_state_dict, checkpoint_dir)
            for shard in sharded_state_dict.values():
                shard.key, shard.data = "gone", None

    state = {"w": _tensor()}
    dc.save(state, tmp_path / "c", Careless())
    assert state["w"].key == "w"
    assert state["w"].data.tolist() == [1.0] * 4


class _FailsOnOne(_Save):
    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        super().save(sharded_state_dict, checkpoint_dir)
        if dist.get_rank() == 1:
            raise ValueError("the disk of rank 1")


def _fail(path: str) -> str:
    rank = dist.get_rank()
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, rank, 2))}
    with pytest.raises(CheckpointingException, match="the disk of rank 1") as caught:
        dc.save(state, path, _FailsOnOne())
    return str(caught.value)


def test_a_failed_save_leaves_nothing(ranks: Ranks, tmp_path: Path) -> None:
    """A strategy that raises on one rank fails the save on all, with the same text, and no file stays."""
    first, second = ranks.run(2, _fail, str(tmp_path / "c"))
    assert first == second
    assert not list(tmp_path.iterdir())


class _Forgets(_Save):
    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Write nothing."""


def _forget(path: str) -> str:
    # the main rank is given nothing: the other one's shard is lost all the same
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(2))
    with pytest.raises(PluginError, match=r"_Forgets has written no file") as caught:
        dc.save({"w": shard} if dist.get_rank() else {}, path, _Forgets())
    return str(caught.value)


def test_a_save_without_files_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """A strategy that writes no file fails a save with shards, on all ranks; with a common state alone it need not."""
    first, second = ranks.run(2, _forget, str(tmp_path / "c"))
    assert first == second
    assert not list(tmp_path.iterdir())
    dc.save({"step": 3}, tmp_path / "c", _Forgets())
    assert dc.load({}, tmp_path / "c", _Load()) == {"step": 3}


def test_a_load_during_an_overwrite_starts_over(tmp_path: Path) -> None:
    """If another save replaces the checkpoint while the strategy reads, it reads again: all is of one save."""
    calls = []

    class Overtaken(_Load):
        def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
            if not calls:
                dc.save({"w": _tensor(2.0), "step": 2}, tmp_path / "c", _Save())
            calls.append(1)
            return super().load(sharded_state_dict, checkpoint_dir)

    dc.save({"w": _tensor(1.0), "step": 1}, tmp_path / "c", _Save())
    loaded = dc.load(_wanted(), tmp_path / "c", Overtaken())
    assert (loaded["w"].tolist(), loaded["step"], len(calls)) == ([2.0] * 4, 2, 2)


@table("what", ["folder", "link", "linked folder", "name", "name in a folder"])
def test_what_a_checkpoint_cannot_have_is_named(tmp_path: Path, what: str) -> None:
    """Empty folders, links and file names with other characters fail the save by name and class; nothing is left."""

    class Odd(_Save):
        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            if what == "folder":
                (checkpoint_dir / "odd" / "inner").mkdir(parents=True)
            elif what == "link":
                (checkpoint_dir / "odd").symlink_to(os.devnull)
            elif what == "linked folder":
                (checkpoint_dir / "odd").symlink_to(tmp_path)
            elif what == "name":
                (checkpoint_dir / "odd@1").write_text("")
            else:
                (checkpoint_dir / "odd").mkdir()
                (checkpoint_dir / "odd" / "a b").write_text("")

    with pytest.raises(PluginError, match=r"\('files', 1\) tests.compat.test_path_adapter.*Odd wrote .*'odd"):
        dc.save({"w": _tensor()}, tmp_path / "c", Odd())
    assert not list(tmp_path.iterdir())


@table("content", [{}, {"other": 1}, [3]])
def test_an_object_that_its_file_lacks_is_damage(tmp_path: Path, content: Any) -> None:
    """Where no digest tells it, the error names the file and the object that the index has there."""
    dc.save({"w": _tensor(), "o": ShardedObject("o", 7, (1,), (0,))}, tmp_path / "c", _Save())
    (tmp_path / "c" / "shardckpt.json").unlink()
    (tmp_path / "c" / "objects_0.pt").write_bytes(encode_object(content, "content", ()))
    with pytest.raises(CorruptCheckpointError, match=r"objects_0\.pt lacks 'o/shard_0_1', which shardckpt_index\.json"):
        dc.load({**_wanted(), "o": ShardedObject("o", None, (1,), (0,))}, tmp_path / "c", _Load())


@table("name", ["common.pt", "shardckpt_index.json", "objects_0.pt"])
def test_a_file_with_the_name_of_another_is_named(tmp_path: Path, name: str) -> None:
    """What is stored beside the strategy's files has names that it cannot give: the error says so, and which."""

    class Odd(_Save):
        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            (checkpoint_dir / name).write_text("")

    state = {"w": _tensor(), "o": ShardedObject("rng", 1, (1,), (0,))}
    with pytest.raises(PluginError, match=rf"Odd wrote {name}, where .*: give the file another name"):
        dc.save(state, tmp_path / "c", Odd())
    assert not list(tmp_path.iterdir())


def test_a_background_save_without_a_request_is_a_plugin_error(tmp_path: Path) -> None:
    """The error says what async_save returned."""

    class Empty(_AsyncSave):
        def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
            """Return nothing."""

    with pytest.raises(PluginError, match=r"Empty\.async_save returned None, no AsyncRequest"):
        dc.save({"w": _tensor()}, tmp_path / "c", Empty("files", 1), async_sharded_save=True)
    assert not list(tmp_path.iterdir())


@table(("returned", "error"), [(None, "a dict"), ({}, "'w'"), ({"w": torch.ones(3)}, "shape")])
def test_a_wrong_result_is_a_plugin_error(tmp_path: Path, returned: Any, error: str) -> None:
    """A load that does not return what was asked for, or tensors of other shapes, is an error that names it."""

    class Wrong(_Load):
        def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
            return returned

    dc.save({"w": _tensor()}, tmp_path / "c", _Save())
    with pytest.raises(PluginError, match=error):
        dc.load(_wanted(), tmp_path / "c", Wrong())


def test_keys_are_compared_without_the_strategys_help(tmp_path: Path) -> None:
    """Keys and shapes are known from the index, even where the strategy cannot list what it stored."""
    dc.save({"w": _tensor()}, tmp_path / "c", _Save())
    other = {"v": ShardedTensor.from_rank_offsets("v", torch.ones(4))}
    with pytest.raises(KeyMismatchError):
        dc.load(other, tmp_path / "c", _Load())
    _, missing, unexpected = dc.load(other, tmp_path / "c", _Load(), strict="return_all")
    assert (missing, unexpected) == ({"w"}, {"v"})


def _in_parallel(path: str) -> tuple[list[str], list[str]]:
    calls: tuple[list[str], list[str]] = ([], [])

    class Save(_Save):
        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            calls[0].extend(name for name, one in sharded_state_dict.items() if is_main_replica(one.replica_id))
            super().save(sharded_state_dict, checkpoint_dir)

    class Load(_Load):
        def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
            calls[1].extend(sharded_state_dict)
            return super().load(sharded_state_dict, checkpoint_dir)

    shards = {
        key: ShardedTensor.from_rank_offsets(key, torch.full((4,), number), replica_id=dist.get_rank())
        for number, key in enumerate("ab")
    }
    fully_parallel.FullyParallelSaveStrategyWrapper(Save()).save(shards, path)
    wrapper = fully_parallel.FullyParallelLoadStrategyWrapper(Load())
    loaded = dc.load({key: shard.without_data() for key, shard in shards.items()}, path, wrapper)
    assert [value.tolist() for value in loaded.values()] == [[0] * 4, [1] * 4]
    return calls


def test_it_is_wrapped_for_parallel_saves_and_loads(ranks: Ranks, tmp_path: Path) -> None:
    """Below the fully parallel wrappers each rank writes and reads its part of what all ranks have."""
    results = ranks.run(2, _in_parallel, str(tmp_path / "c"))
    for part in zip(*results, strict=True):
        assert [len(names) for names in part] == [1, 1]
        assert sorted(part[0] + part[1]) == ["a", "b"]


def _write_file(path: Path, tensor: torch.Tensor) -> None:
    if bool(tensor.isnan().any()):
        raise ValueError("not a number")
    torch.save(tensor, path)


class _AsyncSave(base.AsyncSaveShardedStrategy):
    """Each rank writes one of the tensors, which ``preload_fn`` gives; the others have no finalize function."""

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        key = "ab"[dist.get_rank()]

        def preload() -> torch.Tensor:
            return sharded_state_dict[key].data  # type: ignore[no-any-return]

        def finalize() -> None:
            (checkpoint_dir / "finalized").write_text(key)

        return AsyncRequest(
            _write_file, (checkpoint_dir / f"{key}.pt", None), [finalize] if key == "a" else [], preload_fn=preload
        )


class _FieldsAlone(_AsyncSave):
    """Returns another library's request, with the three fields that all have, and others that are given."""

    def __init__(self, **more: Any) -> None:
        super().__init__("files", 1)
        self.more = more

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        def write(folder: Path) -> None:
            torch.save(sharded_state_dict["w"].data, folder / "w.pt")

        return SimpleNamespace(async_fn=write, async_fn_args=[checkpoint_dir], finalize_fns=[], **self.more)


def test_a_request_needs_no_more_than_the_fields_of_every_library(tmp_path: Path) -> None:
    """A request without ``preload_fn`` is written; one whose ``preload_fn`` has no place to go is an error."""
    dc.save({"w": _tensor()}, tmp_path / "c", _FieldsAlone())
    assert (tmp_path / "c" / "w.pt").is_file()
    with pytest.raises(CheckpointingException, match="with a preload_fn needs a second argument"):
        dc.save({"w": _tensor()}, tmp_path / "d", _FieldsAlone(preload_fn=list))


def _shards(value: float) -> dict[str, ShardedTensor]:
    return {
        key: ShardedTensor.from_rank_offsets(key, torch.full((4,), value), replica_id=dist.get_rank() ^ number)
        for number, key in enumerate("ab")
    }


def _behind(path: str, persistent: bool) -> None:
    queue, shards = AsyncCallsQueue(persistent=persistent), _shards(3.0)
    queue.schedule_async_request(dc.save(shards, path, _AsyncSave("files", 1), async_sharded_save=True))
    for shard in shards.values():
        shard.data.fill_(-1.0)
    queue.close()
    loaded = dc.load({key: shard.without_data() for key, shard in shards.items()}, path, _Load())
    assert [value.tolist() for value in loaded.values()] == [[3.0] * 4] * 2
    dc.save(_shards(4.0), path, _AsyncSave("files", 1))
    loaded = dc.load({key: shard.without_data() for key, shard in shards.items()}, path, _Load())
    assert [value.tolist() for value in loaded.values()] == [[4.0] * 4] * 2


@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.ci)])
def test_it_saves_behind_the_training(ranks: Ranks, tmp_path: Path, persistent: bool) -> None:
    """By a thread or the worker process, what is saved is the state of the plan; the same strategy saves in front."""
    ranks.run(2, _behind, str(tmp_path / "c"), persistent)
    assert (tmp_path / "c" / "finalized").read_text() == "a"
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def _fail_behind(path: str) -> str:
    queue, shards = AsyncCallsQueue(), _shards(1.0)
    shards["b"].data.fill_(float("nan"))
    queue.schedule_async_request(dc.save(shards, path, _AsyncSave("files", 1), async_sharded_save=True))
    with pytest.raises(CheckpointingException, match="not a number") as caught:
        queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    return str(caught.value)


def test_a_failed_background_save_leaves_nothing(ranks: Ranks, tmp_path: Path) -> None:
    """What one rank's async_fn raises, all ranks raise, and no file stays."""
    first, second = ranks.run(2, _fail_behind, str(tmp_path / "c"))
    assert first == second
    assert not list(tmp_path.iterdir())


def test_what_a_strategy_cannot_be_or_do_is_refused(tmp_path: Path) -> None:
    """A class, one without a backend, a URL, a background save without async_save: errors that say what to do."""

    class Nameless(_Save):
        def __init__(self) -> None:
            """Forget the base."""

    with pytest.raises(PluginError, match="_Save is a class: give an instance"):
        base.register_default_strategy(base.StrategyAction.SAVE_SHARDED, "files", 1, _Save)
    with pytest.raises(PluginError, match="_Load is a class: give an instance"):
        dc.load(_wanted(), tmp_path, _Load)
    with pytest.raises(PluginError, match=r"super\(\).__init__\(backend, version\)"):
        dc.save({"w": _tensor()}, tmp_path / "c", Nameless())
    with pytest.raises(StorageError, match="save to a directory, not to a URL"):
        dc.save({"w": _tensor()}, "memory://bucket/c", _Save())
    with pytest.raises(CheckpointingException, match="in the foreground only"):
        dc.save({"w": _tensor()}, tmp_path / "c", _Save(), async_sharded_save=True)


@table("register", [base.register_default_strategy, ours.register_default_strategy])
def test_an_action_by_its_text_is_refused(register: Any) -> None:
    """An action that is a string says which members of the enumeration there are."""
    with pytest.raises(CheckpointingException, match="'save_sharded': pass LOAD_SHARDED or SAVE_SHARDED of"):
        register("save_sharded", "files", 1, _Save())


def test_a_list_of_strategies_names_the_class_that_is_adapted() -> None:
    """Not the adapter alone, which is the same for all strategies of Megatron's kind."""

    class MyLoad:
        def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
            return sharded_state_dict

    registry = StrategyRegistry()
    registry.add(adapt_loader(MyLoad(), "mine", 1))
    (entry,) = registry.entries()
    assert "MyLoad reads from a path" in entry.summary
