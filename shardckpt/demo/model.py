"""The demo's model and training text: a small byte-level transformer, with or without experts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

WIDTH, HEADS, HIDDEN, LAYERS = 250, 5, 1000, 2  # no number of ranks divides them all: shards are uneven
EXPERTS, CHOSEN, EXPERT_HIDDEN = 7, 2, 100  # of a mixture of experts, and how many each token goes through
BATCH, CONTEXT = 8, 128  # sequences a step, of all ranks together, and bytes a sequence


class ByteTransformer(nn.Module):
    """Predicts every byte of a text from the bytes before it.

    Args:
        network: Creates the feed-forward network of a block, with input and output of shape (batch, length, width).
    """

    def __init__(self, network: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, WIDTH)  # a byte, or 256 for the start
        self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block(network()) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of bytes of shape (batch, length), in nats per byte."""
        x = self.embedding(functional.pad(text[:, :-1], (1, 0), value=256)) + self.position
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), text.flatten())


class Block(nn.Module):
    """Causal attention, then a network; both residual."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output; input and output have shape (batch, length, width)."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        before = self.norms[0](x)
        x = x + self.attention(before, before, before, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.network(self.norms[1](x))  # type: ignore[no-any-return]


def feed_forward() -> nn.Module:
    """Return a feed-forward network of two layers."""
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))


class MixtureOfExperts(nn.Module):
    """Sums the outputs of a few experts, chosen and weighted for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the experts; input and output have shape (batch, length, width)."""
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        # Relative to the best expert that is not chosen: where rounding decides a near tie, in another way with another
        # number of ranks, the weight is near 0, so that losses stay comparable.
        weights = functional.relu(scores - scores.topk(CHOSEN + 1).values[:, -1:])
        return self.experts(tokens, weights).view(x.shape)  # type: ignore[no-any-return]


class Experts(nn.Module):
    """All experts in two parameters, of shape (experts, in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, EXPERT_HIDDEN) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, EXPERT_HIDDEN, WIDTH) * EXPERT_HIDDEN**-0.5)
        self.mesh: DeviceMesh | None = None

    def split(self, mesh: DeviceMesh) -> None:
        """Collective: keep this rank's experts only."""
        self.mesh = mesh
        for name, parameter in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))

    def forward(self, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Collective if the experts are split: sum the outputs of the experts, weighted for each token.

        Every rank applies its experts to the tokens of all ranks; each token's sum goes back to its rank.

        Args:
            tokens: Shape (count, width).
            weights: Shape (count, experts).

        Returns:
            Shape (count, width).
        """
        if self.mesh is None:
            return _mix(tokens, weights, self.up, self.down)
        size, rank = self.mesh.size(), self.mesh.get_local_rank()
        tokens, weights = (
            DTensor.from_local(rows, self.mesh, [Shard(0)]).full_tensor(grad_placements=[Partial()])
            for rows in (tokens, weights)
        )
        up, down = (_local(parameter, size) for parameter in (self.up, self.down))
        mixed = _mix(tokens, weights.chunk(size, dim=1)[rank], up, down)
        return DTensor.from_local(mixed, self.mesh, [Partial()]).redistribute(placements=[Shard(0)]).to_local().clone()


def _local(parameter: torch.Tensor, size: int) -> torch.Tensor:
    """Return this rank's experts, whose gradients are of the mean of the ranks' losses, not of their sum."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if local.requires_grad:
        local.register_hook(lambda gradient: gradient / size)  # type: ignore[no-untyped-call]
    return local


def _mix(tokens: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    hidden = functional.gelu(torch.einsum("tw,ewh->teh", tokens, up)) * weights.unsqueeze(-1)
    return torch.einsum("teh,ehw->tw", hidden, down)


@cache
def text() -> bytes:
    """Return the training text: torch's own sources, which every machine with torch has."""
    return b"".join(path.read_bytes() for path in sorted(Path(torch.__file__).parent.glob("*.py")))


def batch(step: int) -> torch.Tensor:
    """Return the bytes of a training step, int64 of shape (batch, length): the same for any number of ranks."""
    starts = torch.randint(len(text()) - CONTEXT, (BATCH,), generator=torch.Generator().manual_seed(step))
    return torch.tensor([list(text()[start : start + CONTEXT]) for start in starts.tolist()])
