"""The pool of gloo ranks that tests share: the one that authors of strategies get, too."""

from __future__ import annotations

from shardckpt.testing import RankError, RankPool
from shardckpt.testing import RankFailure as Failure

__all__ = ["Failure", "RankError", "RankPool"]
