"""Modules and optimizers: saved by name, resumed by any number of ranks, stages merged without collisions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.adapters.modules import assert_close, resume, save_by, train_alone

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def test_one_parallelism_goes_on_as_another(ranks: Ranks, tmp_path: Path) -> None:
    """Tensor parallelism under FSDP2, hybrid sharding, DDP, FSDP1 and FSDP2 load what each of the others saved."""
    kinds = ("tp", "hsdp", "ddp", "fsdp1", "fsdp2")
    expected = train_alone("adamw")
    for kind in kinds:
        assert_close(ranks.run(4, save_by, tmp_path / kind, kind, "adamw"), expected)
    for number, kind in enumerate(kinds):
        world = 2 if kind == "hsdp" else 4
        assert_close(ranks.run(world, resume, tmp_path / kinds[number - 1], kind, "adamw"), expected)
