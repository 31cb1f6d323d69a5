"""Replicas of two ranks each, in one run of four: what torchft's Manager does for them, and how they train."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardckpt import dist_checkpointing
from shardckpt.errors import CheckpointingException
from shardckpt.manager import CheckpointConfig, CheckpointManager, FaultTolerance, PerRank
from tests.logs import collect_warnings
from tests.manager.jobs import weights
from tests.manager.training import WIDTH, Loader, Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh


class Manager:
    """The part of torchft's Manager that a CheckpointManager sees, of one rank; the test says what the quorum is."""

    def __init__(self, rank: int | None) -> None:
        self.rank = rank
        self.asked = 0
        self._functions: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {}

    def participating_rank(self) -> int | None:
        """The number of the replica in the quorum."""
        self.asked += 1
        return self.rank

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """As torchft has it since 0.2: a key is given once."""
        assert key not in self._functions
        self._functions[key] = (load_state_dict, state_dict)

    def sent(self) -> bytes:
        """What goes to a replica that joins, made in a thread and pickled, as torchft's HTTP transport does."""
        found: list[Any] = []

        def collect() -> None:
            found.append({key: state_dict() for key, (_, state_dict) in self._functions.items()})

        thread = threading.Thread(target=collect)
        thread.start()
        thread.join()
        buffer = io.BytesIO()
        torch.save(found[0], buffer)
        return buffer.getvalue()

    def heal(self, sent: bytes) -> None:
        """Take over what another replica's rank of the same number has sent."""
        states = torch.load(io.BytesIO(sent), weights_only=False)
        for key, (load_state_dict, _) in self._functions.items():
            load_state_dict(states[key])


class OldManager(Manager):
    """torchft's before 0.2."""

    register_state_dict_fn = None  # type: ignore[assignment]

    def set_state_dict_fns(self, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]) -> None:
        """One pair of functions, the last."""
        self._functions["only"] = (load_state_dict, state_dict)


class Places(Loader):
    """A loader that takes another rank's place, and remembers whose it was."""

    origin: int | None = None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there."""
        self.origin, self.position = state["rank"], state["position"]


class Witness:
    """A state that says which replica saved it."""

    def __init__(self, replica: int) -> None:
        self.replica = replica

    def state_dict(self) -> dict[str, int]:
        """Which."""
        return {"replica": self.replica}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Remember that one."""
        self.replica = state["replica"]


def replicas() -> DeviceMesh:
    """Four ranks as two replicas of two; called by all."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))


class ReplicaTraining:
    """The training of the other tests, in replicas that average their gradients.

    Args:
        folder: Of the checkpoints.
        mesh: Of :func:`replicas`.
        kind: Of the manager.
        config: Of the CheckpointManager.
    """

    def __init__(self, folder: str, mesh: DeviceMesh, kind: type[Manager] = Manager, **config: Any) -> None:
        rank = dist.get_rank()
        self.mesh, self.replica = mesh, mesh["replica"].get_local_rank()
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 33), torch.nn.Dropout(0.2), torch.nn.LayerNorm(33), torch.nn.Linear(33, 1)
        )
        self.model.register_buffer("steps", torch.zeros(1))
        fully_shard(self.model, mesh=mesh["shard"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.7)
        self.loader, self.progress, self.witness = Places(rank), Progress(), Witness(self.replica)
        torch.manual_seed(7 + rank)
        self.healed: list[int] = []
        self.quorum = kind(self.replica)
        states = {
            "model": self.model,
            "optimizer": self.optimizer,
            "lr_scheduler": self.schedule,
            "dataloader": PerRank(self.loader, lambda states, rank, _: states[rank]),
            "train_state": self.progress,
            "witness": self.witness,
        }
        self.manager = CheckpointManager(
            CheckpointConfig(**{"folder": folder, "interval": 2, "keep_latest_k": 0, **config}),
            states,
            mesh["shard"].get_group(),
            fault_tolerance=FaultTolerance(self.quorum, self.replica, self.healed.append),
        )

    def step(self, *, alone: bool = False) -> float:
        """Train a step, with the other replica or without; this rank's loss."""
        loss = self.model(self.loader.batch()).square().mean()
        loss.backward()
        self.manager.maybe_wait_for_staging()
        for param in () if alone else self.model.parameters():
            local = param.grad.to_local()  # type: ignore[union-attr]
            dist.all_reduce(local, group=self.mesh["replica"].get_group())
            local /= 2
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.model.steps += 1
        self.progress.step += 1
        self.progress.history.append(self.progress.step)
        return loss.item()

    def run(self, until: int, *, alone: bool = False) -> tuple[list[float], list[int]]:
        """Train to a step; the losses, and the steps that this replica saved for all."""
        losses, saved = [], []
        while self.progress.step < until:
            losses.append(self.step(alone=alone))
            if self.manager.save(self.progress.step):
                saved.append(self.progress.step)
        return losses, saved


def steps_in(path: Path) -> list[int]:
    """The numbers of the steps' directories, in order."""
    return (
        sorted(int(each.name[5:]) for each in path.glob("step-*") if each.name[5:].isdigit()) if path.is_dir() else []
    )


def layout(folder: str) -> tuple[list[int], list[int], list[int]]:
    """The steps of all, of replica 0 and of replica 1."""
    path = Path(folder)
    return steps_in(path), steps_in(path / "ft-replicat-0"), steps_in(path / "ft-replicat-1")


def handed_on(training: ReplicaTraining) -> bytes:
    """What the rank of the same number in replica 0 gives."""
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, training.quorum.sent() if training.replica == 0 else None)
    return everyone[dist.get_rank() % 2]  # type: ignore[no-any-return]


def changing_quorum(folder: str, mode: str) -> tuple[list[list[int]], list[int], list[int], tuple[list[int], ...]]:
    """Three steps each: 0 first, 1 first, 0 not there; who saved what, who is in it, how often asked, what is there."""
    training = ReplicaTraining(folder, replicas(), async_mode=mode, interval=1)
    saved = []
    with training.manager as manager:
        for rank, until in ((training.replica, 3), (1 - training.replica, 6), ((None, 0)[training.replica], 9)):
            training.quorum.rank = rank
            saved.append(training.run(until)[1])
        manager.wait()
        dist.barrier()
        found = layout(folder)
        dist.barrier()
    asked = training.quorum.asked
    witnesses = [dist_checkpointing.load_content_metadata(f"{folder}/step-{n}") for n in found[0]]
    assert all("dataloader" not in each["shardckpt_manager"]["states"] for each in witnesses)
    dist.barrier()
    seen = []
    for step in found[0]:
        fresh = ReplicaTraining(folder, training.mesh, load_only=True)
        with fresh.manager as manager:
            assert manager.load(step)
        seen.append(fresh.witness.replica)
    return saved, seen, [asked], found


def durable_at_once(folder: str) -> list[list[int]]:
    """With async_mode disabled: what a replica has of its own as soon as save has returned."""
    training = ReplicaTraining(folder, replicas(), interval=4)
    found = []
    with training.manager:
        for step in range(1, 6):
            training.run(step)
            found.append(layout(folder)[1 + training.replica][-1:])
    return found


def unbroken(folder: str, until: int, config: dict[str, Any]) -> list[float]:
    """The losses of a run without an interruption."""
    training = ReplicaTraining(folder, replicas(), **config)
    with training.manager:
        return training.run(until)[0]


def restarted(folder: str, until: int, config: dict[str, Any]) -> tuple[int, int, list[float]]:
    """All begin again: the step, the place in the data, and the losses from there."""
    training = ReplicaTraining(folder, replicas(), **config)
    with training.manager as manager:
        assert manager.load()
        begun = training.progress.step, training.loader.position
        return *begun, training.run(until)[0]


def loaded(folder: str, config: dict[str, Any], step: int = -1) -> tuple[int, int, int | None, list[str]]:
    """The step that is loaded, the place in the data and whose that was, and the warnings."""
    with collect_warnings("shardckpt.manager") as said:
        training = ReplicaTraining(folder, replicas(), **config)
        with training.manager as manager:
            manager.load(step)
    return training.progress.step, training.loader.position, training.loader.origin, said


def rejoined(folder: str, mode: str, kind: type[Manager] = Manager) -> dict[str, Any]:
    """Replica 1 is lost after step 6, replica 0 goes on to 7, and gives it its states when it is back."""
    config = {"interval": 4, "async_mode": mode}
    mesh = replicas()
    training = ReplicaTraining(folder, mesh, kind, **config)
    training.run(6)
    training.manager.wait()
    dist.barrier()
    found: dict[str, Any] = {}
    if training.replica == 1:
        training.manager.close()
        training = ReplicaTraining(folder, mesh, kind, **config)
        training.manager.load()
        found["loaded"] = (training.progress.step, training.loader.position)
        training.quorum.rank = None
        training.loader.batch()  # of the step in which it joins: it counts for nothing
    else:
        training.run(7, alone=True)
    sent = handed_on(training)
    if training.replica == 1:
        generator = torch.get_rng_state()
        training.quorum.heal(sent)
        found["generator"] = not torch.equal(generator, torch.get_rng_state())
        found["saved"] = training.manager.save(training.progress.step)
        training.quorum.rank = 1
    found["joined"] = (training.progress.step, training.loader.position, list(training.healed))
    found["weights"] = weights_of(training)
    training.run(8)
    if training.replica == 1:
        place = training.loader.position
        training.quorum.heal(sent)  # one that was at work does not go back in its data
        assert training.loader.position == place
    training.manager.close()
    dist.barrier()
    return found | {"layout": layout(folder)}


def weights_of(training: ReplicaTraining) -> list[list[float]]:
    """Everything that replicas have alike: parameters, buffers, moments, rates, counters."""
    tensors = weights(training)  # type: ignore[arg-type]
    groups = [[group["lr"], *group["betas"]] for group in training.optimizer.param_groups]
    counters = [[float(training.progress.step), float(training.schedule.last_epoch)]]
    return [tensor.flatten().tolist() for tensor in tensors] + groups + counters


def retained(folder: str, mode: str) -> tuple[list[int], list[int], list[int]]:
    """What is there after 27 steps, of which every fifth is saved for all, and three are kept."""
    training = ReplicaTraining(folder, replicas(), interval=5, keep_latest_k=3, async_mode=mode)
    with training.manager as manager:
        training.run(26)
        manager.wait()
        dist.barrier()
        training.run(27)
    dist.barrier()
    return layout(folder)


def failing_quorum(folder: str) -> str:
    """Replica 1 is told of no quorum: the error, of which replica 0 sees nothing."""
    training = ReplicaTraining(folder, replicas(), interval=1)

    def fail() -> int:
        raise TimeoutError("no quorum within 60 s")

    if dist.get_rank() == 2:
        training.quorum.participating_rank = fail  # type: ignore[method-assign]
    try:
        with training.manager:
            training.run(1)
    except CheckpointingException as exc:
        return str(exc)
    return ""


def given_in_a_forward_pass() -> bool:
    """Whether what a replica gives while its modules are unsharded is what it has between steps."""
    training = ReplicaTraining("unused", replicas(), enable_checkpoint=False)
    training.run(1)
    before = training.quorum.sent()
    during: list[bytes] = []
    for module in (training.model[0], training.model[-1]):
        module.register_forward_hook(lambda *_: during.append(training.quorum.sent()))
    training.model.eval()
    training.model(training.loader.batch())
    return during == [before, before]


def given_to_another_layout() -> str:
    """The error where a replica that is not sharded is to take the states of one that is."""
    training = ReplicaTraining("unused", replicas(), enable_checkpoint=False)
    sent = handed_on(training)
    quorum = Manager(None)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 33), torch.nn.Dropout(0.2), torch.nn.LayerNorm(33), torch.nn.Linear(33, 1)
    )
    model.register_buffer("steps", torch.zeros(1))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    states = {"model": model, "optimizer": optimizer, "lr_scheduler": schedule}
    states |= {"train_state": Progress(), "witness": Witness(9)}
    group = training.mesh["shard"].get_group()
    config = CheckpointConfig(enable_checkpoint=False)
    CheckpointManager(config, states, group, fault_tolerance=FaultTolerance(quorum, 9))
    try:
        quorum.heal(sent)
    except CheckpointingException as exc:
        return str(exc)
    raise AssertionError("taken")


def given_on_one_rank(folder: str) -> str:
    """Open a manager with fault tolerance on rank 0 alone, and return its error."""
    tolerance = FaultTolerance(Manager(0), "a") if dist.get_rank() == 0 else None
    try:
        CheckpointManager(CheckpointConfig(folder=folder), {"n": Progress()}, fault_tolerance=tolerance)
    except CheckpointingException as exc:
        return str(exc)
    return ""
