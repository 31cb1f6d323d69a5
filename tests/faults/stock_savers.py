"""Savers that are not ours, for comparison: plain DCP, and ``torch.save`` to one file.

A save is one call, as their documents show it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_FILE = "state.pt"


def state(version: int) -> dict[str, Any]:
    """Tensors that tell which save they are from, a large one among them."""
    return {
        "large": torch.arange(3 << 18, dtype=torch.float32) + version,
        "small": torch.arange(40) + version,
        "half": (torch.arange(33) + version).to(torch.bfloat16),
        **{f"bias.{n}": torch.full((8,), float(version * 10 + n)) for n in range(8)},
        "step": version,
    }


def save_by_dcp(target: Path, version: int) -> None:
    """Save by plain DCP, which makes the directory, and writes into one that is there."""
    dcp.save(state(version), checkpoint_id=target)


def load_by_dcp(target: Path) -> dict[str, Any]:
    """Load by plain DCP."""
    wanted = state(0)
    dcp.load(wanted, checkpoint_id=target)
    return wanted


def save_by_torch(target: Path, version: int) -> None:
    """Save a file by ``torch.save``."""
    target.mkdir(parents=True, exist_ok=True)
    torch.save(state(version), target / _FILE)


def load_by_torch(target: Path) -> dict[str, Any]:
    """Load the file."""
    return torch.load(target / _FILE, weights_only=True)  # type: ignore[no-any-return]


#: Saver → what saves, what loads, and the file without which nothing was saved.
SAVERS: dict[str, tuple[Callable[[Path, int], None], Callable[[Path], dict[str, Any]], str]] = {
    "dcp": (save_by_dcp, load_by_dcp, ".metadata"),
    "torch.save": (save_by_torch, load_by_torch, _FILE),
}


def differences(loaded: dict[str, Any], version: int) -> list[str]:
    """Where it is not, bit for bit, what save number ``version`` had."""
    expected = state(version)
    tensors = [key for key, value in expected.items() if isinstance(value, torch.Tensor)]
    wrong = [key for key in tensors if key not in loaded or not torch.equal(loaded[key], expected[key])]
    return [*wrong, *([] if loaded.get("step") == version else ["step"])]
