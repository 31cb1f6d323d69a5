"""What a folder says of its weights is true, and nothing that it had before is loaded with them."""

from __future__ import annotations

import json
import logging
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import CheckpointingException
from shardckpt.huggingface import export_to_huggingface, load_from_huggingface
from shardckpt.mapping import ShardedTensor
from tests.huggingface.samples import read, save, sharded_state
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _assets(path: Path, config: dict[str, Any], *others: str) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    for name in others:
        (path / name).write_text(name)
    return path


def _config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def test_a_config_of_fp8_weights_does_not_say_so_of_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """quantization_config and compression_config go where no tensor is quantized, with a warning; else they stay."""
    config = {"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}, "compression_config": {}}
    assets = _assets(tmp_path / "assets", {**config, "text_config": dict(config)})
    plain = {"model.w": torch.ones(4, 4, dtype=torch.bfloat16)}
    with caplog.at_level(logging.WARNING, "shardckpt"):
        export_to_huggingface(save(tmp_path / "c", plain), tmp_path / "hf", assets=assets)
    assert _config(tmp_path / "hf") == {"dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}}
    assert "says how weights are quantized" in caplog.text
    codes = {"model.w": torch.ones(4, 4).to(torch.float8_e4m3fn), "model.w_scale_inv": torch.ones(1, 1)}
    export_to_huggingface(save(tmp_path / "q", codes), tmp_path / "hf8", assets=assets)
    assert _config(tmp_path / "hf8")["quantization_config"] == {"quant_method": "fp8"}


def test_a_config_without_a_cast_has_the_dtype_of_the_weights(tmp_path: Path) -> None:
    """A bfloat16 model whose assets say float32 becomes a folder that says bfloat16; one that says so is copied."""
    assets = _assets(tmp_path / "assets", {"dtype": "float32"})
    source = save(tmp_path / "c", {"model.w": torch.ones(4, dtype=torch.bfloat16)})
    export_to_huggingface(source, tmp_path / "hf", assets=assets)
    assert _config(tmp_path / "hf") == {"dtype": "bfloat16"}
    (assets / "config.json").write_text('{"dtype":   "bfloat16"}')
    export_to_huggingface(source, tmp_path / "hf", assets=assets, overwrite=True)
    assert (tmp_path / "hf" / "config.json").read_text() == '{"dtype":   "bfloat16"}'


@table("name", {EMBEDDING: (EMBEDDING, {}), HEAD: (HEAD, {}), "text": (EMBEDDING, {"text": 1})})
def test_another_vocabulary_is_refused(name: str, tmp_path: Path) -> None:
    """An embedding or output layer of other rows than vocab_size is an error that names both; nothing is written."""
    key = HEAD if name == HEAD else EMBEDDING
    config: dict[str, Any] = {"vocab_size": 8}
    assets = _assets(tmp_path / "assets", {"text_config": config} if name == "text" else config)
    source = save(tmp_path / "c", {key: torch.ones(10, 4)})
    with pytest.raises(CheckpointingException, match=rf"vocab_size 8, and '{key}' has 10 rows"):
        export_to_huggingface(source, tmp_path / "hf", assets=assets)
    assert not (tmp_path / "hf").exists()


def test_a_config_that_ties_needs_equal_tensors(tmp_path: Path) -> None:
    """Where config.json ties the output layer to an embedding with other values, an export says so, and what to do."""
    assets = _assets(tmp_path / "assets", {"tie_word_embeddings": True})
    equal = {EMBEDDING: torch.rand(3000, 8), "model.norm.weight": torch.ones(8)}
    equal[HEAD] = equal[EMBEDDING].clone()
    export_to_huggingface(save(tmp_path / "equal", equal), tmp_path / "hf", assets=assets)
    other = {**equal, HEAD: equal[HEAD].clone()}
    other[HEAD][-1, -1] += 1
    source = save(tmp_path / "other", other)
    with pytest.raises(CheckpointingException, match=r"other values in 'lm_head\.weight' than in 'model\.embed_tokens"):
        export_to_huggingface(source, tmp_path / "hf2", assets=assets)
    assert not (tmp_path / "hf2").exists()
    export_to_huggingface(source, tmp_path / "hf2", assets=assets, leave_out=[HEAD])
    assert read(tmp_path / "hf2").keys() == equal.keys() - {HEAD}


#: Files of folders that loaders prefer to an export's, or add to it; and others.
STRAY = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "consolidated.00.pth",
    "consolidated.safetensors",
    "consolidated.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "model.safetensors.index.json",
    "tf_model.h5",
)


def test_an_overwrite_leaves_nothing_that_a_loader_would_take(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Adapters and other tools' weights go, and are named; the config stays; with assets the tokenizer goes, too."""
    source = save(tmp_path / "c", {"model.w": torch.ones(4)})
    others = {".gitattributes", "original", "notes.md", "train.py", "step.pt", "model.gguf"}
    target = _assets(tmp_path / "hf", {"old": 1}, *STRAY, "tokenizer.json", *others - {"original"})
    (target / "original").mkdir()
    with caplog.at_level(logging.WARNING, "shardckpt"):
        export_to_huggingface(source, target, overwrite=True)
    names = {path.name for path in target.iterdir()}
    assert names == {"model.safetensors", "config.json", "tokenizer.json", *others}
    assert "adapter_config.json" in caplog.text
    assets = _assets(tmp_path / "assets", {"new": 1}, "tokenizer.model")
    export_to_huggingface(source, target, overwrite=True, assets=assets)
    names = {path.name for path in target.iterdir()}
    assert names == {"model.safetensors", "config.json", "tokenizer.model", *others}
    assert "tokenizer.json" in caplog.text


@table("place", ["directory", "store"])
def test_a_checkpoint_is_not_replaced(place: str, tmp_path: Path) -> None:
    """An export over a checkpoint, whose files are safetensors, too, is refused, and the checkpoint is as it was."""
    source = save(tmp_path / "c", {"model.w": torch.ones(4)})
    target = str(tmp_path / "other") if place == "directory" else "memory://a_checkpoint_is_not_replaced/other"
    dc.save(sharded_state({"w": torch.full((4,), 7.0)}), target, "safetensors")
    for assets in (None, _assets(tmp_path / "assets", {})):
        with pytest.raises(CheckpointingException, match=r"is a checkpoint \(metadata\.json is there\)"):
            export_to_huggingface(source, target, overwrite=True, assets=assets)
    assert dc.load_plain_tensors(target)["w"].tolist() == [7.0] * 4


def test_any_exports_over_a_folder_leave_what_a_new_one_has(tmp_path: Path) -> None:
    """After any sequence of exports with assets a folder has the bytes of an export to a new one."""
    choice = random.Random(3)
    sources = [
        save(tmp_path / f"c{count}", {f"model.{n}.w": torch.full((64,), float(n)) for n in range(count)})
        for count in (1, 5, 9)
    ]
    assets = [_assets(tmp_path / f"assets{n}", {"n": n}, f"tokenizer{n}.json") for n in range(2)]
    target = tmp_path / "hf"
    for number in range(12):
        options: dict[str, Any] = {
            "max_shard_size": choice.choice([300, "5GB"]),
            "format": choice.choice(["safetensors", "bin"]),
            "assets": choice.choice(assets),
        }
        source = choice.choice(sources)
        export_to_huggingface(source, target, overwrite=True, **options)
        export_to_huggingface(source, tmp_path / f"new{number}", **options)
        found, expected = (
            {path.name: path.read_bytes() for path in folder.iterdir()}
            for folder in (target, tmp_path / f"new{number}")
        )
        assert found == expected


def _snapshot(cache: Path, blobs: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A snapshot of huggingface_hub's cache whose files are links into the repository's blobs, and on to others."""
    repository = cache / "models--a--b"
    export_to_huggingface(save(cache / "c", tensors), cache / "real", max_shard_size=64)
    snapshot = repository / "snapshots" / "abc" / "sub"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted((cache / "real").iterdir())):
        shared = blobs / f"{number:02x}" / f"{number:064x}"
        shared.parent.mkdir(parents=True)
        path.rename(shared)
        (repository / "blobs" / f"{number:040x}").symlink_to(shared)
        (snapshot / path.name).symlink_to(f"../../../blobs/{number:040x}")
    return snapshot


def test_the_cache_may_store_the_files_of_all_repositories_once(tmp_path: Path) -> None:
    """Of huggingface_hub 1.32, links lead to a repository's blob and on to the cache's; a folder in a snapshot, too."""
    tensors = {f"{n}.w": torch.full((16,), float(n)) for n in range(3)}
    snapshot = _snapshot(tmp_path / "cache", tmp_path / "cache" / "blobs", tensors)
    wanted = {name: ShardedTensor.from_global_shape(name, torch.float32, (16,)) for name in tensors}
    found = load_from_huggingface(wanted, snapshot)
    assert all(found[name].equal(tensor) for name, tensor in tensors.items())
    elsewhere = _snapshot(tmp_path / "other", tmp_path / "elsewhere", tensors)
    with pytest.raises(CheckpointingException, match="symbolic link"):
        load_from_huggingface(wanted, elsewhere)
