"""Nothing that stands in a checkpoint runs, leaves its directory or takes memory before it is checked."""

from __future__ import annotations

import fractions
import os
from typing import TYPE_CHECKING

import pytest

from shardckpt import dist_checkpointing
from shardckpt.dist_checkpointing import ShardedObject
from shardckpt.errors import UnsafePickleError

if TYPE_CHECKING:
    from pathlib import Path


def test_allowed_global(tmp_path: Path) -> None:
    """A class that the caller names in allow_globals comes through, and no other; the refusal says how."""
    half = fractions.Fraction(1, 2)
    state = {"object": ShardedObject("object", {"half": half}, (1,), (0,)), "half": half}
    dist_checkpointing.save(state, tmp_path / "ckpt", allow_globals=[fractions.Fraction])
    wanted = {"object": ShardedObject("object", None, (1,), (0,))}
    with pytest.raises(UnsafePickleError, match=r"fractions\.Fraction.*allow_globals=\[Fraction\]"):
        dist_checkpointing.load(wanted, tmp_path / "ckpt")
    loaded = dist_checkpointing.load(wanted, tmp_path / "ckpt", allow_globals=[fractions.Fraction])
    assert loaded == {"object": {"half": half}, "half": half}
    named_so = dist_checkpointing.load_common_state_dict(
        tmp_path / "ckpt", allow_globals=[(fractions.Fraction, "fractions.Fraction")]
    )
    assert named_so == {"half": half}
    with pytest.raises(UnsafePickleError, match=r"fractions\.Fraction"):
        dist_checkpointing.load_common_state_dict(tmp_path / "ckpt", allow_globals=[os.path.join])
