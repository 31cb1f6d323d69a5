"""A rule's own split of rows, and its names in the folder."""

from __future__ import annotations

import pytest

from shardckpt.errors import ShapeMismatchError, ShardingError
from shardckpt.huggingface import Rule
from shardckpt.huggingface.megatron import split_qkv, split_vocabulary
from shardckpt.huggingface.rules import HubConfig


@pytest.mark.parametrize("hub", [("a", "b"), ("a", "b", "c")])
def test_a_split_gives_as_many_tensors_as_there_are_names(hub: tuple[str, ...]) -> None:
    """A name to which a split gives no rows is an error: it would be missing in the folder without a word."""
    with pytest.raises(ShardingError, match="give as many names"):
        Rule("w", hub, split=split_vocabulary).links("w", (4, 2))


def test_rows_are_those_of_a_derived_head_dim() -> None:
    """Without head_dim, hidden_size and the heads of a Llama say it: rows of another size of heads are an error."""
    values = {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
    assert len(split_qkv(192, HubConfig(values, "refuse"))) == 9
    with pytest.raises(ShapeMismatchError, match="head_dim 16"):
        split_qkv(48, HubConfig(values, "refuse"))
