"""``verify`` of a Hugging Face folder: what an engine would trip over; and which checkpoint a folder says it has."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import shlex
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from shardckpt import __version__
from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.cli.exit_codes import FAILED
from shardckpt.huggingface import export_to_huggingface, save_state_dict
from shardckpt.huggingface.architecture import own_process
from shardckpt.maintenance import convert_checkpoint, merge_checkpoints, verify_checkpoint
from shardckpt.maintenance.verify import DAMAGED, INTACT, get_exit_code
from shardckpt.manager import list_checkpoints
from shardckpt.storage.fingerprint_file import combine_fingerprints
from tests.huggingface.samples import read, save, sharded_state
from tests.safetensors.contiguous.jobs import read_like_vllm
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WEIGHTS = {EMBEDDING: torch.ones(8, 4), HEAD: torch.full((8, 4), 2.0), "model.norm.weight": torch.ones(4)}


def _folder(path: Path, config: dict[str, Any] | None = None, size: str | int = "5GB") -> Path:
    export_to_huggingface(save(path.with_name("checkpoint"), WEIGHTS), path, max_shard_size=size)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


def _found(folder: Path) -> tuple[int, dict[str, str]]:
    results = verify_checkpoint(folder)
    return get_exit_code(results), {result.name: result.fault or result.note for result in results}


@table(
    ("config", "said"),
    [
        ({"vocab_size": 16}, "vocab_size 16, and 'lm_head.weight' has 8 rows"),
        ({"text_config": {"vocab_size": 16}}, "vocab_size 16, and 'lm_head.weight' has 8 rows"),
        ({"quantization_config": {"quant_method": "fp8"}}, "says how weights are quantized (quantization_config)"),
        ({"tie_word_embeddings": True}, "are one (tie_word_embeddings), and their values differ"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_config_of_another_model_is_damage(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    """Vocabulary, quantization and tied pairs that are not those of the weights: exit code 1, and the reason."""
    code, found = _found(_folder(tmp_path / "hf", config))
    assert code == DAMAGED
    assert said in found["config.json"]
    assert not found["model.safetensors"]


@table("text", ["{", "[]"])
def test_a_config_that_is_no_json_object_is_damage(tmp_path: Path, text: str) -> None:
    """No engine loads such a folder, whose weights are whole: exit code 1, and the reason at the file."""
    folder = _folder(tmp_path / "hf")
    (folder / "config.json").write_text(text)
    code, found = _found(folder)
    assert code == DAMAGED
    assert "config.json is damaged" in found["config.json"]
    assert not found["model.safetensors"]


@table(
    ("name", "text", "is_damage"),
    [
        ("generation_config.json", "{", True),
        ("tokenizer_config.json", "[]", True),
        ("tokenizer.json", "", True),
        ("trainer_state.json", '{"a": 1', True),
        ("modules.json", "[]", False),
        ("added_tokens.json", "{}", False),
    ],
)
def test_a_json_file_that_no_engine_reads_is_damage(tmp_path: Path, name: str, text: str, is_damage: bool) -> None:
    """A file that was cut, or is of another form than its readers want, is named; lists may be in files of others."""
    folder = _folder(tmp_path / "hf", {"vocab_size": 8, "dtype": "bfloat16"})
    (folder / name).write_text(text)
    code, found = _found(folder)
    assert code == (DAMAGED if is_damage else INTACT)
    assert (f"{name} is damaged" in found.get(name, "")) == is_damage
    assert "config says bfloat16, and the weights are float32" in found["config.json"]


def test_a_fault_of_the_config_hides_no_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else is known of the config and of other files stands beside its fault, which alone is red."""
    folder = _folder(tmp_path / "hf", {"vocab_size": 16, "dtype": "bfloat16"})
    save_state_dict({"stray": torch.zeros(2)}, folder / "extra.safetensors")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["verify", str(folder)]) == DAMAGED
    out = capsys.readouterr().out
    assert "has 8 rows" in out
    assert "config says bfloat16, and the weights are float32" in out
    (line,) = (line for line in out.splitlines() if "extra.safetensors" in line)
    assert "vLLM and SGLang load it, too" in line
    assert "\033" not in line
    (folder / "config.json").write_text("{")
    assert main(["verify", str(folder)]) == DAMAGED
    assert "vLLM and SGLang load it, too" in capsys.readouterr().out


def test_loggers_are_as_before_where_transformers_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken installation is said, and leaves no logger of other packages quiet."""
    folder = _folder(tmp_path / "hf", {"architectures": ["LlamaForCausalLM"]})
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    for name in ("transformers", "transformers.utils"):
        monkeypatch.setitem(sys.modules, name, None)
    level = logging.getLogger("torchao").level
    with own_process():
        assert "misses a package" in _found(folder)[1]["config.json"]
    assert logging.getLogger("torchao").level == level


def test_a_config_with_another_dtype_is_said(tmp_path: Path) -> None:
    """Engines cast the weights as the config says: no damage, but a note; so is that no class was asked."""
    code, found = _found(_folder(tmp_path / "hf", {"dtype": "bfloat16", "vocab_size": 8}))
    assert code == INTACT
    assert "config says bfloat16, and the weights are float32" in found["config.json"]
    assert "names and shapes were not compared: it names no class" in found["config.json"]
    assert _found(_folder(tmp_path / "other" / "hf")) == (INTACT, {"model.safetensors": ""})


def test_a_folder_of_several_files_that_has_lost_its_index_is_not_called_intact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each file alone is sound, and no one knows whether all are there: verify and ls say what is lost."""
    folder = _folder(tmp_path / "hf", size=100)
    (folder / "model.safetensors.index.json").unlink()
    said = "has lost model.safetensors.index.json"
    assert main(["verify", str(folder)]) == DAMAGED
    assert said in capsys.readouterr().out
    assert main(["ls", str(tmp_path)]) == DAMAGED
    assert said in capsys.readouterr().out


def test_the_index_of_a_folder_that_has_all_its_files_is_written_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the call that the error names; where the names of the files count one that is gone, no call is named."""
    monkeypatch.chdir(tmp_path)
    folder = _folder(tmp_path / "hf", size=100)
    (index := folder / "model.safetensors.index.json").rename(tmp_path / "index.json")
    assert main(["convert", str(folder), "new", "--to", "hf"]) == FAILED
    (call,) = re.findall("`(shardckpt convert .*)`", capsys.readouterr().err)
    assert main(shlex.split(call.replace("NEW", "new"))[1:]) == INTACT
    (tmp_path / "index.json").rename(index)
    assert main(["diff", str(folder), "new"]) == INTACT
    index.unlink()
    next(folder.glob("model-00001-*")).unlink()
    capsys.readouterr()
    assert main(["convert", str(folder), "other", "--to", "hf", "--skip-damaged"]) == FAILED
    said = capsys.readouterr().err
    assert "nothing says whether a file is missing" in said
    assert "skip-damaged" not in said


@table(
    ("size", "name", "is_loaded", "said"),
    [
        ("5GB", "extra.safetensors", True, "vLLM and SGLang load it, too; transformers does not"),
        (100, "extra.safetensors", False, "no engine loads it"),
        ("5GB", "consolidated.safetensors", True, "vLLM loads this, Mistral's layout"),
    ],
    ids=["alone", "beside an index", "Mistral's"],
)
def test_weights_beside_the_model_are_said(
    tmp_path: Path, size: str | int, name: str, is_loaded: bool, said: str
) -> None:
    """Files that engines load by their rules, or do not: what a loop over the files as vLLM's does finds, too."""
    folder = _folder(tmp_path / "hf", size=size)
    save_state_dict({"stray": torch.zeros(2)}, folder / name)
    code, found = _found(folder)
    assert code == INTACT
    assert said in found[name]
    assert ("stray" in read_like_vllm(folder)) == is_loaded


def test_an_adapter_in_the_folder_is_said(tmp_path: Path) -> None:
    """Transformers with peft would put it onto the weights."""
    folder = _folder(tmp_path / "hf")
    (folder / "adapter_config.json").write_text("{}")
    save_state_dict({"lora": torch.zeros(2)}, folder / "adapter_model.safetensors")
    assert "adds this adapter" in _found(folder)[1]["adapter_config.json"]


def test_two_models_in_one_folder_are_said(tmp_path: Path) -> None:
    """Where a single file and an index of others stand, transformers takes the one and other engines the other."""
    folder = _folder(tmp_path / "hf", size=100)
    save_state_dict({"stray": torch.zeros(2)}, folder / "model.safetensors")
    assert "transformers loads model.safetensors" in _found(folder)[1]["model.safetensors.index.json"]


def test_ls_says_which_step_a_folder_has(tmp_path: Path) -> None:
    """A step and the folder that was exported from it have one fingerprint in the listing."""
    dc.save(sharded_state(WEIGHTS), tmp_path / "step-7", fingerprints=True)
    for size, name in ((100, "index"), ("5GB", "one file")):
        export_to_huggingface(tmp_path / "step-7", tmp_path / name, max_shard_size=size)
    found = {each.name: each.fingerprint for each in list_checkpoints(tmp_path)}
    assert found["step-7"]
    assert set(found.values()) == {found["step-7"]}


def test_a_folder_that_an_export_has_written_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the index, or the header of the only file, ls and inspect name this library, for no other folder."""
    for size, name in ((100, "index"), ("5GB", "one")):
        _folder(tmp_path / name / "hf", size=size)
    folder = tmp_path / "theirs"
    folder.mkdir()
    save_file(WEIGHTS, folder / "model.safetensors", {"format": "pt"})
    found = {each.name: each.library for each in list_checkpoints(tmp_path, recursive=True)}
    ours = f"shardckpt {__version__}"
    assert (found["index/hf"], found["one/hf"], found["theirs"]) == (ours, ours, "Hugging Face")
    for path in (tmp_path / "index" / "hf", tmp_path / "one" / "hf" / "model.safetensors"):
        assert main(["inspect", str(path)]) == INTACT
        assert f"written by {ours}" in capsys.readouterr().out


def _origin(folder: Path) -> dict[str, str]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        metadata = json.loads(index.read_text())["metadata"]
    else:
        with safe_open(folder / "model.safetensors", "pt") as file:
            metadata = file.metadata()
    return {key: value for key, value in metadata.items() if key.startswith("shardckpt_")}


def test_the_report_has_the_file_and_keys_of_each_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """File, bytes and the keys in the checkpoint, of each tensor, in Python and in --json: renames are read from it."""
    tensors = {"model.a": torch.ones(8, 4), "model.b": torch.ones(2), "optimizer.state.a.exp_avg": torch.ones(8, 4)}
    source = save(tmp_path / "c", tensors)
    exported = export_to_huggingface(source, tmp_path / "hf", max_shard_size=100)
    one, two = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    assert exported.tensors == (("a", one, 128, ("model.a",)), ("b", two, 8, ("model.b",)))
    assert main(["export", str(source), str(tmp_path / "hf2"), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["tensors"][1:]
    assert told == {"name": "b", "file": "model.safetensors", "nbytes": 8, "keys": ["model.b"]}


@table("size", ["5GB", 100])
@pytest.mark.parametrize("door", ["export", "convert"])
def test_a_folder_says_which_checkpoint_it_has(tmp_path: Path, door: str, size: str | int) -> None:
    """The index, or the header of the only file, has the checkpoint's name and its fingerprint, as ls shows it."""
    source, folder = tmp_path / "step-7", tmp_path / "hf"
    dc.save(sharded_state(WEIGHTS), source, fingerprints=True)
    if door == "export":
        export_to_huggingface(source, folder, max_shard_size=size)
    else:
        convert_checkpoint(source, folder, "hf", max_shard_size=size)
    with dc.open_checkpoint(source) as checkpoint:
        fingerprint = combine_fingerprints(checkpoint.fingerprints)
    origin = _origin(folder)
    assert (origin["shardckpt_source"], origin["shardckpt_fingerprint"]) == ("step-7", fingerprint)
    assert read(folder).keys() == WEIGHTS.keys()


def test_a_merge_is_none_of_its_sources(tmp_path: Path) -> None:
    """An average has neither the name nor the fingerprint of a checkpoint."""
    for step in (1, 2):
        dc.save(sharded_state(WEIGHTS), tmp_path / f"step-{step}", fingerprints=True)
    merge_checkpoints([tmp_path / "step-1", tmp_path / "step-2"], tmp_path / "hf", to="hf")
    assert _origin(tmp_path / "hf").keys() == {"shardckpt_version"}


def test_files_that_no_one_has_opened_are_not_intact(tmp_path: Path) -> None:
    """Junk by a name that an engine takes is damage."""
    folder = _folder(tmp_path / "hf", size=100)
    (folder / "consolidated.00.safetensors").write_bytes(b"junk")
    assert _found(folder)[0] == DAMAGED


def test_a_folder_of_a_checkpoint_without_fingerprints_has_its_name(tmp_path: Path) -> None:
    """Nothing is made up for what no save has stored."""
    assert _origin(_folder(tmp_path / "hf")).keys() == {"shardckpt_version", "shardckpt_source"}
