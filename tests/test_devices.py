"""torch's default device does not matter: what the product makes for itself is on the device that it names."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.mapping import ShardedTensor
from tests.backends import both
from tests.tree import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: torch's functions that make a tensor on the default device, and that the product uses.
FACTORIES = frozenset(
    {
        *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand"),
        *("randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
    }
)


@pytest.fixture
def on_meta() -> Iterator[None]:
    """The default device on which a value is lost."""
    with torch.device("meta"):
        yield


def _find_calls(source: str) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES:
            names = {each.arg for each in node.keywords}
            if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch" and not names & {"device", None}:
                yield node


def test_each_tensor_that_is_made_names_its_device() -> None:
    """A caller's torch.set_default_device, or `with torch.device`, changes nothing inside of a call."""
    found = []
    for folder in ("shardckpt", "strategies"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT)
            if not name.parts[1:] or name.parts[1] in ("testing", "demo"):
                continue
            found += [f"{name}:{call.lineno}" for call in _find_calls(path.read_text())]
    assert found == []


@both
@pytest.mark.usefixtures("on_meta")
def test_a_save_and_a_load_are_right_on_any_default_device(tmp_path: Path) -> None:
    """Fingerprints, a parallel load, plain tensors, a comparison and a conversion work under another default device."""

    def describe(value: float) -> dict[str, object]:
        tensor = torch.full((300, 7), value, device="cpu")
        plain = torch.full((2,), value, device="cpu")
        return {"w": ShardedTensor.from_rank_offsets("w", tensor), "plain": [plain, 3]}

    for name in ("a", "b"):
        dc.save(describe(2.0), tmp_path / name, fingerprints=True)
    loaded = dc.load(describe(0.0), tmp_path / "a", fully_parallel=True)
    assert torch.equal(loaded["w"], torch.full((300, 7), 2.0, device="cpu"))
    assert torch.equal(loaded["plain"][0], torch.full((2,), 2.0, device="cpu"))
    assert main(["diff", "--read", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert main(["merge", str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "c")]) == 0


@pytest.mark.usefixtures("on_meta")
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_manager_resumes_on_any_default_device(tmp_path: Path, mode: str) -> None:
    """A fresh model and optimizer get their values and moments under another default device."""
    config = CheckpointConfig.model_validate(
        {"folder": tmp_path, "interval": 1, "async_mode": mode, "fingerprints": True, "fully_parallel_load": True}
    )
    models = [torch.nn.Linear(3, 2, device="cpu") for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    models[0](torch.ones(2, 3, device="cpu")).sum().backward()
    with torch.device("cpu"):  # the AdamW of torch 2.10 does not step under another one
        optimizers[0].step()
    with CheckpointManager(config, {"model": models[0], "optimizer": optimizers[0]}) as manager:
        manager.save(1)
    with CheckpointManager(config, {"model": models[1], "optimizer": optimizers[1]}) as manager:
        assert manager.load()
    assert torch.equal(models[0].weight, models[1].weight)
    moments = [each.state[model.weight]["exp_avg"] for model, each in zip(models, optimizers, strict=True)]
    assert torch.equal(*moments)
