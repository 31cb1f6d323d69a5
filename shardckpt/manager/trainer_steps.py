"""Steps of transformers' Trainer: their metrics, and those whose save did not end."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardckpt.errors import CheckpointingException
from shardckpt.huggingface import TRAINER_STATE
from shardckpt.manager.metrics import read_metric
from shardckpt.storage import parse_json, read_file

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

_ARGUMENTS = "training_args.bin"
_STEP = re.compile(r"checkpoint-\d+")
#: Its log has an entry every few steps of a training.
_STATE_LIMIT, _STATE_PARTS = 64 << 20, 1 << 22
#: Values of an evaluation that are no metrics of the model.
_TIMES = ("_runtime", "_per_second", "_time")


def is_unfinished(directory: Path, names: Collection[str]) -> bool:
    """Return whether a directory is a step of a Trainer that was killed while it saved."""
    return bool(_STEP.fullmatch(directory.name)) and _ARGUMENTS in names and TRAINER_STATE not in names


def read_trainer_metrics(directory: Path, names: Collection[str]) -> dict[str, float | None]:
    """Return the values that the Trainer logged at a step: of its evaluations, then its loss; none from another log."""
    if TRAINER_STATE not in names:
        return {}
    try:
        state = parse_json(read_file(directory / TRAINER_STATE, _STATE_LIMIT), most_parts=_STATE_PARTS)
    except (CheckpointingException, ValueError):  # the weights are judged by themselves
        return {}
    if not isinstance(state, dict):
        return {}
    step, log = state.get("global_step"), state.get("log_history")
    entries = [each for each in log if isinstance(each, dict)] if isinstance(log, list) else []
    logged = {name: value for each in entries if each.get("step") == step for name, value in each.items()}
    chosen = [name for name in logged if name.startswith("eval_") and not name.endswith(_TIMES)]
    return {name: read_metric(logged[name]) for name in (*chosen, *({"loss"} & logged.keys()))}
