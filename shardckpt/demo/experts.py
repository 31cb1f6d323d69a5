"""A mixture of experts: a router, and all experts in one tensor, of which expert parallelism gives every rank some."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional

from shardckpt.demo.model import WIDTH

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_EXPERTS = 7
_CHOSEN = 2  # experts a token
_HIDDEN = 300


class MixtureOfExperts(nn.Module):
    """Sends every token through a few of many networks.

    An expert counts by how far its score lies above the best that was not chosen: a tie that another order of float32
    sums decides otherwise, with another number of ranks, changes nothing then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, _EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, length, width) in and out."""
        tokens = x.flatten(0, -2)
        scores = self.router(tokens).softmax(-1)
        weights = functional.relu(scores - scores.topk(_CHOSEN + 1).values[:, -1:])
        return self.experts(tokens, weights).view(x.shape)  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Two-layer networks, grouped: parameters of shape (experts, out, in)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(_EXPERTS, _HIDDEN, WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(_EXPERTS, WIDTH, _HIDDEN) * _HIDDEN**-0.5)
        self._group: ProcessGroup | None = None

    def deal(self, mesh: DeviceMesh) -> None:
        """Keep this rank's experts, as torch.chunk deals them out; those of other ranks get its tokens."""
        self._group = mesh.get_group()
        for name, parameter in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))

    def forward(self, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Tokens of shape (count, width) and weights of shape (count, experts), most of them 0; width out."""
        if self._group is None:
            return _mixed(tokens, weights, self.up, self.down)
        size, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        tokens, weights = _gathered(tokens, self._group), _gathered(weights, self._group)
        mine = weights.chunk(size, dim=1)[rank]
        return _summed(_mixed(tokens, mine, _local(self.up, size), _local(self.down, size)), self._group)


def _mixed(tokens: torch.Tensor, weights: torch.Tensor, ups: torch.Tensor, downs: torch.Tensor) -> torch.Tensor:
    """What some experts make of the tokens that chose them, weighted; zeros for other tokens."""
    mixed = torch.zeros_like(tokens)
    for up, down, weight in zip(ups, downs, weights.unbind(1), strict=True):
        chosen = weight.nonzero().flatten()
        out = functional.linear(functional.gelu(functional.linear(tokens[chosen], up)), down)
        mixed = mixed.index_add(0, chosen, out * weight[chosen].unsqueeze(1))
    return mixed


def _local(parameter: torch.Tensor, ranks: int) -> torch.Tensor:
    """This rank's experts; their gradients are of the mean loss of the ranks whose tokens they get, not of the sum."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if local.requires_grad:
        local.register_hook(lambda gradient: gradient / ranks)  # type: ignore[no-untyped-call]
    return local


def _gathered(own: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The rows of all ranks, in their order; gradients are summed, and every rank gets those of its own rows."""
    return _Gathered.apply(own, group)  # type: ignore[no-any-return,no-untyped-call]


def _summed(part: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """This rank's rows of the sum of all ranks' tensors; gradients go the other way."""
    return _Summed.apply(part, group)  # type: ignore[no-any-return,no-untyped-call]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gather(own, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _own_sum(gradients[0], ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _own_sum(part, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gather(gradients[0], ctx.group), None


def _gather(own: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own.contiguous(), group)
    return torch.cat(parts)


def _own_sum(rows: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    total = rows.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()  # FSDP2 warns of views


__all__ = ["Experts", "MixtureOfExperts"]
