from __future__ import annotations

from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardckpt
from shardckpt import dist_checkpointing as dc
from shardckpt.errors import CheckpointingException, CorruptCheckpointError
from shardckpt.huggingface import Rule, RuleMapping
from shardckpt.maintenance import convert_checkpoint
from shardckpt.maintenance.proof import StagedProof
from shardckpt.maintenance.sources import open_any
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.plugins import get_plugin_manager
from tests.maintenance.proof import whole
from tests.tables import table
from tests.testing.blocks import LoadBlocks, SaveBlocks
from tests.tree import GOLDEN

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt import SaveContext


def prints(report: Any) -> dict[str, str]:
    """The fingerprints of a report by key, which are the same before and after."""
    assert all(tensor.before == tensor.after for tensor in report.proof)
    return {tensor.key: tensor.before for tensor in report.proof}


@table("source", ["mcore-0.9.0", "mcore-0.20.0", "zarr-mcore-0.7.0", "torch-checkpointing-0.1.1/mesh-4"])
@table("to", ["torch", "dcp", "hf"])
def test_checkpoints_of_other_libraries_are_proven(tmp_path: Path, source: str, to: str) -> None:
    """What Megatron and torch_checkpointing wrote has the same fingerprints as a file, for DCP and as a folder."""
    with dc.open_checkpoint(GOLDEN / source) as stored:
        expected = shardckpt.fingerprint({key: stored[key].read() for key in stored})
    report = convert_checkpoint(GOLDEN / source, tmp_path / "new", to, **({"prefix": ""} if to == "hf" else {}))
    assert prints(report) == expected
    if to == "torch":
        assert (
            shardckpt.fingerprint({k: torch.load(tmp_path / "new", weights_only=True)[k] for k in expected}) == expected
        )
    if to == "dcp":
        wanted = {key: torch.zeros_like(t) for key, t in dc.load_plain_tensors(tmp_path / "new").items()}
        dcp.load(wanted, checkpoint_id=tmp_path / "new", no_dist=True)
        assert shardckpt.fingerprint(wanted) == expected


@table("flat", [False, True], ids=["nested", "flattened"])
def test_plain_dcp_becomes_a_file_and_a_checkpoint_for_dcp_again(tmp_path: Path, flat: bool) -> None:
    """What plain torch wrote, nested or flattened, keeps fingerprints and values, and stock `dcp.load` reads it."""
    state: dict[str, Any] = {"model": {"w": torch.randn(6, 5)}, "optim": {"m": torch.randn(6, 5), "lr": 0.5}, "step": 3}
    if flat:
        state = {"model.w": state["model"]["w"], "optim.m": state["optim"]["m"], "optim.lr": 0.5, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "old", no_dist=True)
    first = convert_checkpoint(tmp_path / "old", tmp_path / "st", "safetensors")
    second = convert_checkpoint(tmp_path / "st", tmp_path / "dcp", "dcp")
    file = convert_checkpoint(tmp_path / "old", tmp_path / "a.pt", "torch")
    assert prints(first) == prints(second) == prints(file)
    wanted: dict[str, Any] = {
        "model": {"w": torch.zeros(6, 5)},
        "optim": {"m": torch.zeros(6, 5), "lr": 0.0},
        "step": 0,
    }
    if flat:
        wanted = {"model.w": torch.zeros(6, 5), "optim.m": torch.zeros(6, 5), "optim.lr": 0.0, "step": 0}
    dcp.load(wanted, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert shardckpt.fingerprint(wanted) == shardckpt.fingerprint(state)
    assert wanted["step"] == 3
    assert (wanted["optim.lr"] if flat else wanted["optim"]["lr"]) == 0.5


def test_options_change_names_dtypes_and_what_is_written(tmp_path: Path) -> None:
    """A mapping splits and renames, a dtype casts, and what is left out is listed, for any target; all is proven."""
    gate_up, norm = torch.randn(3, 8, 4), torch.randn(4)
    state = {
        "model": [
            whole("model.experts.0.gate_up", gate_up),
            whole("model.norm", norm),
            whole("model.ids", torch.arange(4)),
        ],
        "optimizer": whole("optimizer.m", torch.ones(2)),
        "extra": ShardedObject("extra", 1, (1,), (0,)),
        "step": 5,
    }
    dc.save(state, tmp_path / "old")
    rule = Rule("experts.{n}.gate_up", ("hub.{n}.{expert}.gate", "hub.{n}.{expert}.up"), transposed=True)
    for to in ("safetensors", "torch", "hf"):
        report = convert_checkpoint(
            *(tmp_path / "old", tmp_path / to, to),
            mapping=RuleMapping([rule]),
            dtype="bfloat16",
            prefix="model.",
            leave_out=["norm"],
        )
        assert {"optimizer.m", "model.norm", "extra/shard_0_1", "step"} <= set(report.left_out)
        (split, ids) = report.proof
        assert (split.key, split.dtype, split.written_dtype) == ("model.experts.0.gate_up", "float32", "bfloat16")
        assert split.before == split.after == shardckpt.fingerprint({"w": gate_up.bfloat16()})["w"]
        assert (ids.names, ids.written_dtype) == (("ids",), "int64")
        assert len(split.names) == 6
    found = torch.load(tmp_path / "torch", weights_only=True)
    assert torch.equal(found["hub.0.2.up"], gate_up[2, 4:].T.bfloat16())
    again = convert_checkpoint(tmp_path / "old", tmp_path / "cast", "torch_dist", dtype="float64")
    assert again.left_out == ()
    with dc.open_checkpoint(tmp_path / "cast") as stored:
        assert (stored["model.norm"].dtype, stored.common["step"]) == (torch.float64, 5)
        assert torch.equal(stored["model.norm"].read(), norm.double())


class Flips(SaveBlocks):
    """Writes one wrong bit."""

    def save(self, shards: Any, common: Any, context: SaveContext) -> None:
        """Save other values than were given."""
        for shard in shards:
            if isinstance(shard, ShardedTensor):
                values = shard.data.dequantize().clone()  # type: ignore[union-attr]
                values.view(torch.uint8)[-1] ^= 1
                shard.data = values
        super().save(shards, common, context)


class Forgets(SaveBlocks):
    """Writes a tensor under another name."""

    def save(self, shards: Any, common: Any, context: SaveContext) -> None:
        """Save under other names than were given."""
        for shard in shards:
            shard.key = "other"
        super().save(shards, common, context)


@table(("saver", "text"), [(Flips, "has other values than were read: 'w'"), (Forgets, "'other' of ")])
def test_a_writer_at_fault_is_found(tmp_path: Path, saver: type[SaveBlocks], text: str) -> None:
    """A strategy that writes other values or names than it was given does not pass the proof, and leaves nothing."""
    registry = get_plugin_manager().registry
    with registry.preserved():
        registry.add(SaveBlocks)
        registry.add(LoadBlocks)
        dc.save({"w": whole("w", torch.ones(3))}, tmp_path / "old")
        url = "memory://bucket/at-fault"
        for target in (tmp_path / "new", url):
            with pytest.raises(CorruptCheckpointError, match=text):
                convert_checkpoint(tmp_path / "old", target, saver())
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert not any("at-fault" in name for name in fsspec.filesystem("memory").store)


@table("to", ["safetensors", "hf", "torch"])
@table("overwrite", [False, True], ids=["absent", "replaced"])
def test_a_wrong_bit_on_the_disk_never_gets_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, overwrite: bool
) -> None:
    """If a bit changes while it is written, an error says so, and DST is as it was before: absent, or the old one."""
    make = StagedProof.make

    def make_after_damage(proof: StagedProof, written: Any, staging: Path, files: Path) -> None:
        found = [staging] if staging.is_file() else [path for path in staging.rglob("*") if path.is_file()]
        file = max(found, key=lambda path: path.stat().st_size)
        content = bytearray(file.read_bytes())
        content[content.index(torch.full((1000,), 3.0).numpy().tobytes())] ^= 1
        file.write_bytes(content)
        make(proof, written, staging, files)

    dc.save({"w": whole("w", torch.full((1000,), 3.0))}, tmp_path / "old", "torch_dist")
    names = {"old"}
    if overwrite:
        convert_checkpoint(tmp_path / "old", tmp_path / "new", to, dtype="float64")
        names.add("new")
    monkeypatch.setattr(StagedProof, "make", make_after_damage)
    with pytest.raises(CorruptCheckpointError):
        convert_checkpoint(tmp_path / "old", tmp_path / "new", to, overwrite=overwrite)
    assert {path.name for path in tmp_path.iterdir()} == names
    if overwrite:
        with open_any(tmp_path / "new") as found:
            assert found["w"].read().equal(torch.full((1000,), 3.0, dtype=torch.float64))


def test_assets_belong_to_folders(tmp_path: Path) -> None:
    """Files to be copied beside the weights are refused for any target but a Hugging Face folder."""
    dc.save({"w": whole("w", torch.ones(3))}, tmp_path / "old")
    with pytest.raises(CheckpointingException, match="copied to Hugging Face folders alone"):
        convert_checkpoint(tmp_path / "old", tmp_path / "new", "ep", assets=tmp_path / "old")
