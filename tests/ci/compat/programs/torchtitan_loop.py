"""A trainer of spring 2025, as users of torchtitan write it: it loads, saves in its loop, and closes."""

import os
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpoint import MODEL, CheckpointManager


@dataclass
class Checkpoint:
    """The options of ``[checkpoint]``."""

    enable_checkpoint: bool = True
    folder: str = "checkpoint"
    interval: int = 2
    model_weights_only: bool = False
    export_dtype: str = "float32"
    async_mode: str = "async"
    keep_latest_k: int = 2
    load_step: int = -1
    exclude_from_loading: list[str] = field(default_factory=list)


@dataclass
class JobConfig:
    """The job's options."""

    job: SimpleNamespace
    checkpoint: Checkpoint
    fault_tolerance: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(enable=False, replica_id=0))


class OptimizersContainer(torch.optim.Optimizer):
    """An optimizer for each part, with one state dict by parameter name."""

    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, model_parts):
        self.model_parts = model_parts
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=0.1) for part in model_parts]
        super().__init__([param for part in model_parts for param in part.parameters()], {})

    def step(self):
        """Step each."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self):
        """Forget the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self):
        """Return the flattened states of all parts."""
        pairs = zip(self.model_parts, self.optimizers, strict=True)
        states = [get_optimizer_state_dict(*pair, options=self.options) for pair in pairs]
        return {key: value for state in states for key, value in state.items()}

    def load_state_dict(self, state_dict):
        """Set each part's."""
        for part, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            set_optimizer_state_dict(part, optimizer, optim_state_dict=state_dict, options=self.options)


class LRSchedulersContainer:
    """A scheduler for each optimizer; all have the same state."""

    def __init__(self, optimizers):
        self.schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers.optimizers]

    def step(self):
        """Step each."""
        for scheduler in self.schedulers:
            scheduler.step()

    def state_dict(self):
        """Return the first one's."""
        return self.schedulers[0].state_dict()

    def load_state_dict(self, state_dict):
        """Set each."""
        for scheduler in self.schedulers:
            scheduler.load_state_dict(dict(state_dict))


class ParallelAwareDataloader:
    """Batches of this data-parallel rank, with a state under the rank's name."""

    def __init__(self):
        self.dp_rank, self.dp_world_size, self.given = dist.get_rank(), dist.get_world_size(), 0

    def __iter__(self):
        while True:
            self.given += 1
            yield torch.full((2, 4), float(self.given * self.dp_world_size + self.dp_rank)).sin()

    def state_dict(self):
        """Return how many were given."""
        return {f"dp_rank_{self.dp_rank}": self.given, "world_size": self.dp_world_size}

    def load_state_dict(self, state_dict):
        """Go on from there."""
        assert state_dict["world_size"] == self.dp_world_size
        self.given = state_dict[f"dp_rank_{self.dp_rank}"]


class Stage(torch.nn.Module):
    """A part of the model, with a buffer that is computed."""

    def __init__(self, number):
        super().__init__()
        self.layers = torch.nn.ModuleDict({str(number): torch.nn.Linear(4, 4)})
        if number == 0:
            self.register_buffer("freqs_cis", torch.arange(4.0))

    def forward(self, hidden):
        """Go on."""
        for layer in self.layers.values():
            hidden = torch.tanh(layer(hidden))
        return hidden


class Trainer:
    """The whole job on one rank."""

    def __init__(self, job_config, steps):
        self.job_config, self.steps, self.step = job_config, steps, 0
        torch.manual_seed(0)
        self.model_parts = [Stage(0), Stage(1)]
        for part in self.model_parts:
            fully_shard(part, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.dataloader = ParallelAwareDataloader()
        self.optimizers = OptimizersContainer(self.model_parts)
        self.lr_schedulers = LRSchedulersContainer(self.optimizers)
        self.checkpointer = CheckpointManager(
            dataloader=self.dataloader,
            model_parts=self.model_parts,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            job_config=job_config,
            ft_manager=SimpleNamespace(enabled=False),
        )

    def train(self, stop_at=None):
        """Train to the last step, or until the job is stopped; return the step that was loaded."""
        loaded = self.checkpointer.load(step=self.job_config.checkpoint.load_step)
        begun = self.step
        assert loaded == (begun > 0)
        batches = iter(self.dataloader)
        while self.step < (stop_at or self.steps):
            self.step += 1
            self.train_step(next(batches))
            self.checkpointer.save(self.step, force=(self.step == self.steps))
        self.checkpointer.close()
        return begun

    def train_step(self, batch):
        """Take a step."""
        self.optimizers.zero_grad()
        hidden = batch
        for part in self.model_parts:
            hidden = part(hidden)
        hidden.square().mean().backward()
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()

    def state_dict(self):
        """Return the train state."""
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state_dict):
        """Go on from there."""
        self.step = int(state_dict["step"])


def configure(dump_folder, **options):
    """Return a job's options."""
    return JobConfig(SimpleNamespace(dump_folder=dump_folder), Checkpoint(**options))


def list_steps(dump_folder):
    """Return the names of what is in the folder, once all ranks have come here."""
    dist.barrier()
    return sorted(os.listdir(os.path.join(dump_folder, "checkpoint")))


def run(folder, mode):
    """A job that is stopped and started again ends as one that was not: with the same bits and checkpoints."""
    whole = Trainer(configure(os.path.join(folder, "whole"), async_mode=mode), 5)
    assert whole.train() == 0
    stopped = os.path.join(folder, "stopped")
    assert Trainer(configure(stopped, async_mode=mode), 5).train(stop_at=3) == 0
    assert list_steps(stopped) == ["step-1", "step-2"]
    again = Trainer(configure(stopped, async_mode=mode), 5)
    assert again.train() == 2
    assert list_steps(stopped) == list_steps(os.path.join(folder, "whole")) == ["step-4", "step-5"]
    assert again.dataloader.given == whole.dataloader.given == 5
    assert again.lr_schedulers.state_dict() == whole.lr_schedulers.state_dict()
    for name, value in whole.checkpointer.states[MODEL].state_dict().items():
        assert equal(value, again.checkpointer.states[MODEL].state_dict()[name]), name
    for name, value in whole.optimizers.state_dict().items():
        assert equal(value, again.optimizers.state_dict()[name]), name


def equal(one, other):
    """Return whether two values are the same, bit for bit."""
    if not isinstance(one, torch.Tensor):
        return one == other
    return torch.equal(*(each.to_local() if hasattr(each, "to_local") else each for each in (one, other)))
