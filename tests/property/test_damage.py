from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import strategies as st

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import CheckpointingException
from shardckpt.maintenance.verify import verify_checkpoint
from shardckpt.testing.cases import SaveLoadCase, save_load_cases
from shardckpt.testing.states import check_region, make_state_dict
from tests import backends
from tests.property.search import drawn, for_all, load

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

#: No digest of these is stored: what a bit changes in them may be nothing that matters, or accuse another file.
JSON = {"metadata.json", "shardckpt.json"}


@dataclass(frozen=True)
class Flip:
    """A bit, somewhere.

    Attributes:
        file: Which of the files, round and round.
        byte: Which of its bytes, counted round and round, from the end if negative.
        bit: Which bit of it.
    """

    file: int
    byte: int
    bit: int


FLIPS = st.builds(Flip, st.integers(0, 11), st.integers(-2000, 1 << 24), st.integers(0, 7))


@backends.both_in_proof
@drawn(4, 80)
def test_a_flipped_bit_anywhere(count: int) -> None:
    """With any bit of any file flipped, what is loaded is right or the error names it; verify finds it."""

    def check(example: tuple[SaveLoadCase, list[Flip]]) -> None:
        batch, flips = example
        with tempfile.TemporaryDirectory(prefix="shardckpt-property-") as folder:
            path = Path(folder) / "checkpoint"
            dc.save(make_state_dict(batch), path)
            for flip in flips:
                _check_flip(batch, path, flip)

    for_all(st.tuples(save_load_cases(1, 1, most=5), st.lists(FLIPS, min_size=8, max_size=8)), count, check)


def _check_flip(batch: SaveLoadCase, path: Path, flip: Flip) -> None:
    files = sorted(path.iterdir())
    damaged = files[flip.file % len(files)]
    whole = damaged.read_bytes()
    content = bytearray(whole)
    content[flip.byte % len(whole)] ^= 1 << flip.bit
    damaged.write_bytes(content)
    blamed = files if damaged.name in JSON else [damaged]
    for read in (load, _slices):
        fault = _fault(lambda read=read: read(batch, path))  # type: ignore[misc]
        assert not fault or any(file.name in fault for file in blamed), (damaged.name, fault)
    verdict = _fault(lambda: _verify(path))
    assert any(file.name in verdict for file in blamed) or damaged.name in JSON, (damaged.name, flip, verdict)
    damaged.write_bytes(whole)


def _fault(read: Callable[[], None]) -> str:
    """The error of the family that it raises; values that are wrong end the test."""
    try:
        read()
    except CheckpointingException as exc:
        return str(exc)
    return ""


def _slices(batch: SaveLoadCase, path: Path) -> None:
    """The middle of every tensor."""
    with dc.open_checkpoint(path) as checkpoint:
        for case in batch.cases:
            region = tuple(slice(size // 3, size - size // 3) for size in case.spec.shape)
            check_region(case, region, checkpoint[case.key][region])


def _verify(path: Path) -> None:
    faults = [f"{result.name}: {result.fault}" for result in verify_checkpoint(path) if result.fault]
    if faults:
        raise CheckpointingException(" ".join(faults))
