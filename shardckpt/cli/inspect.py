"""``shardckpt inspect DIR``: what a checkpoint holds; no data file is read but for the common state."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardckpt.lazy import StoredTensor


def add(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser("inspect", help="list the tensors, objects and common state of a checkpoint")
    parser.add_argument("directory", help="the checkpoint")
    parser.add_argument("prefix", nargs="?", default="", help="list only keys that begin with it")
    parser.set_defaults(run=run)


def run(options: Any) -> int:
    """Print a row for every key."""
    from shardckpt.cli.table import table
    from shardckpt.dist_checkpointing import open_checkpoint

    with open_checkpoint(options.directory) as checkpoint:
        tensors = [stored for key, stored in sorted(checkpoint.items()) if key.startswith(options.prefix)]
        objects = sorted(key for key in checkpoint.objects if key.startswith(options.prefix))
        common = [] if options.prefix else sorted(map(str, checkpoint.common))
        print(f"{options.directory}: {checkpoint.backend!r}, version {checkpoint.version}")
    rows: list[tuple[Any, ...]] = [
        (t.key, str(t.dtype).removeprefix("torch."), "x".join(map(str, t.shape)), _nbytes(t)) for t in tensors
    ]
    rows += [(key, "object", "", "") for key in objects]
    rows += [(key, "common", "", "") for key in common]
    print(table(("key", "kind", "shape", "bytes"), rows))
    print(f"{len(tensors)} tensors of {sum(map(_nbytes, tensors)):,} bytes, {len(objects)} objects")
    return 0


def _nbytes(stored: StoredTensor) -> int:
    return math.prod(stored.shape) * stored.dtype.itemsize


__all__ = ["add", "run"]
