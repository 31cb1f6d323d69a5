from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import shardckpt
from shardckpt import dist_checkpointing as dc
from shardckpt.maintenance import convert_checkpoint
from tests.golden_checkpoints import VERSIONS
from tests.tree import GOLDEN

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

#: What plain torch writes: how its ranks are arranged, and along which axes of the mesh each tensor is cut.
MESHES: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "hsdp": ((2, 2), ("replicate", 0)),
    "2d": ((2, 2), (0, 1)),
}
FOREIGN = [
    *(f"mcore-{version}" for version in VERSIONS),
    "zarr-mcore-0.7.0",
    "zarr-mcore-0.15.3",
    *(f"torch-checkpointing-0.1.1/{name}" for name in ("torch-2", "mesh-4", "stages-4")),
]
CHAIN = ("safetensors", "torch_dist", "hf", "torch_dist", "safetensors")
#: A file of torch.save, and plain DCP, do not say which of their tensors were in objects: of what has none.
LONG_CHAIN = ("safetensors", "torch_dist", "torch", "dcp", "ep", "hf", "safetensors")
PLAIN = ["nested", "flattened", *MESHES]


def make_tensors() -> dict[str, torch.Tensor]:
    """Small tensors of several dtypes."""
    torch.manual_seed(0)
    return {
        "rows": torch.randn(6, 10),
        "half": torch.randn(7, 3).bfloat16(),
        "eight": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "ids": torch.arange(9),
        "mask": torch.arange(9) % 2 == 0,
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
    }


def save_on_a_mesh(folder: str, name: str) -> None:
    """Save a DTensor of each shape by plain torch, on four ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    shape, axes = MESHES[name]
    mesh = init_device_mesh("cpu", shape)
    torch.manual_seed(0)
    placements = [Replicate() if axis == "replicate" else Shard(axis) for axis in axes]
    values = {"w": torch.randn(6, 10), "v": torch.randn(5, 7)}
    state = {"model": {key: distribute_tensor(value, mesh, placements) for key, value in values.items()}, "step": 3}
    dcp.save(state, checkpoint_id=folder)


def make_source(folder: Path, name: str, ranks: Ranks) -> tuple[Path, dict[str, str]]:
    """Return a checkpoint and the fingerprints of its tensors, read by other means where there are any."""
    if name in MESHES:
        ranks.run(4, save_on_a_mesh, str(folder / "old"), name)
        torch.manual_seed(0)
        return folder / "old", shardckpt.fingerprint({"model.w": torch.randn(6, 10), "model.v": torch.randn(5, 7)})
    if name in ("nested", "flattened"):
        tensors = make_tensors()
        state = {"model": tensors, "step": 3} if name == "nested" else {f"model.{k}": t for k, t in tensors.items()}
        dcp.save(state, checkpoint_id=folder / "old", no_dist=True)
        return folder / "old", shardckpt.fingerprint({f"model.{key}": tensor for key, tensor in tensors.items()})
    if name == "hf":
        (folder / "old").mkdir()
        safetensors.torch.save_file(make_tensors(), folder / "old" / "model.safetensors")
        return folder / "old", shardckpt.fingerprint(make_tensors())
    with dc.open_checkpoint(GOLDEN / name) as stored:
        return GOLDEN / name, shardckpt.fingerprint({key: stored[key].read() for key in stored})


@pytest.mark.parametrize("name", ["hf", *(pytest.param(name, marks=pytest.mark.ci) for name in [*FOREIGN, *PLAIN])])
def test_every_origin_goes_through_the_chain_and_back(tmp_path: Path, name: str, ranks: Ranks) -> None:
    """What any library wrote goes to each format in turn, and to the first again; all fingerprints stay the same."""
    source, expected = make_source(tmp_path, name, ranks)
    for number, to in enumerate(CHAIN if name in FOREIGN else LONG_CHAIN):
        options = {"prefix": ""} if to == "hf" else {}
        report = convert_checkpoint(source, tmp_path / f"{number}", to, **options)  # type: ignore[arg-type]
        assert {tensor.key: tensor.before for tensor in report.proof} == expected
        assert {tensor.key: tensor.after for tensor in report.proof} == expected
        source = tmp_path / f"{number}"
    with dc.open_checkpoint(source) as stored:
        assert shardckpt.fingerprint({key: stored[key].read() for key in stored}) == expected


@pytest.mark.parametrize("name", [FOREIGN[0], *(pytest.param(name, marks=pytest.mark.ci) for name in FOREIGN[1:])])
def test_what_a_torch_save_file_has_goes_on(tmp_path: Path, name: str) -> None:
    """Of objects, a file of torch.save makes values under their places; they go to each format and back as they are."""
    with dc.open_checkpoint(GOLDEN / name) as stored:
        expected = shardckpt.fingerprint({key: stored[key].read() for key in stored})
    convert_checkpoint(GOLDEN / name, tmp_path / "file", "torch")
    source, found = tmp_path / "file", dict[str, str]()
    for number, to in enumerate(("dcp", "ep", "torch_dist", "safetensors", "torch", "dcp")):
        report = convert_checkpoint(source, tmp_path / f"{number}", to)
        source = tmp_path / f"{number}"
        after = {tensor.key: str(tensor.after) for tensor in report.proof}
        assert after.items() >= expected.items()
        assert after == (found or after)
        found = after
