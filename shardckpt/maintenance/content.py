"""The changes of a conversion or a merge to the ``content_metadata`` of its sources."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.manifest.names import CONTENT, CONTENT_KEY

if TYPE_CHECKING:
    from shardckpt.manifest.names import Rescue
    from shardckpt.mapping.base import StateDict


def forget_metrics(common: StateDict) -> StateDict:
    """Return the common state without the metrics that a manager has noted: the new checkpoint has others."""
    content = common.get(CONTENT)
    if not isinstance(content, dict) or not isinstance(managed := content.get(CONTENT_KEY), dict):
        return common
    rest = {key: value for key, value in managed.items() if key != "metrics"}
    return {**common, CONTENT: {**content, CONTENT_KEY: rest}}


def note_rescue(common: StateDict, rescue: Rescue) -> StateDict:
    """Return the common state of a rescue: it says which keys are left out, and has no metrics."""
    content = common.get(CONTENT, {})
    if not rescue.total or not isinstance(content, dict):  # another library's may be anything
        return common
    return forget_metrics({**common, CONTENT: {**content, **rescue.to_content()}})
