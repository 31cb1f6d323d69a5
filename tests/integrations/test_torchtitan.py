from __future__ import annotations

import signal
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from shardckpt.errors import CheckpointingException
from shardckpt.manager import CheckpointConfig, KeepEvery, KeepLatest
from tests.integrations import small, titan  # first: it finds torchtitan, or what stands in for it

from shardckpt.integrations.torchtitan import TitanCheckpointManager, make_checkpoint_config  # isort: skip

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def config_of(**options: Any) -> Any:
    """Every second step is saved."""
    return TitanCheckpointManager.Config(**{"enable": True, "interval": 2, **options})


def train(folder: str, steps: int, **options: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any], int]:
    """Weights, train state and batches drawn after so many steps of all."""
    trainer = titan.Trainer(config_of(**options), steps, folder)
    trainer.train()
    trainer.checkpointer.maybe_wait_for_saving()
    trainer.close()
    whole = StateDictOptions(full_state_dict=True)
    weights = {n: value for part in trainer.parts for n, value in get_model_state_dict(part, options=whole).items()}
    return weights, trainer.state_dict(), trainer.loader.given


FULL = {"last_save_model_only": False}


@pytest.mark.parametrize("mode", ["disabled", "async", pytest.param("async_with_pinned_mem", marks=pytest.mark.ci)])
def test_a_resumed_training_is_the_uninterrupted_one(mode: str, tmp_path: Path) -> None:
    """Stopped and started again with a longer plan, torchtitan's loop ends with the same weights and data."""
    whole = train(str(tmp_path / "whole"), 7, async_mode=mode)
    train(str(tmp_path), 4, async_mode=mode, **FULL)
    resumed = train(str(tmp_path), 7, async_mode=mode)
    assert small.is_equal(resumed[0], whole[0])
    assert resumed[1:] == whole[1:]
    assert {path.name for path in (tmp_path / "checkpoint").iterdir()} == {"step-2", "step-4", "step-6", "step-7"}


def _train(folder: str, steps: int, options: dict[str, Any]) -> Any:
    return train(folder, steps, **options)


def test_ranks_resume_each_with_its_own_data(ranks: Ranks, tmp_path: Path) -> None:
    """Under FSDP2 with stages, two ranks go on as they would have; three take the states but the data."""
    whole = ranks.run(2, _train, str(tmp_path / "whole"), 6, FULL)
    ranks.run(2, _train, str(tmp_path / "parts"), 4, FULL)
    resumed = ranks.run(2, _train, str(tmp_path / "parts"), 6, FULL)
    assert all(small.is_equal(one[0], other[0]) for one, other in zip(resumed, whole, strict=True))
    assert [one[1:] for one in resumed] == [one[1:] for one in whole]
    more = ranks.run(3, _train, str(tmp_path / "parts"), 6, {**FULL, "exclude_from_loading": ["dataloader"]})
    assert all(small.is_equal(one[0], whole[0][0]) for one in more)
    outcome = ranks.outcomes(3, _train, str(tmp_path / "parts"), 8, FULL)[1]
    assert "saved by 2 data-parallel ranks" in outcome.message


def test_a_finished_training_leaves_its_model(tmp_path: Path) -> None:
    """The last save is the model alone, in the dtype of the export; another job begins with it."""
    weights, *_ = train(str(tmp_path), 4, export_dtype="bfloat16")
    options = {"initial_load_path": str(tmp_path / "checkpoint" / "step-4")}
    trainer = titan.Trainer(config_of(**options), 0, str(tmp_path / "next"))
    trainer.train()
    trainer.close()
    for part in trainer.parts:
        for name, value in part.state_dict().items():
            assert torch.equal(value, weights[name].bfloat16().float())


def test_every_option_has_its_meaning(tmp_path: Path) -> None:
    """Torchtitan's options arrive under our names; those that there are none for are known."""
    policies = (KeepLatest(3), KeepEvery(100))
    config = config_of(retention=policies, exclude_from_loading=["dataloader"], strategy="torch_dist")
    ours = make_checkpoint_config(config, str(tmp_path))
    assert ours.folder == str(tmp_path / "checkpoint")
    assert (config.export_dtype, ours.export_dtype) == ("float32", None)  # it casts nothing up
    others = {"enable", "folder", "initial_load_in_hf_quantized", "export_dtype"}
    for name in {each.name for each in fields(config)} - others:
        given, taken = getattr(config, name), getattr(ours, name)
        assert (
            taken.value if name == "async_mode" else list(taken) if name == "exclude_from_loading" else taken
        ) == given
    assert make_checkpoint_config(config_of(folder="s3://bucket/x"), str(tmp_path)).folder == "s3://bucket/x"
    assert make_checkpoint_config(config_of(folder="x"), "s3://bucket/dump").folder == "s3://bucket/dump/x"


def test_the_options_of_the_manager_are_those_of_torchtitan_too(tmp_path: Path) -> None:
    """What CheckpointConfig can be told, torchtitan's command line can tell, but for what torchtitan itself decides."""
    decided = {
        "enable_checkpoint",
        "keep_best_k",
        "best_metric",
        "best_mode",
        "step_0_model_only",
        "last_save_bare_keys",
    }
    names = {each.name for each in fields(config_of())}
    assert CheckpointConfig.model_fields.keys() - decided <= names
    ours = make_checkpoint_config(
        config_of(save_on_signals=("SIGTERM", "SIGUSR1"), keep_options=("lr",)), str(tmp_path)
    )
    assert (ours.save_on_signals, ours.keep_options) == (("SIGTERM", "SIGUSR1"), ("lr",))


def test_a_signal_saves_the_next_step(tmp_path: Path) -> None:
    """With save_on_signals, torchtitan's manager saves the step after a SIGUSR1, whatever the interval."""
    before = signal.getsignal(signal.SIGUSR1)
    trainer = titan.Trainer(config_of(interval=100, save_on_signals=("SIGUSR1",)), 1, str(tmp_path))
    trainer.checkpointer.save(1)
    signal.raise_signal(signal.SIGUSR1)
    trainer.checkpointer.save(2)
    trainer.close()
    assert [path.name for path in (tmp_path / "checkpoint").glob("step-*")] == ["step-2"]
    assert signal.getsignal(signal.SIGUSR1) == before


def test_what_it_cannot_do_is_refused(tmp_path: Path) -> None:
    """Hugging Face names without a mapping are an error when the job begins, unless checkpoints are disabled."""
    runtime = {
        "dataloader": None,
        "model_parts": [small.model()],
        "optimizers": [],
        "lr_schedulers": None,
        "states": {},
    }
    with pytest.raises(CheckpointingException, match="hf_mapping"):
        config_of(last_save_in_hf=True).build(**runtime, base_folder=str(tmp_path))
    disabled = config_of(enable=False, last_save_in_hf=True).build(**runtime, base_folder=str(tmp_path))
    assert not disabled.save(2)
    disabled.close()


class Torchft:
    """torchtitan's holder of torchft's Manager, and that Manager, of the second replica that takes part."""

    enabled, replica_id = True, 3

    def __init__(self) -> None:
        self.manager = self
        self.registered: list[Any] = []

    def participating_rank(self) -> int:
        """Its number among those that do."""
        return 1

    def register_state_dict_fn(self, *functions: Any) -> None:
        """To heal by."""
        self.registered.append(functions)


def test_a_replica_of_torchft_saves_its_own_part(tmp_path: Path) -> None:
    """A replica that is not the first saves what is its own, and no step; torchft heals by what is registered."""
    torchft = Torchft()
    trainer = titan.Trainer(config_of(), 4, str(tmp_path), ft_manager=torchft)
    trainer.train()
    trainer.close()
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["ft-replicat-3"]
    assert len(torchft.registered) == 1
