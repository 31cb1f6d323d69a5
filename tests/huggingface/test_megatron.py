from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.errors import (
    CheckpointingException,
    ConfigurationError,
    KeyMismatchError,
    ShapeMismatchError,
    ShardingError,
)
from shardckpt.huggingface import export_to_huggingface, load_from_huggingface, save_state_dict
from shardckpt.huggingface.models import find_mapping
from shardckpt.maintenance import convert_checkpoint, diff_checkpoints
from shardckpt.manager import CheckpointConfig, CheckpointManager
from tests.huggingface.megatron_models import CONFIGS, blank, make_config, make_hub_tensors, make_megatron_state
from tests.huggingface.samples import read, same
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.mapping import ShardedTensor

STYLES = ("numbered", "stacked", "single")


def _write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _save(
    tmp_path: Path, kind: str, style: str, pad_to: int = 0
) -> tuple[dict[str, torch.Tensor], list[ShardedTensor]]:
    """A model by Megatron's names in ``c``, and its config in ``assets``; its tensors and shards."""
    config = make_config(kind)
    hub = make_hub_tensors(config)
    shards = make_megatron_state(hub, config, style, pad_to)
    dc.save({"model": shards, "iteration": 3}, tmp_path / "c")
    _write_config(tmp_path / "assets", config)
    return hub, shards


def _check(found: dict[str, torch.Tensor], hub: dict[str, torch.Tensor]) -> None:
    assert found.keys() == hub.keys()
    assert [name for name in hub if not same(found[name], hub[name])] == []


#: Layers that differ are not along one axis.
CASES = [(kind, style) for kind in CONFIGS for style in STYLES if (kind, style) != ("deepseek_v3", "stacked")]


@table(("kind", "style"), CASES)
def test_a_model_of_megatron_becomes_one_of_transformers_and_back(kind: str, style: str, tmp_path: Path) -> None:
    """TP 2 x PP 2 x EP 2, in each way that Megatron stores it: the Hub's names and bits, and the shards again."""
    hub, shards = _save(tmp_path, kind, style)
    exported = export_to_huggingface(
        tmp_path / "c", tmp_path / "hf", mapping=kind, assets=tmp_path / "assets", strict=True
    )
    assert exported.unmatched == ()
    _check(read(tmp_path / "hf"), hub)
    filled = blank(shards)
    load_from_huggingface({"model": filled}, tmp_path / "hf", mapping=kind)
    assert [a.key for a, b in zip(filled, shards, strict=True) if not same(a.data, b.data)] == []


def test_convert_proves_a_model_of_megatron_and_diff_compares_it(tmp_path: Path) -> None:
    """`convert` reads again what it wrote; `diff --mapping` finds both equal; a config.json is a mapping, too."""
    hub, _ = _save(tmp_path, "qwen3", "stacked")
    c, hf, assets = (str(tmp_path / name) for name in ("c", "hf", "assets"))
    assert main(["convert", c, hf, "--to", "hf", "--mapping", "qwen3", "--assets", assets, "--strict"]) == 0
    _check(read(tmp_path / "hf"), hub)
    assert main(["diff", c, hf, "--mapping", "qwen3"]) == 0
    assert main(["convert", c, f"{hf}.pt", "--to", "torch", "--mapping", f"{assets}/config.json"]) == 0
    found = torch.load(f"{hf}.pt")
    assert found.pop("iteration") == 3
    _check(found, hub)
    with dc.open_checkpoint(c) as checkpoint:
        _check(dict(checkpoint.weights(f"{assets}/config.json")), hub)


@table("kind", CONFIGS)
def test_a_folder_of_the_hub_becomes_a_checkpoint_of_megatron_and_back(kind: str, tmp_path: Path) -> None:
    """`convert --mapping megatron` goes from the Hub's names to those of GPTModel's shards, and back, bit for bit."""
    hub, shards = _save(tmp_path, kind, "numbered")
    assets = str(tmp_path / "assets")
    hf, c, new = (str(tmp_path / name) for name in ("hf", "start", "new"))
    export_to_huggingface(tmp_path / "c", hf, mapping="megatron", assets=assets, strict=True)
    assert main(["convert", hf, c, "--mapping", "megatron", "--strict"]) == 0
    assert diff_checkpoints(c, tmp_path / "c", tensors_only=True).are_same
    filled = blank(shards)
    dc.load({"model": filled}, c)
    assert [a.key for a, b in zip(filled, shards, strict=True) if not same(a.data, b.data)] == []
    assert main(["convert", c, new, "--to", "hf", "--mapping", "megatron", "--assets", hf, "--strict"]) == 0
    _check(read(tmp_path / "new"), hub)


@table("to", ["hf", "torch_dist"])
def test_a_folder_of_the_hub_merges_with_a_checkpoint_of_megatron(to: str, tmp_path: Path) -> None:
    """`merge --mapping megatron` reads each source by Megatron's names, and writes the average as either."""
    hub, shards = _save(tmp_path, "qwen3", "numbered")
    hf, c, doubled = (str(tmp_path / name) for name in ("hf", "c", "doubled"))
    export_to_huggingface(c, hf, mapping="megatron", assets=tmp_path / "assets", strict=True)
    twice = [replace(shard, data=shard.data * 2) for shard in shards if shard.data is not None]
    dc.save({"model": twice}, doubled)
    new, exported = str(tmp_path / "new"), str(tmp_path / "exported")
    assets = ["--assets", hf] if to == "hf" else []
    assert main(["merge", hf, doubled, new, "--to", to, "--mapping", "megatron", *assets]) == 0
    if to != "hf":
        export_to_huggingface(new, exported, mapping="megatron", assets=hf, strict=True)
    found = read(tmp_path / ("new" if to == "hf" else "exported"))
    _check(found, {name: (tensor.double() * 1.5).to(tensor.dtype) for name, tensor in hub.items()})


def test_rows_that_pad_the_vocabulary_are_cut_only_if_said(tmp_path: Path) -> None:
    """More rows than vocab_size are an error that names the way out; cut, they are not written; a load fills zeros."""
    hub, shards = _save(tmp_path, "llama", "numbered", pad_to=64)
    args: dict[str, Any] = {"mapping": "llama", "assets": tmp_path / "assets"}
    with pytest.raises(ShapeMismatchError, match=r"word_embeddings.*vocab_size of 48, .* 64 rows: cut.*--cut-"):
        export_to_huggingface(tmp_path / "c", tmp_path / "hf", **args)
    assert not (tmp_path / "hf").exists()
    export_to_huggingface(tmp_path / "c", tmp_path / "hf", cut_vocabulary=True, **args)
    _check(read(tmp_path / "hf"), hub)
    options = ["--to", "hf", "--mapping", "llama", "--assets", str(tmp_path / "assets"), "--cut-vocabulary"]
    assert main(["convert", str(tmp_path / "c"), str(tmp_path / "proved"), *options]) == 0
    # the way back has nothing to cut, and asks for no folder with a config
    with pytest.raises(CheckpointingException, match=r"a folder of the Hub has none; leave it out"):
        convert_checkpoint(tmp_path / "hf", tmp_path / "back", "torch_dist", mapping="megatron", cut_vocabulary=True)
    _check(read(tmp_path / "proved"), hub)
    filled = blank(shards)
    load_from_huggingface({"model": filled}, tmp_path / "hf", mapping="llama")
    for one, other in zip(filled, shards, strict=True):
        assert same(one.data, torch.where(other.data == -1, 0.0, other.data))


def test_diff_compares_a_folder_without_the_padding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a folder's vocabulary was cut, diff names the option that compares without the padding, and it does."""
    _save(tmp_path, "llama", "numbered", pad_to=64)
    first, hub = str(tmp_path / "c"), str(tmp_path / "hf")
    args: dict[str, Any] = {"mapping": "llama", "assets": tmp_path / "assets"}
    export_to_huggingface(first, hub, cut_vocabulary=True, **args)
    assert main(["diff", first, hub, "--mapping", "llama"]) == 1
    assert "--cut-vocabulary leaves these out" in capsys.readouterr().out
    assert main(["diff", first, hub, "--mapping", "llama", "--cut-vocabulary"]) == 0


@table("name", ["linear_fc1.weight{}", "local_experts.{}.linear_fc1.weight"])
def test_experts_by_the_names_of_parameters_are_mapped(name: str) -> None:
    """What a plain state dict calls the experts of a grouped linear layer, or of a list of them, has its names, too."""
    links = find_mapping("qwen3_moe").links(f"decoder.layers.1.mlp.experts.{name.format(3)}", (8, 4))
    prefix = "model.layers.1.mlp.experts.3"
    assert [link.name for link in links] == [f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"]
    assert links[1].box.offset == (4, 0)


def test_names_of_megatron_without_a_mapping_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An export of Megatron's names warns which mapping gives the Hub's; a load by none of them says it, too."""
    _, shards = _save(tmp_path, "llama", "numbered")
    export_to_huggingface(tmp_path / "c", tmp_path / "same")
    assert "'embedding.word_embeddings.weight' is Megatron's name: mapping='megatron'" in caplog.text
    export_to_huggingface(tmp_path / "c", tmp_path / "hf", mapping="megatron", assets=tmp_path / "assets")
    with pytest.raises(KeyMismatchError, match="That is Megatron's name: give mapping='megatron'"):
        load_from_huggingface({"model": shards}, tmp_path / "hf")


def test_a_cast_leaves_the_bias_of_a_router_in_32_bits(tmp_path: Path) -> None:
    """DeepSeek-V3's e_score_correction_bias is float32 in a folder of bfloat16, by an export and by a conversion."""
    hub, _ = _save(tmp_path, "deepseek_v3", "numbered")
    args: dict[str, Any] = {"mapping": "deepseek_v3", "assets": tmp_path / "assets", "dtype": "bfloat16"}
    export_to_huggingface(tmp_path / "c", tmp_path / "hf", **args)
    convert_checkpoint(tmp_path / "c", tmp_path / "proved", "hf", **args)
    for folder in ("hf", "proved"):
        found = read(tmp_path / folder)
        assert {name for name, value in found.items() if value.dtype == torch.float32} == {
            name for name in hub if name.endswith("e_score_correction_bias")
        }
        assert all(torch.equal(found[name].float(), hub[name].bfloat16().float()) for name in hub if "bias" not in name)


def test_weights_of_8_bits_become_what_they_stand_for(tmp_path: Path) -> None:
    """A folder of fp8 weights with block scales becomes Megatron's in the dtype that is asked for, and not without."""
    config = {**make_config("qwen3"), "quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}}
    hub = {name: tensor.bfloat16() for name, tensor in make_hub_tensors(config).items()}
    name = "model.layers.1.mlp.down_proj.weight"
    hub[name] = torch.ones(hub[name].shape).to(torch.float8_e4m3fn)
    folder = _write_config(tmp_path / "hf", config)
    scales = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    save_state_dict({**hub, f"{name}_scale_inv": scales}, folder / "model.safetensors")
    with pytest.raises(CheckpointingException, match=r"scales belong to 1 weight of 8 bits.*--dtype bfloat16"):
        convert_checkpoint(folder, tmp_path / "c", "torch_dist", mapping="megatron")
    convert_checkpoint(folder, tmp_path / "c", "torch_dist", mapping="megatron", dtype="bfloat16", strict=True)
    with dc.open_checkpoint(tmp_path / "c") as checkpoint:
        found = checkpoint["decoder.layers.1.mlp.linear_fc2.weight"][:]
    assert same(found, scales.repeat_interleave(8, 0).repeat_interleave(8, 1).bfloat16())


def test_the_way_to_megatron_is_refused_where_tensors_or_the_model_are_unknown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that lacks a part of a fused tensor, has one more, or is of another model: errors, and warnings."""
    config = make_config("qwen3")
    hub = {name: tensor for name, tensor in make_hub_tensors(config).items() if "0.self_attn.k_proj" not in name}
    folder = _write_config(tmp_path / "hf", config)
    args: dict[str, Any] = {"mapping": "megatron", "overwrite": True}
    save_state_dict(hub, folder / "model.safetensors")
    with pytest.raises(KeyMismatchError, match=r"lacks model\.layers\.0.*k_proj.*'decoder.*linear_qkv.weight'"):
        convert_checkpoint(folder, tmp_path / "c", "torch_dist", **args)
    hub = make_hub_tensors(config)
    save_state_dict({**hub, "model.rotary.inv_freq": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(KeyMismatchError, match=r"1 of \d+ tensors matched no rule of the mapping: model\.rotary"):
        convert_checkpoint(folder, tmp_path / "c", "torch_dist", strict=True, **args)
    assert not (tmp_path / "c").exists()
    report = convert_checkpoint(folder, tmp_path / "c", "torch_dist", **args)
    assert report.unmatched == ("model.rotary.inv_freq",)
    assert "model.rotary.inv_freq. They keep their names" in caplog.text
    convert_checkpoint(folder, tmp_path / "same", "torch_dist", mapping="qwen3")
    assert "the mapping changes no name of a Hugging Face folder; 'megatron' gives Megatron's" in caplog.text
    hub["model.layers.0.self_attn.k_proj.weight"] = hub["model.layers.0.self_attn.k_proj.weight"].bfloat16()
    save_state_dict(hub, folder / "model.safetensors")
    with pytest.raises(ShardingError, match=r"'decoder\.layers\.0.*is made of tensors of several dtypes"):
        convert_checkpoint(folder, tmp_path / "c", "torch_dist", **args)
    (folder / "config.json").write_text('{"model_type": "gpt9"}')
    with pytest.raises(CheckpointingException, match="'gpt9' as model_type; there are tables for deepseek_v3, llama"):
        convert_checkpoint(folder, tmp_path / "c", "torch_dist", **args)
    with pytest.raises(CheckpointingException, match=r"'megatron' takes the model's config\.json"):
        export_to_huggingface(tmp_path / "c", tmp_path / "new", mapping="megatron")


def test_a_mapping_that_lacks_what_it_needs_says_so(tmp_path: Path) -> None:
    """Without a config, with one of other heads or without heads, and where nothing says the vocabulary, are errors."""
    _save(tmp_path, "qwen3", "numbered")
    wrong = _write_config(tmp_path / "wrong", {**make_config("qwen3"), "num_attention_heads": 6})
    empty = _write_config(tmp_path / "empty", {"model_type": "qwen3"})
    for args, text in (
        ({}, r"linear_qkv.weight' of shape .*numbers of heads.*--assets"),
        ({"assets": wrong}, "not those of 6 heads in 4 groups.*another model"),
        ({"assets": empty}, "None as num_attention_heads"),
        ({"cut_vocabulary": True}, "cut_vocabulary .* takes the key mapping of a model"),
    ):
        with pytest.raises(CheckpointingException, match=text):
            export_to_huggingface(tmp_path / "c", tmp_path / "hf", mapping="qwen3", **args)  # type: ignore[arg-type]
    (tmp_path / "assets" / "config.json").write_text("{}")
    with pytest.raises(CheckpointingException, match="has no model_type"):
        find_mapping(str(tmp_path / "assets" / "config.json"))


class _Sharded:
    """A model that describes its shards itself, as Megatron's do."""

    def __init__(self, shards: list[ShardedTensor]) -> None:
        self.shards = shards

    def sharded_state_dict(self) -> dict[str, Any]:
        return {"shards": self.shards}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        """Nothing: its tensors are filled in place."""


def test_a_manager_exports_the_last_step_of_a_padded_model(tmp_path: Path) -> None:
    """With ``hf_cut_vocabulary`` the folder beside the last step has the model of the config."""
    hub, shards = _save(tmp_path, "llama", "numbered", pad_to=64)
    config = CheckpointConfig(
        folder=str(tmp_path / "steps"),
        last_save_in_hf=True,
        hf_mapping="megatron",
        hf_assets_path=str(tmp_path / "assets"),
        hf_cut_vocabulary=True,
    )
    with CheckpointManager(config, {"model": _Sharded(shards)}) as manager:
        manager.save(3, last_step=True)
    _check(read(tmp_path / "steps" / "step-3-hf"), hub)
    with pytest.raises(ConfigurationError, match="hf_cut_vocabulary needs the vocab_size: give hf_mapping, "):
        CheckpointConfig(hf_cut_vocabulary=True)
    (tmp_path / "assets" / "config.json").rename(tmp_path / "assets" / "tokenizer.json")
    with pytest.raises(CheckpointingException, match=r"^hf_assets_path: cut_vocabulary .* a folder with its config"):
        CheckpointManager(config, {"model": _Sharded(shards)})
