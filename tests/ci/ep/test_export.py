"""Exports of a mixture of experts: the bytes of the Hugging Face folder do not tell how the experts lay."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from shardckpt import dist_checkpointing
from shardckpt.adapters import to_sharded_state_dict
from shardckpt_ep import EPSaveStrategy, expert_sharded_state_dict
from tests.ep.export import export_files, exported, make_experts, state
from tests.ep.live import Case, Kind, Meshes, layout, live, order

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

__all__ = ["exported"]  # fixtures

KINDS: tuple[Kind, ...] = ("two meshes", "efsdp", "local")


#: How the experts that every expert-parallel rank has are counted where they are dealt out unevenly.
COUNTS = {1: (5,), 2: (1, 4), 4: (0, 3, 1, 1)}


def _cases(ep: int) -> list[Case]:
    """The layouts of four ranks: both orders of the mesh, both axes, every way to hold experts, even and uneven."""
    sizes = [("ep", ep), ("efsdp", 4 // ep)]
    orders = ((order(*sizes), 0), (order(*sizes[::-1]), 0), (order(*sizes[::-1]), 1))
    cases = [Case(given, dim, experts=5, kind=kind) for given, dim in orders for kind in KINDS]
    uneven = [Case(order(*sizes), dim, experts=5, counts=COUNTS[ep], kind="efsdp") for dim in (0, 1)]
    return [*cases, *uneven]


def _save_and_export(folder: Path, ep: int) -> None:
    """Save every case, and export it with all ranks together."""
    meshes = Meshes()
    for number, case in enumerate(_cases(ep)):
        mesh = meshes.of(case)
        experts = {name: live(case, mesh, value) for name, value in make_experts().items()}
        moments = {name: live(case, mesh, value * 0.5) for name, value in make_experts().items()}
        given = {name: layout(case, mesh, value) for name, value in experts.items()}
        described = expert_sharded_state_dict(state(experts, moments), given)
        dist_checkpointing.save(described, folder / f"{number}", EPSaveStrategy(given))
        export_files(folder / f"{number}", folder / f"hub-{number}")
        if case.kind == "two meshes":  # nothing but DTensors: the adapters describe them, too
            described = to_sharded_state_dict(state(experts, moments))
            dist_checkpointing.save(described, folder / f"adapted-{number}", "ep")
            export_files(folder / f"adapted-{number}", folder / f"hub-adapted-{number}")


def _files(folder: Path) -> dict[str, bytes]:
    """The content of all files, but for the name of the checkpoint that the index says."""
    name = re.compile(rb'"shardckpt_source": "[^"]*"')
    return {path.name: name.sub(b"", path.read_bytes()) for path in folder.iterdir()}


@pytest.mark.parametrize(
    "ep", [pytest.param(2, marks=pytest.mark.ci), *(pytest.param(ep, marks=pytest.mark.proof) for ep in (1, 4))]
)
def test_every_layout_exports_the_same_bytes(ranks: Ranks, tmp_path: Path, exported: Path, ep: int) -> None:
    """At every ep x efsdp of four ranks, however experts are held: byte for byte but for the source's name."""
    ranks.run(4, _save_and_export, tmp_path, ep, timeout=120)

    wanted = _files(exported)
    assert len(wanted) > 4
    folders = [path for path in tmp_path.iterdir() if path.name.startswith("hub-")]
    assert len(folders) == len(_cases(ep)) + 3
    for folder in folders:
        assert _files(folder) == wanted, folder.name
