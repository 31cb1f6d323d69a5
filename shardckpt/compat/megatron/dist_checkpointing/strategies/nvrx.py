"""megatron.core.dist_checkpointing.strategies.nvrx: how callers ask whether nvidia-resiliency-ext saves."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from torch.torch_version import TorchVersion

from shardckpt.compat.megatron.refusals import QUEUE, make_refusing_getattr


def has_nvrx_async_support() -> bool:
    """Return False: the engine here saves in the background, whether the package is there or not."""
    return False


def is_nvrx_min_version(required: str) -> bool:
    """Return whether nvidia-resiliency-ext is installed, of this version or a later one."""
    try:
        return TorchVersion(version("nvidia-resiliency-ext")) >= required
    except PackageNotFoundError:
        return False


REFUSED = {"make_nvrx_async_request": QUEUE}

__getattr__ = make_refusing_getattr(__name__, REFUSED)

__all__ = ["has_nvrx_async_support", "is_nvrx_min_version"]
