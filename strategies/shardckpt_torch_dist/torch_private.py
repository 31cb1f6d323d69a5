"""Every private name of torch that this package needs, in one place, with the reason."""

from __future__ import annotations

# Referenced by name in the pickle of every tensor that torch.save writes; ours must name the same functions.
from torch._utils import _rebuild_tensor_v2 as rebuild_tensor_v2
from torch._utils import _rebuild_tensor_v3 as rebuild_tensor_v3

# Pickled by its path into every ``.metadata``: readers need exactly this class.
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

import shardckpt.distributed  # noqa: F401 - so that what DCP imports keeps no process group: see shardckpt.tensors.torch_private

__all__ = ["StorageInfo", "rebuild_tensor_v2", "rebuild_tensor_v3"]
