"""Whose copy of a replicated shard is the main one, and which copies are not the same."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt.distributed.comm import Comm
from shardckpt.errors import ShardingError
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.tensors import tensor_bytes
from shardckpt.validation import replicas
from shardckpt.validation.replicas import choose_main_replicas
from tests.tables import in_proof
from tests.validation.replicas import error_of, make_tensor, outcomes_of, settle

if TYPE_CHECKING:
    from shardckpt.mapping import Replicated, ShardedBase
    from tests.ranks import Ranks


def _object(key: str, value: Any, *, replicated: Replicated = True) -> ShardedObject:
    return ShardedObject(key, value, (1,), (0,), replicated=replicated)


def test_of_the_same_everywhere_rank_0_has_the_main_replica(ranks: Ranks) -> None:
    """Where all ranks have the same replicated tensors and objects, in any order, rank 0's are the main ones."""
    first = [make_tensor("a", 1.0), _object("o", {"lr": 0.1})]
    assert outcomes_of(ranks, [first, first[::-1], first]) == [[0, 0], [1, 1], [1, 1]]


def test_of_some_ranks_the_lowest_has_the_main_replica(ranks: Ranks) -> None:
    """A shard that rank 0 lacks has its main replica on the lowest rank that has it, once."""
    shards = [
        [make_tensor("a", 1.0)],
        [make_tensor("b", 2.0), _object("o", None)],
        [],
        [make_tensor("b", 2.0), make_tensor("a", 1.0), _object("o", None), make_tensor("c", 0.0)],
    ]
    for compare in (True, False):
        assert outcomes_of(ranks, shards, compare=compare) == [[0], [0, 0], [], [1, 1, 1, 0]]


def test_other_shards_keep_their_replica_ids(ranks: Ranks) -> None:
    """What is not replicated is left to its own replica id, and is the very object; nothing of the caller's changes."""
    mine: list[ShardedBase] = [
        ShardedTensor.from_rank_offsets("s", torch.ones(1), (0, 0, 2), replica_id=(3, 0)),
        make_tensor("a", 1.0),
    ]
    mine[1].replica_id = 7
    found = choose_main_replicas(mine, Comm(), compare=True)
    assert found[0] is mine[0]
    assert (found[1].replica_id, mine[1].replica_id) == (0, 7)
    assert outcomes_of(ranks, [[mine[0]], []]) == [[(3, 0)], []]


def test_what_says_so_already_is_not_copied() -> None:
    """Of 20,000 replicated shards none is copied where their replica ids are right; ids of several numbers are not."""
    mine: list[ShardedBase] = [make_tensor(name, 1.0) for name in ("a", "b", "c")]
    mine[1].replica_id, mine[2].replica_id = 1, (0, 0)
    found = choose_main_replicas(mine, Comm(), compare=True)
    assert [shard is mine[number] for number, shard in enumerate(found)] == [True, False, False]
    assert [shard.replica_id for shard in found] == [0, 0, 0]


def test_one_rank_has_all_main_replicas_and_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without other ranks no id is made, of 20,000 replicated shards, to find out who has them."""
    monkeypatch.delattr(replicas, "shard_id")
    mine: list[ShardedBase] = [make_tensor("a", 1.0), ShardedTensor.from_rank_offsets("s", torch.ones(1))]
    assert replicas.find_replicas(mine, Comm()) == ({0: True}, [])
    assert replicas.find_replicas(mine[1:], Comm()) == (None, [])


def _make_numbers(odd: float) -> list[ShardedBase]:
    """Numbers of two dtypes, of which one is given, beside a vector."""
    dtypes = (torch.float32, torch.int64)
    values = [torch.tensor(odd if number == 3 else 1.0, dtype=dtypes[number % 2]) for number in range(40)]
    numbers = [ShardedTensor.from_rank_offsets(f"n{n}", value, replicated=True) for n, value in enumerate(values)]
    return [make_tensor("v", 1.0), *numbers]


def test_numbers_are_digested_together(ranks: Ranks) -> None:
    """The steps of 20,000 parameters are compared by one digest a dtype; one of them that differs is named."""
    numbers, others = replicas._group_numbers([(shard, b"") for shard in _make_numbers(1.0)])
    assert [len(group) for group in numbers] == [20, 20]
    assert [shard.key for shard, _ in others] == ["v"]
    assert outcomes_of(ranks, [_make_numbers(1.0), _make_numbers(1.0)]) == [[0] * 41, [1] * 41]
    text = error_of(ranks, [_make_numbers(1.0), _make_numbers(2.0)])
    assert "'n3': one value on rank 0 / one value on rank 1" in text
    assert "'n2'" not in text


def test_places_of_one_key_are_settled_each(ranks: Ranks) -> None:
    """Copies are of the same box of a tensor; another box of the same key has a main replica of its own."""
    halves = [ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, n, 2), replicated=True) for n in (0, 1)]
    assert outcomes_of(ranks, [[halves[0]], [halves[1]], [halves[0]], [halves[1]]]) == [[0], [0], [1], [1]]


def test_different_values_are_named_with_their_ranks(ranks: Ranks) -> None:
    """All ranks raise one error with every tensor and object whose copies differ, and who has which."""
    shards: list[list[ShardedBase]] = [
        [
            make_tensor("a", float(rank == 2)),
            make_tensor("b", 1.0),
            _object("o", {"lr": rank}),
            make_tensor("nan", float("nan")),
        ]
        for rank in range(3)
    ]
    message = error_of(ranks, shards)
    assert "'a': one value on rank 0, 1 / one value on rank 2" in message
    assert "'o': one value on rank 0 / one value on rank 1 / one value on rank 2" in message
    assert "'b'" not in message
    assert "'nan'" not in message
    assert outcomes_of(ranks, shards, compare=False) == [[0] * 4, [1] * 4, [1] * 4]


def test_differences_are_found_where_rank_0_has_no_copy(ranks: Ranks) -> None:
    """Copies on some of the ranks are compared among these; the others raise the same error."""
    shards: list[list[ShardedBase]] = [[], [make_tensor("a", 1.0)], [make_tensor("c", 0.0)], [make_tensor("a", 2.0)]]
    assert "'a': one value on rank 1 / one value on rank 3" in error_of(ranks, shards)


def test_one_bit_of_a_large_tensor_is_a_difference(ranks: Ranks) -> None:
    """Tensors are compared by every byte, in whatever parts: the sign of a zero is told from none."""
    assert outcomes_of(ranks, [[make_tensor("a", 0.0, count=5_000_001)]] * 2) == [[0], [1]]
    other = make_tensor("a", 0.0, count=5_000_001)
    assert other.data is not None
    other.data[-1] = -0.0
    assert "'a'" in error_of(ranks, [[make_tensor("a", 0.0, count=5_000_001)], [other]])


def test_unchecked_copies_are_not_compared(ranks: Ranks) -> None:
    """``"unchecked"`` has its main replica on the lowest rank, whatever the others have."""
    shards: list[list[ShardedBase]] = [[], *([make_tensor("a", float(n), replicated="unchecked")] for n in (1, 2))]
    assert outcomes_of(ranks, shards) == [[], [0], [1]]


def _weight(differing: int, *, shape: tuple[int, ...] = (8, 16), replicated: Replicated = "sampled") -> Any:
    """Of a weight, the first elements differ on rank 1 and later ones."""
    data = torch.zeros(shape)
    data.view(-1)[:differing] = float(dist.get_rank() > 0) if dist.is_initialized() else 0.0
    return ShardedTensor.from_rank_offsets("w", data, replicated=replicated)


def _settle_weight(differing: int, shape: tuple[int, ...], form: str) -> tuple[str, str]:
    shard = _weight(differing, shape=shape)
    if form == "transposed" and dist.get_rank():
        shard.data = shard.data.t().contiguous().t()
    if form == "elsewhere" and dist.get_rank() == 2:
        shard.key = "other"
    if form == "half":
        shard = ShardedTensor.from_rank_offsets("w", shard.data.bfloat16(), replicated="sampled")
    if form == "double":
        shard = ShardedTensor.from_rank_offsets("w", shard.data.double(), replicated="sampled")
    if form == "complex":
        shard = ShardedTensor.from_rank_offsets("w", shard.data * 1j, replicated="sampled")
    try:
        choose_main_replicas([shard], Comm(), compare=True)
    except ShardingError as exc:
        return type(exc).__name__, str(exc)
    return "", ""


@pytest.mark.parametrize("form", ["plain", "transposed", "elsewhere", "half", "double", "complex"])
@pytest.mark.parametrize(("shape", "share"), [((300, 70), 21000), *in_proof(((8, 16), 128), ((2, 3), 6))])
def test_what_differs_on_most_of_a_weight_is_no_copy(
    ranks: Ranks, shape: tuple[int, ...], share: int, form: str
) -> None:
    """A sampled weight that differs on most elements is refused on all ranks; one that differs on a third is not."""
    assert set(ranks.run(3, _settle_weight, share // 3, shape, form)) == {("", "")}
    refused = ranks.run(3, _settle_weight, share * 2 // 3 + 1, shape, form)
    assert len(set(refused)) == 1
    kind, message = refused[0]
    assert kind == "ShardingError"
    assert "check_replicas=False would save one rank's values for all, but most of the values differ" in message
    assert f"'w': one value on rank 0 / one value on rank 1{'' if form == 'elsewhere' else ', 2'}" in message
    assert "shardckpt_ep.expert_layouts" in message


def _refusal(shards: list[list[ShardedBase]]) -> str:
    try:
        settle(shards, compare=True)
    except ShardingError as exc:
        return str(exc)
    return ""


@pytest.mark.parametrize(
    ("key", "is_suggested"),
    [("norm.mean", True), ("layers.0.mlp.experts.bias", False), ("local_experts.1.scale", False)],
)
def test_to_lose_experts_is_not_suggested(ranks: Ranks, key: str, is_suggested: bool) -> None:
    """Any rank's statistics may do, so the error says how; it does not for local experts' vectors and objects."""
    for make in (make_tensor, _object):
        for message in ranks.run(2, _refusal, [[make(key, 1.0)], [make(key, 2.0)]]):
            assert repr(key) in message
            assert ("check_replicas=False" in message) == is_suggested
            assert "shardckpt_ep.expert_layouts" in message


def test_any_ranks_vector_will_do(ranks: Ranks) -> None:
    """Sampled vectors, scalars and objects are not compared: statistics differ on all elements."""
    shards: list[list[ShardedBase]] = [
        [make_tensor("a", float(n), replicated="sampled"), _object("o", n, replicated="sampled")] for n in (1, 2)
    ]
    assert outcomes_of(ranks, shards) == [[0, 0], [1, 1]]


def test_many_samples_travel_in_parts(ranks: Ranks) -> None:
    """Of more weights than go into one message each is judged by its own sample."""
    assert ranks.run(2, _settle_many, 7) == [["w1", "w4"]] * 2


def _settle_many(count: int) -> list[str]:
    replicas._SAMPLES_AT_ONCE, before = 2, replicas._SAMPLES_AT_ONCE
    shards = []
    for number in range(count):
        data = torch.zeros(4, 4)
        data[: 4 if number % 3 == 1 else 1] = dist.get_rank()
        shards.append(ShardedTensor.from_rank_offsets(f"w{number}", data, replicated="sampled"))
    try:
        choose_main_replicas(shards, Comm(), compare=True)
    except ShardingError as exc:
        return [f"w{number}" for number in range(count) if f"'w{number}'" in str(exc)]
    finally:
        replicas._SAMPLES_AT_ONCE = before
    return []


def _differently_pickled() -> list[Any]:
    """Equal values, in one of which a string stands twice, in the other two strings."""
    word = str(b"foreach", "ascii")
    again = word if dist.get_rank() else str(b"foreach", "ascii")
    return settle([[_object("o", {"names": [word, again], "t": torch.ones(2)})]] * 2, compare=True)


def test_equal_objects_may_be_pickled_in_two_ways(ranks: Ranks) -> None:
    """Objects whose pickles differ, by what they share inside, are compared as values."""
    assert ranks.run(2, _differently_pickled) == [[0], [1]]


def test_objects_with_tensors_inside_are_compared_by_their_bits(ranks: Ranks) -> None:
    """Equal tensors in containers of any class are equal, wherever they lie; one that differs is named."""
    whole = torch.arange(6.0)
    copies: list[list[ShardedBase]] = [[_object("o", deque([part], 4))] for part in (whole[:3], whole[:3].clone())]
    assert outcomes_of(ranks, copies) == [[0], [1]]
    other: list[list[ShardedBase]] = [[_object("o", deque([whole[3:]], 4))]]
    assert "'o': one value on rank 0 / one value on rank 1" in error_of(ranks, copies[:1] + other)


def _quantities(rank: int) -> torch.Tensor:
    """The same values in memory of several forms."""
    whole = torch.complex(torch.arange(12.0), torch.ones(12)).view(3, 4)
    return (whole, whole.t().contiguous().t(), whole.conj().resolve_conj().conj())[rank]


def _forms() -> list[Any]:
    shard = ShardedTensor.from_rank_offsets("z", _quantities(dist.get_rank()), replicated=True)
    return [shard.replica_id for shard in choose_main_replicas([shard], Comm(), compare=True)]


def test_how_a_tensor_lies_in_memory_does_not_matter(ranks: Ranks) -> None:
    """Values are compared in the order of elements, whatever the strides."""
    assert ranks.run(3, _forms) == [[0], [1], [1]]


def test_parts_are_cut_alike_whatever_the_memory() -> None:
    """A large tensor is digested in parts of bounded size, which make up the whole in order."""
    tensor = torch.arange(10_000_000, dtype=torch.float32).view(2, -1).t()
    digested: list[bytes] = []

    def digest(data: Any) -> int:
        digested.append(bytes(data))
        return len(digested)

    assert replicas._digest(tensor, digest) == len(digested)
    *parts, digests = digested
    assert len(digests) == 8 * len(parts)
    assert max(map(len, parts)) <= 16 << 20
    assert b"".join(parts) == bytes(tensor_bytes(tensor.reshape(-1)))
