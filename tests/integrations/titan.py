"""A training as torchtitan's Trainer runs one, and its package where it is installed.

torchtitan is not among what the tests install: it needs pyarrow, wandb and a good deal more. Where it is absent,
``titan_stand_in`` has the one name that the adapter imports. ``tests/interop/test_torchtitan.py`` runs these tests with
the part of the real package that a manager needs.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.integrations import small

try:
    import torchtitan.components.checkpointer  # noqa: F401
except ModuleNotFoundError:
    sys.path.append(str(Path(__file__).with_name("titan_stand_in")))

if TYPE_CHECKING:
    from collections.abc import Iterator


class Optimizers(torch.optim.Optimizer):
    """torchtitan's container: an optimizer a model part."""

    def __init__(self, parts: list[torch.nn.Module]) -> None:
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=0.1) for part in parts]
        super().__init__([param for part in parts for param in part.parameters()], {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step each."""
        for each in self.optimizers:
            each.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget each one's gradients."""
        for each in self.optimizers:
            each.zero_grad(set_to_none)


class Schedulers:
    """torchtitan's container: they are all alike, so one's state is stored."""

    def __init__(self, optimizers: Optimizers) -> None:
        self.schedulers = [torch.optim.lr_scheduler.StepLR(each, 2) for each in optimizers.optimizers]

    def step(self) -> None:
        """Step each."""
        for each in self.schedulers:
            each.step()

    def state_dict(self) -> dict[str, Any]:
        """The first one's."""
        return self.schedulers[0].state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """For each."""
        for each in self.schedulers:
            each.load_state_dict(dict(state_dict))


class Loader:
    """torchtitan's: its state is bytes under the data-parallel rank, and it refuses another number of these."""

    def __init__(self) -> None:
        self._rank, self._size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.given = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Batches, each rank its own, from where it was."""
        data = small.data()
        while True:
            self.given += 1
            yield data[((self.given - 1) * self._size + self._rank) % len(data)]

    def state_dict(self) -> dict[str, Any]:
        """How many were given."""
        return {f"dp_rank_{self._rank}": pickle.dumps({"given": self.given}), "world_size": self._size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        if state_dict["world_size"] != self._size:
            raise ValueError(f"saved by {state_dict['world_size']} data-parallel ranks")
        self.given = pickle.loads(state_dict[f"dp_rank_{self._rank}"])["given"]


class Trainer:
    """The order in which torchtitan's calls a checkpoint manager.

    Args:
        checkpoint: The manager's Config.
        steps: Of the whole training.
        folder: Where the job dumps.
        fault_tolerance: ``ft_manager``, as torchtitan's Trainer for torchft gives it.
    """

    def __init__(self, checkpoint: Any, steps: int, folder: str, **fault_tolerance: Any) -> None:
        self._checkpoint, self._steps = checkpoint, steps
        self.step, self.tokens = 0, 0
        whole = small.model()
        whole[2].p = 0.0
        self.parts: list[torch.nn.Module] = [part_of(whole, [0, 1]), part_of(whole, [2, 3])]
        if dist.is_initialized():
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for part in self.parts:
                fully_shard(part, mesh=mesh)
        self._optimizers = Optimizers(self.parts)
        self._schedulers = Schedulers(self._optimizers)
        self.loader = Loader()
        self.checkpointer = checkpoint.build(
            dataloader=self.loader,
            model_parts=self.parts,
            optimizers=self._optimizers,
            lr_schedulers=self._schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=folder,
            **fault_tolerance,
        )

    def train(self) -> None:
        """To the last step."""
        self.checkpointer.load(step=self._checkpoint.load_step)
        batches = iter(self.loader)
        while self.step < self._steps:
            self.step += 1
            self._train_step(*next(batches))
            self.checkpointer.save(self.step, last_step=self.step == self._steps)

    def close(self) -> None:
        """End."""
        self.checkpointer.close()

    def state_dict(self) -> dict[str, Any]:
        """The train state."""
        return {"step": self.step, "ntokens_seen": self.tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.step, self.tokens = state_dict["step"], state_dict["ntokens_seen"]

    def _train_step(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self._optimizers.zero_grad()
        for part in self.parts:
            inputs = part(inputs)
        torch.nn.functional.mse_loss(inputs, labels).backward()
        self.tokens += labels.numel()
        self.checkpointer.maybe_wait_for_staging()
        self._optimizers.step()
        self._schedulers.step()


def part_of(whole: torch.nn.Sequential, layers: list[int]) -> torch.nn.Module:
    """A stage, in which layers have their names in the whole model."""
    part = torch.nn.Sequential()
    for number in layers:
        part.add_module(str(number), whole[number])
    return part
