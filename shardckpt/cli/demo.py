"""``shardckpt demo``: the main job, end to end, on text that every Python has."""

from __future__ import annotations

import argparse
import functools
from typing import Any


def add(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser("demo", help="train, save with 4 ranks, load with 2 and with 1, and show what happened")
    parser.add_argument("--dir", help="keep the checkpoint and the ranks' logs in this directory, new or empty")
    parser.add_argument("--steps", type=_positive, default=20, help="training steps before the checkpoint (20)")
    parser.set_defaults(run=run)


def run(options: Any) -> int:
    """Run the demo; it raises if anything fails or does not agree."""
    from shardckpt.demo.run import run_demo

    run_demo(options.dir, options.steps, functools.partial(print, flush=True))
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


__all__ = ["add", "run"]
