"""Train a small model with 4 processes, save, kill them, and go on with 4, 2 and 1.

Checks that the later processes load what the first saved, bit for bit, and go on with the same losses. Needs no GPU.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardckpt.cli.output import parse_count, say
from shardckpt.cli.table import table
from shardckpt.errors import name_call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.demo.launch import Run


def add_options(parser: Any) -> None:
    """Add the options."""
    parser.add_argument("--moe", action="store_true", help="train a mixture of experts, with expert parallelism")
    parser.add_argument("--dir", help="new or empty directory for checkpoints and logs (default: temporary)")
    parser.add_argument(
        "--steps", type=parse_count, default=16, metavar="N", help="training steps before the checkpoint (16)"
    )


def run(options: Any) -> int:
    """Run the demo, print its report, and return the exit code; an error if anything failed or does not agree."""
    from shardckpt.demo import launch

    start = time.monotonic()
    layouts = launch.EXPERTS if options.moe else launch.DENSE
    runs = launch.run_demo(options.dir, options.steps, layouts, functools.partial(say, flush=True))
    say(f"\n{_report(runs, options.steps)}\n")
    launch.check(runs)
    say(f"All agree, after {time.monotonic() - start:.0f} s.")
    say(f"The code that ran, to copy from: {Path(launch.__file__).with_name('train.py')}")
    if options.dir is not None:
        checkpoint = Path(options.dir).absolute() / "checkpoints" / f"step-{options.steps}"
        say(f"The checkpoint stays; check its bytes with: {name_call('verify', checkpoint)}")
    return 0


def _report(runs: Sequence[Run], steps: int) -> str:
    """Return the losses and states of all groups as tables."""
    from shardckpt.demo.launch import TOLERANCE, differences

    first, *others = runs
    rows = [
        (step, *(f"{run.losses[step]:.6f}" for run in runs), f"{max(found):.1e}")
        for step, found in differences(runs).items()
    ]
    states = ["the same" if run.state == first.state else f"differs: {run.state[:16]}" for run in others]
    names = [f"{first.layout}, killed", *(str(run.layout) for run in others)]
    return (
        f"Losses after the checkpoint of {first.layout} at step {steps}\n"
        + table(("step", *names, "relative difference"), rows)
        + f"\nequal in every bit with as many ranks as before; else within {TOLERANCE:.0e} (sums in another order)"
        + "\n\nModel and optimizer at the checkpoint, bit for bit (SHA-256 of all tensors, gathered)\n"
        + table((f"saved by {first.layout}", *(f"loaded by {n}" for n in names[1:])), [(first.state[:16], *states)])
    )
