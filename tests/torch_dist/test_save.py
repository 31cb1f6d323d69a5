from __future__ import annotations

import pickle
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import CheckpointingException
from shardckpt.manifest import Record
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.storage.direct import bypasses_cache
from shardckpt.storage.new_file import NewFile
from shardckpt_torch_dist import TorchDistSaveShardedStrategy
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def _files(path: Path) -> dict[str, int]:
    record = Record.model_validate_json((path / "shardckpt.json").read_text())
    return {file.name: file.size for file in record.files if file.name.endswith(".distcp")}


def _state(count: int = 12, shape: tuple[int, ...] = (64, 64), first: float = 0.0) -> dict[str, Any]:
    """Tensors of this rank alone, of equal size, half of them an optimizer's, and an object each."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    names = [f"{'optimizer.' if n % 2 else ''}t{n}" for n in range(count)]
    cuts = (0, rank, world)
    tensors = {
        name: ShardedTensor.from_rank_offsets(name, torch.full(shape, first + n), cuts) for n, name in enumerate(names)
    }
    return {**tensors, "object": ShardedObject("optimizer.object", first, (world,), (rank,))}


def _check(path: Path | str, state: dict[str, Any]) -> None:
    wanted = {name: shard.without_data() for name, shard in state.items()}
    loaded = dc.load(wanted, path)
    for name, shard in state.items():
        same = torch.equal(loaded[name], shard.data) if name != "object" else loaded[name] == shard.data
        assert same, name


@pytest.mark.parametrize("options", [{"keep_only_main_replica": "false"}, {"thread_count": 1.5}, {"thread_count": "2"}])
def test_options_of_another_type_are_refused(options: dict[str, Any]) -> None:
    """A text in the place of a flag, which would be true, and a number of files that is not whole are named."""
    with pytest.raises(CheckpointingException, match=f": {next(iter(options))}=.*: expected"):
        TorchDistSaveShardedStrategy(**options)


def test_thread_count_is_the_number_of_files_and_they_are_even(tmp_path: Path) -> None:
    """thread_count=3 gives three files of about equal size, and the content is the same."""
    dc.save(_state(), tmp_path / "c", TorchDistSaveShardedStrategy(thread_count=3))
    files = _files(tmp_path / "c")
    assert sorted(files) == [f"__0_{n}.distcp" for n in range(3)]
    assert max(files.values()) < 1.2 * min(files.values())
    _check(tmp_path / "c", _state())


@table("direct", ["0", "1"])
def test_by_default_a_rank_has_the_files_that_are_written_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: str
) -> None:
    """One where writes go past the page cache; else one for each thread, if there are 32 MiB for it."""
    monkeypatch.setenv("SHARDCKPT_DIRECT_IO", direct)
    monkeypatch.setenv("SHARDCKPT_IO_THREADS", "4")
    for number, (count, files) in enumerate(((3, 1), (8, 1 if bypasses_cache(tmp_path) else 2))):
        state = _state(count, (2 << 20,), float(number))
        dc.save(state, tmp_path / str(number))
        assert sorted(_files(tmp_path / str(number))) == [f"__0_{n}.distcp" for n in range(files)]
        _check(tmp_path / str(number), state)


def test_the_number_of_files_is_that_of_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same shards saved to file systems of two kinds in turn have in each the files that are best there."""
    monkeypatch.setenv("SHARDCKPT_IO_THREADS", "2")
    counts = []
    for number, direct in enumerate("0101"):
        monkeypatch.setenv("SHARDCKPT_DIRECT_IO", direct)
        dc.save(_state(8, (2 << 20,), float(number)), tmp_path / str(number))
        counts.append(len(_files(tmp_path / str(number))))
    alone = 1 if bypasses_cache(tmp_path) is not False else 2
    assert counts == [2, alone, 2, alone]


def test_several_files_are_written_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors go to the files in turn, so that no file waits for another to be whole."""
    monkeypatch.setenv("SHARDCKPT_IO_THREADS", "2")
    monkeypatch.setenv("SHARDCKPT_DIRECT_IO", "0")
    together, write, begun = threading.Barrier(2), NewFile.write, {}

    def meeting(self: NewFile, view: memoryview, *args: Any) -> None:
        # the first large write of each file: how many follow depends on the addresses of the tensors
        if view.nbytes >= 1 << 19 and begun.setdefault(self.path, me := object()) is me:
            together.wait(60)
        write(self, view, *args)

    monkeypatch.setattr(NewFile, "write", meeting)
    state = _state(10, (1 << 20,))
    dc.save(state, tmp_path / "c", TorchDistSaveShardedStrategy(thread_count=2))
    assert len(begun) == 2
    _check(tmp_path / "c", state)


def test_separation_hint_keeps_keys_in_files_of_their_own(tmp_path: Path) -> None:
    """Keys that begin with the hint are in files that have nothing else, named after it as Megatron does."""
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=2, separation_hint="optimizer")
    dc.save(_state(), tmp_path / "c", strategy)
    assert sorted(_files(tmp_path / "c")) == [
        "__0_0.distcp",
        "__0_1.distcp",
        "optimizer__0_0.distcp",
        "optimizer__0_1.distcp",
    ]
    for path in (tmp_path / "c").glob("*.distcp"):
        path.rename(path.with_suffix(".gone")) if path.name.startswith("optimizer") else None
    (tmp_path / "c" / "shardckpt.json").unlink()
    model = {name: shard for name, shard in _state().items() if name.startswith("t")}
    _check(tmp_path / "c", model)
    with pytest.raises(CheckpointingException, match="optimizer__0_"):
        dc.load({"o": _state()["optimizer.t1"]}, tmp_path / "c")


def test_wrong_arguments_are_refused() -> None:
    """Another backend or version, no file at all, and a hint that is no file name are errors."""
    with pytest.raises(CheckpointingException, match="zarr"):
        TorchDistSaveShardedStrategy("zarr", 1)
    with pytest.raises(CheckpointingException, match="thread_count=0"):
        TorchDistSaveShardedStrategy(thread_count=0)
    for hint in ("../up", "", 3):
        with pytest.raises(CheckpointingException, match=r"^separation_hint=.*names of files begin with it") as caught:
            TorchDistSaveShardedStrategy(separation_hint=hint)  # type: ignore[arg-type]
        assert caught.type is CheckpointingException  # no checkpoint is corrupt


def _save_copies(path: str, main_only: bool) -> None:
    data = torch.arange(4000.0)
    copies = {f"w{n}": ShardedTensor.from_rank_offsets(f"w{n}", data, replica_id=dist.get_rank()) for n in range(8)}
    dc.save(copies, path, TorchDistSaveShardedStrategy(keep_only_main_replica=main_only))
    _check(path, copies)


def test_any_replica_may_be_written(ranks: Ranks, tmp_path: Path) -> None:
    """keep_only_main_replica=False lets all holders of copies share the writing; by default one writes all."""
    for main_only, writers in ((True, 1), (False, 4)):
        path = tmp_path / str(main_only)
        ranks.run(4, _save_copies, str(path), main_only)
        assert len(_files(path)) == writers


def _cached_in_groups(folder: str) -> None:
    groups = {other: dist.new_group([0, other]) for other in (1, 2)}
    strategy = TorchDistSaveShardedStrategy(cached_metadata=True)
    rank = dist.get_rank()
    for step, other in enumerate((1, 2, 1)):
        if rank in (0, other):
            state = {f"of {rank}": ShardedTensor.from_rank_offsets(f"of {rank}", torch.full((3,), float(step)))}
            dc.save(state, f"{folder}/{step}", strategy, process_group=groups[other])
            assert dc.load_sharded_metadata(f"{folder}/{step}").keys() == {"of 0", f"of {other}"}
        dist.barrier()


def test_a_cached_plan_is_that_of_its_process_group(ranks: Ranks, tmp_path: Path) -> None:
    """One strategy that serves several groups in turn never saves one group's shards with another's plan."""
    ranks.run(3, _cached_in_groups, str(tmp_path))
    for step in range(3):
        assert all(tensor.eq(step).all() for tensor in dc.load_plain_tensors(tmp_path / str(step)).values())


def test_a_save_without_shards_has_only_common_state(tmp_path: Path) -> None:
    """A state dict of plain values is a checkpoint too: nothing is stored as a tensor or object."""
    dc.save({"step": 3}, tmp_path / "c")
    assert pickle.loads((tmp_path / "c" / ".metadata").read_bytes()).state_dict_metadata == {}
    assert not list((tmp_path / "c").glob("*.distcp"))
    assert dc.load({}, tmp_path / "c") == {"step": 3}


def _save_on_one_rank(path: str) -> None:
    mine = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))} if dist.get_rank() == 1 else {}
    dc.save(mine, path)


def test_a_rank_without_shards_writes_nothing(ranks: Ranks, tmp_path: Path) -> None:
    """Only ranks that hold main replicas have a data file, and only real keys are in the metadata."""
    ranks.run(3, _save_on_one_rank, str(tmp_path / "c"))
    assert [path.name for path in (tmp_path / "c").glob("*.distcp")] == ["__1_0.distcp"]
    assert set(dc.load_sharded_metadata(tmp_path / "c")) == {"w"}


def test_metadata_json_has_megatrons_four_fields(tmp_path: Path) -> None:
    """Megatron 0.9 to 0.18 refuse unknown fields: there are exactly four."""
    dc.save({"step": 3}, tmp_path / "c")
    text = (tmp_path / "c" / "metadata.json").read_text()
    assert text == (
        '{"sharded_backend":"torch_dist","sharded_backend_version":1,"common_backend":"torch","common_backend_version":1}'
    )


def test_one_key_for_a_tensor_and_an_object(tmp_path: Path) -> None:
    """The index has one entry a key: such a save is refused, and does not become a checkpoint that nothing reads."""
    tensor = ShardedTensor.from_rank_offsets("rng/shard_0_1", torch.ones(2))
    with pytest.raises(CheckpointingException, match=r"'rng/shard_0_1' would be the key of a tensor and of an object"):
        dc.save({"tensor": tensor, "object": ShardedObject("rng", 1, (1,), (0,))}, tmp_path / "c")
    assert not (tmp_path / "c").exists()
