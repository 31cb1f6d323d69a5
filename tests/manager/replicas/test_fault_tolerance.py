from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt.errors import CheckpointingException
from shardckpt.manager import CheckpointConfig, CheckpointManager, FaultTolerance, PerRank, ReplicaManager
from shardckpt.manager.replicas.checkpoints import find_abandoned_steps, keep_replica_steps
from shardckpt.manager.retention import steps_to_remove
from tests.manager.folders import steps_of
from tests.manager.replicas import jobs as replicas
from tests.manager.replicas.jobs import Manager, OldManager
from tests.manager.training import Loader
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks
    from tests.remote.store import Store


def test_what_is_disabled_waits_for_its_own(ranks: Ranks, tmp_path: Path) -> None:
    """Where nothing is to happen in the background, a replica's own is there when save returns."""
    for found in ranks.run(4, replicas.durable_at_once, str(tmp_path)):
        assert found == [[1], [2], [3], [4], [5]]


def test_what_of_its_own_may_go(tmp_path: Path) -> None:
    """Of a step that another replica may still be writing, a replica's own stays: a due one, or one that was forced."""
    for step in (4, 8):
        (tmp_path / f"step-{step}").mkdir()
    steps = steps_of(tmp_path)
    policies = [functools.partial(keep_replica_steps, steps=steps, interval=4)]
    own: dict[int, dict[str, Any]] = {step: {} for step in range(1, 19)}
    assert steps_to_remove(policies, own, [14]) == [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 15]
    (tmp_path / "step-16").mkdir()
    assert steps_to_remove(policies, own) == [1, 2, 3, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15]
    assert find_abandoned_steps(own, steps, 7) == [7, 9, 10, 11, 12, 13, 14, 15, 17, 18]


def test_one_place_in_the_data_for_all(ranks: Ranks, tmp_path: Path) -> None:
    """Without enable_ft_dataloader_checkpoints it is in the steps' checkpoints: the first replica's is everyone's."""
    config = {"enable_ft_dataloader_checkpoints": False}
    ranks.run(4, replicas.unbroken, str(tmp_path), 4, config)
    assert replicas.layout(str(tmp_path)) == ([2, 4], [], [])
    assert [result[:3] for result in ranks.run(4, replicas.loaded, str(tmp_path), config)] == [
        (4, 4, 0),
        (4, 4, 1),
    ] * 2


def test_an_error_of_the_replica_manager(ranks: Ranks, tmp_path: Path) -> None:
    """A quorum that one rank does not reach is the same error on all ranks of its replica, and none of the other's."""
    results = ranks.run(4, replicas.failing_quorum, str(tmp_path))
    assert results[:2] == ["", ""]
    assert results[2] == results[3]
    assert "no quorum within 60 s" in results[2]
    assert replicas.layout(str(tmp_path)) == ([1], [1], [])


def test_a_replica_gives_while_its_model_computes(ranks: Ranks) -> None:
    """What is given in a forward pass, where FSDP has gathered parameters, is the same as between steps."""
    assert ranks.run(4, replicas.given_in_a_forward_pass) == [True] * 4


def test_replicas_must_be_alike(ranks: Ranks) -> None:
    """States that lie otherwise on the ranks of the replica that takes them are an error that says how."""
    for message in ranks.run(4, replicas.given_to_another_layout):
        assert "Shard(dim=0)" in message
        assert "the same parallelism" in message


def _manager(folder: Path | str, states: dict[str, Any], replica: Any = "a", quorum: Any = None, **config: Any) -> Any:
    tolerance = FaultTolerance(quorum or Manager(0), replica)
    return CheckpointManager(CheckpointConfig(folder=folder, **config), states, fault_tolerance=tolerance)


def test_all_ranks_or_none_are_of_a_replica(ranks: Ranks, tmp_path: Path) -> None:
    """Fault tolerance on some ranks alone is an error that says so."""
    for message in ranks.run(2, replicas.given_on_one_rank, str(tmp_path)):
        assert "ranks disagree on fault_tolerance: True on rank 0, False on rank 1" in message


def test_wrong_arguments(tmp_path: Path) -> None:
    """What cannot be a replica's is refused by name, before anything is trained."""
    model = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointingException, match="not wrapped in PerRank"):
        _manager(tmp_path, {"model": model, "dataloader": Loader(0)})
    with pytest.raises(CheckpointingException, match=r"replica_id 'a/\.\./b'"):
        _manager(tmp_path, {"model": model}, "a/../b")
    with pytest.raises(CheckpointingException, match=r"a Loader has no participating_rank\(\)"):
        _manager(tmp_path, {"model": model}, quorum=Loader(0))
    config, bare = CheckpointConfig(folder=str(tmp_path)), Manager(0)
    with pytest.raises(CheckpointingException, match=r"fault_tolerance=.*: give FaultTolerance\(manager, replica_id\)"):
        CheckpointManager(config, {"model": model}, fault_tolerance=bare)  # type: ignore[arg-type]
    mute = OldManager(0)
    mute.set_state_dict_fns = None  # type: ignore[assignment,method-assign]
    with pytest.raises(CheckpointingException, match="neither register_state_dict_fn nor set_state_dict_fns"):
        _manager(tmp_path, {"model": model}, quorum=mute)


@table("kind", [Manager, OldManager])
def test_one_checkpoint_manager_for_each(tmp_path: Path, kind: type[Manager]) -> None:
    """A second one that registers with the same replica manager is told so, and replaces nothing of the first."""
    quorum, model, other = kind(0), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with _manager(tmp_path, {"model": model}, quorum=quorum):
        before = quorum.sent()
        with pytest.raises(CheckpointingException, match="another CheckpointManager has registered"):
            _manager(tmp_path, {"model": other}, quorum=quorum)
        assert quorum.sent() == before


def test_an_assertion_of_the_replica_manager_is_said_as_it_is(tmp_path: Path) -> None:
    """What the replica manager asserts when it is registered with is not taken for another CheckpointManager."""
    quorum = Manager(0)

    def fail(*_: Any) -> None:
        raise AssertionError("the lighthouse is gone")

    quorum.register_state_dict_fn = fail  # type: ignore[method-assign]
    with pytest.raises(CheckpointingException, match="the lighthouse is gone") as found:
        _manager(tmp_path, {"model": torch.nn.Linear(2, 2)}, quorum=quorum)
    assert "another CheckpointManager" not in str(found.value)


@table("replica", [True, 1.5, None])
def test_a_replica_id_is_text_or_an_integer(tmp_path: Path, replica: Any) -> None:
    """A bool or a float names no folder."""
    with pytest.raises(CheckpointingException, match=f"replica_id {replica!r} becomes part of a directory's name"):
        _manager(tmp_path, {"model": torch.nn.Linear(2, 2)}, replica)


def test_no_state_of_its_own(tmp_path: Path) -> None:
    """Where no rank has anything of its own, there is no folder for it, and the rest is saved and healed."""
    quorum, model = Manager(0), torch.nn.Linear(2, 2)
    with _manager(tmp_path, {"model": model}, quorum=quorum, save_rng=False, interval=1) as manager:
        assert manager.save(1)
    assert replicas.steps_in(tmp_path) == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_wrapped_optimizer_is_not_stepped(tmp_path: Path) -> None:
    """Looking at the state of an optimizer in a wrapper that commits steps, as torchft's, makes no step of it."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optim: torch.optim.Optimizer) -> None:
            self.optim = optim

        def step(self, closure: Any = None) -> None:
            raise AssertionError("a step was committed")

        def zero_grad(self, set_to_none: bool = True) -> None:
            raise AssertionError("a quorum was asked for")

    model = torch.nn.Linear(2, 2)
    states = {"model": model, "optimizer": Wrapper(torch.optim.AdamW(model.parameters()))}
    with _manager(tmp_path, states, interval=1) as manager:
        assert manager.save(1)
        assert manager.load()


def test_extra_state_is_given_as_it_is(tmp_path: Path) -> None:
    """What a module makes anew for each look at it is looked at after every step, due or not."""

    class Counting(torch.nn.Linear):
        count = 0

        def get_extra_state(self) -> torch.Tensor:
            return torch.tensor(self.count)

        def set_extra_state(self, state: torch.Tensor) -> None:
            self.count = int(state)

    giver, taker = Manager(0), Manager(1)
    model, other = Counting(2, 2), Counting(2, 2)
    config = {"interval": 100, "save_rng": False}
    with (
        _manager(tmp_path, {"model": model}, "a", giver, **config) as manager,
        _manager(tmp_path, {"model": other}, "b", taker, **config),
    ):
        model.count = 3
        assert not manager.save(1)
        taker.heal(giver.sent())
    assert other.count == 3
    assert torch.equal(other.weight, model.weight)


def test_without_checkpoints_it_heals(tmp_path: Path) -> None:
    """enable_checkpoint=False saves nothing; a replica that joins is given the states all the same."""
    giver, taker = Manager(0), Manager(1)
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    for quorum, each in ((giver, model), (taker, other)):
        with _manager(tmp_path, {"model": each}, quorum=quorum, enable_checkpoint=False) as manager:
            assert not manager.save(1)
            assert not manager.load()
    taker.heal(giver.sent())
    assert torch.equal(other.weight, model.weight)
    assert not list(tmp_path.iterdir())


def test_a_replica_without_a_checkpoint_joins(tmp_path: Path) -> None:
    """Lost before anything was saved for all: its place in the data waits until it is given the states of a step."""
    giver, loader = Manager(0), Loader(0)
    with _manager(tmp_path, {"dataloader": PerRank(loader)}, quorum=Manager(1)) as manager:
        for step in range(1, 4):
            loader.batch()
            assert not manager.save(step)
    other = _manager(tmp_path, {"dataloader": PerRank(Loader(0))}, "b", giver)
    other.save(5)
    loader, taker = Loader(0), Manager(None)
    with _manager(tmp_path, {"dataloader": PerRank(loader)}, quorum=taker) as manager:
        assert not manager.load()
        assert loader.position == 0
        taker.heal(giver.sent())
    assert loader.position == 3
    other.close()


def test_a_store(store: Store, tmp_path: Path) -> None:
    """A replica's own are on a URL, too, where nothing is replaced: those of a run that was given up go first."""
    folder = f"faulty://{tmp_path}/store"
    (tmp_path / "store" / "ft-replicat-a").mkdir()  # where the faulty store has its journal
    for begun, until in ((0, 7), (4, 9)):
        loader = Loader(0)
        with _manager(folder, {"dataloader": PerRank(loader), "model": torch.nn.Linear(2, 2)}, interval=4) as manager:
            assert manager.load() == bool(begun)
            assert loader.position == begun
            for step in range(begun + 1, until + 1):
                loader.batch()
                assert manager.save(step) == (step % 4 == 0)
    assert replicas.steps_in(tmp_path / "store") == [4, 8]
    assert replicas.steps_in(tmp_path / "store" / "ft-replicat-a") == [4, 8, 9]


def test_the_protocol() -> None:
    """What torchft's Manager has of it is all that is asked for."""
    assert isinstance(Manager(0), ReplicaManager)
    assert not isinstance(Loader(0), ReplicaManager)
