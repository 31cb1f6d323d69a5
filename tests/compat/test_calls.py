from __future__ import annotations

import json
import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import shardckpt_torch_dist
from shardckpt import dist_checkpointing as ours
from shardckpt.compat.megatron import dist_checkpointing as dc
from shardckpt.compat.megatron.dist_checkpointing import core, exchange_utils, serialization, utils, validation
from shardckpt.compat.megatron.dist_checkpointing.dict_utils import dict_map_with_key, inspect_types
from shardckpt.compat.megatron.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor
from shardckpt.compat.megatron.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from shardckpt.compat.megatron.dist_checkpointing.strategies import base, fully_parallel
from shardckpt.compat.megatron.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from shardckpt.compat.megatron.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    flatten_state_dict,
)
from shardckpt.errors import (
    CannotLoadError,
    CheckpointingException,
    CorruptCheckpointError,
    KeyMismatchError,
    PluginError,
    ShardingError,
    StrategyMismatchError,
    UnknownBackendError,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def _state(value: float, **common: Any) -> dict[str, Any]:
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.full((4,), value)),
        "o": ShardedObject("o", value, (1,), (0,)),
        **common,
    }


def _wanted() -> dict[str, Any]:
    return {key: leaf.without_data() for key, leaf in _state(0.0).items()}


def test_a_save_over_a_checkpoint_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As with Megatron an existing checkpoint may be saved over; here the new one replaces it, with a warning."""
    dc.save(_state(1.0, iteration=1), tmp_path / "c")
    (tmp_path / "c" / "tokenizer.json").write_text("kept")
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        dc.save({"v": ShardedTensor.from_rank_offsets("v", torch.ones(2)), "iteration": 2}, tmp_path / "c")
    assert "will replace the checkpoint there when it commits" in caplog.text
    assert set(dc.load_tensors_metadata(tmp_path / "c")) == {"v"}
    assert dc.load_common_state_dict(tmp_path / "c") == {"iteration": 2}
    assert (tmp_path / "c" / "tokenizer.json").read_text() == "kept"


def test_a_save_beside_other_files_says_that_they_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder that is not empty need not have a checkpoint: nothing is said of one that is replaced."""
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "tokenizer.json").write_text("kept")
    dc.save(_state(1.0), tmp_path / "c")
    assert "will be written next to other files, which belong to no checkpoint and stay" in caplog.text
    assert (tmp_path / "c" / "tokenizer.json").read_text() == "kept"


def test_positions_of_arguments_are_those_of_every_release(tmp_path: Path) -> None:
    """Until 0.18 the fourth argument was common_strategy, now it is validate_access_integrity: both are understood."""
    preprocess = dict
    dc.save(_state(1.0), tmp_path / "old", ("torch_dist", 1), None, True, False, preprocess, {"a": 1})
    dc.save(_state(2.0), tmp_path / "older", None, ("torch", 1), False)
    dc.save(_state(3.0), tmp_path / "new", None, True, False, preprocess, {"a": 3}, "nvrx", True)
    assert dc.load_content_metadata(tmp_path / "old") == {"a": 1}
    assert dc.load_content_metadata(tmp_path / "new") == {"a": 3}
    assert (tmp_path / "new" / "integrity.json").exists()
    assert dc.load(_wanted(), tmp_path / "old", None, None, True, "raise_all")["w"].tolist() == [1.0] * 4
    loaded = dc.load(_wanted(), tmp_path / "new", None, False, "return_all", True)
    assert (loaded[0]["o"], *loaded[1:]) == (3.0, set(), set())
    assert dc.load(_wanted(), tmp_path / "older", common_strategy=None, strict=True)["o"] == 2.0


def test_arguments_too_many_or_twice_are_refused(tmp_path: Path) -> None:
    """What Python refuses of a function with named arguments is refused here too."""
    for args, keywords in (((True,), {"validate_access_integrity": True}), ((True,) * 9, {})):
        with pytest.raises(TypeError, match="too many arguments, or one twice"):
            dc.save(_state(1.0), tmp_path / "c", None, *args, **keywords)
    with pytest.raises(TypeError, match="nonsense"):
        dc.load(_wanted(), tmp_path / "c", nonsense=1)
    with pytest.raises(CheckpointingException, match="common_strategy"):
        dc.save(_state(1.0), tmp_path / "c", common_strategy=("zarr", 1))
    assert not (tmp_path / "c").exists()


def _with_group(path: str) -> None:
    dc.save(
        _state(1.0) if dist.get_rank() == 0 else {}, path, content_metadata={"dp_cp_group": dist.group.WORLD, "a": 1}
    )
    assert dc.load_content_metadata(path) == {"a": 1}


def test_a_process_group_in_the_content_metadata_is_left_out(ranks: Ranks, tmp_path: Path) -> None:
    """Megatron carries a process group in its content metadata, which nothing can store."""
    ranks.run(2, _with_group, str(tmp_path / "c"))


def _by_path(path: str) -> None:
    rank = dist.get_rank()
    state = {
        "w": ShardedTensor.from_rank_offsets("w", torch.full((2,), float(rank)), (0, rank, dist.get_world_size())),
        "again": ShardedTensor.from_rank_offsets("again", torch.arange(3.0), replica_id=rank),
    }
    savers = (
        TorchDistSaveShardedStrategy("torch_dist", 1),
        fully_parallel.FullyParallelSaveStrategyWrapper(
            base.get_default_strategy(base.StrategyAction.SAVE_SHARDED, "torch_dist", 1), dist.group.WORLD
        ),
    )
    for saver in savers:
        saver.save({**state, "step": 5}, path)
        queue = AsyncCallsQueue()
        queue.schedule_async_request(saver.async_save({**state, "step": 5}, path))
        queue.close()
    loaders = (
        TorchDistLoadShardedStrategy(),
        serialization.get_default_load_sharded_strategy(path),
        fully_parallel.FullyParallelLoadStrategyWrapper(serialization.get_default_load_sharded_strategy()),
    )
    for loader in loaders:
        wanted = {key: leaf.without_data() for key, leaf in state.items()}
        loaded = loader.load({**wanted, "common": 3}, path)
        assert loaded["w"].tolist() == [rank] * 2
        assert loaded["again"].tolist() == [0, 1, 2]
        assert set(loaded) == set(wanted)
        assert loader.load_common(path) == {"step": 5}
        assert set(loader.load_tensors_metadata(path)) == set(loader.load_sharded_metadata(path)) == {"w", "again"}
        loader.check_backend_compatibility("torch_dist")
        loader.check_version_compatibility(1)


def test_content_metadata_of_any_kind_is_stored(tmp_path: Path) -> None:
    """What is no dict is stored as it is, as by our own save."""
    dc.save({"iteration": 1}, tmp_path / "c", content_metadata="v1")  # type: ignore[arg-type]
    assert dc.load_content_metadata(tmp_path / "c") == "v1"


def test_strategies_are_called_with_a_path(ranks: Ranks, tmp_path: Path) -> None:
    """Megatron's callers save and load with strategies themselves, in the foreground and behind the training."""
    ranks.run(2, _by_path, str(tmp_path / "c"))


def test_strategies_refuse_what_they_do_not_read() -> None:
    """The compatibility checks, which do nothing in Megatron, raise."""
    loader = TorchDistLoadShardedStrategy()
    with pytest.raises(StrategyMismatchError, match=r"'zarr'.*reads backend 'torch_dist'"):
        loader.check_backend_compatibility("zarr")
    with pytest.raises(StrategyMismatchError, match=r"version 2.*reads version 1"):
        loader.check_version_compatibility(2)


def test_keys_are_removed_by_path(tmp_path: Path) -> None:
    """A strategy takes the keys with a prefix out of a checkpoint."""
    dc.save(_state(1.0), tmp_path / "c", TorchDistSaveShardedStrategy("torch_dist", 1, separation_hint="w"))
    TorchDistLoadShardedStrategy().remove_sharded_tensors(tmp_path / "c", "w")
    assert set(serialization.load_sharded_metadata(tmp_path / "c")) == {"o/shard_0_1"}


class _Mine(shardckpt_torch_dist.TorchDistSaveShardedStrategy):
    pass


def test_a_users_strategy_is_never_undone(registry: Any) -> None:
    """What the user registers under a key is what the key means from then on, with the arguments it was made with."""
    mine = _Mine(thread_count=3)
    base.register_default_strategy(base.StrategyAction.SAVE_SHARDED, "torch_dist", 1, mine)
    for _ in range(2):
        found = base.get_default_strategy(base.StrategyAction.SAVE_SHARDED, "torch_dist", 1)
        assert isinstance(found, _Mine)
        assert found._files == 3
        assert hasattr(found, "async_save")
    assert serialization.get_default_save_sharded_strategy()._files == 3
    assert ours.get_default_save_sharded_strategy() is mine


def test_a_registered_instance_is_of_megatrons_class_too(registry: Any, tmp_path: Path) -> None:
    """An instance of the built-in strategy keeps its arguments and is an instance of the class that callers import."""
    own = shardckpt_torch_dist.TorchDistSaveShardedStrategy(thread_count=2)
    base.register_default_strategy(base.StrategyAction.SAVE_SHARDED, "torch_dist", 1, own)
    found = serialization.get_default_save_sharded_strategy("torch_dist", 1)
    assert isinstance(found, TorchDistSaveShardedStrategy)
    assert isinstance(found, base.AsyncSaveShardedStrategy)
    found.save(_state(1.0), tmp_path / "c")
    assert len(list((tmp_path / "c").glob("*.distcp"))) == 2


def test_unknown_strategies_are_named() -> None:
    """A backend that nothing has, and an action on common state alone, say what there is."""
    with pytest.raises(UnknownBackendError, match=r"no strategy loads \('tensorstore', 1\); installed: .*torch_dist 1"):
        base.get_default_strategy(base.StrategyAction.LOAD_SHARDED, "tensorstore", 1)
    with pytest.raises(CheckpointingException, match="load_common_state_dict"):
        base.get_default_strategy(base.StrategyAction.LOAD_COMMON, "torch", 1)


def test_methods_of_megatrons_kind_below_ours_are_refused() -> None:
    """A subclass of a strategy of ours that saves or loads by path is refused where it is defined, with the way out."""
    with pytest.raises(PluginError, match=r"save\(shards, common, context\)"):

        class Saver(TorchDistSaveShardedStrategy):
            def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
                """Write to a path."""

    with pytest.raises(
        PluginError, match=r"AsyncSaver.async_save takes a checkpoint_dir.*AsyncSaveShardedStrategy alone"
    ):

        class AsyncSaver(TorchDistSaveShardedStrategy):
            def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "mcore") -> Any:
                """Return a request."""

    with pytest.raises(PluginError, match=r"load\(wanted, context\)"):

        class Loader(TorchDistLoadShardedStrategy):
            def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
                """Read from a path."""


def test_options_without_a_counterpart_are_refused() -> None:
    """Shared memory by flag, and a stored distribution that nobody checks, are refused with what to use."""
    saver = TorchDistSaveShardedStrategy("torch_dist", 1, cpu_shm_mode=False)
    with pytest.raises(CheckpointingException, match="persistent=True"):
        TorchDistSaveShardedStrategy("torch_dist", 1, cpu_shm_mode=True)
    with pytest.raises(CheckpointingException, match="do_cache_distribution"):
        fully_parallel.FullyParallelSaveStrategyWrapper(saver, pg_cache_path="/tmp/cache")
    with pytest.raises(CheckpointingException, match="do_cache_distribution"):
        exchange_utils.determine_main_replica_uniform_distribution({}, pg_cache_create=True)


def test_the_strategies_of_a_checkpoint_are_checked(tmp_path: Path) -> None:
    """The strategy for a checkpoint, or a caller's own, is compared with what the checkpoint says."""
    dc.save(_state(1.0, iteration=4), tmp_path / "c")
    for given in (None, ("torch_dist", 1), TorchDistLoadShardedStrategy()):
        sharded, common = validation.verify_checkpoint_and_load_strategy(tmp_path / "c", given)
        assert isinstance(sharded, TorchDistLoadShardedStrategy)
        assert common.load_common(tmp_path / "c") == {"iteration": 4}
        loaded = dc.load(_wanted(), tmp_path / "c", sharded, common)
        assert loaded["o"] == 1.0
    validation.verify_checkpoint(tmp_path / "c")
    for verify in (validation.verify_checkpoint, validation.verify_checkpoint_and_load_strategy):
        with pytest.raises(CannotLoadError):
            verify(tmp_path)


def test_metadata_json_has_no_field_of_ours(tmp_path: Path) -> None:
    """Megatron makes its config of all fields of the file, and takes no other than its own."""
    config = core.CheckpointingConfig("torch_dist", 1)
    core.save_config(config, tmp_path)
    assert json.loads((tmp_path / "metadata.json").read_text()) == asdict(config)


def test_metadata_json_is_read_and_written(tmp_path: Path) -> None:
    """The config has four fields, unknown ones are dropped, a damaged file is an error, and writing is by rename."""
    assert core.maybe_load_config(tmp_path) is None
    config = core.CheckpointingConfig("torch_dist", 1)
    core.save_config(config, tmp_path)
    assert core.maybe_load_config(tmp_path) == config
    core.save_config(core.CheckpointingConfig("npy", 2), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metadata.json"]
    text = {"sharded_backend": "npy", "sharded_backend_version": 2, "later": True}
    (tmp_path / "metadata.json").write_text(json.dumps(text))
    assert core.maybe_load_config(tmp_path) == core.CheckpointingConfig("npy", 2)
    (tmp_path / "metadata.json").write_text("{")
    with pytest.raises(CorruptCheckpointError):
        core.maybe_load_config(tmp_path)


def _validate() -> list[str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    good = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, rank, world)), "x": 1}
    mine, everyone = validation.determine_global_metadata(good)
    assert [shard.data for shard in mine] == [None]
    assert [len(shards) for shards in everyone] == [1] * world
    validation.validate_sharding_integrity(everyone, {"step": 1})
    stored = {key: good["w"].without_data() for key in ("w",)}
    wanted = {"w": good["w"], "more": [ShardedObject("new", None, (world,), (rank,))]}
    kept, missing, unexpected = validation.validate_integrity_and_strict_load(
        wanted, validation.StrictHandling.RETURN_ALL, True, global_metadata=everyone, ckpt_sharded_metadata=stored
    )
    assert (set(kept), missing) == ({"w"}, set())
    bad = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 0, world))}
    try:
        validation.validate_sharding_integrity(validation.determine_global_metadata(bad)[1])
    except ShardingError as error:
        return [*unexpected, str(error)]
    return []


def test_shards_of_all_ranks_are_checked(ranks: Ranks) -> None:
    """Megatron's validation functions check the shards of all ranks, and raise the same error on every one."""
    first, second = ranks.run(2, _validate)
    assert (first[0], second[0]) == ("new", "new")
    assert first[1] == second[1]
    assert "described as the main replica twice" in first[1]


def test_keys_are_left_out_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Shards are left out by their keys, and mismatches are raised or logged in both libraries' words."""
    state = {"a": [_state(1.0)], "b": LocalNonpersistentObject(3)}
    kept = validation.adjust_non_strict_load(state, {"w", "o/shard_0_1"})
    assert kept == {"b": state["b"]}
    assert set(state["a"][0]) == {"w", "o"}
    validation.maybe_report_missing_and_unexpected_keys(set(), set())
    with pytest.raises(
        KeyMismatchError,
        match=r"^In the checkpoint, not in .*\(Megatron: Missing keys; torch: unexpected keys\): gone$",
    ):
        validation.maybe_report_missing_and_unexpected_keys({"gone"}, set())
    with caplog.at_level(logging.WARNING):
        validation.maybe_report_missing_and_unexpected_keys(set(), {"new"}, raise_error=False)
    assert (
        "In the state dict, not in the checkpoint (Megatron: Unexpected keys; torch: missing keys): new" in caplog.text
    )


def test_errors_have_megatrons_terms(tmp_path: Path) -> None:
    """What Megatron's callers and tests look for in a message is there, with its capitals."""
    with pytest.raises(CheckpointingException, match=rf"directory {tmp_path}/absent does not exist"):
        dc.load(_wanted(), tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    for name in ("empty", "other"):
        with pytest.raises(CheckpointingException, match=rf"{name} is not a distributed checkpoint"):
            dc.load(_wanted(), tmp_path / name)
    dc.save(_state(1.0), tmp_path / "c")
    with pytest.raises(CheckpointingException, match="Global shape mismatch"):
        dc.load({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(5))}, tmp_path / "c")
    for shards in ([ShardedObject("o", 1, (2,), (0,))], [_state(1.0)["w"]] * 2):
        with pytest.raises(CheckpointingException, match="Invalid access pattern"):
            dc.save({"shards": shards}, tmp_path / "d")


def test_a_filter_by_suffix_finds_objects(tmp_path: Path) -> None:
    """Megatron's trainer leaves ``_extra_state`` out of what it reports: keys come back without the shard's place."""

    def state(*keys: str) -> dict[str, Any]:
        return {key: ShardedObject(f"{key}._extra_state", 1, (1,), (0,)) for key in keys} | {"w": _state(1.0)["w"]}

    dc.save(state("a", "b"), tmp_path / "c")
    for validate in (True, False):
        loaded, missing, unexpected = dc.load(
            state("a", "x"), tmp_path / "c", validate_access_integrity=validate, strict="return_all"
        )
        assert (missing, unexpected) == ({"b._extra_state"}, {"x._extra_state"})
        assert set(loaded) == {"a", "w"}
        assert not [key for key in missing | unexpected if not key.endswith("_extra_state")]
        with pytest.raises(CheckpointingException, match=r"Unexpected keys(.|\n)*Missing keys"):
            dc.load(state("a", "x"), tmp_path / "c", validate_access_integrity=validate, strict="raise_all")


def test_a_shard_of_an_object_that_nobody_wants_is_missing(tmp_path: Path) -> None:
    """Without validation, ``raise_all`` sees that one of two shards is not wanted, or was never saved."""
    shards = [ShardedObject("o", cell, (2,), (cell,)) for cell in range(2)]
    dc.save({"o": shards}, tmp_path / "whole")
    dc.save({"o": shards[:1]}, tmp_path / "half", validate_access_integrity=False)
    for name in ("whole", "half"):
        with pytest.raises(KeyMismatchError, match=r"o/shard_1_2|1 of its 2 shards"):
            dc.load({"o": shards[:1]}, tmp_path / name, validate_access_integrity=False, strict="raise_all")


def test_state_dicts_are_split_without_change() -> None:
    """Preprocessing for a save and for a load returns the parts, and leaves the caller's state dict as it is."""
    empty = ShardedTensor("flat", torch.empty(0), torch.float32, (4,), (4,), (0,), None, flattened_range=slice(2, 2))
    state = {**_state(1.0), "flat": empty, "local": [LocalNonpersistentObject(3)], "step": 2}
    sharded, common = save_preprocess({**state, "flat": _state(1.0)["w"]}, validate_access_integrity=False)
    assert (set(sharded), common) == ({"w", "o", "flat"}, {"step": 2})
    wanted, local, factories = load_preprocess(state)
    assert set(wanted) == {"w", "o", "step"}
    assert (local, factories) == ({"local": [3]}, {})
    assert set(state) == {"w", "o", "flat", "local", "step"}
    assert wanted["w"] is not state["w"]


def test_blocks_have_names_and_times(caplog: pytest.LogCaptureFixture) -> None:
    """Logging blocks nest, and are left as they were entered, through errors too."""
    with caplog.at_level(logging.DEBUG), utils.logger_stack("outer", logging.getLogger("here")):
        with pytest.raises(KeyError), utils.debug_time("inner"):
            raise KeyError
        utils.debug_msg("message")
        with utils.debug_time("never", threshold=1e9):
            pass
    assert [(record.name, record.getMessage().split(" took")[0]) for record in caplog.records] == [
        ("here", "outer.inner"),
        ("here", "outer message"),
    ]
    with utils.logger_stack() as (name, logger):
        assert (name, logger) == ("", utils.fallback_logger)


def test_nested_dicts_are_printed_and_mapped(capsys: pytest.CaptureFixture[str]) -> None:
    """The helpers of older releases: a map with keys, the types of nested dicts, and a flat dict with the paths."""
    nested: dict[str, Any] = {"a": [1, {"b": 2}], "c": torch.ones(2, 3)}
    flat, paths = flatten_state_dict(nested)
    assert (set(flat), paths["a.1.b"]) == ({"a.0", "a.1.b", "c"}, ("a", 1, "b"))
    inspect_types(nested)
    assert "Tensor of shape (2, 3)" in capsys.readouterr().out
    del nested["c"]
    dict_map_with_key(lambda key, value: (key, value), nested)
    assert nested == {"a": [(0, 1), {"b": ("b", 2)}]}
    with pytest.raises(ValueError, match="shorter"):
        list(utils.zip_strict([1], []))


def test_grid_cells_have_their_place() -> None:
    """What indexes a shard in its global tensor, and the extent of a cell, as before 0.16."""
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(2, 3), (0, 4, 5), (2, 1, 2), prepend_axis_num=1)
    assert shard.global_slice() == (4, slice(0, 2), slice(3, 6))
    assert shard.max_allowed_chunks() == (1, 2, 3)
    box = ShardedTensor("w", None, torch.float32, (2,), (5,), (3,), None)
    with pytest.raises(ShardingError, match="irregular"):
        box.max_allowed_chunks()
