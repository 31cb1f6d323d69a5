from __future__ import annotations

import gc
import json
import pickle
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.errors import CheckpointingException, ShardingError, StorageError, UnsafePickleError
from shardckpt_torch_dist import (
    CheckpointStorageReader,
    CheckpointStorageWriter,
)
from tests.interop.sample import check_equal
from tests.names import MARKER, METADATA, RECORD, data_file
from tests.plugged import registered
from tests.plugins.manager import Recorder
from tests.states import rank_and_size, run_here
from tests.tables import in_proof
from tests.torch_dist import plain_states
from tests.torch_dist.dcp.storage_writer import NEW, OLD, forget_plans, left_beside, load_by_all, save_by_writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.ranks import Ranks


class Recipe:
    """A value of a user's own class."""

    def __init__(self, name: str) -> None:
        self.name = name


def _failures(function: Callable[[], Any]) -> dict[int, BaseException]:
    """What the ranks raise in DCP's one error, which every rank gets."""
    with pytest.raises(CheckpointException) as caught:
        function()
    found = {rank: failure for rank, (failure, _) in caught.value.failures.items()}
    caught.value.with_traceback(None)
    return found


# What it refuses.


class _Losing(CheckpointStorageWriter):
    """Leaves a result of one rank out."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        results = super().write_data(plan, planner).value()
        kept = [result for result in results if result.index.fqn != "model.rows"]
        found: Any = torch.futures.Future()
        found.set_result(results if rank_and_size()[0] == 0 else kept)
        return found


class _Littering(CheckpointStorageWriter):
    """Writes past the writer on one rank."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        found = super().write_data(plan, planner)
        if rank_and_size()[0] == 1:
            (staging,) = Path(self.checkpoint_id).parent.glob(".c.shardckpt-staging-*")
            (staging / "litter").write_text("litter")
        return found


def _save_carelessly(path: str) -> dict[str, str]:
    found = {}
    for kind in (_Losing, _Littering):
        writer = kind(path, overwrite=True)
        (failure,) = _failures(lambda writer=writer: dcp.save(plain_states.state(NEW), storage_writer=writer)).values()  # type: ignore[misc]
        found[kind.__name__] = str(failure)
    return found


def test_what_is_lost_or_written_past_the_writer_is_named(ranks: Ranks, tmp_path: Path) -> None:
    """A value that no rank has written, and a file without digests, fail the save on all ranks; the old one stays."""
    path = tmp_path / "c"
    ranks.run(2, save_by_writer, str(path), OLD)
    one, other = ranks.run(2, _save_carelessly, str(path))
    assert one == other
    assert "no rank has written these items of the planner's metadata: 'model.rows' at (" in one["_Losing"]
    assert "'litter'" in one["_Littering"]
    plain_states.load(str(path), OLD)
    assert left_beside(path) == []


@pytest.mark.parametrize("writers", [0, 2, *in_proof(1, 4)])
def test_every_reader_reads_it(ranks: Ranks, tmp_path: Path, writers: int) -> None:
    """What any number of ranks wrote, stock dcp.load, our reader and dist_checkpointing.load read at 1 and 3 ranks."""
    path = tmp_path / "c"
    (ranks.run if writers else run_here)(writers, save_by_writer, str(path))
    for world in (1, 3):
        ranks.run(world, load_by_all, str(path))
    tensors = dc.load_plain_tensors(path)
    check_equal(tensors, plain_states.tensors(NEW), "tensors")
    check_equal(dc.load_common_state_dict(path), plain_states.values(NEW), "common")
    with dc.open_checkpoint(path) as opened:
        check_equal(opened["model.rows"][2:5], plain_states.tensors(NEW)["model.rows"][2:5], "slice")
    assert left_beside(path) == []


def test_the_commands_take_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``shardckpt verify``, ``inspect`` and ``remove`` work on it; what remains after a removal loads by stock DCP."""
    path = tmp_path / "c"
    save_by_writer(str(path))
    assert main(["verify", str(path)]) == 0
    assert main(["inspect", str(path)]) == 0
    assert "model.columns" in capsys.readouterr().out
    dc.remove_sharded_tensors(str(path), "model.")
    assert main(["verify", str(path)]) == 0
    left = {"flags": torch.zeros(4, dtype=torch.bool)}
    dcp.load(left, checkpoint_id=str(path))
    check_equal(left["flags"], plain_states.tensors(NEW)["flags"], "flags")


def test_the_record_names_who_wrote_what(ranks: Ranks, tmp_path: Path) -> None:
    """shardckpt.json has the number of ranks and every file with its rank; a rank without items has no file."""
    path = tmp_path / "c"
    ranks.run(4, save_by_writer, str(path))
    record = json.loads((path / RECORD).read_text())
    files = {file["name"]: file["rank"] for file in record["files"]}
    assert record["world_size"] == 4
    assert files == {METADATA: 0, **{data_file(rank): rank for rank in range(4)}}
    assert {entry.name for entry in path.iterdir()} == {*files, RECORD, MARKER}
    ranks.run(2, _save_alone_on_rank_1, str(tmp_path / "d"))
    assert [file.name for file in (tmp_path / "d").glob("*.distcp")] == [data_file(1)]


def _save_alone_on_rank_1(path: str) -> None:
    state = {"w": torch.ones(3)} if dist.get_rank() == 1 else {}
    dcp.save(state, storage_writer=CheckpointStorageWriter(path))


def test_every_dtype_and_memory_comes_back(tmp_path: Path) -> None:
    """Odd dtypes, negated and conjugated views, slices that do not begin on a page, parameters: large or small."""
    large = torch.arange(3 << 18, dtype=torch.float32)
    state = {
        "float8": torch.arange(16, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "uint16": torch.arange(9, dtype=torch.int32).to(torch.uint16),
        "conj": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "neg": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "transposed": large.view(3, -1).t(),
        "slice": large[7:-5],
        "grad": torch.ones(3, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(2, 2)),
    }
    dcp.save(state, storage_writer=CheckpointStorageWriter(tmp_path / "c"))
    for reader in (dcp.FileSystemReader, CheckpointStorageReader):
        found = {key: torch.empty(tensor.shape, dtype=tensor.dtype) for key, tensor in state.items()}
        dcp.load(found, storage_reader=reader(tmp_path / "c"))
        check_equal(found, state, reader.__name__)


# Whole or absent.


class _FailingPlanner(DefaultSavePlanner):
    """Cannot give the values of rank 1's last item."""

    def resolve_data(self, write_item: Any) -> Any:
        if rank_and_size()[0] == 1 and write_item is self.plan.items[-1]:
            raise OSError("the disk of rank 1 is gone")
        return super().resolve_data(write_item)


def _fail(path: str, *, overwrite: bool) -> None:
    failures = _failures(lambda: save_by_writer(path, NEW, overwrite=overwrite, planner=_FailingPlanner()))
    assert set(failures) == {1}
    assert isinstance(failures[1], CheckpointingException)
    assert "the disk of rank 1 is gone" in str(failures[1])
    gc.collect()  # the writer is no longer used
    dist.barrier()


@pytest.mark.parametrize("exists", [False, True])
def test_a_failed_rank_leaves_what_was_there(ranks: Ranks, tmp_path: Path, exists: bool) -> None:
    """An error on one rank is DCP's on all; the target is as before, and nothing stays beside it."""
    path = tmp_path / "c"
    if exists:
        ranks.run(2, save_by_writer, str(path), OLD)
    ranks.run(2, partial(_fail, overwrite=exists), str(path))
    assert left_beside(path) == []
    if exists:
        ranks.run(2, plain_states.load, str(path), OLD, CheckpointStorageReader)
    else:
        assert not path.exists()


def _fail_and_keep(path: str) -> None:
    writer = CheckpointStorageWriter(path)
    _failures(lambda: dcp.save(plain_states.state(OLD), storage_writer=writer, planner=_FailingPlanner()))
    dist.barrier()
    assert [entry for entry in Path(path).parent.iterdir() if "staging" in entry.name]
    dist.barrier()
    dcp.save(plain_states.state(NEW), storage_writer=writer)
    plain_states.load(path, NEW)


def test_a_writer_saves_again_after_a_failure(ranks: Ranks, tmp_path: Path) -> None:
    """What a failed save left is removed by the next save with the same writer, which succeeds."""
    ranks.run(2, _fail_and_keep, str(tmp_path / "c"))
    assert left_beside(tmp_path / "c") == []


def _refused(path: str) -> None:
    failures = _failures(lambda: save_by_writer(path, NEW))
    assert set(failures) == {0}
    assert isinstance(failures[0], StorageError)
    assert "overwrite=True" in str(failures[0])


def test_what_stands_there_is_not_overwritten_unasked(ranks: Ranks, tmp_path: Path) -> None:
    """Without overwrite=True a save to a directory with content is refused on all ranks, and changes nothing."""
    path = tmp_path / "c"
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    ranks.run(2, _refused, str(path))
    assert [entry.name for entry in path.iterdir()] == ["notes.txt"]
    assert left_beside(path) == []


def test_overwriting_replaces_a_checkpoint_and_keeps_other_files(ranks: Ranks, tmp_path: Path) -> None:
    """overwrite=True takes the place of our checkpoint, or of stock DCP's, and lets files of others be."""
    for old in (CheckpointStorageWriter, dcp.FileSystemWriter):
        path = tmp_path / old.__name__
        dcp.save(plain_states.state(OLD), storage_writer=old(path))
        (path / "notes.txt").write_text("mine")
        ranks.run(2, partial(save_by_writer, overwrite=True), str(path))
        ranks.run(1, plain_states.load, str(path), NEW, CheckpointStorageReader)
        assert (path / "notes.txt").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2


# What is refused.


def test_an_object_that_a_load_would_refuse_is_refused_by_the_save(tmp_path: Path) -> None:
    """A class of the user's is an error that names key and class; allow_globals lets it pass, both ways."""
    state = {"recipe": Recipe("soup")}
    (failure,) = _failures(lambda: dcp.save(state, storage_writer=CheckpointStorageWriter(tmp_path / "c"))).values()
    assert isinstance(failure, UnsafePickleError)
    assert "'recipe'" in str(failure)
    assert "Recipe" in str(failure)
    dcp.save(state, storage_writer=CheckpointStorageWriter(tmp_path / "c", allow_globals=[Recipe]))
    found: dict[str, Any] = {"recipe": None}
    dcp.load(found, storage_reader=CheckpointStorageReader(tmp_path / "c", allow_globals=[Recipe]))
    assert found["recipe"].name == "soup"


class _RawPlanner(DefaultSavePlanner):
    """Gives a bare string where bytes are planned."""

    def resolve_data(self, write_item: Any) -> Any:
        return "raw" if write_item.type == WriteItemType.BYTE_IO else super().resolve_data(write_item)


def test_a_planner_that_gives_something_else_is_an_error(tmp_path: Path) -> None:
    """What is neither the planned tensor nor bytes is refused by name."""
    writer = CheckpointStorageWriter(tmp_path / "c")
    (failure,) = _failures(lambda: dcp.save({"x": 1}, storage_writer=writer, planner=_RawPlanner())).values()
    assert isinstance(failure, ShardingError)
    assert "'x'" in str(failure)
    assert not (tmp_path / "c").exists()


def test_saves_without_collectives_are_refused(tmp_path: Path) -> None:
    """Every rank would commit for itself: an error says so, before anything is written."""
    writer = CheckpointStorageWriter(tmp_path / "c")
    with pytest.raises(CheckpointingException, match="use_collectives=False"):
        dcp.save({"x": 1}, storage_writer=writer, use_collectives=False)
    assert list(tmp_path.iterdir()) == []


def test_urls_are_refused(tmp_path: Path) -> None:
    """A store has no rename: an error names the URL; validate_checkpoint_id says so beforehand."""
    (failure,) = _failures(lambda: save_by_writer("memory://bucket/c")).values()
    assert isinstance(failure, CheckpointingException)
    assert "memory://bucket/c" in str(failure)
    assert not CheckpointStorageWriter.validate_checkpoint_id("memory://bucket/c")
    assert CheckpointStorageWriter.validate_checkpoint_id(tmp_path / "new" / "c")


# Plan caching.


@pytest.fixture
def _no_cached_plans() -> Iterator[None]:
    """DCP keeps plans in its class, by the planner's class: none from before, none for later tests."""
    forget_plans()
    yield
    forget_plans()


@pytest.mark.usefixtures("_no_cached_plans")
def test_a_dtype_that_a_cached_plan_does_not_know_is_an_error(tmp_path: Path) -> None:
    """DCP caches plans without dtypes; a bfloat16 tensor never goes under metadata that says float32."""
    for name, dtype in (("a", torch.float32), ("b", torch.bfloat16)):
        writer = CheckpointStorageWriter(tmp_path / name)
        planner = DefaultSavePlanner(enable_plan_caching=True)
        state = {"w": torch.ones(3, dtype=dtype)}
        if name == "a":
            dcp.save(state, storage_writer=writer, planner=planner)
            continue
        (failure,) = _failures(lambda w=writer, p=planner, s=state: dcp.save(s, storage_writer=w, planner=p)).values()
        assert isinstance(failure, ShardingError)
        assert "'w'" in str(failure)
    assert not (tmp_path / "b").exists()


def test_a_writer_is_pickled_without_its_save(tmp_path: Path) -> None:
    """A copy has path and options, and nothing that would end the save of the one that was copied."""
    writer = CheckpointStorageWriter(tmp_path / "c", overwrite=True)
    planner = DefaultSavePlanner()
    planner.set_up_planner({"w": torch.ones(2)}, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    copy = pickle.loads(pickle.dumps(writer))
    copy.reset()
    del copy
    results = writer.write_data(planner.finish_plan(plan), planner).value()
    writer.finish(metadata, [results])
    found = {"w": torch.zeros(2)}
    dcp.load(found, storage_reader=CheckpointStorageReader(tmp_path / "c"))
    check_equal(found["w"], torch.ones(2), "w")


# Who watches.


def test_plugins_see_the_steps(tmp_path: Path) -> None:
    """shardckpt_event hears of every step of a dcp.save and dcp.load, with the bytes that were written."""
    with registered(Recorder()) as recorder:
        save_by_writer(str(tmp_path / "c"))
        plain_states.load(str(tmp_path / "c"), NEW, CheckpointStorageReader)
    ends = [(event.operation, event.phase) for event in recorder.events if event.state == "end"]
    assert ends == [
        ("save", "staging"),
        ("save", "writing"),
        ("save", "writing the metadata"),
        ("save", "committing"),
        ("load", "reading the metadata"),
        ("load", "reading"),
    ]
    (written,) = recorder.find("end", "writing")
    assert written.nbytes == (tmp_path / "c" / data_file(0)).stat().st_size
