from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.engine.opening import OpenCheckpoint
from shardckpt.errors import CheckpointingException, KeyMismatchError
from shardckpt.maintenance.sources import open_any
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.storage.reader import CheckpointReader
from tests import backends
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardckpt.storage import RangeRead
    from tests.backends import Backend

WHOLE = torch.arange(4 * 6 * 5.0).reshape(4, 6, 5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, backend: Backend) -> Path:
    """A tensor in four pieces, a scalar, an object and common state."""
    path = tmp_path_factory.mktemp("lazy") / "c"
    pieces = [
        ShardedTensor.from_rank_offsets("w", WHOLE[2 * r : 2 * r + 2, 3 * c : 3 * c + 3].clone(), (0, r, 2), (1, c, 2))
        for r in range(2)
        for c in range(2)
    ]
    scalar = ShardedTensor.from_rank_offsets("scalar", torch.tensor(2.5))
    dc.save({"w": pieces, "s": scalar, "o": ShardedObject("rng", {"seed": 7}, (1,), (0,)), "step": 3}, path)
    return path


@backends.both
def test_a_checkpoint_is_a_mapping_of_descriptions(checkpoint: Path) -> None:
    """Keys, dtypes and shapes are there without reading a tensor; objects and common state beside them."""
    with dc.open_checkpoint(checkpoint) as stored:
        assert set(stored) == {"w", "scalar"}
        assert len(stored) == 2
        assert (stored["w"].shape, stored["w"].dtype, stored["w"].key) == ((4, 6, 5), torch.float32, "w")
        assert repr(stored["w"]) == "StoredTensor('w', torch.float32, (4, 6, 5))"
        assert stored.objects == ["rng/shard_0_1"]
        assert stored.read_object("rng/shard_0_1") == {"seed": 7}
        assert stored.common == {"step": 3}
        with pytest.raises(CheckpointingException, match=r"no object 'rng' is stored \(objects: rng/shard_0_1\)"):
            stored.read_object("rng")
        with pytest.raises(KeyError, match=r"^no tensor 'v' is stored \(keys: scalar, w\)$") as caught:
            stored["v"]
        assert isinstance(caught.value, KeyMismatchError)
        assert "v" not in stored
        assert stored.get("v") is None


INDICES: list[Any] = [
    ...,
    0,
    -1,
    slice(1, 3),
    (slice(None), 2),
    (slice(1, 4), slice(2, 5), slice(-2, None)),
    (..., 3),
    (1, ..., slice(0, 2)),
    (1, 2, 3),
    slice(3, 1),
    (slice(0, 4), slice(6, 9)),
    (np.int64(1), torch.tensor(2)),
    (slice(np.int64(1), None, 1), np.uint8(2)),
]


@backends.both
@table("index", INDICES, ids=str)
def test_slices_are_those_of_the_whole_tensor(checkpoint: Path, index: Any) -> None:
    """Any basic index gives what it gives on the whole tensor, across the pieces that are stored."""
    with dc.open_checkpoint(checkpoint) as stored:
        assert torch.equal(stored["w"][index], WHOLE[index])
        assert torch.equal(stored["w"].read(), WHOLE)
        assert stored["scalar"].read() == 2.5


REFUSED_INDICES: list[Any] = [
    slice(0, 4, 2),
    slice(0, 4, 0),
    slice("a"),
    slice(0, 2.0),
    "x",
    True,
    4,
    (0, 0, 0, 0),
    (..., ...),
    [0, 1],
    np.array([0, 1]),
    (torch.tensor([1]), ...),
]


@backends.both
@table("index", REFUSED_INDICES, ids=str)
def test_what_cannot_be_read_is_refused(checkpoint: Path, index: Any) -> None:
    """Steps, lists, masks, arrays, indices outside and too many axes are errors that name the key."""
    with dc.open_checkpoint(checkpoint) as stored, pytest.raises(CheckpointingException, match="'w'"):
        stored["w"][index]


def test_a_string_is_one_key(checkpoint: Path) -> None:
    """A key alone is not taken for its characters, and keys of a generator are all read."""
    with dc.open_checkpoint(checkpoint) as stored:
        assert torch.equal(stored.read("scalar")["scalar"], torch.tensor(2.5))
        with pytest.raises(CheckpointingException, match=r"^'ww' not stored"):
            stored.read("ww")
        for keys in ("scalar", (key for key in ["scalar"])):
            assert list(stored.compute_fingerprints(keys)) == ["scalar"]


@backends.both
def test_many_regions_are_read_at_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions of several tensors are those that each tensor gives, in the order asked for, by one plan."""
    plans: list[int] = []
    values = OpenCheckpoint.values

    def counted(self: OpenCheckpoint, wanted: list[Any]) -> list[Any]:
        plans.append(len(wanted))
        return values(self, wanted)

    with dc.open_checkpoint(checkpoint) as stored:
        monkeypatch.setattr(OpenCheckpoint, "values", counted)
        for index in INDICES:
            read = stored.read({"scalar": ..., "w": index})
            assert list(read) == ["scalar", "w"]
            assert torch.equal(read["w"], WHOLE[index])
            assert read["scalar"] == 2.5
        assert torch.equal(stored.read(["w"])["w"], WHOLE)
        assert stored.read({}) == {}
        assert plans == [2] * len(INDICES) + [1, 0]
        with pytest.raises(CheckpointingException, match=r"'v' not stored \(keys: .*w"):
            stored.read({"w": 0, "v": 0})
        with pytest.raises(CheckpointingException, match="'w': index 4 is outside an axis of 4"):
            stored.read({"scalar": ..., "w": 4})


@backends.both
def test_a_slice_reads_its_own_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a large tensor is read in as many bytes, not the whole item; a column in bounded pieces."""
    large = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)
    dc.save({"w": ShardedTensor.from_rank_offsets("w", large)}, tmp_path / "c")
    read: list[int] = []
    read_ranges = CheckpointReader.read_ranges

    def counted(reader: CheckpointReader, ranges: Sequence[RangeRead], meanwhile: Any = None) -> None:
        read.extend(found.memory.nbytes for found in ranges if found.file == backends.data_file(0))
        read_ranges(reader, ranges, meanwhile)

    monkeypatch.setattr(CheckpointReader, "read_ranges", counted)
    with dc.open_checkpoint(tmp_path / "c") as stored:
        assert torch.equal(stored["w"][7], large[7])
    *heads, row = read
    assert sum(heads) < 8192
    assert row == 4096


@table("opens", [dc.open_checkpoint, open_any], ids=["open_checkpoint", "open_any"])
def test_an_exception_of_the_block_leaves_it_as_it_is(checkpoint: Path, opens: Any) -> None:
    """What the caller raises while a checkpoint is open is neither wrapped nor given another class."""
    own = KeyError("mine")
    with pytest.raises(KeyError) as caught, opens(checkpoint):
        raise own
    assert caught.value is own
    assert caught.value.__cause__ is None


class _Own(Exception):
    """An exception of a user's."""


def test_any_class_of_exception_leaves_the_block(checkpoint: Path) -> None:
    """A class that we do not know is neither wrapped nor adopted."""
    own = _Own("mine")
    with pytest.raises(_Own) as caught, dc.open_checkpoint(checkpoint):
        raise own
    assert caught.value is own
