"""Loads the initial state of a training if its folder has no checkpoint yet."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from shardckpt.distributed.comm import Comm
from shardckpt.distributed.error_report import replace_text
from shardckpt.engine.locations import locate
from shardckpt.errors import IncompleteCheckpointError, NotACheckpointError
from shardckpt.huggingface.load import load_from_huggingface
from shardckpt.huggingface.load_strategy import HuggingFaceLoadStrategy
from shardckpt.manager.reader import ACCEPT_OF
from shardckpt.manager.states import MODEL
from shardckpt.manager.steps import MODEL_PREFIX
from shardckpt.manifest.models import Manifest
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.plugins.resolver import check_policy

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from shardckpt.manager.config import CheckpointConfig
    from shardckpt.manager.reader import StepReader
    from shardckpt.manager.states import TrainingStates

logger = logging.getLogger(__name__)


def load_initial(
    config: CheckpointConfig, states: TrainingStates, reader: StepReader, process_group: ProcessGroup | None
) -> bool:
    """Collective: load ``initial_load_path``; return whether one is given."""
    path = config.initial_load_path
    if path is None:
        return False
    if config.initial_load_in_hf:
        comm = Comm(process_group)
        with comm.local_phase("describing the model"):
            hub = Manifest(backend=HuggingFaceLoadStrategy.backend, version=HuggingFaceLoadStrategy.version)
            check_policy(Path(path), hub, config.accept, ACCEPT_OF)
            requested = states.describe([MODEL], comm)[MODEL]
        loaded = load_from_huggingface(
            requested,
            path,
            mapping=config.hf_mapping,
            prefix=MODEL_PREFIX,
            optional=config.exclude_from_last_save,
            process_group=process_group,
            fully_parallel=config.fully_parallel_load,
            memory_budget=config.memory_budget,
            allow_dtype_cast=config.allow_dtype_cast,
            resize=config.resize,
        )
        with comm.collective_phase("restoring the model"):
            states.restore_model(loaded)
    else:
        try:
            reader.read(locate(path, get_plugin_manager()), model_only=config.initial_load_model_only)
        except (NotACheckpointError, IncompleteCheckpointError) as exc:
            raise replace_text(
                exc,
                f"initial_load_path: {exc}; of a folder of steps give one: <folder>/step-<n>",
            ) from exc.__cause__
    logger.info("loaded initial_load_path %s", path)
    return True
