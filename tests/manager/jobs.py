"""What ranks do with a CheckpointManager; module-level, so that processes find it by name."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing
from shardckpt.errors import CheckpointingException
from shardckpt.manager import CheckpointConfig, CheckpointManager, PerRank
from tests.logs import collect_warnings
from tests.manager.folders import HOLDS, names_in
from tests.manager.training import Loader, Training


def unbroken(folder: str, until: int, config: dict[str, Any]) -> list[float]:
    """The losses of a run without an interruption."""
    training = Training(folder, **config)
    with training.manager:
        return training.run(until)


def resumed(folder: str, until: int, config: dict[str, Any]) -> tuple[int, list[float]]:
    """The step that a new run begins with, and its losses."""
    training = Training(folder, **config)
    with training.manager:
        assert training.manager.load()
        first = training.progress.step
        return first, training.run(until)


def weights(training: Training) -> list[torch.Tensor]:
    """All of the model's and the optimizer's tensors, gathered whole."""
    tensors = list(training.model.state_dict().values())
    for state in training.optimizer.state_dict()["state"].values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return [t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for t in tensors]


def trained(folder: str, until: int, config: dict[str, Any]) -> list[torch.Tensor]:
    """The weights after a run."""
    training = Training(folder, **config)
    with training.manager:
        training.run(until)
    return weights(training)


def loaded(folder: str, config: dict[str, Any]) -> list[torch.Tensor]:
    """The weights that a new run begins with."""
    training = Training(folder, **config)
    training.states["dataloader"] = PerRank(training.loader, lambda states, rank, _: states[0] | {"rank": rank})
    with CheckpointManager(training.manager.config, training.states) as manager:
        assert manager.load()
    assert training.progress.history == list(range(1, training.progress.step + 1))
    return weights(training)


def begun_weights(folder: str, config: dict[str, Any]) -> list[torch.Tensor]:
    """The model's weights that a new run begins with, where its folder has no checkpoint."""
    training = Training(folder, **config)
    with training.manager:
        assert training.manager.load()
    assert not training.progress.step
    return weights(training)[:4]


def load_error(folder: str, config: dict[str, Any], step: int = -1) -> str:
    """The error of a load; every other rank has the same."""
    with Training(folder, **config).manager as manager, pytest.raises(CheckpointingException) as caught:
        manager.load(step)
    return f"{caught.type.__name__}: {caught.value}"


def load_outcome(folder: str, config: dict[str, Any]) -> tuple[int, list[str]]:
    """The step that is loaded, 0 for none, and the warnings about it."""
    training = Training(folder, **config)
    with collect_warnings("shardckpt.manager") as said, training.manager:
        training.manager.load()
    return training.progress.step, said


def failing_save(folder: str, at_close: bool) -> tuple[str, set[str]]:
    """Rank 0 can write no file: the error, which comes with the next call or with close, and what stands there."""
    large = torch.nn.Linear(1 << 10, 1 << 10, bias=False)
    torch.nn.init.ones_(large.weight)
    training = Training(folder, states={"large": large}, interval=1, async_mode="async")
    manager = training.manager
    training.step()
    manager.save(1)
    manager.wait()  # staging memory is there, and used again: only the file is refused
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if training.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))  # enough for what gloo writes
    try:
        manager.save(2)
        if at_close:
            manager.close()
        while True:
            manager.maybe_wait_for_staging()
    except CheckpointingException as exc:
        message = str(exc)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    manager.close()
    return message, names_in(Path(folder))


def closed_without_wait(folder: str, mode: str) -> set[str]:
    """What stands in the folder as soon as close has returned."""
    training = Training(folder, interval=1, async_mode=mode)
    training.step()
    training.manager.save(1)
    training.manager.close()
    training.manager.close()
    with pytest.raises(CheckpointingException, match="closed"):
        training.manager.save(2)
    return names_in(Path(folder)) - {HOLDS}  # the main rank may be about to remove it


def after_the_last_step(folder: str, config: dict[str, Any]) -> tuple[list[torch.dtype], list[int], list[int]]:
    """The last save leaves the states as they are: training, full saves and loads go on; dtypes, steps, keys."""
    training = Training(folder, interval=2, **config)
    with training.manager as manager:
        training.run(3)
        assert manager.save(3, last_step=True)
        dtypes = [parameter.dtype for parameter in training.model.parameters()]
        training.run(4)
        manager.wait()
        steps = manager.steps()
        assert manager.load(4)
    stored = dist_checkpointing.load_tensors_metadata(f"{folder}/step-3")
    assert {key.split(".")[0] for key in stored} == {"model"}
    return dtypes, steps, sorted({tensor.dtype.itemsize for tensor in stored.values()})


def own_state_without_wrapper(folder: str) -> str:
    """A loader that every rank has its own of, given as if all had it alike."""
    training = Training(folder)
    states = {**training.states, "dataloader": Loader(dist.get_rank())}
    with (
        CheckpointManager(CheckpointConfig(folder=folder), states) as manager,
        pytest.raises(CheckpointingException) as caught,
    ):
        manager.save(1, force=True)
    return str(caught.value)


def preempted(folder: str, mode: str) -> tuple[bool, int]:
    """One rank has a SIGTERM: all save at the next step, and know it."""
    training = Training(folder, interval=100, async_mode=mode, save_on_sigterm=True)
    before = signal.getsignal(signal.SIGTERM)
    with training.manager as manager:
        while not manager.preempted:
            training.run(training.progress.step + 1)
            if training.progress.step == 3 and training.rank == training.world - 1:
                os.kill(os.getpid(), signal.SIGTERM)
        manager.wait()
        steps = manager.steps()
    assert signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, before)
    return manager.preempted, steps[-1]
