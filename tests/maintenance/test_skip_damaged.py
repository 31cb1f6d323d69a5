"""What is left of a damaged checkpoint is written, and what is not is named."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from shardckpt import dist_checkpointing as dc
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.cli import main
from shardckpt.engine import display
from shardckpt.manifest import Rescue
from shardckpt.manifest.names import CONTENT_KEY
from shardckpt.mapping import ShardedTensor
from tests.damage import flip
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

KEYS = tuple(f"model.{letter}" for letter in "abcd")


def _values() -> dict[str, torch.Tensor]:
    return {key: torch.full((64, 64), float(number + 1)) for number, key in enumerate(KEYS)}


def _save(path: Path, backend: str) -> None:
    dc.save({key: ShardedTensor.from_rank_offsets(key, value) for key, value in _values().items()}, path, backend)


def _flip_value(path: Path, value: float) -> None:
    """Change a byte amid the values of a tensor, of whichever file of a checkpoint has them."""
    raw = torch.full((64,), value).numpy().tobytes()
    (file,) = [file for file in path.rglob("*") if file.is_file() and raw in file.read_bytes()]
    flip(file, file.read_bytes().index(raw) + 32)


def test_damage_of_objects_for_other_libraries_costs_no_tensor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What stock DCP alone looks for is left out, and said; tensors, groups and common state are as they were."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    dc.save(to_sharded_state_dict(model, optimizer), tmp_path / "a")
    stored = dcp.FileSystemReader(tmp_path / "a").read_metadata().storage_data
    (place,) = [place for key, place in stored.items() if key.fqn == "optimizer.param_groups.0.maximize"]
    flip(tmp_path / "a" / place.relative_path, place.offset + place.length // 2)
    call = ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--skip-damaged"]
    assert main(call) == 1
    assert "damaged, and left out: 34 names: optimizer.param_groups.0." in capsys.readouterr().out
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    dc.load(to_sharded_state_dict(model, optimizer), tmp_path / "b")


@table("verb, backend", [("convert", "torch_dist"), ("export", "torch_dist"), ("merge", "safetensors")])
def test_a_damaged_record_costs_its_tensor_alone(
    tmp_path: Path, verb: str, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --skip-damaged one flipped bit costs one tensor: the rest is written, it is named, and the code is 1."""
    _save(tmp_path / "a", backend)
    _flip_value(tmp_path / "a", 2.0)
    sources = ["a", "a"] if verb == "merge" else ["a"]
    call = [verb, *(str(tmp_path / name) for name in (*sources, "hf")), *([] if verb == "export" else ["--to", "hf"])]
    assert main(call) == 2
    assert "--skip-damaged" in capsys.readouterr().err
    assert main([*call, "--skip-damaged", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    damaged = found["conversion"]["damaged"] if verb == "merge" else found["damaged"]
    assert damaged == ([f"{tmp_path / 'a'}: model.b"] * 2 if verb == "merge" else ["model.b"])
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert {name.removeprefix("model."): value[0, 0].item() for name, value in written.items()} == {
        "a": 1.0,
        "c": 3.0,
        "d": 4.0,
    }


@table("backend, file", [("safetensors", "common.safetensors"), ("torch_dist", "common.pt")])
@table("to", ["safetensors", "torch_dist", "torch"])
def test_a_damaged_common_state_is_left_out(
    tmp_path: Path, backend: str, file: str, to: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --skip-damaged a common state that cannot be read costs no tensor: it is named, and the code is 1."""
    shards = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in _values().items()}
    dc.save({**shards, "step": 7}, tmp_path / "a", backend)
    flip(tmp_path / "a" / file)
    call = ["convert", str(tmp_path / "a"), str(tmp_path / "new"), "--to", to]
    if backend != to:
        assert main(call) == 2
        assert f"the common state: bytes 0 to {(tmp_path / 'a' / file).stat().st_size}" in capsys.readouterr().err
    assert main([*call, "--skip-damaged", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["damaged"] == ["common state"]
    assert found["tensors"] == len(KEYS)
    if to != "torch":
        assert main(["verify", str(tmp_path / "new")]) == 0
        assert "step" not in dc.load(shards, tmp_path / "new")
        assert dc.load_content_metadata(tmp_path / "new") == Rescue(1, ("common state",)).to_content()


@table("backend", ["torch_dist", "safetensors", "ep"])
@table("verb", ["convert", "export"])
def test_a_cut_file_costs_what_was_behind_the_cut(
    tmp_path: Path, verb: str, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tensors before it are written, their digests compared: one of them that is damaged, too, is left out."""
    keys = {f"model.{n}": torch.full((256, 1024), float(n + 1)) for n in range(4)}  # more than a digest is of
    dc.save({k: ShardedTensor.from_rank_offsets(k, v) for k, v in keys.items()}, tmp_path / "a", backend)
    _flip_value(tmp_path / "a", 2.0)
    data = max((file for file in (tmp_path / "a").rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    content = data.read_bytes()
    data.write_bytes(content[: content.index(torch.full((64,), 4.0).numpy().tobytes()) + 64])
    call = [verb, str(tmp_path / "a"), str(tmp_path / "hf"), *(["--to", "hf"] if verb == "convert" else [])]
    assert main([*call, "--skip-damaged", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["damaged"] == ["model.1", "model.3"]
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert sorted(value.mean().item() for value in written.values()) == [1.0, 3.0]


@table("verb", ["convert", "export", "merge"])
def test_the_search_for_damage_is_a_part_of_the_progress(
    tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes that it reads are shown before those that are written, and counted up to the last."""
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(display, "_make_bar", lambda _: nullcontext(lambda *counts: seen.append(counts)))
    _save(tmp_path / "a", "torch_dist")
    more = [str(tmp_path / "a")] * (verb == "merge") + [str(tmp_path / "new"), "--skip-damaged"]
    more += ["--to", "ep"] * (verb == "convert")
    assert main([verb, str(tmp_path / "a"), *more]) == 0
    nbytes = len(KEYS) * 64 * 64 * 4
    assert seen[0] == (0, nbytes)
    assert (nbytes, nbytes) in seen
    assert seen[-1][1] > nbytes


def test_a_missing_file_costs_what_was_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Hub folder without one of its files, and one with a cut file, give what they have."""
    values = _values()
    (tmp_path / "hf").mkdir()
    weight_map = {}
    for number, key in enumerate(KEYS):
        file = f"model-0000{number // 2 + 1}-of-00002.safetensors"
        weight_map[key] = file
    for file in set(weight_map.values()):
        save_file({key: values[key] for key in KEYS if weight_map[key] == file}, tmp_path / "hf" / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    call = ["convert", str(tmp_path / "hf"), str(tmp_path / "c"), "--to", "safetensors", "--overwrite"]
    second = tmp_path / "hf" / weight_map[KEYS[-1]]
    second.write_bytes(second.read_bytes()[:-100])
    for lost in ([KEYS[3]], [KEYS[2], KEYS[3]]):
        assert main(call) == 2
        assert "--skip-damaged" in capsys.readouterr().err
        assert main([*call, "--skip-damaged"]) == 1
        said = capsys.readouterr().out
        assert f"damaged, and left out: {len(lost)} " in said
        assert all(key in said for key in lost)
        assert sorted(dc.load_sharded_metadata(tmp_path / "c")) == [key for key in KEYS if key not in lost]
        second.unlink(missing_ok=True)


def test_a_sound_source_is_written_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--skip-damaged of a sound checkpoint is a conversion like any other: exit code 0, nothing named."""
    _save(tmp_path / "a", "torch_dist")
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "c"), "--to", "safetensors", "--skip-damaged"]) == 0
    assert "damaged" not in capsys.readouterr().out


def test_verbs_that_only_read_name_the_rescue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """diff, and inspect of values, have no --skip-damaged: their error says which verb writes the rest."""
    for name in ("a", "b"):
        _save(tmp_path / name, "torch_dist")
    _flip_value(tmp_path / "b", 2.0)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    for call, path in ((["diff", a, b], "PATH"), (["inspect", b, "--stats"], b)):
        assert main(call) == 2
        assert f"`shardckpt convert {path} NEW --skip-damaged` writes the rest of it" in capsys.readouterr().err


@table("to", ["ep", "hf", "dcp"])
def test_a_rescue_is_said_of_what_it_has_written(tmp_path: Path, to: str, capsys: pytest.CaptureFixture[str]) -> None:
    """ls, inspect and their JSON say which keys it lacks, also of what is converted from it; it has no metrics."""
    content = {CONTENT_KEY: {"metrics": {"loss": 0.1}}}
    shards = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in _values().items()}
    dc.save(shards, tmp_path / "a", content_metadata=content)
    _flip_value(tmp_path / "a", 2.0)
    rescued, again, back = (str(tmp_path / name) for name in ("rescued", "again", "back"))
    assert main(["convert", str(tmp_path / "a"), rescued, "--to", to, "--skip-damaged"]) == 1
    assert main(["convert", rescued, again, "--to", "ep" if to == "hf" else "hf"]) == 0
    assert main(["convert", again, back, "--to", "safetensors"]) == 0
    capsys.readouterr()
    for path in (rescued, again, back):
        for verb in ("ls", "inspect"):
            assert main([verb, path]) == 0
            said = capsys.readouterr().out
            assert "rescued: 1 key left out" in said
            assert main([verb, path, "--json"]) == 0
            found = json.loads(capsys.readouterr().out)
            found = found[0] if verb == "ls" else found
            assert (found["rescued"], found["metrics"]) == (1, {})
        assert f"rescued: 1 key left out as damaged: {'model.b'}" in said
        assert found["rescued_keys"] == ["model.b"]
    assert main(["ls", str(tmp_path / "a"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)[0]
    assert (found["rescued"], found["metrics"]) == (0, {"loss": 0.1})


def test_a_rescue_names_what_it_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Some keys that a rescue left out are printed, with --verbose all that are stored, which are bounded."""
    keys = [f"w{number:04}" for number in range(1100)]
    rescue = Rescue(1).add(keys)
    dc.save(
        {"w": ShardedTensor.from_rank_offsets("w", torch.ones(1))}, tmp_path / "a", content_metadata=rescue.to_content()
    )
    for more, last in (((), "w0019, ... and 980 more"), (("--verbose",), "w0999")):
        assert main(["inspect", str(tmp_path / "a"), *more]) == 0
        said = capsys.readouterr().out
        assert "rescued: 1,101 keys left out as damaged: w0000, " in said
        assert f", {last} (the names of 101 are not stored)" in said
