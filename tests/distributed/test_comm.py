from __future__ import annotations

import ast
import gc
import traceback
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.distributed import comm as comm_module
from shardckpt.distributed.comm import Comm
from shardckpt.errors import CheckpointingException, CommunicationError, RankFailedError, ShardingError, StorageError
from shardckpt.local import CliqueReplication, LocalCheckpointManager, TensorAwareStateDict
from shardckpt.mapping import ShardedTensor
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.ranks import Ranks


def _moves() -> tuple[list[int], list[int], int, str]:
    comm = Comm()
    rank = comm.rank
    return comm.all_gather(rank), comm.gather(rank * 10), comm.broadcast(rank + 7), comm.main_runs("x", lambda: "main")


def test_values_move_between_ranks(ranks: Ranks) -> None:
    """Gathers and broadcasts give every rank what they promise."""
    results = ranks.run(3, _moves)
    assert results[0] == ([0, 1, 2], [0, 10, 20], 7, "main")
    assert results[2] == ([0, 1, 2], [], 7, "main")


def _gathers(unit: int) -> list[list[int]]:
    comm = Comm()
    everyone = comm.gather(bytes([comm.rank]) * unit * comm.rank)
    some = comm.gather_some(bytes([7]) * unit, given=comm.rank == 2)
    none = comm.gather_some(0, given=False)
    return [[len(part) for part in parts] for parts in (everyone, some)] + [list(none)]


@pytest.mark.parametrize("unit", [1, 4 << 20])
def test_values_of_any_size_are_gathered(ranks: Ranks, unit: int) -> None:
    """The main rank gets the values of those that give one, small ones at once and large ones each by itself."""
    results = ranks.run(3, _gathers, unit)
    assert results == [[[0, unit, 2 * unit], [unit], []], [[], [], []], [[], [], []]]


def _gathers_up_to() -> list[Any]:
    comm = Comm()
    value = bytes(100 * comm.rank)
    return [comm.gather_up_to(limit, value) for limit in (0, 300, 1 << 20)]


def test_a_gather_has_a_limit(ranks: Ranks) -> None:
    """What the longest value times the ranks exceeds is gathered by none; one rank has its own in any case."""
    assert ranks.run(1, _gathers_up_to) == [[[b""]] * 3]
    assert ranks.run(3, _gathers_up_to) == [
        [None, None, [b"", bytes(100), bytes(200)]],
        [None, None, []],
        [None, None, []],
    ]


def _fails(where: str) -> None:
    comm = Comm()
    with comm.collective_phase("outer"):
        with comm.collective_phase("first"):
            if where == "own" and comm.rank == 1:
                raise ShardingError("bad shard")
            if where == "foreign" and comm.rank >= 1:
                raise ValueError(f"odd value {comm.rank}")
        if where == "between" and comm.rank == 2:
            raise ShardingError("outside of any inner phase")
        with comm.collective_phase("second"):
            pass
        comm.gather(1)


@pytest.mark.parametrize(
    ("where", "kind", "texts"),
    [
        ("own", ShardingError, ["rank 1, in 'first': bad shard"]),
        ("foreign", RankFailedError, ["rank 1, in 'first': ValueError: odd value 1", "rank 2", "odd value 2"]),
        ("between", ShardingError, ["rank 2, in 'outer': outside of any inner phase"]),
    ],
)
def test_one_ranks_error_is_everyones(ranks: Ranks, where: str, kind: type, texts: list[str]) -> None:
    """Whoever fails, inside a phase or between two, all ranks raise the same error, and no rank is left behind."""
    (outcome,) = set(ranks.run(3, _error_and_gather, where))
    assert outcome[0] == kind.__name__
    for text in texts:
        assert text in outcome[1]
    assert outcome[2:] == (0, 1, 2)


def _error_and_gather(where: str) -> tuple[Any, ...]:
    try:
        _fails(where)
    except CheckpointingException as exc:
        return (type(exc).__name__, str(exc), *Comm().all_gather(dist.get_rank()))
    return ()


def _traceback_of_a_shared_error(text: str, reason: str) -> str:
    def read() -> None:
        try:
            raise OSError(reason)
        except OSError as exc:
            raise StorageError(text) from exc

    try:
        with Comm().collective_phase("reading"):
            read()
    except StorageError as exc:
        return "".join(traceback.format_exception(exc))
    return ""


@table("count", [1, 2])
def test_a_traceback_has_a_shared_text_once(ranks: Ranks, count: int) -> None:
    """Each rank's traceback leads to the line that failed and to its cause, and has the error's text once."""
    for found in ranks.run(count, _traceback_of_a_shared_error, "it is damaged", "disk on fire"):
        assert found.count("it is damaged") == 1
        assert "in read" in found
        assert "OSError: disk on fire" in found


def _in_subgroup() -> list[int]:
    group = dist.new_group([1, 2])
    if dist.get_rank() not in (1, 2):
        return []
    comm = Comm(group)
    return [comm.rank, comm.world_size, comm.broadcast(dist.get_rank())]


def test_a_subgroup_has_its_own_main_rank(ranks: Ranks) -> None:
    """With process_group= the first rank of the group speaks for it."""
    assert ranks.run(3, _in_subgroup) == [[], [0, 2, 1], [1, 2, 1]]


def test_one_process_needs_no_group() -> None:
    """Without torch.distributed everything works, and foreign errors join the family."""
    comm = Comm()
    assert (comm.rank, comm.world_size, comm.is_main) == (0, 1, True)
    assert (comm.gather(1), comm.all_gather(2), comm.broadcast(3), comm.main_runs("x", lambda: 4)) == ([1], [2], 3, 4)
    with pytest.raises(RankFailedError, match="in 'step': KeyError"), comm.collective_phase("step"):
        raise KeyError("k")
    with pytest.raises(ShardingError, match=r"^plain$"), comm.collective_phase("step"):
        raise ShardingError("plain")


def test_a_group_without_torch_distributed_is_an_error() -> None:
    """A job that forgot to initialise would save as one rank, and each of its ranks over the others."""
    with pytest.raises(CheckpointingException, match=r"process_group=.*: .*call torch\.distributed\.init_"):
        Comm(object())  # type: ignore[arg-type]


def _hands_out_what_cannot_be_pickled(how: str) -> None:
    comm = Comm()
    value = (lambda: None) if comm.rank == (0 if how == "broadcast" else 1) else 1
    getattr(comm, how)(value)


@pytest.mark.parametrize("how", ["gather", "all_gather", "broadcast"])
def test_a_value_that_cannot_travel_is_everyones_error(ranks: Ranks, how: str) -> None:
    """A value that pickle refuses on one rank is the same error on all, and no rank waits for it."""
    outcomes = ranks.outcomes(3, _hands_out_what_cannot_be_pickled, how)
    assert len({outcome.message for outcome in outcomes}) == 1
    assert "pickle" in outcomes[0].message


def _fails_in_a_smaller_group(how: str) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    outer = Comm()
    with outer.collective_phase("outer"):
        inner = Comm(alone=True) if how == "alone" else Comm(halves[outer.rank // 2])
        with inner.collective_phase("inner"):
            if outer.rank == 1:
                raise ShardingError("bad shard")
    outer.gather(1)


@pytest.mark.parametrize("how", ["alone", "half"])
def test_an_error_of_a_smaller_group_is_shared_in_the_larger(ranks: Ranks, how: str) -> None:
    """An error that some ranks share is not yet that of all: the others hear of it at once, and raise the same."""
    outcomes = ranks.outcomes(4, _fails_in_a_smaller_group, how)
    assert {outcome.kind for outcome in outcomes} == {"ShardingError"}
    assert len({outcome.message for outcome in outcomes}) == 1
    assert "bad shard" in outcomes[0].message


def _is_interrupted_deep_inside() -> list[Any]:
    comm, heard = Comm(), "nothing"
    try:
        with comm.local_phase("operation"), comm.collective_phase("step"), comm.local_phase("part"):
            if comm.rank == 1:
                raise KeyboardInterrupt
    except (KeyboardInterrupt, RankFailedError) as exc:
        heard = type(exc).__name__

    def next_operation() -> None:
        with comm.collective_phase("next"):
            if comm.rank == 1:
                raise ValueError("odd value")

    return [heard, Comm().all_gather(comm.rank), _error_of(next_operation)]


def test_an_interrupt_on_one_rank_is_heard_by_all_once(ranks: Ranks) -> None:
    """Ctrl-C ends the rank that got it, however deep in phases; the others hear of it once, and of what fails then."""
    after = [[0, 1, 2], "rank 1, in 'next': ValueError: odd value"]
    heard = ("RankFailedError", "KeyboardInterrupt", "RankFailedError")
    assert ranks.run(3, _is_interrupted_deep_inside) == [[each, *after] for each in heard]


def _fails_on_the_way_out(who: int) -> list[Any]:
    comm = Comm()

    def operation() -> None:
        with comm.local_phase("operation"):
            try:
                with comm.collective_phase("step"):
                    if comm.rank == 1:
                        raise ShardingError("bad shard")
            finally:
                if comm.rank == who:
                    raise OSError("and the disk is full")

    def next_operation() -> None:
        with comm.collective_phase("next"):
            if comm.rank == who:
                raise ValueError("another")

    return [_error_of(operation), Comm().all_gather(comm.rank), _error_of(next_operation)]


def _error_of(operation: Callable[[], None]) -> str:
    try:
        operation()
    except CheckpointingException as exc:
        return str(exc)
    return ""


@pytest.mark.parametrize("who", [0, 1])
def test_what_fails_after_a_shared_error_is_not_reported(ranks: Ranks, who: int) -> None:
    """An error while a failed operation is cleaned up does not become the others' in what they do next."""
    shared, another = "rank 1, in 'step': bad shard", f"rank {who}, in 'next': ValueError: another"
    assert ranks.run(2, _fails_on_the_way_out, who) == [[shared, [0, 1], another]] * 2


def _phase(comm: Comm) -> None:
    with comm.collective_phase("together"):
        pass


COLLECTIVES: dict[str, Callable[[Comm], Any]] = {
    "collective_phase": _phase,
    "agree": lambda comm: comm.agree(value=1),
    "largest": lambda comm: comm.largest(1),
    "many": lambda comm: comm.largest(1, 2, 3),
    "total": lambda comm: comm.total(1),
    "gather": lambda comm: comm.gather(1),
    "all_gather": lambda comm: comm.all_gather(1),
    "all_to_all": lambda comm: comm.all_to_all({0: b"x"}),
    "gather_up_to": lambda comm: comm.gather_up_to(0, 1),
    "broadcast": lambda comm: comm.broadcast(1),
    "main_runs": lambda comm: comm.main_runs("x", lambda: 1),
    "exchange": lambda comm: comm.exchange([], []),
    "broadcast_tensors": lambda comm: comm.broadcast_tensors([]),
    "sync_errors": Comm.sync_errors,
}


def _fails_in_a_local_phase(then: str) -> None:
    comm = Comm()
    with comm.local_phase("alone"):
        if comm.rank == 1:
            raise ShardingError("bad shard")
    COLLECTIVES[then](comm)  # the others go on, until they sync errors


@pytest.mark.parametrize("limit", [comm_module.MAX_BYTES_BY_MAIN, 0], ids=["by the main rank", "by all-reduces"])
@table("then", COLLECTIVES)
def test_an_error_in_a_local_phase_is_everyones_in_what_follows(
    ranks: Ranks, then: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the ranks do together next, they do not do it, and raise the error of the one that has failed."""
    monkeypatch.setattr(comm_module, "MAX_BYTES_BY_MAIN", limit)
    outcomes = ranks.outcomes(3, _fails_in_a_local_phase, then)
    assert [outcome.kind for outcome in outcomes] == ["ShardingError"] * 3
    assert {outcome.message for outcome in outcomes} == {"rank 1, in 'alone': bad shard"}


def _disagrees() -> None:
    comm = Comm()
    comm.agree(strict="log_all" if comm.rank == 2 else "raise_all", validate=True)


def test_arguments_are_the_same_on_all_ranks(ranks: Ranks) -> None:
    """Where an argument decides which collectives follow, ranks that differ raise before any of them."""
    outcomes = ranks.outcomes(3, _disagrees)
    assert len({outcome.message for outcome in outcomes}) == 1
    assert "disagree on strict: 'raise_all' on rank 0, 'log_all' on rank 2" in outcomes[0].message


def _under_another_default_device() -> list[int]:
    with torch.device("meta"):
        return Comm().all_gather(dist.get_rank())


def test_a_default_device_does_not_matter(ranks: Ranks) -> None:
    """The control plane is on the CPU whatever torch.set_default_device says."""
    assert ranks.run(2, _under_another_default_device) == [[0, 1]] * 2


def _groups_left_after_errors(path: str) -> list[str]:
    """With the collector off, fail in every way that a job may catch, and see what a destroyed group leaves."""
    gc.disable()
    try:
        for action in (_load_of_nothing, _save_of_what_does_not_fit):
            with suppress(CheckpointingException):
                action(path)
        group = weakref.ref(dist.group.WORLD)
        dist.destroy_process_group()
        return ["alive"] if group() is not None else []
    finally:
        gc.enable()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the test's pool ends it


def _load_of_nothing(path: str) -> None:
    dc.load({}, path)


def _save_of_what_does_not_fit(path: str) -> None:
    dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2), replica_id=1)}, path)


def test_errors_do_not_keep_a_process_group_alive(ranks: Ranks, tmp_path: Path) -> None:
    """A job that catches an error and destroys its group really ends it: else its threads abort the exit."""
    assert ranks.run(2, _groups_left_after_errors, str(tmp_path / "c")) == [[], []]


def _after_the_end(path: str) -> str:
    comm = Comm()
    dist.destroy_process_group()
    try:
        comm.sync_errors()
    except CommunicationError as exc:
        return str(exc)
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return ""


def test_a_destroyed_group_is_said_to_be(ranks: Ranks, tmp_path: Path) -> None:
    """What comes after the group's end says that it was destroyed, not that a rank died."""
    said = "the process group was destroyed: save, load and finalize before that"
    assert ranks.run(2, _after_the_end, str(tmp_path)) == [said, said]


def _returns_what_cannot_travel(path: str) -> str:
    try:
        Comm().main_runs("looking", lambda: lambda: 1)
    except CheckpointingException as exc:
        return str(exc)
    return ""


def test_what_the_main_rank_ran_is_named_while_its_result_is_on_the_way(ranks: Ranks, tmp_path: Path) -> None:
    """An error of the message with the result of ``main_runs`` names what was run, on all ranks."""
    assert all("in 'looking'" in said for said in ranks.run(2, _returns_what_cannot_travel, str(tmp_path)))


def _combines(count: int) -> list[Any]:
    comm = Comm()
    values = [(comm.rank + 1) * (n - 3) << 40 for n in range(count)]
    told = comm.all_gather(bytes([comm.rank]) * count * (comm.rank + 1))
    return [comm.largest(*values), comm.total(*values), [len(part) for part in told]]


@pytest.mark.parametrize("count", [0, 1, 6, 7, 50])
def test_numbers_are_combined_by_the_main_rank_or_round_a_ring(
    ranks: Ranks, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Largest, sums and gathered values are the same whichever way they go."""
    rows = [[(rank + 1) * (n - 3) << 40 for n in range(count)] for rank in range(3)]
    columns = list(zip(*rows, strict=True))
    expected = [list(map(max, columns)), list(map(sum, columns)), [count, 2 * count, 3 * count]]
    for limit in (0, 400, 1 << 20):
        monkeypatch.setattr(comm_module, "MAX_BYTES_BY_MAIN", limit)
        assert ranks.run(3, _combines, count) == [expected] * 3


def _sends_in_every_way(folder: str) -> None:
    shard = ShardedTensor.from_rank_offsets(f"w{dist.get_rank()}", torch.ones(9))
    part, _ = TensorAwareStateDict.from_state_dict({"w": shard}, "atomic")
    comm = Comm()
    values = (comm.all_gather(comm.rank), comm.gather(comm.rank), comm.broadcast(7), comm.total(1))
    assert values == ([0, 1], [0, 1] if comm.is_main else [], 7, [2])
    with suppress(CheckpointingException), comm.collective_phase("failing"):
        raise ShardingError("bad shard")
    LocalCheckpointManager(f"{folder}/{comm.rank}", CliqueReplication(1, 2)).save(part, 1)


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_messages_are_in_memory_of_torch(
    ranks: Ranks, tmp_path: Path, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No collective takes a tensor over Python's memory: gloo may let go of it when there is no Python any more."""
    noted: list[torch.Tensor] = []

    def note(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            for value in (*args, *kwargs.values()):
                noted.extend(one for one in (value if isinstance(value, list) else [value]) if torch.is_tensor(one))
            return function(*args, **kwargs)

        return call

    for name in ("gather", "broadcast", "all_gather", "all_reduce", "P2POp"):
        monkeypatch.setattr(dist, name, note(getattr(dist, name)))
    for name in ("_AT_ONCE", "MAX_BYTES_BY_MAIN"):
        monkeypatch.setattr(comm_module, name, limit)
    ranks.run(2, _sends_in_every_way, str(tmp_path))
    assert len(noted) > 40
    assert all(tensor.untyped_storage().resizable() for tensor in noted)  # what torch has not allocated is not


def test_what_is_collective_says_so() -> None:
    """A function of the room that always reaches a collective says ``Collective:`` first, and no other does."""
    nodes = [node for path in Path(comm_module.__file__).parent.glob("*.py") for node in ast.walk(_tree(path))]
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef) and ast.get_docstring(node)}
    for where_it_fails in ("local_phase", "_diagnose"):
        assert not _says_collective(functions.pop(where_it_fails))
    collective = {"_call", "new_group", "diagnose"}
    while found := {name for name, node in functions.items() if _attributes(node) & collective} - collective:
        collective |= found
    assert {name for name, node in functions.items() if _says_collective(node)} == collective & functions.keys()


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _says_collective(function: ast.FunctionDef) -> bool:
    return (ast.get_docstring(function) or "").startswith("Collective: ")


def _attributes(function: ast.FunctionDef) -> set[str]:
    return {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}


def _fail_on_last() -> str:
    comm = Comm()
    try:
        with comm.collective_phase(f"digging on {comm.rank}"):
            if comm.rank == comm.world_size - 1:
                raise StorageError("stone")
    except StorageError as exc:
        return exc.phase
    return ""


def test_an_error_has_the_phase_in_which_it_was_raised(ranks: Ranks) -> None:
    """It is that of the rank that failed, the same on all ranks: metrics of all of them agree."""
    assert ranks.run(2, _fail_on_last) == ["digging on 1"] * 2
    assert ranks.run(1, _fail_on_last) == ["digging on 0"]
