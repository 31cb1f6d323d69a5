from __future__ import annotations

import json
import math
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.distributed.comm import Comm
from shardckpt.errors import CheckpointingException
from shardckpt.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from shardckpt.parallel.load import FullyParallelLoadStrategyWrapper
from shardckpt.strategy import LoadStrategy, OwnsFiles, Recognises
from tests import backends
from tests.faults.deaths import Scenario
from tests.faults.programs import ask
from tests.tables import in_proof

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.mapping import ShardedBase
    from shardckpt.strategy import LoadContext
    from tests.backends import Backend
    from tests.ranks import RankPool, Ranks

ALGORITHMS = ("broadcast", "gather_rounds", "gather_object", "direct")
WHOLE = {
    "bfloat16": torch.arange(40).to(torch.bfloat16),
    "int64": torch.arange(40) * 2**40,
    "bool": torch.arange(40) % 3 == 0,
    "float8": torch.arange(8).float().to(torch.float8_e4m3fn),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 3),
}


class Counting(LoadStrategy):
    """Reads through another strategy, and notes how many bytes of tensors it is asked for, and which objects."""

    def __init__(self, strategy: LoadStrategy) -> None:
        self._strategy = strategy
        self.backend, self.version = strategy.backend, strategy.version
        self.nbytes = 0
        self.keys: list[str] = []

    def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
        """Note, and load."""
        self.nbytes += sum(_nbytes(shard) for shard in wanted)
        self.keys += [shard.key for shard in wanted]
        return self._strategy.load(wanted, context)

    def load_common(self, context: LoadContext) -> dict[str, Any]:
        """As the strategy does."""
        return self._strategy.load_common(context)

    def load_index(self, context: LoadContext) -> list[ShardedBase]:
        """As the strategy does."""
        return self._strategy.load_index(context)


@contextmanager
def _calls(name: str, notes: Any) -> Iterator[list[Any]]:
    """What ``notes(self, *args)`` says of every call of a method of Comm in the meantime."""
    original, noted = getattr(Comm, name), []

    def noting(self: Comm, *args: Any) -> Any:
        noted.append(notes(self, *args))
        return original(self, *args)

    setattr(Comm, name, noting)
    try:
        yield noted
    finally:
        setattr(Comm, name, original)


@contextmanager
def _arrivals() -> Iterator[list[int]]:
    """Bytes that come to this rank from others, as tensors."""

    def received(_: Comm, __: Any, receives: Any, *___: Any) -> int:
        return sum(tensor.nbytes for tensor, _ in receives)

    def heard(comm: Comm, routes: Any, *_: Any) -> int:
        return sum(tensor.nbytes for tensor, rank in routes if rank != comm.rank)

    with _calls("exchange", received) as sent, _calls("broadcast_tensors", heard) as told:
        counts: list[int] = []
        yield counts
        counts.append(sum(sent) + sum(told))


def _nbytes(shard: ShardedBase) -> int:
    return math.prod(shard.data_shape) * shard.dtype.itemsize if isinstance(shard, ShardedTensor) else 0


def _swiglu(key: str, data: torch.Tensor, replica: Any, _: Any, tp: int, tps: int) -> dict[str, ShardedTensor]:
    halves = data.chunk(2)
    return {
        name: ShardedTensor.from_rank_offsets(f"{key}.{name}", half.contiguous(), (0, tp, tps), replica_id=replica)
        for name, half in zip("wv", halves, strict=True)
    }


def _state(tps: int, *, filled: bool) -> dict[str, Any]:
    """Tensor parallel ``tps``, the rest data parallel, rank = dp * tps + tp; the global content is always the same."""
    tp, dp = dist.get_rank() % tps, dist.get_rank() // tps

    def part(whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(tps)[tp].clone() if filled else torch.zeros_like(whole.chunk(tps)[tp])

    def same(whole: torch.Tensor) -> torch.Tensor:
        return whole.clone() if filled else torch.zeros_like(whole)

    state: dict[str, Any] = {}
    for number in range(8):
        whole = torch.arange(24 * 32.0).view(24, 32) + number
        state[f"w{number}"] = ShardedTensor.from_rank_offsets(f"w{number}", part(whole), (0, tp, tps), replica_id=dp)
    for name, whole in WHOLE.items():
        state[name] = ShardedTensor.from_rank_offsets(name, same(whole), replica_id=dist.get_rank())
    state["layers"] = [
        ShardedTensor.from_rank_offsets(
            "layers", part(torch.arange(24.0) + layer), (0, layer, 3), (1, tp, tps), replica_id=dp, prepend_axis_num=1
        )
        for layer in range(3)
    ]
    state["swiglu"] = ShardedTensorFactory(
        "swiglu",
        torch.cat([part(torch.arange(24.0)), part(torch.arange(24.0) + 100)]),
        lambda key, data, replica, flat: _swiglu(key, data, replica, flat, tp, tps),
        lambda built: torch.cat([built["w"], built["v"]]),
        replica_id=dp,
    )
    turned = torch.arange(48.0).view(8, 6)
    destination = turned.clone() if filled else torch.zeros(6, 8).t()
    state["turned"] = ShardedTensor.from_rank_offsets("turned", destination, replica_id=dist.get_rank())
    state["object"] = ShardedObject("object", {"a": 1} if filled else None, (1,), (0,), replica_id=dist.get_rank())
    return state


def _differences(loaded: dict[str, Any], tps: int) -> list[str]:
    expected = _state(tps, filled=True)
    pairs = [(name, loaded[name], expected[name].data) for name in expected if name != "layers"]
    pairs += [(f"layer {n}", loaded["layers"][n], expected["layers"][n].data) for n in range(3)]
    return [name for name, found, value in pairs if not _same(found, value)]


def _same(found: Any, value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return bool(found == value)
    return found.dtype == value.dtype and found.shape == value.shape and torch.equal(found.double(), value.double())


def _save(path: str) -> None:
    dc.save(_state(2, filled=True), path)


def _wrapped(path: str, group: Any = None, **options: Any) -> tuple[FullyParallelLoadStrategyWrapper, Counting]:
    counting = Counting(dc.get_default_load_sharded_strategy(path))
    return FullyParallelLoadStrategyWrapper(counting, group, **options), counting


def _load(path: str, tps: int, options: dict[str, Any], grouped: bool = False) -> dict[str, Any]:
    """What this rank read, received and got wrong."""
    groups = [dist.new_group([*range(tp, dist.get_world_size(), tps)]) for tp in range(tps)]
    strategy, counting = _wrapped(path, groups[dist.get_rank() % tps] if grouped else None, **options)
    wanted = _state(tps, filled=False)
    for name in ("w7", "bool", "scalar"):
        wanted[name] = wanted[name].without_data()
    destinations = {name: shard.data for name, shard in wanted.items() if isinstance(shard, ShardedTensor)}
    with _arrivals() as arrived:
        loaded = dc.load(wanted, path, strategy)
    kept = all(loaded[name] is data for name, data in destinations.items() if data is not None)
    return {
        "wrong": _differences(loaded, tps),
        "read": counting.nbytes,
        "objects": counting.keys.count("object"),
        "received": arrived[0],
        "kept": kept,
    }


@pytest.fixture(scope="module")
def checkpoint(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, backend: Backend) -> str:
    """A checkpoint that four ranks have saved."""
    path = str(tmp_path_factory.mktemp("parallel") / "ckpt")
    ranks.run(4, _save, path)
    return path


def _wanted_bytes(tps: int) -> tuple[int, int]:
    """Bytes that a rank wants, and bytes of all different shards of the job."""
    split = 8 * 24 * 32 * 4 + 3 * 24 * 4 + 2 * 24 * 4
    whole = sum(tensor.nbytes for tensor in WHOLE.values()) + 48 * 4
    return split // tps + whole, split + whole


@pytest.mark.ci
@backends.both_in_proof
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("world", "tps"), [(3, 1), (4, 2), *in_proof((2, 1), (4, 1))])
def test_each_shard_is_read_once(gloo_ranks: RankPool, checkpoint: str, world: int, tps: int, algorithm: str) -> None:
    """All algorithms give what a plain load gives, in the caller's memory; a shard is read once and goes where wanted.

    With "direct" every rank reads all that it wants.
    """
    options = {"exchange_algo": algorithm, "round_bytes": 1000}
    reports = gloo_ranks.run(world, _load, checkpoint, tps, options)
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


@pytest.mark.ci
@backends.both_in_proof
def test_groups_share_among_themselves(gloo_ranks: RankPool, checkpoint: str) -> None:
    """With a data parallel group a shard is read once in each group that wants it."""
    reports = gloo_ranks.run(4, _load, checkpoint, 2, {}, True)
    each, _ = _wanted_bytes(2)
    assert [report["wrong"] for report in reports] == [[]] * 4
    for group in (reports[::2], reports[1::2]):
        assert sum(report["read"] for report in group) == each
        assert [report["read"] + report["received"] for report in group] == [each] * 2


@backends.both_in_proof
def test_one_process_loads_too(tmp_path: Path) -> None:
    """Without a process group the wrapper is the strategy."""
    data = torch.arange(6.0)
    dc.save({"w": ShardedTensor.from_rank_offsets("w", data)}, tmp_path / "c")
    strategy, counting = _wrapped(str(tmp_path / "c"))
    loaded = dc.load({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(6))}, tmp_path / "c", strategy)
    assert torch.equal(loaded["w"], data)
    assert counting.nbytes == 24


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
    strategy, counting = _wrapped(path)
    with _arrivals() as arrived:
        loaded = dc.load(wanted, path, strategy, validate_access_integrity=False)
    loaded["read"], loaded["received"] = counting.nbytes, arrived[0]
    return loaded


@pytest.mark.ci
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


def _resized(path: str) -> torch.Tensor:
    padded = ShardedTensor(
        "w0", torch.full((30, 32), -1.0), torch.float32, (30, 32), (30, 32), (0, 0), None, 1, allow_shape_mismatch=True
    )
    strategy, _ = _wrapped(path)
    return dc.load({"w": padded}, path, strategy, validate_access_integrity=False)["w"]


@backends.both_in_proof
def test_padding_is_zero_everywhere(ranks: Ranks, checkpoint: str) -> None:
    """A shard that may differ in shape is the same on the ranks that received it: common region loaded, rest zero."""
    for loaded in ranks.run(2, _resized, checkpoint):
        assert torch.equal(loaded[:24], torch.arange(24 * 32.0).view(24, 32))
        assert not loaded[24:].any()


def _damaged(path: str, grouped: bool) -> None:
    _load(path, 2, {}, grouped)


@backends.both_in_proof
@pytest.mark.parametrize("grouped", [False, True])
def test_one_ranks_reading_error_is_everyones(ranks: Ranks, tmp_path: Path, grouped: bool) -> None:
    """Where one rank reads damaged bytes, all ranks raise its error, also those of other groups."""
    path = tmp_path / "c"
    ranks.run(4, _save, str(path))
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
    dc.load(_state(2, filled=False), path, FullyParallelLoadStrategyWrapper(careless))


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
    return _differences(dc.load(_state(2, filled=False), path, strategy), 2)


@backends.both_in_proof
def test_strategies_may_give_tensors_of_their_own(ranks: Ranks, checkpoint: str) -> None:
    """A strategy that does not fill destinations, nor keeps to the dtype, serves all ranks alike."""
    assert ranks.run(4, _own_value, checkpoint) == [[]] * 4


def _disagree(path: str) -> None:
    _load(path, 2, {"exchange_algo": "direct" if dist.get_rank() == 3 else "broadcast"})


@backends.both_in_proof
def test_ranks_agree_on_the_algorithm(ranks: Ranks, checkpoint: str) -> None:
    """Ranks that would wait for what others do not send raise before that."""
    outcomes = ranks.outcomes(4, _disagree, checkpoint)
    assert len({outcome.message for outcome in outcomes}) == 1
    assert "disagree on exchange_algo" in outcomes[0].message


def _not_a_member(path: str) -> None:
    group = dist.new_group([0, 1])
    strategy, _ = _wrapped(path, group)
    dc.load(_state(1, filled=False), path, strategy)


@backends.both_in_proof
def test_every_rank_needs_a_group_of_its_own(ranks: Ranks, checkpoint: str) -> None:
    """A group that a rank does not belong to is an error on all ranks."""
    outcomes = ranks.outcomes(3, _not_a_member, checkpoint)
    assert len({outcome.message for outcome in outcomes}) == 1
    assert "does not belong to the process group" in outcomes[0].message


@backends.both_in_proof
def test_arguments_are_checked(checkpoint: str) -> None:
    """An unknown algorithm is refused with the names of the known ones."""
    with pytest.raises(CheckpointingException, match="no exchange_algo 'ring': it is one of broadcast"):
        _wrapped(checkpoint, exchange_algo="ring")


def test_abilities_of_the_strategy_stay(checkpoint: str) -> None:
    """The wrapper recognises checkpoints and owns files where the strategy does, and only there."""
    inner = dc.get_default_load_sharded_strategy(checkpoint)
    wrapper = FullyParallelLoadStrategyWrapper(inner, per_rank_object_load=True)
    assert isinstance(wrapper, Recognises)
    assert isinstance(wrapper, OwnsFiles)
    assert wrapper.recognises(Path(checkpoint)) == inner.version
    assert wrapper.owned_files(Path(checkpoint)) == inner.owned_files(Path(checkpoint))
    plain, _ = _wrapped(checkpoint)
    assert not isinstance(plain, Recognises)
    assert not isinstance(plain, OwnsFiles)


def _again_and_again(path: str, cached: bool) -> tuple[list[int], list[list[str]], list[int]]:
    """Gathers, errors and bytes read of four loads; in the third, rank 1 alone wants something else."""
    strategy, counting = _wrapped(path, do_cache_distribution=cached)
    gathers, wrong, read = [], [], []
    for number in range(4):
        wanted = _state(2, filled=False)
        if number == 2 and dist.get_rank() == 1:
            wanted["w0"] = ShardedTensor.from_rank_offsets("w0", torch.zeros(24, 32))
        before = counting.nbytes
        with _calls("all_gather", lambda *_: 1) as noted:
            loaded = dc.load(wanted, path, strategy, validate_access_integrity=False)
        if number == 2 and dist.get_rank() == 1:
            loaded["w0"] = loaded["w0"].chunk(2)[1]
        gathers.append(len(noted))
        wrong.append(_differences(loaded, 2))
        read.append(counting.nbytes - before)
    return gathers, wrong, read


@pytest.mark.ci
@backends.both_in_proof
def test_an_assignment_is_kept_while_nothing_changes(gloo_ranks: RankPool, checkpoint: str) -> None:
    """The same wants send no gather; as soon as one rank wants anything else all assign anew."""
    plain = gloo_ranks.run(4, _again_and_again, checkpoint, False)
    cached = gloo_ranks.run(4, _again_and_again, checkpoint, True)
    assert all(wrong == [[]] * 4 for _, wrong, _ in cached)
    for (before, _, read), (after, _, read_too) in zip(plain, cached, strict=True):
        assert after == [before[0], before[1] - 2, before[2], before[3]]
        assert read == read_too


SCENARIOS = [
    Scenario(world=3, group=3, victim=1, algorithm="gather_rounds", how="kill"),
    Scenario(world=3, group=3, victim=0, algorithm="broadcast", how="kill"),
    Scenario(world=4, group=2, victim=1, algorithm="broadcast", how="kill"),
    Scenario(world=4, group=2, victim=2, algorithm="gather_rounds", how="stop"),
]


@backends.both_in_proof
@pytest.mark.proof
def test_a_rank_lost_in_the_exchange(tmp_path: Path) -> None:
    """Where a rank dies or stops between two rounds, all others name it within one timeout, in all groups."""
    reports = ask("deaths", "exchange", tmp_path, text=json.dumps(SCENARIOS))
    for scenario, report in zip(SCENARIOS, reports, strict=True):
        assert not report["hung"], scenario
        survivors = {str(rank) for rank in range(scenario["world"])} - {str(scenario["victim"])}
        assert set(report["outcomes"]) == survivors, scenario
        ((kind, message),) = {tuple(outcome) for outcome in report["outcomes"].values()}
        assert kind == "CommunicationError", message
        assert message.startswith(f"rank {scenario['victim']} "), message
