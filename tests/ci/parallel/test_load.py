from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.mapping import ShardedTensor
from tests import backends
from tests.parallel.load import WHOLE, arrivals, calls, checkpoint, differences, load_by, state_of, wrapped
from tests.tables import in_proof

if TYPE_CHECKING:
    from tests.ranks import RankPool

__all__ = ["checkpoint"]  # fixtures

ALGORITHMS = ("broadcast", "gather_rounds", "gather_object", "direct")


def _wanted_bytes(tps: int) -> tuple[int, int]:
    """Bytes that a rank wants, and bytes of all different shards of the job."""
    split = 8 * 24 * 32 * 4 + 3 * 24 * 4 + 2 * 24 * 4
    whole = sum(tensor.nbytes for tensor in WHOLE.values()) + 48 * 4
    return split // tps + whole, split + whole


@backends.both_in_proof
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("world", "tps"), [(3, 1), (4, 2), *in_proof((2, 1), (4, 1))])
def test_each_shard_is_read_once(gloo_ranks: RankPool, checkpoint: str, world: int, tps: int, algorithm: str) -> None:
    """All algorithms give what a plain load gives, in the caller's memory; a shard is read once and goes where wanted.

    With "direct" every rank reads all that it wants.
    """
    options = {"exchange_algo": algorithm, "round_bytes": 1000}
    reports = gloo_ranks.run(world, load_by, checkpoint, tps, options)
    each, unique = _wanted_bytes(tps)
    assert [report["wrong"] for report in reports] == [[]] * world
    assert [report["objects"] for report in reports] == [1] * world
    assert all(report["kept"] for report in reports)
    if algorithm == "direct":
        assert [report["read"] for report in reports] == [each] * world
        assert [report["received"] for report in reports] == [0] * world
        return
    assert sum(report["read"] for report in reports) == unique
    assert max(report["read"] for report in reports) <= unique / world + 24 * 32 * 4
    if algorithm != "gather_object":
        assert [report["read"] + report["received"] for report in reports] == [each] * world


@backends.both_in_proof
def test_groups_share_among_themselves(gloo_ranks: RankPool, checkpoint: str) -> None:
    """With a data parallel group a shard is read once in each group that wants it."""
    reports = gloo_ranks.run(4, load_by, checkpoint, 2, {}, True)
    each, _ = _wanted_bytes(2)
    assert [report["wrong"] for report in reports] == [[]] * 4
    for group in (reports[::2], reports[1::2]):
        assert sum(report["read"] for report in group) == each
        assert [report["read"] + report["received"] for report in group] == [each] * 2


def _rows(key: str, data: torch.Tensor | None, start: int, count: int, **kwargs: Any) -> ShardedTensor:
    dtype = torch.float32 if data is None else data.dtype
    return ShardedTensor(key, data, dtype, (count, 32), (24, 32), (start, 0), None, replica_id=1, **kwargs)


class _Odd(torch.Tensor):
    """A class of tensors of someone else's."""


def _uneven(path: str) -> dict[str, Any]:
    rank = dist.get_rank()
    zeros = torch.zeros(12, 32)
    wanted: dict[str, Any] = {
        0: {"top": _rows("w0", zeros, 0, 12), "w1": _rows("w1", torch.zeros(24, 32), 0, 24)},
        1: {"top": _rows("w0", zeros, 0, 12), "w1": _rows("w1", torch.zeros(24, 32, dtype=torch.bfloat16), 0, 24)},
        2: {
            "bottom": _rows("w0", zeros, 12, 12),
            "top": _rows("w0", torch.zeros(12, 32).as_subclass(_Odd), 0, 12),
            "again": [_rows("w2", None, 0, 24), _rows("w2", torch.zeros(24, 32), 0, 24)],
        },
        3: {},
    }[rank]
    strategy, counting = wrapped(path)
    with arrivals() as arrived:
        loaded = dc.load(wanted, path, strategy, validate_access_integrity=False)
    loaded["read"], loaded["received"] = counting.nbytes, arrived[0]
    return loaded


@backends.both_in_proof
def test_ranks_may_want_different_things(gloo_ranks: RankPool, checkpoint: str) -> None:
    """Shards are shared where they are the same, dtype included; other parts, dtypes and tensor classes are read apart.

    A rank that wants nothing takes part, and what a rank wants twice is read once.
    """
    loaded = gloo_ranks.run(4, _uneven, checkpoint)
    whole = torch.arange(24 * 32.0).view(24, 32)
    half = 12 * 32 * 4
    assert torch.equal(loaded[0]["top"], whole[:12])
    assert torch.equal(loaded[1]["top"], whole[:12])
    assert torch.equal(loaded[2]["bottom"], whole[12:])
    assert torch.equal(loaded[2]["top"].as_subclass(torch.Tensor), whole[:12])
    assert torch.equal(loaded[0]["w1"], whole + 1)
    assert torch.equal(loaded[1]["w1"], (whole + 1).bfloat16())
    assert all(torch.equal(copy, whole + 2) for copy in loaded[2]["again"])
    assert loaded[2]["again"][0].data_ptr() != loaded[2]["again"][1].data_ptr()
    assert [rank["read"] + rank["received"] for rank in loaded] == [3 * half, 2 * half, 4 * half, 0]
    assert [rank["received"] for rank in loaded] == [half, 0, 0, 0]
    assert set(loaded[3]) == {"read", "received"}


def _again_and_again(path: str, cached: bool) -> tuple[list[int], list[list[str]], list[int]]:
    """Gathers, errors and bytes read of four loads; in the third, rank 1 alone wants something else."""
    strategy, counting = wrapped(path, do_cache_distribution=cached)
    gathers, wrong, read = [], [], []
    for number in range(4):
        wanted = state_of(2, filled=False)
        if number == 2 and dist.get_rank() == 1:
            wanted["w0"] = ShardedTensor.from_rank_offsets("w0", torch.zeros(24, 32))
        before = counting.nbytes
        with calls("all_gather", lambda *_: 1) as noted:
            loaded = dc.load(wanted, path, strategy, validate_access_integrity=False)
        if number == 2 and dist.get_rank() == 1:
            loaded["w0"] = loaded["w0"].chunk(2)[1]
        gathers.append(len(noted))
        wrong.append(differences(loaded, 2))
        read.append(counting.nbytes - before)
    return gathers, wrong, read


@backends.both_in_proof
def test_an_assignment_is_kept_while_nothing_changes(gloo_ranks: RankPool, checkpoint: str) -> None:
    """The same wants send no gather; as soon as one rank wants anything else all assign anew."""
    plain = gloo_ranks.run(4, _again_and_again, checkpoint, False)
    cached = gloo_ranks.run(4, _again_and_again, checkpoint, True)
    assert all(wrong == [[]] * 4 for _, wrong, _ in cached)
    for (before, _, read), (after, _, read_too) in zip(plain, cached, strict=True):
        assert after == [before[0], before[1] - 2, before[2], before[3]]
        assert read == read_too
