from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import strategies as st

from shardckpt import dist_checkpointing as dc
from shardckpt.compat.megatron.dist_checkpointing.validation import validate_sharding_integrity
from shardckpt.errors import ShardingError
from shardckpt.testing.states import rank_and_size
from tests.property.breakage import KINDS, Claims, claims
from tests.property.search import drawn, for_all
from tests.ranks import Failure, Ranks
from tests.tables import in_proof

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

SOUND = ("none",)


@st.composite
def _states(draw: st.DrawFn, world: int, most: int = 8, kinds: tuple[str, ...] = KINDS) -> list[Claims]:
    """Several tensors, of which some fit together and others do not."""
    count = draw(st.integers(1, most))
    return [draw(claims(f"layer.{n:02}.weight", world, draw(st.sampled_from((SOUND, kinds))))) for n in range(count)]


def _check_message(state: list[Claims], message: str) -> None:
    for tensor in state:
        assert (repr(tensor.key) in message) == (tensor.kind != "none"), (tensor, message)


@drawn(12)
@pytest.mark.parametrize("world", [1, 3, 16])
def test_what_all_ranks_say_is_judged(count: int, world: int) -> None:
    """Partitions pass and every other set of shards is refused, the broken keys named and no other."""

    def check(state: list[Claims]) -> None:
        said = [[shard for tensor in state for shard in tensor.shards(rank, filled=False)] for rank in range(world)]
        message = ""
        try:
            validate_sharding_integrity(said)
        except ShardingError as exc:
            message = str(exc)
        _check_message(state, message)

    for_all(_states(world), count, check)


@drawn(15)
def test_a_save_by_one_process_is_refused(count: int) -> None:
    """A layout with a fault is not saved: the error names the key, and nothing is left on the disk."""

    def check(state: list[Claims]) -> None:
        with tempfile.TemporaryDirectory(prefix="shardckpt-property-") as folder:
            message = ""
            try:
                _save(str(Path(folder) / "checkpoint"), state)
            except ShardingError as exc:
                message = str(exc)
            _check_message(state, message)
            assert [path.name for path in Path(folder).iterdir()] == ([] if message else ["checkpoint"])

    for_all(_states(1), count, check)


def _save(path: str, state: list[Claims]) -> None:
    rank, _ = rank_and_size()
    dc.save({tensor.key: tensor.shards(rank, filled=True) for tensor in state}, path)


@drawn(6)
@pytest.mark.parametrize("world", [2, *in_proof(4)])
def test_a_save_by_ranks_is_refused_on_all_of_them(ranks: Ranks, count: int, world: int) -> None:
    """Whichever ranks say what does not fit, every rank gets the same error with the key, and nothing is left."""

    def check(state: list[Claims]) -> None:
        with tempfile.TemporaryDirectory(prefix="shardckpt-property-") as folder:
            outcomes = ranks.outcomes(world, _save, str(Path(folder) / "checkpoint"), state)
            failures = {(o.kind, o.message) for o in outcomes if isinstance(o, Failure)}
            assert len(failures) <= 1
            assert len(failures) == len({type(outcome) for outcome in outcomes} & {Failure})
            assert {kind for kind, _ in failures} <= {"ShardingError"}
            _check_message(state, " ".join(message for _, message in failures))
            assert [path.name for path in Path(folder).iterdir()] == ([] if failures else ["checkpoint"])

    for_all(_states(world), count, check)
