"""A small byte-level transformer, with sizes that no number of ranks divides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

#: Longest sequence.
CONTEXT = 128
#: Of a byte's representation.
WIDTH = 250

_START = 256  # stands before the first byte
_VOCABULARY = 257
_HEADS = 5
_HIDDEN = 1000
_LAYERS = 4


class FeedForward(nn.Module):
    """A two-layer network."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, _HIDDEN)
        self.down = nn.Linear(_HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, length, width) in and out."""
        return self.down(functional.gelu(self.up(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention with a learned temperature a head, then a network; both residual."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.temperature = nn.Parameter(torch.full((_HEADS,), 8.0))
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.network_norm = nn.LayerNorm(WIDTH)
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, length, width) in and out."""
        x = x + self._attention(self.attention_norm(x))
        return x + self.network(self.network_norm(x))  # type: ignore[no-any-return]

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        count, length, _ = x.shape
        heads = self.query_key_value(x).view(count, length, 3, _HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key = functional.normalize(heads[0], dim=-1), functional.normalize(heads[1], dim=-1)
        query = query * self.temperature.view(-1, 1, 1)
        mixed = functional.scaled_dot_product_attention(query, key, heads[2], is_causal=True, scale=1.0)
        return self.projection(mixed.transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


class ByteTransformer(nn.Module):
    """Predicts every byte of a sequence from those before it.

    Args:
        network: Makes the network of a block.
        layers: Number of blocks.
    """

    def __init__(self, network: Callable[[], nn.Module] = FeedForward, layers: int = _LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block(network()) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, _VOCABULARY, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of a batch of bytes, shape (batch, length), in nats a byte."""
        before = functional.pad(text[:, :-1], (1, 0), value=_START)
        x = self.embedding(before) + self.position[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), text.flatten())


__all__ = ["CONTEXT", "WIDTH", "Block", "ByteTransformer", "FeedForward"]
