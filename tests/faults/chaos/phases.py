"""The phases that the referee asks of a training program: reference, train (killed in its save), resume."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def parse_phase() -> tuple[str, Path]:
    """The phase that is asked for, and the folder of the run, which exists then."""
    parser = argparse.ArgumentParser()
    parser.add_argument("phase", choices=["reference", "train", "resume"])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    return args.phase, args.out


def store_final(model: torch.nn.Module, out: Path) -> None:
    """Write the weights at the training's end, which the referee compares."""
    torch.save(model.state_dict(), out / f"final_rank{RANK}.pt")


def report_resume(out: Path, resume: Callable[[], int]) -> None:
    """Resume to the end, and write what came of it, as the referee reads it; exit with 3 if it raised.

    Args:
        out: The folder of the run.
        resume: Trains to the end; returns the step at which it began.
    """
    outcome: dict[str, str | int | None] = {"raised": None, "message": "", "resumed_from_step": None}
    try:
        outcome["resumed_from_step"] = resume()
    except BaseException as exc:  # noqa: BLE001 - each failure is a result
        outcome.update(raised=type(exc).__name__, message=str(exc)[:200])
    (out / f"outcome_rank{RANK}.json").write_text(json.dumps(outcome))
    if outcome["raised"]:
        sys.exit(3)
