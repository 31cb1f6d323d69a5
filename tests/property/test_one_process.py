from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st

from shardckpt import dist_checkpointing as dc
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.maintenance.verify import verify_checkpoint
from shardckpt.mapping import ShardedObject
from shardckpt.testing.cases import SaveLoadCase, save_load_cases
from shardckpt.testing.memory import MEMORY_LAYOUTS, bits, garbage, place_in_memory, plain
from shardckpt.testing.shard_specs import boxes_in
from shardckpt.testing.states import Destinations, check_region, make_state_dict
from shardckpt.testing.tensors import TensorSpec, tensor_specs
from shardckpt_torch_dist import ShardedLoadPlanner, ShardedSavePlanner
from tests import backends
from tests.property.search import drawn, for_all, load

if TYPE_CHECKING:
    from shardckpt.testing.shard_specs import Ints

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def _new(folder: Path) -> Path:
    """The directory of one example."""
    return Path(tempfile.mkdtemp(dir=folder)) / "checkpoint"


@backends.both
@drawn(12)
def test_any_layout_loads_as_any_other(tmp_path: Path, count: int) -> None:
    """Saved under one layout and loaded under another, every element is the global tensor's, bit for bit."""

    def check(batch: SaveLoadCase) -> None:
        path = _new(tmp_path)
        state = make_state_dict(batch)
        dc.save(state, path)
        load(batch, path)
        assert not [result for result in verify_checkpoint(path) if result.fault or result.foreign]

    for_all(save_load_cases(1, 1), count, check)


@st.composite
def _sliced(draw: st.DrawFn) -> tuple[SaveLoadCase, list[list[tuple[Ints, Ints]]]]:
    batch = draw(save_load_cases(1, 1, plain=True))
    return batch, [draw(st.lists(boxes_in(case.spec.shape), max_size=3)) for case in batch.cases]


@backends.both_in_proof
@drawn(6)
def test_any_slice_of_an_open_checkpoint(tmp_path: Path, count: int) -> None:
    """open_checkpoint()[key][region] is the global tensor's region, whatever the layout that was saved."""

    def check(example: tuple[SaveLoadCase, list[list[tuple[Ints, Ints]]]]) -> None:
        batch, regions = example
        path = _new(tmp_path)
        dc.save(make_state_dict(batch), path)
        with dc.open_checkpoint(path) as checkpoint:
            assert set(checkpoint) == {case.key for case in batch.cases}
            for case, boxes in zip(batch.cases, regions, strict=True):
                for offset, shape in boxes:
                    region = tuple(slice(lo, lo + size) for lo, size in zip(offset, shape, strict=True))
                    check_region(case, region, checkpoint[case.key][region])
                check_region(case, (), checkpoint[case.key].read())

    for_all(_sliced(), count, check)


@drawn(6)
def test_stock_dcp_reads_any_layout(tmp_path: Path, count: int) -> None:
    """Stock dcp.load fills whole tensors from what any layout saved."""

    def check(batch: SaveLoadCase) -> None:
        path = _new(tmp_path)
        dc.save(make_state_dict(batch), path)
        state = {case.key: torch.empty_like(case.spec.values()) for case in batch.cases}
        dcp.load(state, checkpoint_id=path)
        for case in batch.cases:
            check_region(case, (), state[case.key])

    for_all(save_load_cases(1, 1, plain=True), count, check)


@drawn(6)
def test_every_item_is_a_torch_archive(tmp_path: Path, count: int) -> None:
    """torch.load(weights_only=True) reads every stored chunk by itself, and the chunks are the whole tensor's parts."""

    def check(batch: SaveLoadCase) -> None:
        path = _new(tmp_path)
        dc.save(make_state_dict(batch), path)
        metadata = dcp.FileSystemReader(path).read_metadata()
        cases = {case.key: case for case in batch.cases}
        seen = dict.fromkeys(cases, 0)
        for index, place in metadata.storage_data.items():
            item = (path / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
            value = torch.load(io.BytesIO(item), weights_only=True)
            if index.fqn in cases:
                spans = tuple(slice(lo, lo + n) for lo, n in zip(index.offset, value.shape, strict=True))
                check_region(cases[index.fqn], spans, value)
                seen[index.fqn] += value.numel()
        assert seen == {key: case.spec.values().numel() for key, case in cases.items()}

    for_all(save_load_cases(1, 1, plain=True), count, check)


@drawn(6)
def test_the_planners_serve_dcp(tmp_path: Path, count: int) -> None:
    """dcp.save and dcp.load with our planners take any layout; dist_checkpointing.load reads the same directory."""

    def check(batch: SaveLoadCase) -> None:
        path, wanted = _new(tmp_path), Destinations(batch)
        dcp.save(make_state_dict(batch), checkpoint_id=path, planner=ShardedSavePlanner())
        dcp.load(wanted.state(), checkpoint_id=path, planner=ShardedLoadPlanner())
        wanted.check_memory()
        again = Destinations(batch)
        again.check(dc.load(again.state(), path, validate_access_integrity=batch.validate, allow_dtype_cast=True))

    for_all(save_load_cases(1, 1), count, check)


@backends.both_in_proof
@drawn(5)
@pytest.mark.parametrize(
    "persistent", [pytest.param(False, id="thread"), pytest.param(True, id="process", marks=pytest.mark.ci)]
)
def test_background_saves_of_any_layout(tmp_path: Path, count: int, persistent: bool) -> None:
    """What is saved behind the training is what the tensors said when it was scheduled, under any layout."""
    with AsyncCallsQueue(persistent) as queue:

        def check(batch: SaveLoadCase) -> None:
            path, state = _new(tmp_path), make_state_dict(batch)
            queue.schedule_async_request(dc.save(state, path, async_sharded_save=True))
            _spoil(state)
            queue.maybe_finalize_async_calls(blocking=True)
            load(batch, path)

        for_all(save_load_cases(1, 1), count, check)


def _spoil(state: dict[str, Any]) -> None:
    """What a training does after it has scheduled a save."""
    for shards in state["tensors"].values():
        for shard in shards:
            if 0 not in shard.data.stride():  # expanded memory cannot be written to
                plain(shard.data).copy_(plain(garbage(1, shard.dtype))[0])
    for shard in state["objects"]:
        shard.data.clear()


@backends.both_in_proof
@drawn(6)
def test_removal_leaves_the_rest_as_it_was(tmp_path: Path, count: int) -> None:
    """After the keys of one prefix are removed, all others load under any layout, and those are gone."""

    def check(batch: SaveLoadCase) -> None:
        path = _new(tmp_path)
        dc.save(make_state_dict(batch), path)
        dc.remove_sharded_tensors(path, "optimizer.")
        kept = tuple(case for case in batch.cases if case.key.startswith("model."))
        load(SaveLoadCase(kept, batch.objects, batch.grid, batch.validate), path)
        assert set(dc.load_tensors_metadata(path)) == {case.key for case in kept}

    for_all(save_load_cases(1, 1, prefixes=("model", "optimizer")), count, check)


@backends.both_in_proof
@drawn(6)
def test_tensors_in_objects_and_common_state(tmp_path: Path, count: int) -> None:
    """Tensors of any dtype and in any memory come back bit for bit from objects and from the common state too."""

    def check(wanted: list[TensorSpec]) -> None:
        path = _new(tmp_path)
        views = [[place_in_memory(whole.values(), way).view for way in MEMORY_LAYOUTS] for whole in wanted]
        dc.save({"common": views, "object": ShardedObject("object", views, (1,), (0,))}, path)
        loaded = dc.load({"object": ShardedObject("object", None, (1,), (0,))}, path)
        for whole, *values in zip(wanted, loaded["common"], loaded["object"], strict=True):
            for value in (*values[0], *values[1]):
                assert (value.dtype, tuple(value.shape)) == (whole.dtype, whole.shape), whole
                assert torch.equal(bits(value), bits(whole.values())), whole

    for_all(st.lists(tensor_specs("any"), min_size=2, max_size=6), count, check)
