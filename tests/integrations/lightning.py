"""What the tests of lightning share."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.integrations import small

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("lightning")
from shardckpt.integrations.lightning import ShardedCheckpointIO


def trainer_of(package: str, folder: Path | str, steps: int, **options: Any) -> Any:
    """A Trainer that saves every 3 steps to the folder."""
    lightning = importlib.import_module(package)
    saving = importlib.import_module(f"{package}.callbacks").ModelCheckpoint(
        dirpath=folder, filename="{step}", every_n_train_steps=3, save_top_k=options.pop("keep", -1)
    )
    given = {"accelerator": "cpu", "devices": 1, "logger": False, "plugins": [ShardedCheckpointIO()], **options}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(max_steps=steps, callbacks=[saving], **quiet, **given)


def fit(package: str, folder: Path | str, steps: int, ckpt_path: str | None = None, **options: Any) -> Any:
    """Weights after so many steps of all."""
    module = module_of(package)
    trainer_of(package, folder, steps, **options).fit(module, Loader(small.data(), batch_size=4), ckpt_path=ckpt_path)
    return small.weights(module.model)


class Loader(torch.utils.data.DataLoader[Any]):
    """It knows how many batches of the epoch it has given: Lightning stores that."""

    _given = 0

    def __iter__(self) -> Any:
        """The batches that are left of the epoch."""
        for batch in list(super().__iter__())[self._given :]:
            self._given += 1
            yield batch
        self._given = 0

    def state_dict(self) -> dict[str, int]:
        """How many were given."""
        return {"given": self._given}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on from there."""
        self._given = state_dict["given"]


def module_of(package: str) -> Any:
    """A module with momentum and a schedule, for the Trainer of a package."""
    base = importlib.import_module(package).LightningModule

    class Module(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = small.model()
            self.model[2].p = 0.0  # Lightning saves no random states
            self.save_hyperparameters({"width": small.WIDTH})

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Module()
