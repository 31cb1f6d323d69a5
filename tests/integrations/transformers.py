"""What the tests of transformers share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from shardckpt.integrations.transformers import ShardedCheckpointCallback
from shardckpt.manager import CheckpointConfig
from tests.integrations import small
from tests.integrations.accelerated import accelerated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def without_ranks() -> Iterator[None]:
    """Run without a group, and with transformers' own state."""
    with accelerated():
        yield


class Model(torch.nn.Module):
    """A model as the Trainer wants one; it drops out, so that random numbers matter."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small.model()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Its loss."""
        found = self.model(inputs)
        return {"loss": torch.nn.functional.mse_loss(found, labels), "logits": found}


class At(TrainerCallback):
    """Does something at the end of a step."""

    def __init__(self, step: int, action: Callable[[], None]) -> None:
        self._step = step
        self._action = action

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Do it."""
        if state.global_step == self._step:
            self._action()


class Crash(Exception):
    """The training's."""


def crash() -> None:
    """End the training."""
    raise Crash


def config_of(folder: Path | str, **options: Any) -> CheckpointConfig:
    """Every third step is saved."""
    return CheckpointConfig(folder=f"{folder}/ours", interval=3, **options)


def trainer_of(folder: Path | str, config: CheckpointConfig | None, *more: Any, **options: Any) -> Trainer:
    """A Trainer of 3 epochs; its own checkpoints are off."""
    args = make_arguments(folder, **{"num_train_epochs": 3, "learning_rate": 0.05, "logging_steps": 1, **options})
    data = [{"inputs": inputs, "labels": labels} for inputs, labels in small.data()]
    callbacks = ([] if config is None else [ShardedCheckpointCallback(config)]) + list(more)
    return Trainer(Model(), args, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks)


def make_arguments(folder: Path | str, **options: Any) -> TrainingArguments:
    """Return arguments of a training on the CPU without checkpoints of its own."""
    return TrainingArguments(
        output_dir=f"{folder}/trainer",
        per_device_train_batch_size=4 // int(os.environ.get("WORLD_SIZE", "1")),
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        **{"save_strategy": "no", **options},
    )


def callback_of(trainer: Trainer) -> ShardedCheckpointCallback:
    """Ours."""
    found = trainer.pop_callback(ShardedCheckpointCallback)
    trainer.add_callback(found)
    return found


def resume(trainer: Trainer, step: int = -1) -> dict[str, torch.Tensor]:
    """Weights at the end of a resumed training."""
    trainer.train(resume_from_checkpoint=callback_of(trainer).resume_path(step))
    return small.weights(trainer.model)
