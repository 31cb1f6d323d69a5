"""Print a row for each tensor, object and name in the common state of a checkpoint.

Files that are missing or too short are named; the exit code is 0 all the same. Bytes are not checked: verify does that.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from shardckpt.errors import CheckpointingException, CheckpointReplacedError, KeyMismatchError, listed

if TYPE_CHECKING:
    from shardckpt.engine import IncompleteFile, StoredCheckpoint, StoredTensor


def add(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "inspect", help="list the tensors, objects and common state of a checkpoint", description=__doc__
    )
    parser.add_argument("directory", help="the checkpoint's directory or URL")
    parser.add_argument("prefix", nargs="?", default="", help="list only keys that begin with it")
    parser.set_defaults(run=run)


def run(options: Any) -> int:
    """Print a row per key, and what is missing. Return the exit code.

    Raises:
        KeyMismatchError: no key begins with the prefix; the command exits with 1.
    """
    from shardckpt.storage import retry_if_replaced

    for line in retry_if_replaced(lambda: _lines(options.directory, options.prefix), options.directory):
        print(line)
    return 0


def _lines(directory: str, prefix: str) -> list[str]:
    """Return the lines to print for a checkpoint."""
    from shardckpt.cli.table import table
    from shardckpt.dist_checkpointing import open_checkpoint

    with open_checkpoint(directory) as checkpoint:
        tensors = [stored for key, stored in sorted(checkpoint.items()) if key.startswith(prefix)]
        objects = sorted(key for key in checkpoint.objects if key.startswith(prefix))
        if prefix and not tensors and not objects:
            have = listed(sorted([*checkpoint, *checkpoint.objects]), limit=6) or "none"
            raise KeyMismatchError(
                f"{directory}: no tensor or object has a key that begins with {prefix!r} (keys: {have})"
            )
        common, fault = ([], "") if prefix else _common(checkpoint)
        incomplete = checkpoint.find_incomplete_files()
        title = f"{directory}: {checkpoint.backend!r}, version {checkpoint.version}"
    rows: list[tuple[Any, ...]] = [
        (t.key, str(t.dtype).removeprefix("torch."), "x".join(map(str, t.shape)), _nbytes(t)) for t in tensors
    ]
    rows += [(key, "object", "", "") for key in objects]
    rows += [(key, "common", "", "") for key in common]
    summary = f"{len(tensors)} tensors of {sum(map(_nbytes, tensors)):,} bytes, {len(objects)} objects"
    faults = [f"the common state cannot be read: {fault}"] if fault else []
    faults += [f"incomplete: {file.name} {file.fault}{_affected(file, prefix)}" for file in incomplete]
    return [title, table(("key", "kind", "shape", "bytes"), rows), summary, *faults]


def _common(checkpoint: StoredCheckpoint) -> tuple[list[str], str]:
    """Return the names in the common state, and why they cannot be read, if so."""
    try:
        return sorted(map(str, checkpoint.common)), ""
    except CheckpointReplacedError:
        raise
    except CheckpointingException as exc:
        return [], str(exc)


def _affected(file: IncompleteFile, prefix: str) -> str:
    keys = [key for key in file.keys if key.startswith(prefix)]
    return f"; {len(keys)} tensors and objects cannot be read completely: {listed(keys)}" if keys else ""


def _nbytes(stored: StoredTensor) -> int:
    return math.prod(stored.shape) * stored.dtype.itemsize
