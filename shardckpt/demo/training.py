"""Training steps that come out alike with any number of ranks, and the state that a checkpoint keeps of them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from shardckpt import dist_checkpointing
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.demo.experts import MixtureOfExperts
from shardckpt.demo.model import CONTEXT, ByteTransformer
from shardckpt.demo.sharding import shard_model
from shardckpt.demo.text import batch, library_text
from shardckpt.state_dict import nested_items
from shardckpt.tensors import plain_cpu, tensor_bytes

if TYPE_CHECKING:
    from shardckpt.demo.job import Layout
    from shardckpt.mapping import StateDict

_LAYERS_WITH_EXPERTS = 2
_BATCH = 8  # sequences a step, of all ranks together


class Trainer:
    """A model, its optimizer and the number of steps made, shared by the ranks of a group.

    Args:
        seed: Of the fresh parameters.
        rank: This rank.
        layout: Of the group; more than one rank need a default process group.
    """

    def __init__(self, seed: int, rank: int, layout: Layout) -> None:
        torch.manual_seed(seed)
        self.model = ByteTransformer(MixtureOfExperts, _LAYERS_WITH_EXPERTS) if layout.ep else ByteTransformer()
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.step = 0
        #: Of saves; None for the default. Expert parallelism has its own; loads go by what the checkpoint names.
        self.strategy = ("ep", 1) if layout.ep else None
        self._rank, self._world_size = rank, layout.world_size
        self._text = library_text()
        if layout.world_size > 1:
            shard_model(self.model, layout)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def train(self) -> float:
        """Make a step; the loss before it."""
        loss = self.model(self._batch())
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        return self._mean(loss)

    def loss(self, step: int) -> float:
        """The loss on the batch of a step, without training."""
        with torch.no_grad():
            return self._mean(self.model(self._batch(step)))

    def save(self, directory: str) -> None:
        """Save model, optimizer and step."""
        dist_checkpointing.save(to_sharded_state_dict(self.state()), directory, self.strategy)

    def load(self, directory: str) -> None:
        """Load what any number of ranks saved: the tensors in place, the rest from the common state."""
        state = self.state()
        loaded = dist_checkpointing.load(to_sharded_state_dict(state), directory, strict=True)
        state["optimizer"]["param_groups"] = loaded["optimizer"]["param_groups"]
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self._optimizer, state["optimizer"])
        self.step = loaded["step"]

    def state(self) -> StateDict:
        """What a checkpoint keeps; its tensors are the model's and the optimizer's own."""
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self._optimizer),
            "step": self.step,
        }

    def digests(self) -> dict[str, str]:
        """SHA-256 of all tensors of the model and of the optimizer, gathered whole: equal for any sharding."""
        state = self.state()
        return {part: _digest(state[part]) for part in ("model", "optimizer")}

    def _batch(self, step: int | None = None) -> torch.Tensor:
        """This rank's part of the global batch."""
        whole = batch(self._text, self.step if step is None else step, _BATCH, CONTEXT)
        return whole.chunk(self._world_size)[self._rank]

    def _mean(self, loss: torch.Tensor) -> float:
        total = loss.detach().clone()
        if self._world_size > 1:
            dist.all_reduce(total)
        return total.item() / self._world_size


def _digest(nest: Any) -> str:
    sha = hashlib.sha256()
    leaves = {".".join(map(str, path)): leaf for path, leaf in nested_items(nest) if isinstance(leaf, torch.Tensor)}
    for name in sorted(leaves):
        leaf = leaves[name]
        whole = plain_cpu(leaf.full_tensor() if isinstance(leaf, DTensor) else leaf)
        sha.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode())
        sha.update(tensor_bytes(whole))
    return sha.hexdigest()


__all__ = ["Trainer"]
