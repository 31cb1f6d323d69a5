"""``shardckpt demo``: the main job, end to end, on text that every Python has."""

from __future__ import annotations

import argparse
import functools
import time
from pathlib import Path
from typing import Any


def add(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser("demo", help="train, save with 4 ranks, load with others, and show what happened")
    parser.add_argument("--moe", action="store_true", help="train a mixture of experts, with expert parallelism")
    parser.add_argument("--dir", help="keep the checkpoint and the ranks' logs in this directory, new or empty")
    parser.add_argument("--steps", type=_positive, default=16, help="training steps before the checkpoint (16)")
    parser.set_defaults(run=run)


def run(options: Any) -> int:
    """Run the demo and print its report; an error if anything failed or does not agree."""
    from shardckpt.cli.demo_report import report
    from shardckpt.demo import DENSE, EXPERTS, check, run_demo

    start = time.monotonic()
    layouts = EXPERTS if options.moe else DENSE
    outcome = run_demo(options.dir, options.steps, layouts, functools.partial(print, flush=True))
    print(f"\n{report(outcome)}\n")
    check(outcome)
    print(f"All agree, after {time.monotonic() - start:.0f} s.")
    if options.dir is not None:
        checkpoint = Path(options.dir).absolute() / "checkpoint"
        print(f"The checkpoint stays; check its bytes with: shardckpt verify {checkpoint}")
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


__all__ = ["add", "run"]
