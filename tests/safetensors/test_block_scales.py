from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.errors import CorruptCheckpointError, ShardingError
from shardckpt.mapping import BlockScales, ShardedTensor
from shardckpt_safetensors import SafetensorsSaveShardedStrategy
from tests.safetensors.checkpoints import change_index
from tests.safetensors.conformance.independent_reader import read_checkpoint
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

CODES = torch.arange(128, dtype=torch.uint8).view(4, 32)
SCALES = torch.full((4, 2), 0.5).to(torch.float8_e4m3fn)


def make_state(codes: torch.Tensor = CODES, block: tuple[int, ...] = (1, 16), **others: Any) -> dict[str, Any]:
    """An MXFP8 or NVFP4 weight: codes, and a scale for 16 elements of a row."""
    scaled = BlockScales("w.scales", block)
    return {
        "bias": ShardedTensor.from_rank_offsets("bias", torch.ones(3)),
        "codes": ShardedTensor.from_rank_offsets("w.codes", codes, block_scales=scaled),
        "scales": ShardedTensor.from_rank_offsets("w.scales", SCALES),
    } | others


def columns_of(path: Path) -> tuple[list[str], dict[str, Any]]:
    """The optional features of an index, and the columns of the scales by name."""
    with safe_open(path / "index.safetensors", framework="pt") as index:
        features = json.loads(index.metadata()["shardckpt"])["optional_features"]
        names = [name for name in index.keys() if name.startswith("scaled")]  # noqa: SIM118 - not a dict
        return features, {name: index.get_tensor(name).tolist() for name in names}


def scales_of(path: Path) -> dict[str, BlockScales | None]:
    """What scales each tensor."""
    with dc.open_checkpoint(path) as stored:
        return {key: tensor.block_scales for key, tensor in stored.items()}


def test_scales_are_stored_with_their_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The relation is in the index as the page says, in what is opened, and in inspect; values are as ever."""
    dc.save(make_state(), tmp_path / "c", "safetensors")
    features, columns = columns_of(tmp_path / "c")
    assert features == ["block_scales"]
    assert columns == {"scaled": [1], "scaled_by": [2], "scaled_block": [[1, 16]]}
    assert scales_of(tmp_path / "c") == {"bias": None, "w.codes": BlockScales("w.scales", (1, 16)), "w.scales": None}
    assert torch.equal(dc.load_plain_tensors(tmp_path / "c")["w.codes"], CODES)
    assert main(["inspect", str(tmp_path / "c")]) == 0
    assert "w.codes is scaled by w.scales, in blocks of 1x16" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "c")]) == 0
    read_checkpoint(tmp_path / "c")
    dc.save({"bias": make_state()["bias"]}, tmp_path / "without", "safetensors")
    assert columns_of(tmp_path / "without") == ([], {})


@table("layout", ["contiguous", {"w.codes": "contiguous"}, {"bias": "contiguous"}], ids=["all", "codes", "another"])
def test_a_layout_for_other_tools_keeps_the_relation(tmp_path: Path, layout: Any) -> None:
    """Scales are stored with what they scale whichever of both, or of others, is contiguous."""
    dc.save(make_state(), tmp_path / "c", SafetensorsSaveShardedStrategy(layout=layout))
    assert scales_of(tmp_path / "c")["w.codes"] == BlockScales("w.scales", (1, 16))
    read_checkpoint(tmp_path / "c")


def test_blocks_of_packed_codes_count_elements(tmp_path: Path) -> None:
    """Shapes of float4 count pairs, blocks elements: 16 pairs are two blocks of 16."""
    codes = CODES[:, :16].contiguous().view(torch.float4_e2m1fn_x2)
    dc.save(make_state(codes), tmp_path / "c", "safetensors")
    assert scales_of(tmp_path / "c")["w.codes"] == BlockScales("w.scales", (1, 16))


@table(
    ("state", "text"),
    [
        (
            lambda: make_state(block=(1, 8)),
            r"'w\.codes' of shape \(4, 32\) has.*the shape \(4, 4\), but it has \(4, 2\)",
        ),
        (
            lambda: make_state(CODES[:, :16].contiguous().view(torch.float4_e2m1fn_x2), block=(1, 8)),
            r"'w\.codes' of shape \(4, 16\), \(4, 32\) in elements, has.*the shape \(4, 4\), but it has \(4, 2\)",
        ),
        (lambda: make_state(scales=None), r"'w\.scales', which no rank saves"),
        (lambda: make_state(block=(16,)), r"the block \(16,\), expected a tuple of 2 sizes"),
        (lambda: make_state(block=(1, 0)), "none below 1"),
    ],
)
def test_scales_that_do_not_fit_are_refused(tmp_path: Path, state: Any, text: str) -> None:
    """A relation that no reader could use is an error of the save, which names the tensors."""
    with pytest.raises(ShardingError, match=text):
        dc.save(state(), tmp_path / "c", "safetensors")


@table(("prefix", "left"), [("bias", True), ("w.codes", False), ("w.scales", False)])
def test_a_removal_keeps_the_relation_of_what_stays(tmp_path: Path, prefix: str, left: bool) -> None:
    """Other tensors keep their scales, by their new numbers; a relation to what is gone goes."""
    dc.save(make_state(), tmp_path / "c", "safetensors")
    dc.remove_sharded_tensors(tmp_path / "c", prefix)
    found = {key: scales for key, scales in scales_of(tmp_path / "c").items() if scales}
    assert found == ({"w.codes": BlockScales("w.scales", (1, 16))} if left else {})
    assert columns_of(tmp_path / "c")[0] == (["block_scales"] if left else [])
    read_checkpoint(tmp_path / "c")


def _save_rows(path: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    state = {
        "codes": ShardedTensor.from_rank_offsets(
            "w.codes", CODES.chunk(world)[rank], (0, rank, world), block_scales=BlockScales("w.scales", (1, 16))
        ),
        "scales": ShardedTensor.from_rank_offsets("w.scales", SCALES.chunk(world)[rank], (0, rank, world)),
    }
    if rank:  # has more axes: rows of this rank are wider than those of the other
        state["deep"] = ShardedTensor.from_rank_offsets(
            "deep", torch.ones(2, 2, 4), block_scales=BlockScales("deep.scales", (1, 1, 4))
        )
        state["deep scales"] = ShardedTensor.from_rank_offsets("deep.scales", torch.ones(2, 2, 1))
    for _ in range(2):  # the second by the plan of the first
        dc.save(state, path, "safetensors", overwrite=True)
    state["codes"].block_scales = BlockScales("w.scales", (1, 16) if rank else (1, 17))
    with pytest.raises(ShardingError, match="ranks disagree on its block_scales"):
        dc.save(state, f"{path}-other", "safetensors")


def test_ranks_say_the_same(ranks: Ranks, tmp_path: Path) -> None:
    """Shards of several ranks have one relation; another one on a rank is an error on all."""
    ranks.run(2, _save_rows, str(tmp_path / "c"))
    found = scales_of(tmp_path / "c")
    assert found["w.codes"] == BlockScales("w.scales", (1, 16))
    assert found["deep"] == BlockScales("deep.scales", (1, 1, 4))


def test_a_malformed_relation_is_damage(tmp_path: Path) -> None:
    """Numbers of tensors that are not there, and blocks of nothing, are refused with the file's name."""
    dc.save(make_state(), tmp_path / "c", "safetensors")

    def twist(header: dict[str, Any]) -> None:
        header["optional_features"] = ["block_scales"]  # whose columns are gone

    change_index(tmp_path / "c", header=twist)
    with pytest.raises(CorruptCheckpointError, match=r"index\.safetensors.*scaled"):
        dc.load_plain_tensors(tmp_path / "c")
