"""What the tests of rank errors share."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist

from tests.tables import in_proof

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.faults.attempts import Attempt


SIZES = (3, *in_proof(2, 4))


def one_error(attempts: list[Attempt]) -> Attempt:
    """The attempt of all ranks, after checking that they agree, left nothing behind, and then went on."""
    assert all(found.family for found in attempts), attempts
    assert len({(found.kind, found.message) for found in attempts}) == 1, attempts
    assert [found.left for found in attempts] == [[]] * len(attempts)
    assert [found.wrong for found in attempts] == [[]] * len(attempts)
    return attempts[0]


@contextmanager
def set_on_rank(rank: int, name: str, value: str) -> Iterator[None]:
    """An environment variable that is so on one rank."""
    before = os.environ.get(name)
    if dist.get_rank() == rank:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
