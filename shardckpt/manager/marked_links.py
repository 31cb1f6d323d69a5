"""The links ``latest`` and ``best`` after a verification: here, since :mod:`step_links` needs no torch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from shardckpt.engine.locations import find_local
from shardckpt.errors import CheckpointingException
from shardckpt.manager.step_links import find_own_links, update_links
from shardckpt.manager.steps import StepFolder
from shardckpt.manifest.names import LINKS
from shardckpt.plugins.manager import get_plugin_manager

if TYPE_CHECKING:
    from collections.abc import Iterable

logger = logging.getLogger(__name__)


def follow_marks(checkpoints: Iterable[str]) -> None:
    """Update the links next to checkpoints that were marked, where a manager keeps links: they lead to loadable steps.

    Of URLs, which have no links, nothing is done.
    """
    for place in {local.parent for each in checkpoints if (local := find_local(each)) is not None}:
        if any((place / name).is_symlink() for name in LINKS):
            folder = StepFolder(place, get_plugin_manager())
            try:
                steps = [folder.inspect_step(step) for step in folder.steps()]
            except CheckpointingException as exc:  # one is being replaced: the manager that does it moves the links
                logger.warning("the links of %s are not looked at: %s", folder, exc)
                continue
            if find_own_links(folder, steps):
                update_links(folder, steps)
