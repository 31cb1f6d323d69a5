from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt.huggingface import Rule, RuleMapping
from shardckpt_safetensors import SafetensorsSaveShardedStrategy
from tests.safetensors.contiguous import jobs
from tests.states import entire
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


def _save(tensors: dict[str, torch.Tensor], path: Path, **options: Any) -> dict[str, str]:
    """Save tensors, and return the folder's weight map."""
    state = entire(tensors)
    dc.save(state, path, SafetensorsSaveShardedStrategy(**options))
    index = path / jobs.INDEX
    return json.loads(index.read_text())["weight_map"] if index.exists() else {}


TRAINING = {"model.a.w": torch.ones(4, 4), "model.b.w": torch.ones(3), "optimizer.a.w": torch.ones(4, 4)}


@table(
    ("options", "names"),
    [
        ({"layout": "contiguous"}, ["a.w", "b.w"]),
        ({"layout": "contiguous", "prefix": ""}, ["model.a.w", "model.b.w", "optimizer.a.w"]),
        ({"layout": {"model.b.*": "boxes", "*": "contiguous"}}, ["a.w"]),
        ({"layout": {"model.a.*": "auto"}}, ["a.w"]),
        ({"layout": {"nothing": "contiguous"}}, []),
        ({"layout": "boxes"}, []),
    ],
    ids=str,
)
def test_which_tensors_are_contiguous(tmp_path: Path, options: dict[str, Any], names: list[str]) -> None:
    """By layout, pattern and prefix; all tensors are loaded from either place."""
    assert _save(TRAINING, tmp_path / "c", **options).keys() == set(names)
    loaded = dc.load_plain_tensors(tmp_path / "c")
    assert loaded.keys() == TRAINING.keys()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in TRAINING.items())


@table("prefix", ["", "model.", "app.model."])
def test_the_optimizers_tensors_are_not_in_the_folder(tmp_path: Path, prefix: str) -> None:
    """Whatever the sections are called, the folder has the model's names alone, and a load has all tensors."""
    optimizer = f"{prefix.removesuffix('model.')}optim.state"
    state = {f"{prefix}a.w": torch.ones(4, 4), f"{prefix}b.w": torch.ones(3)}
    state |= {f"{optimizer}.{name}.exp_avg": torch.rand(4) for name in ("a.w", "b.w")}
    assert _save(state, tmp_path / "c", layout="contiguous").keys() == {"a.w", "b.w"}
    assert dc.load_plain_tensors(tmp_path / "c").keys() == state.keys()


def test_the_config_is_of_the_tensors_that_are_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The copy of config.json has the dtype of contiguous tensors; another vocabulary is a warning, and no error."""
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "config.json").write_text('{"dtype": "float32", "vocab_size": 3, "quantization_config": {}}')
    tensors = {"model.embed_tokens.weight": torch.ones(4, 4, dtype=torch.bfloat16)}
    _save(tensors, tmp_path / "c", layout="contiguous", assets=str(tmp_path / "assets"))
    assert json.loads((tmp_path / "c" / "config.json").read_text()) == {"dtype": "bfloat16", "vocab_size": 3}
    assert "has vocab_size 3, and 'model.embed_tokens.weight' has 4 rows" in caplog.text


def test_a_mapping_splits_experts(tmp_path: Path) -> None:
    """A tensor of all experts is stored as one for each, and is still one tensor for a load."""
    experts = torch.arange(4 * 6 * 5.0).reshape(4, 6, 5)
    key = "model.layers.0.mlp.experts.gate_up_proj"
    names = _save({key: experts}, tmp_path / "c", layout="contiguous", mapping="qwen3_moe").keys()
    assert len(names) == 8
    found = jobs.read_like_vllm(tmp_path / "c")
    assert torch.equal(found["model.layers.0.mlp.experts.2.up_proj.weight"], experts[2, 3:])
    assert torch.equal(dc.load_plain_tensors(tmp_path / "c")[key], experts)


_TRANSPOSED = RuleMapping([Rule("w", ("w",), transposed=True)])
_JOINED = RuleMapping([Rule("v", ("w",))])


@table(
    ("mapping", "tensors", "message"),
    [
        (_TRANSPOSED, {"w": torch.ones(2, 3)}, "'w' cannot be stored contiguously: it is transposed"),
        (_JOINED, {"v": torch.ones(2), "w": torch.ones(2)}, "would both be 'w' in the folder"),
        (None, {"w": torch.ones(2, dtype=torch.complex64)}, "inference tools do not read"),
        (RuleMapping([Rule("w", ())]), {"w": torch.ones(2)}, "has no name in the folder"),
    ],
    ids=["transposed", "joined", "dtype", "left out"],
)
def test_what_cannot_be_contiguous(
    tmp_path: Path, mapping: Any, tensors: dict[str, torch.Tensor], message: str
) -> None:
    """Is refused by key with what to do, and nothing is there; "auto" stores it in boxes, unless names collide."""
    with pytest.raises(ShardingError, match=message):
        _save(tensors, tmp_path / "c", layout="contiguous", mapping=mapping)
    assert not (tmp_path / "c").exists()
    if len(tensors) == 1:
        assert not _save(tensors, tmp_path / "c", layout="auto", mapping=mapping)
        assert torch.equal(dc.load_plain_tensors(tmp_path / "c")["w"], tensors["w"])


@table(
    ("options", "message"),
    [
        ({"layout": "contigous"}, "did you mean contiguous.* expected 'boxes', 'contiguous' or 'auto'"),
        ({"layout": {"a": "box"}}, "layout of 'a'"),
        ({"assets": ["config.json"]}, "pass layout='contiguous'"),
        ({"layout": "contiguous", "assets": ["shardckpt.json"]}, "cannot be copied: it is weights, or of a checkpoint"),
        ({"layout": "contiguous", "assets": ["a b.json"]}, "cannot be among a checkpoint's files"),
        ({"layout": "contiguous", "assets": ["a/x.json", "b/x.json"]}, "two files have one name"),
        ({"layout": "contiguous", "assets": []}, "no files other than weights"),
        ({"layout": "contiguous", "max_shard_size": "big"}, "max_shard_size='big'"),
        (
            {"layout": "contiguous", "mapping": "peft"},
            "'peft' leaves the base model out.*: give no mapping, and export",
        ),
        ({"layout": "contiguous", "mapping": "no_model"}, "no mapping for models of type"),
    ],
    ids=str,
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    """Are refused when the strategy is made."""
    with pytest.raises(CheckpointingException, match=message):
        SafetensorsSaveShardedStrategy(**options)


def test_assets_of_a_step_are_those_of_the_next(tmp_path: Path) -> None:
    """A step's directory can be the folder of assets: its weights and its own files are not copied."""
    (tmp_path / "config.json").write_text("{}")
    tensors = {"w": torch.ones(64)}
    _save(tensors, tmp_path / "1", layout="contiguous", assets=[tmp_path / "config.json"])
    _save(tensors, tmp_path / "2", layout="contiguous", assets=tmp_path / "1")
    assert (tmp_path / "2" / "config.json").read_text() == "{}"
    assert {path.name for path in (tmp_path / "1").iterdir()} == {path.name for path in (tmp_path / "2").iterdir()}


def test_an_element_with_a_stride(tmp_path: Path) -> None:
    """A tensor of one element may have any stride, which is no reason to fail."""
    tensors = {"w": torch.arange(6, dtype=torch.int16).view(3, 2)[1:2, ::2]}
    _save(tensors, tmp_path / "c", layout="contiguous")
    assert jobs.read_like_vllm(tmp_path / "c")["w"].tolist() == [[2]]


def test_a_removal_leaves_a_folder(tmp_path: Path) -> None:
    """Tensors that are removed leave both indexes; what stays has its names and values, for us and for others."""
    tensors = {f"model.{name}": torch.full((n,), float(n)) for n, name in ((70, "a.w"), (3, "b.w"), (64, "c.w"))}
    # some without bytes are at one place, and two of them are equal
    tensors |= {f"model.{name}": torch.zeros(0, n) for n, name in ((3, "empty"), (3, "none"), (2, "c.empty"))}
    others = {"ema.empty": torch.zeros(0, 3), "optimizer.m": torch.ones(4)}
    _save({**tensors, **others}, tmp_path / "c", layout="contiguous")
    names = {name.removeprefix("model.") for name in tensors}
    for prefix, gone in (
        ("optimizer.", set()),
        ("ema.", set()),
        ("model.c", {"c.w", "c.empty"}),
        ("model.none", {"none"}),
        ("model.a", {"a.w"}),
        ("model.b", {"b.w"}),
    ):
        dc.remove_sharded_tensors(tmp_path / "c", prefix)
        names -= gone
        found, ours = jobs.read_like_vllm(tmp_path / "c"), dc.load_plain_tensors(tmp_path / "c")
        listed = json.loads((tmp_path / "c" / jobs.INDEX).read_text())["weight_map"]
        assert found.keys() == listed.keys() == names, prefix
        for read in (found, {name.removeprefix("model."): tensor for name, tensor in ours.items()}):
            assert all(torch.equal(read[name], tensors[f"model.{name}"]) for name in names), prefix
    dc.remove_sharded_tensors(tmp_path / "c", "model.")
    assert not [path.name for path in (tmp_path / "c").glob("model*")]


def test_the_old_name_of_the_layout_is_accepted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A strategy with the layout "whole", as it was called, writes the same files, and says the new name."""
    tensors = {"w": torch.ones(2, 3)}
    old = _save(tensors, tmp_path / "old", layout={"*": "whole"})
    assert "is called 'contiguous' now" in caplog.text
    assert old == _save(tensors, tmp_path / "new", layout="contiguous") != {}
