"""All types of models, trained on four ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.ci.huggingface.test_model_types import check
from tests.huggingface.model_types import TYPES

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.testing.ranks import Ranks


@pytest.mark.parametrize("name", TYPES)
def test_a_model_of_four_ranks_comes_back(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """FSDP2 shards of a trained model become folders that from_pretrained loads, bit for bit, by every door."""
    check(ranks, tmp_path, name, 4)
