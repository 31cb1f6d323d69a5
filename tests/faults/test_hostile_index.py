"""An index of ours that lies and has digests that are right: refused before memory is taken or a file is opened."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt import dist_checkpointing
from shardckpt.chunks import Chunks
from shardckpt.errors import CheckpointingException
from shardckpt.maintenance.verify import verify_checkpoint
from shardckpt.planning.table import Table
from shardckpt_torch_dist.dialects.index_file import encode_index, parse_index
from tests.faults import samples
from tests.faults.fuzzer import sign
from tests.names import INDEX, data_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardckpt_torch_dist.dialects.stored import StoredIndex

    Lie = Callable[[StoredIndex], StoredIndex]

KEY = "half"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of one process."""
    dist_checkpointing.save(samples.state_dict(1), tmp_path / "ckpt")
    return tmp_path / "ckpt"


def index_of(checkpoint: Path) -> StoredIndex:
    """What its index says."""
    return parse_index((checkpoint / INDEX).read_bytes(), INDEX)


def put(checkpoint: Path, index: StoredIndex) -> None:
    """Let its index say something else, and shardckpt.json that this was written."""
    sign(checkpoint, INDEX, encode_index(index))


def claiming(**columns: int) -> Lie:
    """Say something else of where the chunk of one key is."""

    def lie(index: StoredIndex) -> StoredIndex:
        chunks, row = index.chunks, int(index.bounds[index.keys.index(KEY)])
        changed = {name: getattr(chunks, name).clone() for name in columns}
        for name, value in columns.items():
            changed[name][row] = value
        return replace(index, chunks=replace(chunks, **changed))

    return lie


def in_file(name: str) -> Lie:
    """Say that the data is in a file of another name."""
    return lambda index: replace(index, files=[name], objects={})


def many_times_the_same(index: StoredIndex) -> StoredIndex:
    """A tensor of 4096 chunks, all of which are one archive."""
    count, number, chunks = 1 << 12, index.keys.index(KEY), index.chunks
    row = int(index.bounds[number])
    volume = int(chunks.volume[row])
    extent = torch.full((count, 1), volume)
    offset = torch.arange(count).view(-1, 1) * volume
    columns = (chunks.file, chunks.start, chunks.length, chunks.first, chunks.volume)
    of_one = [column[row].expand(count).clone() for column in columns]
    return replace(
        index,
        keys=[KEY],
        dtypes=[index.dtypes[number]],
        shapes=[(volume * count,)],
        bounds=torch.tensor([0, count]),
        chunks=Chunks(Table(torch.zeros(count, dtype=torch.int64), offset, extent), *of_one),
    )


@pytest.mark.parametrize(
    ("lie", "text"),
    [
        (many_times_the_same, "chunks claim .* bytes of __0_0.distcp, which has"),
        (claiming(length=1 << 50), "chunks claim .* bytes of __0_0.distcp, which has"),
        (claiming(start=1 << 50), "__0_0.distcp"),
        (claiming(start=0), KEY),
        (in_file("__7_0.distcp"), "__7_0.distcp, which has 0"),
        (in_file("../ckpt/__0_0.distcp"), "not allowed"),
    ],
)
def test_lies_are_refused(checkpoint: Path, lie: Lie, text: str) -> None:
    """What cannot be, by the files that there are, is an error of the family that names it; no value is delivered."""
    put(checkpoint, lie(index_of(checkpoint)))
    wanted = samples.template()[KEY]
    for load in (
        lambda: dist_checkpointing.load_plain_tensors(checkpoint),
        lambda: dist_checkpointing.load({KEY: wanted}, checkpoint, validate_access_integrity=False),
    ):
        with pytest.raises(CheckpointingException, match=text):
            load()
    assert wanted.data.eq(-7).all()


def test_an_index_that_is_put_back_is_fine(checkpoint: Path) -> None:
    """The lies above are the only fault of what they are told in."""
    put(checkpoint, index_of(checkpoint))
    assert samples.differences(samples.load(checkpoint), 1) == []
    assert not [result for result in verify_checkpoint(checkpoint) if result.fault]
    assert index_of(checkpoint).files == [data_file(0)]
