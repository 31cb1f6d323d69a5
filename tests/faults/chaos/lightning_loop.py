"""Program: the referee's Lightning training, saved by ShardedCheckpointIO; it resumes at the newest step's directory.

The referee resumes at ``last``, which Lightning writes after the step's own checkpoint: a kill between the two costs
the work since the one before, whoever writes the bytes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import lightning.pytorch as pl
from ckpt_chaos.targets import lightning_trainer

from shardckpt.integrations.lightning import ShardedCheckpointIO
from tests.faults.chaos.phases import WORLD, parse_phase, report_resume, store_final

if TYPE_CHECKING:
    from pathlib import Path


def find_newest(out: Path) -> Path | None:
    """The checkpoint of the highest step, by its name alone: what has the name is whole."""
    found = [
        (int(m[1]), path)
        for path in out.glob("checkpoints/*")
        if (m := re.fullmatch(r"ck-step=(\d+)\.ckpt", path.name))
    ]
    return max(found)[1] if found else None


def run(out: Path, *, stop: bool = False) -> int:
    """Train from the newest checkpoint; return the step at which it began."""
    pl.seed_everything(0, workers=False)
    model, hooks = lightning_trainer.Lit(), lightning_trainer.Hooks(stop=stop)
    saves = pl.callbacks.ModelCheckpoint(
        dirpath=out / "checkpoints", filename="ck-{step}", every_n_epochs=1, save_top_k=-1
    )
    trainer = pl.Trainer(
        max_epochs=lightning_trainer.MAX_EPOCHS,
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp" if WORLD > 1 else "auto",
        callbacks=[hooks, saves],
        plugins=[ShardedCheckpointIO()],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=out,
    )
    trainer.fit(model, lightning_trainer.loader(), ckpt_path=find_newest(out))
    if not stop:
        store_final(model, out)
    return hooks.started_at or 0


if __name__ == "__main__":
    phase, folder = parse_phase()
    if phase == "resume":
        report_resume(folder, lambda: run(folder))
    else:
        run(folder, stop=phase == "train")
