"""A small tensor- and data-parallel training job, as users of megatron.core.dist_checkpointing write it.

Megatron runs it as it is; the tests run it here by replacing ``megatron.core`` in the imports, and nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, maybe_load_config
from megatron.core.dist_checkpointing.dict_utils import diff
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.dist_checkpointing.validation import StrictHandling

SHAPES = {"embedding": (16, 4), "fc1": (16, 4), "norm": (4,)}
CONTENT = {"distrib_optim_sharding_type": "fully_reshardable"}


class Job:
    """One rank: tensor-parallel index ``tp`` of ``tps``, data-parallel index ``dp``."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.tps = 1 if self.world % 2 else 2
        self.tp, self.dp = self.rank % self.tps, self.rank // self.tps
        groups = [dist.new_group(list(range(tp, self.world, self.tps))) for tp in range(self.tps)]
        self.data_parallel_group = groups[self.tp]
        self.model = {name: torch.nn.Parameter(self.local(name, 0)) for name in SHAPES}
        self.optimizer = torch.optim.Adam(self.model.values(), lr=0.01)
        self.iteration = 0

    def local(self, name: str, number: int) -> torch.Tensor:
        """This rank's part of a global tensor; there is another for every number."""
        count = torch.Size(SHAPES[name]).numel()
        whole = torch.cos(torch.arange(count, dtype=torch.float32).reshape(SHAPES[name]) * (number + 1))
        if name == "embedding":
            return whole.chunk(self.tps)[self.tp].clone()
        if name == "fc1":
            return torch.cat([half.chunk(self.tps)[self.tp] for half in whole.chunk(2)])
        return whole

    def train(self, steps: int) -> None:
        """Take some steps."""
        for _ in range(steps):
            self.iteration += 1
            for name, param in self.model.items():
                param.grad = self.local(name, self.iteration)
            self.optimizer.step()

    def spoil(self) -> None:
        """Forget everything, and keep its form."""
        self.iteration = -1
        with torch.no_grad():
            for param in self.model.values():
                param.fill_(-1)
                for value in self.optimizer.state[param].values():
                    value.fill_(-1)

    def sharded_state_dict(self) -> dict[str, Any]:
        """Model, optimizer and the rest, described."""
        model = {
            "embedding": ShardedTensor.from_rank_offsets(
                "embedding", self.model["embedding"], (0, self.tp, self.tps), replica_id=self.dp
            ),
            "fc1": ShardedTensorFactory("fc1", self.model["fc1"], self.split, self.merge, self.dp),
            "norm": ShardedTensor.from_rank_offsets("norm", self.model["norm"], replica_id=(0, self.tp, self.dp)),
        }
        add_prefix_for_sharding(model, "model.")
        optimizer = self.optimizer.state_dict()
        steps = {number: values["step"].item() for number, values in optimizer["state"].items()}
        id_map = get_param_id_to_sharded_param_map(model, self.model.values())
        optim_state_to_sharding_state(optimizer, id_map, exclude_keys=("step",))
        return {
            "model": model,
            "optimizer": optimizer,
            "steps": steps,
            "rng": ShardedObject("rng", {"seed": self.iteration}, (1,), (0,), replica_id=self.rank),
            "rank": LocalNonpersistentObject(self.rank),
            "iteration": self.iteration,
        }

    def split(self, key: str, data: torch.Tensor, replica_id: Any, flattened_range: slice | None) -> list[Any]:
        """A gated layer as its two halves."""
        return [
            ShardedTensor.from_rank_offsets(
                key, half, (0, self.tp + number * self.tps, 2 * self.tps), replica_id=replica_id
            )
            for number, half in enumerate(data.chunk(2))
        ]

    def merge(self, halves: list[torch.Tensor]) -> torch.Tensor:
        """The gated layer again."""
        with torch.no_grad():
            return torch.cat(halves)

    def restore(self, loaded: dict[str, Any]) -> None:
        """Take over what was loaded."""
        with torch.no_grad():
            for name, param in self.model.items():
                param.copy_(loaded["model"][name])
        for number, values in loaded["optimizer"]["state"].items():
            values["step"] = torch.tensor(loaded["steps"][number])
        self.optimizer.load_state_dict(loaded["optimizer"])
        assert loaded["rank"] == self.rank
        assert loaded["rng"] == {"seed": loaded["iteration"]}
        self.iteration = loaded["iteration"]

    def check(self, steps: int) -> None:
        """All state is that of a job that has taken so many steps."""
        other = Job()
        other.train(steps)
        assert self.iteration == steps
        for name, param in self.model.items():
            assert torch.equal(param, other.model[name]), name
            for part, value in other.optimizer.state[other.model[name]].items():
                assert torch.equal(self.optimizer.state[param][part], value), (name, part)


def train(directory: str) -> None:
    """Train, save three times (one of them over another checkpoint, one in the background), and load each."""
    job = Job()
    job.train(2)
    first, second = made(directory, "first"), made(directory, "second")
    strategy = FullyParallelSaveStrategyWrapper(
        get_default_save_sharded_strategy("torch_dist", 1), job.data_parallel_group
    )
    dist_checkpointing.save(job.sharded_state_dict(), first, strategy, content_metadata=dict(CONTENT))
    resume(directory, "first", "2")
    job.train(1)
    queue = AsyncCallsQueue()
    saver = FullyParallelSaveStrategyWrapper(
        TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=2), job.data_parallel_group
    )
    request = dist_checkpointing.save(job.sharded_state_dict(), second, saver, async_sharded_save=True)
    assert request is not None
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)
    assert queue.get_num_unfinalized_calls() == 0
    job.train(1)
    resume(directory, "second", "3")
    dist_checkpointing.save(job.sharded_state_dict(), first, strategy, content_metadata=dict(CONTENT))
    queue.close()
    dist.barrier()


def resume(directory: str, name: str, taken: str) -> None:
    """Load a checkpoint with this number of ranks, and ask for all that can be asked."""
    steps = int(taken)
    path = str(Path(directory, name))
    assert dist_checkpointing.check_is_distributed_checkpoint(path)
    config = maybe_load_config(path)
    assert isinstance(config, CheckpointingConfig)
    assert (config.sharded_backend, config.sharded_backend_version) == ("torch_dist", 1)
    common = dist_checkpointing.load_common_state_dict(path)
    assert common["iteration"] == steps
    assert diff(common["steps"], dict.fromkeys(range(3), float(steps))) == ([], [], [])
    assert dist_checkpointing.load_content_metadata(path) == (CONTENT if name == "first" else None)
    shapes = {key: tuple(tensor.global_shape) for key, tensor in dist_checkpointing.load_tensors_metadata(path).items()}
    states = ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
    assert shapes == {f"{state}model.{key}": shape for state in states for key, shape in SHAPES.items()}
    job = Job()
    job.train(1)
    job.spoil()
    loader = FullyParallelLoadStrategyWrapper(
        get_default_load_sharded_strategy(path), job.data_parallel_group, exchange_algo="gather_object"
    )
    job.restore(dist_checkpointing.load(job.sharded_state_dict(), path, loader))
    job.check(steps)
    strictness(job, path)
    dist.barrier()


def prune(directory: str, name: str, taken: str) -> None:
    """Remove the optimizer's tensors from a checkpoint; the model goes on from there."""
    path = Path(directory, name)
    strategy = TorchDistLoadShardedStrategy()
    strategy.remove_sharded_tensors(str(path), key_prefix="optimizer.state.")
    assert strategy.load_tensors_metadata(path).keys() == {f"model.{key}" for key in SHAPES}
    assert {shard.key for shard in strategy.load_sharded_metadata(path).values()} == {
        "rng",
        *(f"model.{key}" for key in SHAPES),
    }
    trained, job = Job(), Job()
    trained.train(int(taken))
    model = dist_checkpointing.load({"model": job.sharded_state_dict()["model"]}, str(path), strategy)["model"]
    for key, param in trained.model.items():
        assert torch.equal(model[key], param), key
    dist.barrier()


def strictness(job: Job, path: str) -> None:
    """Keys that do not match are returned, ignored, or raised."""

    def wanted() -> dict[str, Any]:
        state = job.sharded_state_dict()
        del state["model"]["norm"]
        state["model"]["new"] = ShardedTensor.from_rank_offsets("model.new", torch.ones(3), replica_id=job.rank)
        return state

    loaded, missing, unexpected = dist_checkpointing.load(wanted(), path, strict=StrictHandling.RETURN_ALL)
    assert (missing, unexpected) == ({"model.norm"}, {"model.new"})
    assert "new" not in loaded["model"]
    assert "new" not in dist_checkpointing.load(wanted(), path, strict="log_all")["model"]
    try:
        dist_checkpointing.load(wanted(), path, strict=StrictHandling.RAISE_ALL)
    except CheckpointingException as error:
        assert "model.new" in str(error)  # noqa: PT017 - Megatron's environment has no pytest
    else:
        raise AssertionError("strict=RAISE_ALL did not raise")


def made(directory: str, name: str) -> str:
    """A directory that all ranks see."""
    path = Path(directory, name)
    path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return str(path)
