"""Program: the referee's Hugging Face training, saved by ShardedCheckpointCallback in place of the Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_chaos.targets import hf_trainer
from transformers import Trainer, TrainingArguments

from shardckpt.integrations.transformers import ShardedCheckpointCallback
from shardckpt.manager import CheckpointConfig
from tests.faults.chaos.phases import parse_phase, report_resume, store_final

if TYPE_CHECKING:
    from pathlib import Path


def make_trainer(out: Path, hooks: hf_trainer.Hooks) -> tuple[Trainer, ShardedCheckpointCallback]:
    """The referee's trainer with other saves: its model, data and arguments."""
    theirs = hf_trainer.make_trainer(str(out), hooks)
    config = CheckpointConfig(folder=f"{out}/ours", interval=hf_trainer.SAVE_STEPS, last_save_model_only=False)
    callback = ShardedCheckpointCallback(config)
    given = theirs.args.to_dict() | {"save_strategy": "no", "use_cpu": True}
    args = TrainingArguments(**{name: given[name] for name in _KEPT})
    return Trainer(
        model=theirs.model, args=args, train_dataset=theirs.train_dataset, callbacks=[hooks, callback]
    ), callback


#: The arguments that the referee sets.
_KEPT = (
    "output_dir",
    "max_steps",
    "save_strategy",
    "per_device_train_batch_size",
    "use_cpu",
    "report_to",
    "logging_steps",
    "seed",
    "data_seed",
    "disable_tqdm",
    "ddp_timeout",
)


def run(out: Path, hooks: hf_trainer.Hooks) -> int:
    """Train from the newest checkpoint; return the step at which it began."""
    trainer, callback = make_trainer(out, hooks)
    trainer.train(resume_from_checkpoint=callback.resume_path())
    if hooks.stop_at is None:
        store_final(trainer.model, out)
    return hooks.started_at or 0


if __name__ == "__main__":
    phase, folder = parse_phase()
    if phase == "resume":
        report_resume(folder, lambda: run(folder, hf_trainer.Hooks()))
    elif phase == "train":
        run(folder, hf_trainer.Hooks(stop_at=hf_trainer.ARM_STEP, arm_step=hf_trainer.ARM_STEP))
    else:
        run(folder, hf_trainer.Hooks())
