"""The last save of weights by torchtitan's manager: its keys are the names of the model's tensors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp

from shardckpt import dist_checkpointing
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.compat.torchtitan import CheckpointManager, ModelWrapper
from shardckpt.manager import CheckpointConfig
from shardckpt.manager import CheckpointManager as OwnManager
from tests.compat.torchtitan import Job
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.ranks import Ranks


def _weights(parts: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in ModelWrapper(parts).state_dict().items() if "freqs_cis" not in name}


def _saved(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A last step of weights, and what is in it."""
    job = Job(folder, model_weights_only=True)
    job.train(3, last=3)
    job.manager.close()
    return folder / "checkpoint" / "step-3", _weights(job.parts)


def _fresh(folder: Path) -> Job:
    """A job whose weights are 0."""
    job = Job(folder)
    with torch.no_grad():
        for part in job.parts:
            for param in part.parameters():
                param.zero_()
    return job


def _by_stock_dcp(step: Path, job: Job) -> None:
    state = {name: torch.zeros_like(value) for name, value in _weights(job.parts).items()}
    dcp.load(state, checkpoint_id=step)
    ModelWrapper(job.parts).load_state_dict(state)


def _by_the_facade(step: Path, job: Job) -> None:
    checkpoint = SimpleNamespace(enable_checkpoint=True, initial_load_path=str(step), folder="next")
    config = SimpleNamespace(job=SimpleNamespace(dump_folder=str(step.parent.parent)), checkpoint=checkpoint)
    manager = CheckpointManager(None, job.parts, job.optimizers, job.schedulers, {}, config)
    assert manager.load()
    manager.close()


def _as_step_0(step: Path, job: Job) -> None:
    seed = Path(job.manager.folder) / "step-0"
    seed.parent.mkdir(parents=True, exist_ok=True)
    step.rename(seed)
    assert job.manager.load()


def _by_our_manager(step: Path, job: Job) -> None:
    config = CheckpointConfig(folder=str(step.parent / "next"), initial_load_path=str(step))
    with OwnManager(config, {"model": job.parts}) as manager:
        assert manager.load()


def _by_our_load(step: Path, job: Job) -> None:
    described = {name: leaf for name, leaf in to_sharded_state_dict(job.parts).items() if "freqs_cis" not in name}
    load_into(dist_checkpointing.load(described, step), job.parts, strict=False)


@table("load", [_by_stock_dcp, _by_the_facade, _as_step_0, _by_our_manager, _by_our_load])
def test_every_reader_finds_the_names_of_the_model(tmp_path: Path, load: Callable[[Path, Job], None]) -> None:
    """Stock dcp.load by a model's state dict, the facade, also as step 0, and our own manager and load read it."""
    step, saved = _saved(tmp_path)
    assert dist_checkpointing.load_tensors_metadata(step).keys() == saved.keys()
    fresh = _fresh(tmp_path / "fresh")
    load(step, fresh)
    fresh.manager.close()
    loaded = _weights(fresh.parts)
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())


class _Inner(torch.nn.Module):
    """Names as Hugging Face gives them: some begin with ``model.`` themselves, and differ by no more than that."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.model = torch.nn.Linear(2, 2)
        self.weight = torch.nn.Parameter(torch.full((2, 2), value))


def test_names_that_begin_with_model_are_not_mixed_up(tmp_path: Path) -> None:
    """A parameter ``model.weight`` beside one ``weight`` comes back as itself, from the Hub's folder as well."""
    saved = _Inner(3.0)
    options = {"folder": str(tmp_path / "a"), "last_save_bare_keys": True, "last_save_in_hf": True}
    with OwnManager(CheckpointConfig(**options), {"model": saved}) as manager:
        manager.save(2, last_step=True)
    assert dist_checkpointing.load_tensors_metadata(tmp_path / "a/step-2").keys() == saved.state_dict().keys()
    for name, in_hf in (("step-2", False), ("step-2-hf", True)):
        model = _Inner(0.0)
        start = CheckpointConfig(
            folder=str(tmp_path / "b"), initial_load_path=str(tmp_path / "a" / name), initial_load_in_hf=in_hf
        )
        with OwnManager(start, {"model": model}) as manager:
            assert manager.load()
        assert all(torch.equal(model.state_dict()[key], value) for key, value in saved.state_dict().items())


def _train_and_load(folder: Path) -> bool:
    step, saved = _saved(folder)
    fresh = _fresh(folder / "fresh")
    _by_the_facade(step, fresh)
    fresh.manager.close()
    loaded = _weights(fresh.parts)
    return all(torch.equal(loaded[name].to_local(), value.to_local()) for name, value in saved.items())


def test_ranks_find_them_too(ranks: Ranks, tmp_path: Path) -> None:
    """On two ranks, sharded."""
    assert ranks.run(2, _train_and_load, tmp_path) == [True, True]
