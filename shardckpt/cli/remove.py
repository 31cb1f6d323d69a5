"""``shardckpt remove DIR PREFIX``: take the tensors and objects whose keys begin with a prefix out of a checkpoint."""

from __future__ import annotations

from typing import Any


def add(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser("remove", help="take keys out of a checkpoint, in one step")
    parser.add_argument("directory", help="the checkpoint")
    parser.add_argument("prefix", help="what the keys to be removed begin with")
    parser.set_defaults(run=run)


def run(options: Any) -> int:
    """Remove, and say how many keys are gone; 1 if none begins with the prefix."""
    from shardckpt.dist_checkpointing import load_sharded_metadata, remove_sharded_tensors

    before = load_sharded_metadata(options.directory)
    remove_sharded_tensors(options.directory, options.prefix)
    gone = len(before) - len(load_sharded_metadata(options.directory))
    print(f"{options.directory}: {gone} of {len(before)} keys removed")
    return int(not gone)


__all__ = ["add", "run"]
