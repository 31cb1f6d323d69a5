"""Exports of a mixture of experts: the bytes of the Hugging Face folder do not tell how the experts lay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.huggingface import export_to_huggingface
from shardckpt_ep import EPSaveStrategy, expert_sharded_state_dict
from tests.ep.live import Case, Kind, Meshes, layout, live, order, whole
from tests.huggingface.samples import read

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

HUB_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
KINDS: tuple[Kind, ...] = ("two meshes", "efsdp", "local")
FILE_BYTES = 600  # of which the folder has several then, written by several ranks

#: How the experts that every expert-parallel rank has are counted where they are dealt out unevenly.
COUNTS = {1: (5,), 2: (1, 4), 4: (0, 3, 1, 1)}


def _experts() -> dict[str, torch.Tensor]:
    """The whole tensors of experts of two layers: every element another number."""
    names = [f"layers.{layer}.moe.experts.{name}" for layer in (0, 1) for name in HUB_NAMES]
    return {name: whole(5) + 1000 * number for number, name in enumerate(names)}


def _others() -> dict[str, torch.Tensor]:
    return {
        "tok_embeddings.weight": torch.arange(35.0).reshape(7, 5),
        "layers.0.moe.router.gate.weight": torch.arange(15.0).reshape(5, 3),
        "layers.0.attention_norm.weight": torch.tensor([3.0, 1.0]),
        "layers.0.moe.expert_bias": torch.ones(5),
    }


def _state(experts: dict[str, torch.Tensor], moments: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Model and optimizer, as a trainer would save them."""
    slots = {name: {"exp_avg": value, "step": torch.tensor(2.0)} for name, value in moments.items()}
    return {"model": {**experts, **_others()}, "optimizer": {"state": slots}, "step": 2}


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
        experts = {name: live(case, mesh, value) for name, value in _experts().items()}
        moments = {name: live(case, mesh, value * 0.5) for name, value in _experts().items()}
        given = {name: layout(case, mesh, value) for name, value in experts.items()}
        described = expert_sharded_state_dict(_state(experts, moments), given)
        dist_checkpointing.save(described, folder / f"{number}", EPSaveStrategy(given))
        _export(folder / f"{number}", folder / f"hub-{number}")
        if case.kind == "two meshes":  # nothing but DTensors: the adapters describe them, too
            described = to_sharded_state_dict(_state(experts, moments))
            dist_checkpointing.save(described, folder / f"adapted-{number}", "ep")
            _export(folder / f"adapted-{number}", folder / f"hub-adapted-{number}")


def _export(checkpoint: Path, target: Path) -> None:
    export_to_huggingface(checkpoint, target, mapping="qwen3_moe", max_shard_size=FILE_BYTES)


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process, that has all experts, saves and exports."""
    folder = tmp_path_factory.mktemp("whole")
    moments = {name: value * 0.5 for name, value in _experts().items()}
    dist_checkpointing.save(to_sharded_state_dict(_state(_experts(), moments)), folder / "checkpoint")
    _export(folder / "checkpoint", folder / "hub")
    return folder / "hub"


def test_the_export_has_a_matrix_for_every_expert(exported: Path) -> None:
    """The folder's tensors are each expert's own, by Qwen3-MoE's names, and those beside them."""
    found = read(exported)
    for name, value in _experts().items():
        place, _, ours = name.rpartition(".")
        for expert in range(5):
            hub = f"model.{place.replace('moe', 'mlp')}.{expert}.{HUB_NAMES[ours]}.weight"
            assert torch.equal(found.pop(hub), value[expert])
    assert found.keys() == {
        "model.embed_tokens.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.input_layernorm.weight",
    }
    assert torch.equal(found["model.layers.0.mlp.gate.weight"], torch.arange(15.0).reshape(5, 3))


@pytest.mark.parametrize(
    "ep", [pytest.param(2, marks=pytest.mark.ci), *(pytest.param(ep, marks=pytest.mark.proof) for ep in (1, 4))]
)
def test_every_layout_exports_the_same_bytes(ranks: Ranks, tmp_path: Path, exported: Path, ep: int) -> None:
    """At every ep x efsdp of four ranks, however experts are held, the folder is one process's, byte for byte."""
    ranks.run(4, _save_and_export, tmp_path, ep, timeout=120)

    wanted = _files(exported)
    assert len(wanted) > 4
    folders = [path for path in tmp_path.iterdir() if path.name.startswith("hub-")]
    assert len(folders) == len(_cases(ep)) + 3
    for folder in folders:
        assert _files(folder) == wanted, folder.name
