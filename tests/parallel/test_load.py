from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import CheckpointingException
from shardckpt.mapping import ShardedTensor
from shardckpt.parallel.load import FullyParallelLoadStrategyWrapper
from shardckpt.strategy import OwnsFiles, Recognises
from tests import backends
from tests.parallel.load import WHOLE, Counting, checkpoint, differences, load_by, save_two_ways, state_of, wrapped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.mapping import ShardedBase
    from shardckpt.strategy import LoadContext
    from tests.ranks import Ranks

__all__ = ["checkpoint"]  # fixtures


@backends.both_in_proof
def test_one_process_loads_too(tmp_path: Path) -> None:
    """Without a process group the wrapper is the strategy."""
    data = torch.arange(6.0)
    dc.save({"w": ShardedTensor.from_rank_offsets("w", data)}, tmp_path / "c")
    strategy, counting = wrapped(str(tmp_path / "c"))
    loaded = dc.load({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(6))}, tmp_path / "c", strategy)
    assert torch.equal(loaded["w"], data)
    assert counting.nbytes == 24


def _resized(path: str) -> torch.Tensor:
    padded = ShardedTensor(
        "w0", torch.full((30, 32), -1.0), torch.float32, (30, 32), (30, 32), (0, 0), None, 1, allow_shape_mismatch=True
    )
    strategy, _ = wrapped(path)
    return dc.load({"w": padded}, path, strategy, validate_access_integrity=False)["w"]


@backends.both_in_proof
def test_padding_is_zero_everywhere(ranks: Ranks, checkpoint: str) -> None:
    """A shard that may differ in shape is the same on the ranks that received it: common region loaded, rest zero."""
    for loaded in ranks.run(2, _resized, checkpoint):
        assert torch.equal(loaded[:24], torch.arange(24 * 32.0).view(24, 32))
        assert not loaded[24:].any()


def _damaged(path: str, grouped: bool) -> None:
    load_by(path, 2, {}, grouped)


@backends.both_in_proof
@pytest.mark.parametrize("grouped", [False, True])
def test_one_ranks_reading_error_is_everyones(ranks: Ranks, tmp_path: Path, grouped: bool) -> None:
    """Where one rank reads damaged bytes, all ranks raise its error, also those of other groups."""
    path = tmp_path / "c"
    ranks.run(4, save_two_ways, str(path))
    file = min(path.glob(backends.current().data_files))
    content = bytearray(file.read_bytes())
    place = content.find(WHOLE["int64"].numpy().tobytes())
    assert place > 0
    content[place + 9] ^= 1
    file.write_bytes(content)
    outcomes = ranks.outcomes(4, _damaged, str(path), grouped)
    assert {outcome.kind for outcome in outcomes} == {"CorruptCheckpointError"}
    assert len({outcome.message for outcome in outcomes}) == 1
    assert "int64" in outcomes[0].message


class _Careless(Counting):
    """A strategy that gives one tensor in another shape, or none."""

    wrong: Any = torch.zeros(1, 7)

    def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
        """Give something wrong for one shard."""
        values = super().load(wanted, context)
        return [self.wrong if shard.key == "w3" else value for shard, value in zip(wanted, values, strict=True)]


def _careless(path: str, wrong: Any) -> None:
    careless = _Careless(dc.get_default_load_sharded_strategy(path))
    careless.wrong = wrong
    dc.load(state_of(2, filled=False), path, FullyParallelLoadStrategyWrapper(careless))


@backends.both_in_proof
@pytest.mark.parametrize("wrong", [torch.zeros(1, 7), None], ids=["shape", "none"])
def test_what_does_not_fit_is_not_sent(ranks: Ranks, checkpoint: str, wrong: Any) -> None:
    """A strategy that gives the source a tensor of another shape, or nothing, is an error on all ranks."""
    outcomes = ranks.outcomes(4, _careless, checkpoint, wrong)
    assert {outcome.kind for outcome in outcomes} == {"PluginError"}
    assert len({outcome.message for outcome in outcomes}) == 1
    assert f"{__name__}._Careless (" in outcomes[0].message
    assert "load returned for 'w3'" in outcomes[0].message


def _own_value(path: str) -> list[str]:
    class Generous(Counting):
        def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
            values = super().load([shard.without_data() for shard in wanted], context)
            return [value.double() if isinstance(value, torch.Tensor) else value for value in values]

    strategy = FullyParallelLoadStrategyWrapper(Generous(dc.get_default_load_sharded_strategy(path)))
    return differences(dc.load(state_of(2, filled=False), path, strategy), 2)


@backends.both_in_proof
def test_strategies_may_give_tensors_of_their_own(ranks: Ranks, checkpoint: str) -> None:
    """A strategy that does not fill destinations, nor keeps to the dtype, serves all ranks alike."""
    assert ranks.run(4, _own_value, checkpoint) == [[]] * 4


def _disagree(path: str) -> None:
    load_by(path, 2, {"exchange_algo": "direct" if dist.get_rank() == 3 else "broadcast"})


@backends.both_in_proof
def test_ranks_agree_on_the_algorithm(ranks: Ranks, checkpoint: str) -> None:
    """Ranks that would wait for what others do not send raise before that."""
    outcomes = ranks.outcomes(4, _disagree, checkpoint)
    assert len({outcome.message for outcome in outcomes}) == 1
    assert "disagree on exchange_algo" in outcomes[0].message


def _not_a_member(path: str) -> None:
    group = dist.new_group([0, 1])
    strategy, _ = wrapped(path, group)
    dc.load(state_of(1, filled=False), path, strategy)


@backends.both_in_proof
def test_every_rank_needs_a_group_of_its_own(ranks: Ranks, checkpoint: str) -> None:
    """A group that a rank does not belong to is an error on all ranks."""
    outcomes = ranks.outcomes(3, _not_a_member, checkpoint)
    assert len({outcome.message for outcome in outcomes}) == 1
    assert "does not belong to the process group" in outcomes[0].message


@backends.both_in_proof
def test_arguments_are_checked(checkpoint: str) -> None:
    """An unknown algorithm is refused with the names of the known ones, and a round that has no bytes."""
    with pytest.raises(CheckpointingException, match="no exchange_algo 'ring': it is one of broadcast"):
        wrapped(checkpoint, exchange_algo="ring")
    for given in (0, -5, "64MiB", None):
        with pytest.raises(CheckpointingException, match=rf"round_bytes={given!r}: .* 1 or more"):
            wrapped(checkpoint, round_bytes=given)


def test_abilities_of_the_strategy_stay(checkpoint: str) -> None:
    """The wrapper recognises checkpoints and owns files where the strategy does, and only there."""
    inner = dc.get_default_load_sharded_strategy(checkpoint)
    wrapper = FullyParallelLoadStrategyWrapper(inner, per_rank_object_load=True)
    assert isinstance(wrapper, Recognises)
    assert isinstance(wrapper, OwnsFiles)
    assert wrapper.recognises(Path(checkpoint)) == inner.version
    assert wrapper.owned_files(Path(checkpoint)) == inner.owned_files(Path(checkpoint))
    plain, _ = wrapped(checkpoint)
    assert not isinstance(plain, Recognises)
    assert not isinstance(plain, OwnsFiles)
