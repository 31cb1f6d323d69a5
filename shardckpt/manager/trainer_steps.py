"""The step and the metrics of a checkpoint of transformers' Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardckpt.errors import CheckpointingException
from shardckpt.manager.metrics import read_metric
from shardckpt.manifest.hub import TRAINER_STATE
from shardckpt.manifest.strict_json import parse_json
from shardckpt.storage.input_file import read_file

if TYPE_CHECKING:
    from pathlib import Path

#: Its log has an entry every few steps of a training.
_STATE_LIMIT, _STATE_PARTS = 64 << 20, 1 << 22
#: Values of an evaluation that are no metrics of the model.
_TIMES = ("_runtime", "_per_second", "_time")


class TrainerState(NamedTuple):
    """The step of a training that transformers' Trainer saved, and the metrics that it logged there.

    ``step`` is None if it is not known. The metrics are its evaluations', then its loss.
    """

    step: int | None
    metrics: dict[str, float | None]


def read_trainer_state(directory: Path) -> TrainerState:
    """Return the step and metrics in the Trainer's log of a directory; none if no log can be read."""
    try:
        state = parse_json(read_file(directory / TRAINER_STATE, _STATE_LIMIT), most_parts=_STATE_PARTS)
    except (CheckpointingException, ValueError):  # the weights are judged by themselves
        state = None
    if not isinstance(state, dict):
        return TrainerState(None, {})
    step, log = state.get("global_step"), state.get("log_history")
    entries = [each for each in log if isinstance(each, dict)] if isinstance(log, list) else []
    logged = {name: value for each in entries if each.get("step") == step for name, value in each.items()}
    chosen = [name for name in logged if name.startswith("eval_") and not name.endswith(_TIMES)]
    metrics = {name: read_metric(logged[name]) for name in (*chosen, *({"loss"} & logged.keys()))}
    return TrainerState(step if isinstance(step, int) else None, metrics)
