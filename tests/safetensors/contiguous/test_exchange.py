from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardckpt.planning import Box
from shardckpt.tensors import plain_cpu
from shardckpt_safetensors.contiguous import exchange
from shardckpt_safetensors.contiguous.exchange import ExchangePlan, Message, View
from tests.safetensors.contiguous import jobs

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from shardckpt.testing.ranks import Ranks


def test_a_message_copies_its_own_bytes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transposed tensor that goes to a store in many messages is not copied as a whole for each of them."""
    copied: list[int] = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(tensor.numel())
        return plain_cpu(tensor)

    monkeypatch.setattr(exchange, "plain_cpu", count)
    tensor = torch.arange(3 * 40, dtype=torch.int16).view(3, 40).T
    expected = bytes(exchange.as_bytes(tensor.contiguous()).tolist())
    plan = ExchangePlan([View(0, Box((0, 0), (40, 3)))], [], [], {}, {}, [], 0)
    for start in (0, 1, 7, 234):
        for nbytes in (1, 2, 6, 240 - start):
            copied.clear()
            found = exchange._read_message(plan, [tensor], Message(0, 0, nbytes, None, 0, start))
            assert bytes(found.tolist()) == expected[start : start + nbytes]
            assert sum(copied) <= nbytes // 2 + 2


def test_the_order_of_memory_does_not_change_the_files(ranks: Ranks, tmp_path: Path) -> None:
    """Tensors that are transposed in memory arrive on a store, whose files have one writer, as they are."""
    jobs.save(str(tmp_path / "plain"))
    ranks.run(3, jobs.save_transposed, str(tmp_path / "store"))
    assert jobs.digest_weights(tmp_path / "store") == jobs.digest_weights(tmp_path / "plain")
