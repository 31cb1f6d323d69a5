"""A matrix of crash points, by the referee, and its score."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed.checkpoint
from ckpt_chaos import runner

from shardckpt.commit.staging_names import HOLDS_NAME, STAGING
from shardckpt.errors import CheckpointingException
from shardckpt.maintenance import verify_checkpoint
from shardckpt.maintenance.verify import get_exit_code
from shardckpt.manager.step_names import MARKS_NAME
from tests.faults.chaos.forks import Fork
from tests.faults.chaos.names import OURS, THEIRS

if TYPE_CHECKING:
    from pathlib import Path

#: What a program imports before it is forked: with what it trains, but not the modules that read their rank at import.
_IMPORTS = {
    "manager_loop": ("shardckpt.manager", "shardckpt.dist_checkpointing"),
    "trainer": ("shardckpt.integrations.transformers", "accelerate"),
    "hf_trainer": ("transformers.trainer", "accelerate"),
    "lightning_loop": ("lightning.pytorch", "shardckpt.integrations.lightning"),
    "lightning_trainer": ("lightning.pytorch",),
}


#: Of events that are others in each run, which is no drift: a staging directory and the file of a job have an id in
#: their names, and two threads remove the empty folders of holds and marks.
_VARYING = re.compile("|".join(("[0-9a-f]{32}", *map(re.escape, (STAGING, HOLDS_NAME, MARKS_NAME)))))


class Score(NamedTuple):
    """What the referee says of one program.

    Attributes:
        program: Its name.
        ranks: How many.
        points: Crash points, without the control run.
        verdicts: How often the referee gave each, the control run included.
        failed: The crash points that did not pass, each with its verdict.
        drifted: Crash points at which nothing, or something else, was killed.
    """

    program: str
    ranks: int
    points: int
    verdicts: dict[str, int]
    failed: list[str]
    drifted: list[str]


def measure(program: str, ranks: int, work: Path, *, jobs: int = 1) -> Score:
    """Let the referee kill a program at each file event of a save, on each rank, and resume it."""
    target = THEIRS.get(program, "")
    if not target:
        target = OURS[program]
        runner.TARGETS[target] = f"{__package__}.{target}"
        runner.NEWEST[target] = _find_newest_step
    for name in _IMPORTS.get(target, ()):
        importlib.import_module(name)
    torch.set_num_threads(1)  # threads do not outlive a fork
    runner.subprocess = SimpleNamespace(Popen=Fork, STDOUT=None)  # it asks for nothing else of the module
    rows = runner.run_matrix(work, jobs, ranks, target)
    bad = [f"{row.label}: {row.verdict}" for row in rows if row.verdict != "PASS"]
    drifted = [row.label for row in rows[1:] if not row.crashed or (row.drift and not _VARYING.search(row.label))]
    return Score(program, ranks, len(rows) - 1, dict(Counter(row.verdict for row in rows)), bad, drifted)


def _find_newest_step(out: Path, _: dict[str, int]) -> int:
    """The highest step whose checkpoint is whole by its digests, wherever the program keeps them."""
    found = [0]
    for path in [*out.glob("ours/step-*"), *out.glob("checkpoints/ck-step=*.ckpt")]:
        try:
            code = get_exit_code(verify_checkpoint(path))
        except CheckpointingException:
            continue  # it is not whole
        if code == 0:
            found.append(int(re.findall(r"\d+", path.name)[-1]))
    return max(found)
