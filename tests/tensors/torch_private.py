"""What the tests of torch private share."""

from __future__ import annotations

from shardckpt.tensors.torch_private import OLDEST_TORCH

OLDEST = ".".join(map(str, OLDEST_TORCH))
