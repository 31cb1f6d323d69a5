"""Loads into a vocabulary of another size."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from shardckpt import dist_checkpointing as dc
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.errors import CheckpointingException, ShapeMismatchError
from shardckpt.huggingface import export_to_huggingface, load_from_huggingface
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.mapping import ShardedTensor
from tests.engine import resizing

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def test_a_grown_vocabulary_keeps_its_new_rows(tmp_path: Path) -> None:
    """What is stored is loaded, new rows of weights stay as initialised, and moments of new rows are zero."""
    saved = resizing.save(str(tmp_path / "c"), 10)
    resizing.check(saved, *resizing.load(str(tmp_path / "c"), 13))


def test_new_rows_of_an_optimizers_weights_stay_as_initialised(tmp_path: Path) -> None:
    """The float32 weights of a mixed-precision optimizer keep their new rows: its next step would write zeros."""
    keys = [f"{prefix}embed.weight" for prefix in ("", "optimizer.state.fp32_param.", "optimizer.state.exp_avg.")]
    keys += ["chained_0.optimizer.state.fp32_param.embed.weight", "optim.embed.weight.master_param"]

    def describe(rows: int, value: float) -> dict[str, ShardedTensor]:
        return {key: ShardedTensor.from_rank_offsets(key, torch.full((rows, 2), value)) for key in keys}

    dc.save(describe(2, 1.0), tmp_path / "c")
    found = dc.load(describe(3, 7.0), tmp_path / "c", resize=["*embed.weight*"])
    assert {key: rows[:, 0].tolist() for key, rows in found.items()} == {
        key: [1.0, 1.0, 0.0 if "exp_avg" in key else 7.0] for key in keys
    }


def test_a_manager_loads_into_a_grown_vocabulary(tmp_path: Path) -> None:
    """CheckpointConfig(resize=) does the same for a manager's steps."""
    config = CheckpointConfig(folder=str(tmp_path), resize=resizing.RESIZED)
    model, optimizer = resizing.make(10)
    saved = resizing.gather(model, optimizer)
    with CheckpointManager(config, {"model": model, "optimizer": optimizer}) as manager:
        manager.save(1, force=True)
    model, optimizer = resizing.make(13)
    before = resizing.gather(model, optimizer)
    with CheckpointManager(config, {"model": model, "optimizer": optimizer}) as manager:
        assert manager.load()
    resizing.check(saved, before, resizing.gather(model, optimizer))


def test_rows_that_are_not_loaded_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A vocabulary that has become smaller gets its rows; a warning names the tensors whose others are left."""
    saved = resizing.save(str(tmp_path / "c"), 10)
    with caplog.at_level(logging.WARNING, "shardckpt"):
        resizing.check(saved, *resizing.load(str(tmp_path / "c"), 8))
    assert "stored rows beyond the wanted shape are not loaded: model.embed_tokens.weight" in caplog.text


def test_a_model_of_the_hub_grows_too(tmp_path: Path) -> None:
    """A Hugging Face folder is loaded into a larger vocabulary by the same argument."""
    saved = resizing.save(str(tmp_path / "c"), 10)
    export_to_huggingface(tmp_path / "c", tmp_path / "hf")
    model, _ = resizing.make(13)
    start = model.embed_tokens.weight.detach().clone()
    load_from_huggingface(to_sharded_state_dict(model), tmp_path / "hf", resize=resizing.RESIZED)
    assert torch.equal(model.embed_tokens.weight[:10], saved.weights["embed_tokens.weight"])
    assert torch.equal(model.embed_tokens.weight[10:], start[10:])


def _load_stage(folder: str) -> tuple[list[float], str]:
    """Load a stage of a pipeline, with patterns of all stages, and then with one that is no stage's."""
    name = ("embed_tokens.weight", "lm_head.weight")[torch.distributed.get_rank()]
    rows = torch.zeros(13, 4)
    state = {name: ShardedTensor.from_rank_offsets(name, rows)}
    load_from_huggingface(state, folder, resize=resizing.RESIZED)
    with pytest.raises(CheckpointingException, match="resize: the pattern") as caught:
        load_from_huggingface(state, folder, resize=[*resizing.RESIZED, "*embed_token"])
    return rows[9:11, 0].tolist(), str(caught.value)


def test_a_pattern_of_another_stage_matches(tmp_path: Path, ranks: Ranks) -> None:
    """A stage without a tensor of a pattern loads its own; a pattern that no stage has is one error on all."""
    (tmp_path / "hf").mkdir()
    weights = {f"{name}.weight": torch.ones(10, 4) for name in ("embed_tokens", "lm_head")}
    save_file(weights, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    (first, said), (second, also_said) = ranks.run(2, _load_stage, str(tmp_path / "hf"))
    assert first == second == [1, 0]
    assert said == also_said
    assert "'*embed_token' matches no tensor (did you mean embed_tokens.weight?" in said


def test_only_what_is_named_may_have_another_size(tmp_path: Path) -> None:
    """Other tensors of another shape, patterns that match nothing, and a text in the place of a list are errors."""
    resizing.save(str(tmp_path / "c"), 10)
    state = to_sharded_state_dict(*resizing.make(13))
    for resize in ((), ["*embed_tokens*"]):
        with pytest.raises(ShapeMismatchError, match=r"has the shape.*load\(\.\.\., resize="):
            dc.load(state, tmp_path / "c", resize=resize)
    with pytest.raises(CheckpointingException, match=r"^resize: the pattern '\*embed_token' matches no tensor"):
        dc.load(state, tmp_path / "c", resize=["*embed_token"])
    with pytest.raises(CheckpointingException, match=r"^load: resize=.*: expected a list of texts, such as \['\*'\]"):
        dc.load(state, tmp_path / "c", resize="*")
    with pytest.raises(CheckpointingException, match=r"resize=\[1\]: expected a list of texts"):
        dc.load(state, tmp_path / "c", resize=[1])  # type: ignore[list-item]


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float4_e2m1fn_x2", "uint4", "int4"])
def test_codes_grow_too(tmp_path: Path, name: str) -> None:
    """A tensor of a dtype of few bits gets the stored rows, and its new rows keep theirs."""
    if (dtype := getattr(torch, name, None)) is None:
        pytest.skip(f"this torch has no {name}")

    def describe(codes: torch.Tensor) -> dict[str, ShardedTensor]:
        return {"w": ShardedTensor.from_rank_offsets("w", codes.view(dtype))}

    dc.save(describe(torch.ones(4, 4, dtype=torch.uint8)), tmp_path / "c")
    codes = torch.full((6, 4), 7, dtype=torch.uint8)
    dc.load(describe(codes), tmp_path / "c", resize=["w"])
    assert codes[:, 0].tolist() == [1, 1, 1, 1, 7, 7]


def test_what_cannot_be_resized_is_refused_before_anything_is_filled(tmp_path: Path) -> None:
    """Flattened shards and layers of one stored tensor: an error if their shape differs, and nothing if it does not."""
    layers = [ShardedTensor.from_rank_offsets("w", torch.ones(4), (0, n, 2), prepend_axis_num=1) for n in range(2)]
    dc.save({"w": layers}, tmp_path / "c")
    same = [ShardedTensor.from_rank_offsets("w", torch.zeros(4), (0, n, 2), prepend_axis_num=1) for n in range(2)]
    assert dc.load({"w": same}, tmp_path / "c", resize=["*"])["w"][1].tolist() == [1] * 4
    more = [ShardedTensor.from_rank_offsets("w", torch.zeros(5), (0, n, 2), prepend_axis_num=1) for n in range(2)]
    with pytest.raises(CheckpointingException, match=r"'w' has another shape than is stored, and is stored with other"):
        dc.load({"w": more}, tmp_path / "c", resize=["*"])
    assert not more[0].data.any()


def test_an_optimizer_that_nothing_describes_is_refused(tmp_path: Path) -> None:
    """Moments of a plain state_dict() would come back as they are stored, without a word."""
    model, optimizer = resizing.make(10)
    dc.save({"model": to_sharded_state_dict(model), "optimizer": optimizer.state_dict()}, tmp_path / "c")
    model, optimizer = resizing.make(13)
    state = {"model": to_sharded_state_dict(model), "optimizer": optimizer.state_dict()}
    with pytest.raises(ShapeMismatchError, match=r"exp_avg'\] \(10, \d+\) for \(13, \d+\).*; describe the optimizer"):
        dc.load(state, tmp_path / "c", resize=["*embed*"])


def test_factored_state_grows_where_its_axes_are_the_parameters(tmp_path: Path) -> None:
    """Adafactor's variances of an embedding that has grown are those of the old rows, and it takes steps."""
    model = torch.nn.Embedding(10, 4)
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.arange(6)).sum().backward()
    optimizer.step()
    dc.save(to_sharded_state_dict(model, optimizer), tmp_path / "c")
    grown = torch.nn.Embedding(12, 4)
    fresh = torch.optim.Adafactor(grown.parameters())
    load_into(dc.load(to_sharded_state_dict(grown, fresh), tmp_path / "c", resize=["*"]), grown, fresh)
    assert fresh.state[grown.weight]["row_var"].shape == (12, 1)
    grown(torch.arange(12)).sum().backward()
    fresh.step()
