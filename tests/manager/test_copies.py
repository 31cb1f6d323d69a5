"""A manager belongs to one process: it is neither copied nor pickled."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt.errors import CheckpointingException
from shardckpt.local import LocalCheckpointManager
from shardckpt.manager import CheckpointConfig, CheckpointManager

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class _Callback:
    """As those of trainers: it has a manager."""

    def __init__(self, manager: CheckpointManager) -> None:
        self.manager = manager


@pytest.mark.parametrize("action", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused_with_what_to_do(tmp_path: Path, action: Callable[[object], object]) -> None:
    """Copying or pickling a manager, or a callback that has one, says why not and what to make instead."""
    with CheckpointManager(CheckpointConfig(folder=tmp_path), {"model": torch.nn.Linear(2, 2)}) as manager:
        for value in (manager, [_Callback(manager)] if action is not copy.copy else manager):
            with pytest.raises(
                CheckpointingException, match=r"cannot be copied or pickled.*another one from its `config`"
            ):
                action(value)


@pytest.mark.parametrize("action", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_manager_of_local_checkpoints_is_no_exception(tmp_path: Path, action: Callable[[object], object]) -> None:
    """It has a group and a disk of its process: the sentence says what to make instead."""
    manager = LocalCheckpointManager(tmp_path)
    match = r"a LocalCheckpointManager cannot be copied or pickled.*another one of the same arguments"
    with pytest.raises(CheckpointingException, match=match):
        action(manager)


def test_the_configuration_may_be_copied(tmp_path: Path) -> None:
    """What another process needs to make a manager of its own comes through copies and pickles."""
    config = CheckpointConfig(folder=tmp_path, interval=7)
    assert copy.deepcopy(config) == config == pickle.loads(pickle.dumps(config))
