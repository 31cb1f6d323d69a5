from __future__ import annotations

import hashlib
import json
import logging
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    KeyMismatchError,
    NotACheckpointError,
    ShardingError,
    StorageError,
    natural_order,
)
from shardckpt.huggingface import (
    Rule,
    RuleMapping,
    dcp_to_torch_state_dict,
    export_to_huggingface,
    huggingface_index,
    load_from_huggingface,
)
from shardckpt.huggingface.blocks import BLOCK_BYTES
from shardckpt.maintenance import convert_checkpoint, diff_checkpoints, merge_checkpoints
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt_safetensors import SafetensorsSaveShardedStrategy
from tests.damage import flip
from tests.huggingface.samples import global_tensors, read, same, save, sharded_state
from tests.states import error_of
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

SMALL = 150  # bytes of a file, of which the sample has several then


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample, saved by this process."""
    return save(tmp_path_factory.mktemp("export") / "c")


def test_every_kind_of_tensor_is_exported_bit_for_bit(checkpoint: Path, tmp_path: Path) -> None:
    """0-D, empty, ints, bools, 8-bit and packed floats, complex64: what safetensors reads is what was saved."""
    exported = export_to_huggingface(checkpoint, tmp_path / "hf")
    found, expected = read(tmp_path / "hf"), global_tensors()
    assert found.keys() == expected.keys() - {"packed"}
    assert all(same(found[name], expected[name]) for name in found)
    assert huggingface_index(tmp_path / "hf")["packed"] == (torch.float4_e2m1fn_x2, (4, 6))
    assert exported.total_size == sum(tensor.nbytes for tensor in expected.values())
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["model.safetensors"]
    data = (tmp_path / "hf" / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    assert header % 8 == 0
    assert len(data) == header + exported.total_size
    packed = json.loads(data[8:header])["packed"]
    assert (packed["dtype"], packed["shape"]) == ("F4", [4, 12])
    first, last = packed["data_offsets"]
    assert data[header + first : header + last] == bytes(range(24))


def test_several_files_have_an_index(checkpoint: Path, tmp_path: Path) -> None:
    """Each file keeps to the limit, a larger tensor has its own; the index names every tensor's file and the total."""
    exported = export_to_huggingface(checkpoint, tmp_path / "hf", max_shard_size=SMALL)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    expected = global_tensors()
    assert index["metadata"]["total_size"] == exported.total_size == sum(t.nbytes for t in expected.values())
    assert index["weight_map"].keys() == expected.keys()
    for name, count, nbytes in exported.files:
        members = [tensor for tensor, file in index["weight_map"].items() if file == name]
        assert len(members) == count
        assert sum(expected[member].nbytes for member in members) == nbytes
        assert nbytes <= SMALL or count == 1
    order = [name for name in index["weight_map"] if name.startswith("layers")]
    assert sorted(order, key=lambda name: index["weight_map"][name]) == ["layers.2.w", "layers.10.w"]
    found = read(tmp_path / "hf")
    assert all(same(found[name], expected[name]) for name in found)
    assert len(found) == len(expected) - 1


def test_a_cast_is_of_floats_and_not_of_scales(checkpoint: Path, tmp_path: Path) -> None:
    """Floats of 16 bits and more are cast as torch does; ints, bools, 8-bit floats and their scales stay."""
    export_to_huggingface(checkpoint, tmp_path / "hf", dtype={"*": "bfloat16", "layers.2.w": "bfloat16"})
    found, expected = read(tmp_path / "hf"), global_tensors()
    for name in ("layers.10.w", "layers.2.w", "half", "scale", "empty"):
        expected[name] = expected[name].bfloat16()
    assert all(same(found[name], expected[name]) for name in found)


def test_bin_files_hold_anything(tmp_path: Path) -> None:
    """What safetensors has no dtype for is refused by name, and goes into .bin files, with their own index."""
    expected = {**global_tensors(), "z": torch.tensor([1 + 2j], dtype=torch.complex128)}
    save(tmp_path / "c", expected)
    with pytest.raises(CheckpointingException, match=r"'z' \(torch.complex128\)"):
        export_to_huggingface(tmp_path / "c", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    export_to_huggingface(tmp_path / "c", tmp_path / "hf", format="bin", max_shard_size=SMALL)
    index = json.loads((tmp_path / "hf" / "pytorch_model.bin.index.json").read_text())
    for name, file in index["weight_map"].items():
        assert same(torch.load(tmp_path / "hf" / file, weights_only=True)[name], expected[name])
    assert index["weight_map"].keys() == expected.keys()
    export_to_huggingface(tmp_path / "c", tmp_path / "one", format="bin")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["pytorch_model.bin"]


def test_tensors_across_blocks_are_complete(tmp_path: Path) -> None:
    """Tensors larger than a block of memory, in rows and columns, and what lies behind them, are bit for bit right."""
    rows = BLOCK_BYTES // 4 // 1000 + 700
    state: dict[str, Any] = {
        "a": torch.arange(rows * 1001).reshape(rows, 1001).to(torch.int32),
        "b": torch.arange(5, dtype=torch.int64),
        "c": torch.arange(3 * rows).reshape(3, rows, 1).to(torch.float32),
    }
    cut = [state["a"][:, :333], state["a"][:, 333:]]
    parts = [
        ShardedTensor("a", part, part.dtype, tuple(part.shape), (rows, 1001), (0, start), None)
        for part, start in zip(cut, (0, 333), strict=True)
    ]
    dc.save({**sharded_state({"b": state["b"], "c": state["c"]}), "a": parts}, tmp_path / "c")
    export_to_huggingface(tmp_path / "c", tmp_path / "hf")
    found = read(tmp_path / "hf")
    assert all(same(found[name], state[name]) for name in state)


def _with_experts() -> dict[str, torch.Tensor]:
    experts = torch.arange(5 * 4 * 6.0).reshape(5, 4, 6)
    return {**global_tensors(), "model.layers.1.mlp.experts.gate_up_proj": experts}


def _save_and_export(path: Path) -> tuple[Any, int]:
    save(path / "c", _with_experts())
    exported = export_to_huggingface(path / "c", path / "hf", max_shard_size=SMALL, mapping="qwen3_moe")
    return exported, (dist.get_rank() if dist.is_initialized() else 0)


def test_the_bytes_do_not_depend_on_the_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """1, 2, 3 and 4 ranks, each with its own cuts, and one process without a group, write the same files.

    Experts are cut by rows, by columns and among the ranks.
    """
    _save_and_export(tmp_path)
    expected = _digests(tmp_path / "hf")
    assert len(huggingface_index(tmp_path / "hf")) == len(global_tensors()) + 10
    for world in (1, 2, 3, 4):
        path = tmp_path / str(world)
        path.mkdir()
        results = ranks.run(world, _save_and_export, path)
        assert len({repr(exported) for exported, _ in results}) == 1
        assert _digests(path / "hf") == expected
        assert sorted(entry.name for entry in path.iterdir()) == ["c", "hf"]


def _export(path: Path, *, same_target: bool = True) -> None:
    export_to_huggingface(path / "c", path / f"hf{0 if same_target else dist.get_rank()}", max_shard_size=1)


def test_a_failure_on_one_rank_is_everyones_and_leaves_nothing(ranks: Ranks, tmp_path: Path) -> None:
    """Damaged bytes that one rank reads are the same error on all; neither folder nor staging is left."""
    save(tmp_path / "c", {f"w{n}": torch.full((5000,), float(n)) for n in range(6)})
    flip(tmp_path / "c" / "__0_0.distcp")
    errors = ranks.run(3, error_of, _export, tmp_path)
    assert len(set(errors)) == 1
    kind, text = errors[0]
    assert kind == "CorruptCheckpointError"
    assert re.search(r"^rank \d.*\bw\d: .*digest differs", text)
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_ranks_must_mean_the_same_target(ranks: Ranks, tmp_path: Path) -> None:
    """Different targets are an error that names both, not a folder at one of them."""
    save(tmp_path / "c")
    for _, text in ranks.run(2, partial(error_of, same_target=False), _export, tmp_path):
        assert "ranks disagree on target" in text
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def _export_renamed(path: Path) -> None:
    there, back = {"a": "b", "b": "a"}, {"a": "a2", "b": "b2"}
    export_to_huggingface(path / "c", path / "hf", rename=back if dist.get_rank() else there)


def test_ranks_must_rename_alike(ranks: Ranks, tmp_path: Path) -> None:
    """Other names on another rank are an error that says so: by them it would write another tensor's values."""
    save(tmp_path / "c", {"a": torch.zeros(4), "b": torch.ones(4)})
    for _, text in ranks.run(2, error_of, _export_renamed, tmp_path):
        assert "ranks disagree on rename" in text
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def _export_in_two_formats(path: Path) -> None:
    export_to_huggingface(path / "c", path / "hf", format=("safetensors", "bin")[dist.get_rank()], max_shard_size=1)


def test_ranks_must_write_one_format(ranks: Ranks, tmp_path: Path) -> None:
    """Another format on another rank is an error that says so: it would write pickles under names of safetensors."""
    save(tmp_path / "c")
    for _, text in ranks.run(2, error_of, _export_in_two_formats, tmp_path):
        assert "ranks disagree on format" in text
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def test_an_overwrite_replaces_weights_and_keeps_the_rest(checkpoint: Path, tmp_path: Path) -> None:
    """A folder that holds anything is refused; with overwrite=True its weights of any format go, its config stays."""
    target = _made(tmp_path / "hf")
    for name in (
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
    ):
        (target / name).write_text('{"old": 1}')
    with pytest.raises(StorageError, match=r"pass overwrite=True .* to replace"):
        export_to_huggingface(checkpoint, target)
    assert len(list(target.iterdir())) == 4
    export_to_huggingface(checkpoint, target, overwrite=True)
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]
    assert (target / "config.json").read_text() == '{"old": 1}'
    assert [entry.name for entry in tmp_path.iterdir()] == ["hf"]


def test_assets_are_the_files_that_are_no_weights(checkpoint: Path, tmp_path: Path) -> None:
    """Config and tokenizer come along; weights, hidden files and directories do not."""
    assets = _made(tmp_path / "assets")
    for name in ("config.json", "tokenizer.model", "model.safetensors", "tf_model.h5", ".gitattributes"):
        (assets / name).write_text("{}")
    _made(assets / "original")
    export_to_huggingface(checkpoint, tmp_path / "hf", assets=assets)
    assert sorted(p.name for p in (tmp_path / "hf").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.model",
    ]
    assert (tmp_path / "hf" / "config.json").read_text() == "{}"
    with pytest.raises(StorageError, match="there is no such folder"):
        export_to_huggingface(checkpoint, tmp_path / "hf2", assets=tmp_path / "nowhere")
    with pytest.raises(StorageError, match=r"config\.json: that is a file: give the folder, or a list of files"):
        export_to_huggingface(checkpoint, tmp_path / "hf2", assets=assets / "config.json")


def test_a_folder_without_a_config_is_warned_of_once(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """from_pretrained needs config.json: one warning names --assets, and none comes where it is, or in the folder."""
    export_to_huggingface(checkpoint, tmp_path / "hf")
    assert (caplog.text.count("from_pretrained"), caplog.text.count("--assets")) == (1, 1)
    (tmp_path / "hf" / "config.json").write_text("{}")
    export_to_huggingface(checkpoint, tmp_path / "hf", overwrite=True)
    export_to_huggingface(checkpoint, tmp_path / "other", assets=tmp_path / "hf")
    assert caplog.text.count("from_pretrained") == 1


def test_a_cast_is_said_in_the_config(checkpoint: Path, tmp_path: Path) -> None:
    """config.json names the dtype that the weights were cast to, in parts of the model too; the rest of it stays."""
    assets, hf = _made(tmp_path / "assets"), tmp_path / "hf"
    parts = {"text_config": {"torch_dtype": "float32", "a": 1}, "vision_config": {"dtype": None}}
    quantization = {"quantization_config": {"dtype": "float8"}}
    (assets / "config.json").write_text(json.dumps({"model_type": "é", "dtype": "float32", **parts, **quantization}))
    export_to_huggingface(checkpoint, hf, assets=assets, dtype="bfloat16")
    parts["text_config"]["torch_dtype"] = "bfloat16"
    found = json.loads((hf / "config.json").read_text())
    assert found == {"model_type": "é", "dtype": "bfloat16", **parts, **quantization}
    export_to_huggingface(checkpoint, hf, dtype=torch.float16, overwrite=True)
    assert json.loads((hf / "config.json").read_text())["dtype"] == "float16"
    (assets / "config.json").write_text('{"model_type": "x"}')
    export_to_huggingface(checkpoint, hf, assets=assets, overwrite=True)
    assert (hf / "config.json").read_text() == '{"model_type": "x"}'
    export_to_huggingface(checkpoint, hf, assets=assets, dtype="float64", overwrite=True)
    assert json.loads((hf / "config.json").read_text()) == {"model_type": "x", "dtype": "float64"}
    (assets / "config.json").write_text("[]")
    with pytest.raises(CorruptCheckpointError, match=r"config\.json is damaged"):
        export_to_huggingface(checkpoint, hf, assets=assets, dtype="bfloat16", overwrite=True)


def test_the_model_is_found_among_its_optimizers_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of what holds model.* and optimizer.* the model is exported, without its prefix, unless another prefix is given.

    Objects have no place in a folder: a warning names them.
    """
    keys = ("model.model.w", "model.lm_head.w", "optimizer.state.model.w.exp_avg")
    state = sharded_state({key: torch.full((2,), float(n)) for n, key in enumerate(keys)})
    dc.save({**state, "o": ShardedObject("model.rng", 1, (1,), (0,))}, tmp_path / "c")
    with caplog.at_level(logging.WARNING, "shardckpt"):
        export_to_huggingface(tmp_path / "c", tmp_path / "hf")
    assert read(tmp_path / "hf").keys() == {"model.w", "lm_head.w"}
    assert "model.rng/shard_0_1" in caplog.text
    export_to_huggingface(tmp_path / "c", tmp_path / "moments", prefix="optimizer.state.model.")
    assert read(tmp_path / "moments").keys() == {"w.exp_avg"}
    with pytest.raises(KeyMismatchError, match=r"begins with 'nets\.' \(did you mean model\.\? keys"):
        export_to_huggingface(tmp_path / "c", tmp_path / "x", prefix="nets.")


def test_tied_weights_can_be_left_out(checkpoint: Path, tmp_path: Path) -> None:
    """A tensor that the model ties to another is not written when its name says so; a wrong name is an error."""
    export_to_huggingface(checkpoint, tmp_path / "hf", leave_out=["half"])
    assert read(tmp_path / "hf").keys() == global_tensors().keys() - {"packed", "half"}
    with pytest.raises(CheckpointingException, match="'whole'"):
        export_to_huggingface(checkpoint, tmp_path / "hf2", leave_out=["whole"])


def test_a_mapping_cuts_transposes_and_joins(tmp_path: Path) -> None:
    """Experts become matrices of their own, transposed where the folder has them so, halves too, from any cut."""
    whole = torch.arange(3 * 8 * 5.0).reshape(3, 8, 5)
    parts = [
        ShardedTensor("e.w", part, part.dtype, tuple(part.shape), (3, 8, 5), (0, 0, start), None)
        for part, start in ((whole[..., :2], 0), (whole[..., 2:], 2))
    ]
    dc.save({"e": parts, "c": ShardedTensor.from_rank_offsets("x.cache", torch.ones(2))}, tmp_path / "c")
    mapping = RuleMapping([Rule("e.w", ("{expert}.gate", "{expert}.up"), transposed=True), Rule("{any}.cache", ())])
    export_to_huggingface(tmp_path / "c", tmp_path / "hf", mapping=mapping)
    found = read(tmp_path / "hf")
    assert len(found) == 6
    for expert in range(3):
        assert torch.equal(found[f"{expert}.gate"], whole[expert, :4].t())
        assert torch.equal(found[f"{expert}.up"], whole[expert, 4:].t())


def test_a_mapping_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Two tensors under one name, and holes, are errors that name the tensors."""
    save(tmp_path / "c", {"a": torch.ones(2), "b": torch.ones(2)})
    with pytest.raises(ShardingError, match=r"'x' of shape .* is stored twice, by 'a', 'b'"):
        export_to_huggingface(tmp_path / "c", tmp_path / "hf", mapping=RuleMapping([Rule("{any}", ("x",))]))
    save(tmp_path / "d", {"a": torch.ones(2), "b": torch.ones(3)})
    with pytest.raises(ShardingError, match="'x' is of several shapes and dtypes"):
        export_to_huggingface(tmp_path / "d", tmp_path / "hf", mapping=RuleMapping([Rule("{any}", ("x",))]))
    assert not (tmp_path / "hf").exists()


def test_wrong_arguments_are_named(checkpoint: Path, tmp_path: Path) -> None:
    """What cannot be done is said before anything is written."""
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"format": "gguf"}, CheckpointingException, "format='gguf'"),
        ({"dtype": "int8"}, CheckpointingException, "dtype='int8'"),
        ({"max_shard_size": "much"}, CheckpointingException, "max_shard_size='much'"),
        ({"mapping": "gpt9"}, CheckpointingException, "'gpt9'"),
    ]
    for arguments, kind, text in wrong:
        with pytest.raises(kind, match=text):
            export_to_huggingface(checkpoint, tmp_path / "hf", **arguments)
    with pytest.raises(NotACheckpointError):
        export_to_huggingface(tmp_path / "nowhere", tmp_path / "hf")
    assert not list(tmp_path.iterdir())


def test_a_number_of_thousands_of_digits_is_a_name_like_any_other(tmp_path: Path) -> None:
    """Names are ordered by their numbers, of any length: Python turns none of more than 4,300 digits into an int."""
    names = [f"w.{number}" for number in ("2", "10", "010", "9" * 5000)]
    assert sorted(names, key=natural_order) == [names[0], names[2], names[1], names[3]]
    source = tmp_path / "a.safetensors"
    safetensors.torch.save_file({name: torch.ones(1) for name in names}, source)
    convert_checkpoint(source, tmp_path / "hf", "hf")
    assert huggingface_index(tmp_path / "hf").keys() == set(names)


def test_assets_are_neither_weights_nor_files_of_a_checkpoint(tmp_path: Path) -> None:
    """Weights in a list are refused: the export's own would be replaced. A step with assets gives those alone."""
    (tmp_path / "config.json").write_text("{}")
    safetensors.torch.save_file({"w": torch.zeros(4)}, tmp_path / "model.safetensors")
    save(tmp_path / "step", {"w": torch.ones(4)}, SafetensorsSaveShardedStrategy(layout="contiguous", assets=tmp_path))
    files = [tmp_path / "config.json", tmp_path / "model.safetensors"]
    with pytest.raises(CheckpointingException, match=r"assets: model\.safetensors cannot be copied: it is weights"):
        export_to_huggingface(tmp_path / "step", tmp_path / "hf", assets=files)  # type: ignore[arg-type]
    export_to_huggingface(tmp_path / "step", tmp_path / "hf", assets=tmp_path / "step")
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {"config.json", "model.safetensors"}
    assert huggingface_index(tmp_path / "hf").keys() == {"w"}


def test_no_assets_are_those_of_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty text, of a variable that is not set, is an error: all files there would be copied."""
    save(tmp_path / "step")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("not for the Hub")
    with pytest.raises(CheckpointingException, match="assets='': the path is empty: give a directory"):
        export_to_huggingface(tmp_path / "step", tmp_path / "hf", assets="")
    assert not (tmp_path / "hf").exists()


def test_data_files_and_weights_in_capitals_are_no_assets(tmp_path: Path) -> None:
    """A step of (torch_dist, 1) as the folder of assets gives none of its data, nor are other weights copied."""
    save(tmp_path / "step", {"w": torch.ones(4)}, ("torch_dist", 1))
    for name in ("config.json", "WEIGHTS.PT"):
        (tmp_path / "step" / name).write_text("{}")
    export_to_huggingface(tmp_path / "step", tmp_path / "hf", assets=tmp_path / "step")
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {"config.json", "model.safetensors"}


def test_an_asset_that_is_a_link_to_nothing_is_not_left_out(tmp_path: Path) -> None:
    """It is an error, as of a cache that has lost a file; so are values that are no paths."""
    save(tmp_path / "step")
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "config.json").write_text("{}")
    (tmp_path / "assets" / "tokenizer.json").symlink_to("nothing")
    with pytest.raises(StorageError, match=r"tokenizer\.json is a link to a missing file"):
        export_to_huggingface(tmp_path / "step", tmp_path / "hf", assets=tmp_path / "assets")
    for assets in (True, b"assets", [None], [1]):
        with pytest.raises(CheckpointingException, match=r"assets: .* where a folder or a list of files is expected"):
            export_to_huggingface(tmp_path / "step", tmp_path / "hf", assets=assets)  # type: ignore[arg-type]


@table("prefix", [("model.",), ["model."], True])
def test_a_prefix_is_one_text(tmp_path: Path, prefix: Any) -> None:
    """``str.startswith`` takes a tuple, whose length is no text's: names would lose as many letters as it has items."""
    save(tmp_path / "step")
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))}
    for call in (
        lambda: export_to_huggingface(tmp_path / "step", tmp_path / "new", prefix=prefix),
        lambda: load_from_huggingface(state, tmp_path / "step", prefix=prefix),
        lambda: dcp_to_torch_state_dict(tmp_path / "step", prefix=prefix),
        lambda: convert_checkpoint(tmp_path / "step", tmp_path / "new", "safetensors", prefix=prefix),
        lambda: diff_checkpoints(tmp_path / "step", tmp_path / "step", prefix=prefix),
        lambda: dc.remove_sharded_tensors(tmp_path / "step", prefix),
    ):
        with pytest.raises(CheckpointingException, match=r"prefix=.*: expected one text"):
            call()
    assert not (tmp_path / "new").exists()


@table(("prefix", "left"), [("model", "'.w'"), ("model.w", "''")])
def test_a_prefix_without_its_dot_leaves_no_name(tmp_path: Path, prefix: str, left: str) -> None:
    """No loader asks for a name that begins with a dot, or is empty: the error has the prefix that was meant."""
    save(tmp_path / "step", {"model.w": torch.ones(4)})
    for call in (
        lambda: export_to_huggingface(tmp_path / "step", tmp_path / "new", prefix=prefix),
        lambda: dcp_to_torch_state_dict(tmp_path / "step", prefix=prefix),
        lambda: convert_checkpoint(tmp_path / "step", tmp_path / "new", "safetensors", prefix=prefix),
        lambda: diff_checkpoints(tmp_path / "step", tmp_path / "step", prefix=prefix),
    ):
        with pytest.raises(KeyMismatchError, match=f"prefix='{prefix}' would leave {left} of 'model.w': give"):
            call()
    assert not (tmp_path / "new").exists()


@table("rename", ["optim", ["ab"], [("optim", "optimizer")], {"optim": None}, True])
def test_renames_are_a_dict_of_texts(tmp_path: Path, rename: Any) -> None:
    """A list of pairs, a text, and a name that is no text are errors, by every function that renames."""
    save(tmp_path / "step")
    for call in (
        lambda: export_to_huggingface(tmp_path / "step", tmp_path / "new", rename=rename),
        lambda: convert_checkpoint(tmp_path / "step", tmp_path / "new", "safetensors", rename=rename),
        lambda: diff_checkpoints(tmp_path / "step", tmp_path / "step", rename=rename),
        lambda: merge_checkpoints([tmp_path / "step"] * 2, tmp_path / "new", rename=[rename, None]),
    ):
        with pytest.raises(CheckpointingException, match=r"rename=.*: give a dict from old names to new"):
            call()
    assert not (tmp_path / "new").exists()


def test_an_export_s_memory_budget_that_is_too_small_is_refused(tmp_path: Path) -> None:
    """The error says the smallest that works; all bytes of a file of torch.save count."""
    dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(8 << 20))}, tmp_path / "step")
    with pytest.raises(CheckpointingException, match="takes at least 32MiB"):
        export_to_huggingface(tmp_path / "step", tmp_path / "hf", memory_budget="31MiB")
    with pytest.raises(CheckpointingException, match="takes at least 64MiB"):
        export_to_huggingface(tmp_path / "step", "memory://small/hf", memory_budget="63MiB")
    with pytest.raises(CheckpointingException, match="takes at least 40MiB"):
        export_to_huggingface(tmp_path / "step", tmp_path / "hf", format="bin", memory_budget="32MiB")
    assert not (tmp_path / "hf").exists()
    export_to_huggingface(tmp_path / "step", tmp_path / "bin", format="bin", memory_budget="40MiB")
    export_to_huggingface(tmp_path / "step", tmp_path / "hf", memory_budget="32MiB")
    assert (tmp_path / "hf" / "model.safetensors").exists()
