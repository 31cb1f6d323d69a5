"""``shardckpt inspect``."""

from __future__ import annotations

import argparse
import json
import re
from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.cli import inspect as inspect_
from shardckpt.cli import main
from shardckpt.dist_checkpointing import StrategyAction
from shardckpt.huggingface import export_to_huggingface
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.plugins import get_plugin_manager
from tests import names as names_
from tests.backends import Backend, both
from tests.cli.checkpoints import copy_golden, damage, save_plain_dcp
from tests.cli.inspect import make_varied
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


def test_inspect_lists_what_is_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys with dtype, shape and bytes, objects and common state; a prefix lists a part."""
    state = {
        "w": ShardedTensor.from_rank_offsets("model.w", torch.ones(2, 3)),
        "o": ShardedObject("rng", 1, (1,), (0,)),
        "iteration": 3,
    }
    dc.save(state, tmp_path / "c")
    assert main(["inspect", str(tmp_path / "c")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["model.w", "float32", "2x3", "24"] in rows
    assert ["rng/shard_0_1", "object"] in rows
    assert ["iteration", "common"] in rows
    assert main(["inspect", str(tmp_path / "c"), "model."]) == 0
    assert "rng" not in capsys.readouterr().out


@both
def test_inspect_says_who_wrote_what(backend: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Writer, ranks, step, sizes by dtype, modules with sums, files; the same as JSON."""
    sizes = {"model.layers.10.w": 30, "model.layers.2.w": 10, "model.layers.2.b": 2, "head": 5}
    tensors = {key: torch.ones(size, dtype=torch.int8 if key == "head" else None) for key, size in sizes.items()}
    state = {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()}
    dc.save(state, tmp_path / "c", step=7)
    assert main(["inspect", str(tmp_path / "c"), "--sort", "size"]) == 0
    title, writer, *_ = lines = capsys.readouterr().out.splitlines()
    assert f"{backend.name!r}, version 1" in title
    assert title.endswith(", step 7")
    assert "written by shardckpt " in writer
    assert " on 1 rank, " in writer
    assert [line.split()[0] for line in lines[4:8]] == [
        "model.layers.10.w",
        "model.layers.2.w",
        "model.layers.2.b",
        "head",
    ]
    assert lines[8] == "4 tensors of 173 bytes, 47 parameters, 0 objects; bytes by dtype: float32 168, int8 5"
    assert main(["inspect", str(tmp_path / "c"), "--tree"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[4:-1]]
    layers = [["model", "3", "168"], ["layers", "3", "168"], ["2", "2", "48"], ["10", "1", "120"]]
    assert rows == [["(all)", "4", "173"], *layers]
    assert main(["inspect", str(tmp_path / "c"), "--tree", "--depth", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 7
    assert main(["inspect", str(tmp_path / "c"), "--files"]) == 0
    names = {line.split()[0] for line in capsys.readouterr().out.splitlines()[4:-1]}
    assert names == {path.name for path in (tmp_path / "c").iterdir()} - {names_.MARKER, names_.RECORD}
    assert main(["inspect", str(tmp_path / "c"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["backend"], said["step"], said["ranks"]) == (backend.name, 7, 1)
    assert said["bytes_on_disk"] == sum(path.stat().st_size for path in (tmp_path / "c").iterdir())
    assert said["tensors"][0] == {"key": "head", "dtype": "int8", "shape": [5], "nbytes": 5}


def test_inspect_shows_a_region(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Statistics of the finite values, counts of others, and the values; of a large region its first corner."""
    values = torch.arange(4 * 6 * 50.0).reshape(4, 6, 50)
    values[1, 2, 3], values[1, 2, 4] = float("nan"), float("inf")
    dc.save({"w": ShardedTensor.from_rank_offsets("w", values)}, tmp_path / "c")
    assert main(["inspect", str(tmp_path / "c"), "w[1, 2, 2:6]"]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = torch.tensor([402.0, 405.0], dtype=torch.float64)
    assert lines == [
        "w: float32, shape 4x6x50, 4 elements read",
        f"min 402, max 405, mean 403.5, norm {row.norm().item():.9g}",
        "NaN 1, Inf 1 (left out above)",
        "values:",
        "tensor([402., nan, inf, 405.])".replace("402., ", "402.,  ")
        .replace("nan, ", "nan,  ")
        .replace("inf, ", "inf, "),
    ]
    assert main(["inspect", str(tmp_path / "c"), "w[..., 2:]", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["count"], said["nans"], said["infs"], said["first"]) == (4 * 6 * 48, 1, 1, True)
    assert main(["inspect", str(tmp_path / "c"), "w[:, 0, 0]", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["values"] == [0.0, 300.0, 600.0, 900.0]
    for wrong, text in {"w[a]": "'a' is no index", "v[0]": "(keys: w)", "w[9]": "outside an axis of 4"}.items():
        assert main(["inspect", str(tmp_path / "c"), wrong]) == 2
        assert text in capsys.readouterr().err


@table("index", ["100:", "..., 50:", "1:1"])
def test_an_index_that_selects_nothing_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], index: str
) -> None:
    """A slice beyond the end of a tensor is an error with its shape, as an integer is; an empty tensor is none."""
    shards = {"w": torch.ones(4, 6, 50), "empty": torch.ones(0, 3)}
    dc.save({key: ShardedTensor.from_rank_offsets(key, value) for key, value in shards.items()}, tmp_path / "c")
    assert main(["inspect", str(tmp_path / "c"), f"w[{index}]"]) == 2
    assert "'w' has the shape 4x6x50, and the index selects no element" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "c"), "empty[]"]) == 0


def test_long_listings_are_paged_on_a_terminal_only(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What does not fit on the terminal goes to the pager; what fits, or goes to a file, is printed."""
    paged: list[str] = []
    monkeypatch.setattr("pydoc.pager", paged.append)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("LINES", "3")
    assert main(["inspect", str(checkpoint)]) == 0
    printed = capsys.readouterr().out
    assert not paged
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["inspect", str(checkpoint)]) == 0
    assert paged == [printed]
    monkeypatch.setenv("LINES", "30")
    assert main(["inspect", str(checkpoint)]) == 0
    assert capsys.readouterr().out == printed
    assert len(paged) == 1


@pytest.mark.parametrize("how", ["missing", "cut to a half"])
@pytest.mark.parametrize("version", ["ours", "0.16.1", "0.20.0", "dcp"])
def test_inspect_works_where_a_data_file_is_missing(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str], version: str, how: str
) -> None:
    """Everything is listed, and the file is named with the keys that are in it, by all of them or by a prefix."""
    made = {"ours": lambda: checkpoint, "dcp": lambda: save_plain_dcp(tmp_path)}
    path = made.get(version, lambda: copy_golden(version, tmp_path))()
    key = {"ours": "w", "dcp": "a"}.get(version, "decoder.final_layernorm.weight")
    assert main(["inspect", str(path)]) == 0
    before = capsys.readouterr().out
    assert "damaged" not in before
    damage(path / "__0_0.distcp", how)
    assert main(["inspect", str(path)]) == 1
    out = capsys.readouterr().out
    has_common = version in ("ours", "0.16.1") or how != "missing"
    rows = [line.split() for line in before.splitlines()[4:]]
    assert [row for row in rows if has_common or row[-1] != "common"] == [
        line.split() for line in out.splitlines()[4 : 4 + len(rows)] if not line.startswith(("the common", "damaged"))
    ]
    assert ("the common state cannot be read: " in out) != has_common
    (said,) = [line for line in out.splitlines() if line.startswith("damaged: __0_0.distcp ")]
    assert ("is missing" if how == "missing" else "bytes, ") in said
    assert main(["inspect", str(path), "--json"]) == 1
    incomplete = json.loads(capsys.readouterr().out)["incomplete_files"]
    (keys,) = [file["keys"] for file in incomplete if file["name"] == "__0_0.distcp"]
    assert how != "missing" or key in keys
    assert keys[0] in said
    assert main(["inspect", str(path), keys[0]]) == 1
    out = capsys.readouterr().out
    assert f"cannot be read completely: {keys[0]}" in out


@table(("written", "to"), [("safetensors", "torch_dist"), ("torch_dist", "safetensors"), ("ep", "dcp"), ("ep", "hf")])
def test_inspect_names_what_a_cut_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], written: str, to: str
) -> None:
    """Of a cut file of any format it names the keys that a rescue leaves out, and counts those before the cut."""
    source, cut = tmp_path / "source", tmp_path / "cut"
    keys = [f"w{number}" for number in range(6)]
    dc.save({key: ShardedTensor.from_rank_offsets(key, torch.rand(100, 100)) for key in keys}, source, written)
    assert main(["convert", str(source), str(cut), "--to", to]) == 0
    file = max(cut.iterdir(), key=lambda path: path.stat().st_size)
    damage(file, "cut to a half")
    assert main(["convert", str(cut), str(tmp_path / "rescued"), "--to", to, "--skip-damaged"]) == 1
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "rescued"), "--json"]) == 0
    kept = {tensor["key"] for tensor in json.loads(capsys.readouterr().out)["tensors"]}
    assert 0 < len(kept) < len(keys)
    assert main(["inspect", str(cut), "--json"]) == 1
    (incomplete,) = json.loads(capsys.readouterr().out)["incomplete_files"]
    assert {*incomplete["keys"]} == {*keys} - kept
    assert {*incomplete["kept"]} == kept
    assert main(["inspect", str(cut)]) == 1
    assert f"; {len(kept)} others before its end" in capsys.readouterr().out


def test_a_damaged_header_of_a_hub_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a Hub folder with a file whose header is damaged, the tensors of the others are listed, and it is a fault."""
    source, folder = tmp_path / "source", tmp_path / "folder"
    keys = [f"w{number}" for number in range(6)]
    dc.save({key: ShardedTensor.from_rank_offsets(key, torch.ones(100, 100)) for key in keys}, source)
    export_to_huggingface(source, folder, max_shard_size="80KB")
    file = folder / "model-00002-of-00003.safetensors"
    content = bytearray(file.read_bytes())
    content[9] ^= 0xFF
    file.write_bytes(content)
    capsys.readouterr()
    assert main(["inspect", str(folder), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    (incomplete,) = answer["incomplete_files"]
    assert (incomplete["name"], incomplete["keys"], incomplete["kept"]) == (file.name, ["w2", "w3"], [])
    assert "cannot be read: " in incomplete["fault"]


def test_inspect_counts_what_it_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a cut file it counts the tensors and objects of the listing, not what is stored for readers of DCP beside."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    dc.save(to_sharded_state_dict(model, optimizer), tmp_path / "step", "torch_dist")
    (tmp_path / "step" / "__0_0.distcp").write_bytes(b"P")
    assert main(["inspect", str(tmp_path / "step")]) == 1
    said = capsys.readouterr().out
    listed = re.search(r"(\d+) tensors of .* bytes, .* parameters, (\d+) objects?", said)
    affected = re.search(r"(\d+) keys? cannot be read completely", said)
    assert listed
    assert affected
    assert int(affected[1]) == int(listed[1]) + int(listed[2])


def test_inspect_works_where_the_common_state_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tensors are listed, and the file is named."""
    path = copy_golden("0.16.1", tmp_path)
    (path / "common.pt").unlink()
    assert main(["inspect", str(path)]) == 1
    out = capsys.readouterr().out
    assert "decoder.final_layernorm.weight" in out
    assert f"the common state cannot be read: {path / 'common.pt'} is missing" in out
    assert "damaged: common.pt is missing" in out


@both
def test_inspect_works_where_metadata_json_is_lost(
    backend: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1, with the whole listing by shardckpt.json, and how to write the lost file again; a region is shown, too."""
    path = tmp_path / backend.name
    dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(7)), "step": 3}, path, step=9)
    assert main(["inspect", str(path)]) == 0
    listing = capsys.readouterr().out.rstrip().splitlines()
    (path / "metadata.json").unlink()
    assert main(["inspect", str(path)]) == 1
    *shown, said = capsys.readouterr().out.splitlines()
    assert [line for line in shown if "bytes on disk" not in line] == [
        line for line in listing if "bytes on disk" not in line
    ]
    assert said.startswith("damaged: metadata.json is missing: ")
    assert f"`shardckpt verify {path} --repair`" in said
    assert main(["inspect", str(path), "w[:2]"]) == 1
    assert "min 1, max 1" in capsys.readouterr().out
    damage(path / "shardckpt.json", "cut to a half")
    assert main(["inspect", str(path)]) == 2
    assert "metadata.json was lost" in capsys.readouterr().err


def test_a_prefix_that_nothing_begins_with(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """2, with the prefix and the keys that there are, by every verb that takes one; nothing is made or changed."""
    verbs = (["inspect"], ["remove"], ["remove", "--dry-run"])
    for verb, *options in verbs:
        assert main([verb, str(checkpoint), "x", *options]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert "a key that begins with 'x' (keys: w)" in shown.err
    assert main(["export", str(checkpoint), str(checkpoint.parent / "hf"), "--prefix", "x"]) == 2
    assert "no tensor to export has a key that begins with 'x' (keys: w)" in capsys.readouterr().err
    assert not (checkpoint.parent / "hf").exists()


@table("how", [[], ["--json"], ["--files"], ["--tree"], ["--sort", "size"], ["m."], ["rng"], ["x"]])
@table("name", ["torch_dist", "safetensors"])
def test_the_outline_is_what_the_strategy_lists(
    name: str, how: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What inspect says without torch is what it says with it, and so is the exit code."""
    make_varied(tmp_path / "c", name)
    found = []
    for outline in (True, False):
        if not outline:
            monkeypatch.setattr(inspect_, "_read_outline", lambda _: None)
        else:
            options = argparse.Namespace(directory=str(tmp_path / "c"), prefix="", files=False, sort="key")
            assert inspect_._read_outline(options) is not None
        code = main(["inspect", str(tmp_path / "c"), *how])
        found.append((code, *capsys.readouterr()))
    assert found[0] == found[1]


@table(
    ("name", "file"),
    [
        *(("safetensors", file) for file in ("index.safetensors", "common.safetensors", "rank_0_0.safetensors")),
        *(("torch_dist", file) for file in ("shardckpt-index.safetensors", "common.pt", "__0_0.distcp")),
        ("safetensors", "shardckpt.json"),
    ],
)
@table("fault", ["flipped", "cut", "missing"])
def test_a_damaged_checkpoint_has_no_outline(tmp_path: Path, name: str, file: str, fault: str) -> None:
    """A file that is damaged is left to the strategy, which says what is wrong; values of tensors are not looked at."""
    make_varied(tmp_path / "c", name)
    path, options = tmp_path / "c" / file, argparse.Namespace(directory=str(tmp_path / "c"), prefix="", files=False)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if fault == "missing":
        path.unlink()
    else:
        path.write_bytes(data if fault == "flipped" else data[:-1])
    options.sort = "key"
    is_seen = file not in ("rank_0_0.safetensors", "__0_0.distcp") or fault != "flipped"
    assert (inspect_._read_outline(options) is None) == is_seen


def test_own_outlines_are_those_that_plugins_register() -> None:
    """The table of functions that inspect asks without a look at plugins has what the plugins say."""
    entries = get_plugin_manager().registry.entries(StrategyAction.LOAD_SHARDED)
    own = {(entry.backend, entry.version): entry.outline for entry in entries if entry.outline.startswith("shardckpt")}
    assert own == inspect_.OUTLINES


def test_values_of_the_common_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of it, a part by its path with or without ``common.``, as JSON; a tensor's key says that [] has values."""
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2)), "args": {"lr": 0.5, "names": ["a", "b"]}, "n": 1}
    dc.save(state, tmp_path / "c")
    for path, said in (
        ("common", "common: common state, dict\n{'args': {'lr': 0.5, 'names': ['a', 'b']}, 'n': 1}\n"),
        ("common.args.lr", "args.lr: common state, float\n0.5\n"),
        ("args.names.1", "args.names.1: common state, str\n'b'\n"),
    ):
        assert main(["inspect", str(tmp_path / "c"), path]) == 0
        assert capsys.readouterr().out == said
    assert main(["inspect", str(tmp_path / "c"), "args", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"common": "args", "value": state["args"]}
    assert main(["inspect", str(tmp_path / "c"), "w"]) == 0
    assert "its values: w[], a region: w[0:4, ...]" in capsys.readouterr().out
    for typo in ("argz", "common.argz", "common.args.name"):
        assert main(["inspect", str(tmp_path / "c"), typo]) == 2
        assert "did you mean " in capsys.readouterr().err


def test_the_common_state_of_a_file_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a nested file, as Lightning's, the nesting is not shown beside the values; by its name, and in JSON, it is."""
    path = str(tmp_path / "last.ckpt")
    torch.save({"state_dict": {"w": torch.ones(2)}, "epoch": 3, "hyper_parameters": {"lr": 0.1}}, path)
    assert main(["inspect", path, "common"]) == 0
    said = capsys.readouterr().out
    assert said.count("hyper_parameters") == 1
    assert "not shown: how it and the tensors are nested (common.content_metadata has it" in said
    assert main(["inspect", path, "common.content_metadata"]) == 0
    said = capsys.readouterr().out
    assert "state_dict.w" in said
    assert "not shown" not in said
    assert main(["inspect", path, "common", "--json"]) == 0
    assert "state_dict.w" in capsys.readouterr().out


@table("fault", ["gone", "cut"])
def test_inspect_lists_what_is_left_of_a_hub_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    """Of a folder that has lost a file, or the end of one, the other tensors; the index names those that are gone."""
    source, folder = tmp_path / "source", tmp_path / "folder"
    keys = [f"w{number}" for number in range(6)]
    dc.save({key: ShardedTensor.from_rank_offsets(key, torch.ones(100, 100)) for key in keys}, source)
    export_to_huggingface(source, folder, max_shard_size="80KB")
    file = folder / "model-00002-of-00003.safetensors"
    if fault == "gone":
        file.unlink()
    else:
        damage(file, "cut by a byte")
    capsys.readouterr()
    assert main(["inspect", str(folder), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    lost = ["w2", "w3"] if fault == "gone" else ["w3"]
    assert [each["key"] for each in answer["tensors"]] == [key for key in keys if key not in lost]
    assert [(each["name"], each["keys"]) for each in answer["incomplete_files"]] == [(file.name, lost)]
    assert main(["inspect", str(folder)]) == 1
    many = "2 keys" if fault == "gone" else "1 key"
    assert f"{many} cannot be read completely: {', '.join(lost)}" in capsys.readouterr().out
