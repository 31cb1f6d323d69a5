"""A rule's own split of rows, and its names in the folder."""

from __future__ import annotations

import pytest

from shardckpt.errors import ShardingError
from shardckpt.huggingface import Rule
from shardckpt.huggingface.megatron import split_vocabulary


@pytest.mark.parametrize("hub", [("a", "b"), ("a", "b", "c")])
def test_a_split_gives_as_many_tensors_as_there_are_names(hub: tuple[str, ...]) -> None:
    """A name to which a split gives no rows is an error: it would be missing in the folder without a word."""
    with pytest.raises(ShardingError, match="give as many names"):
        Rule("w", hub, split=split_vocabulary).links("w", (4, 2))
