from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

import shardckpt
from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.mapping import PlainObject, ShardedObject, ShardedTensor
from tests.damage import flip
from tests.manager import folders
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


def test_convert_prints_the_proof(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`convert` prints one line, with -v also one a tensor with both fingerprints, or all of it as JSON."""
    values = {"w": torch.arange(6.0), "step": 3}
    torch.save(values, tmp_path / "a.pt")
    mark = shardckpt.fingerprint({"w": values["w"]})["w"]
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "c"), "--to", "safetensors@1"]) == 0
    (summary,) = capsys.readouterr().out.splitlines()
    assert (
        main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "c"), "--to", "safetensors@1", "-v", "--overwrite"])
        == 0
    )
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == summary
    assert said[2].split() == ["w", "float32", "[6]", mark, mark]
    assert said[-1].endswith(
        "safetensors version 1, written from torch_save version 1: 1 tensor of 24 bytes, 0 objects; read again, all "
        "fingerprints are equal"
    )
    arguments = ["convert", str(tmp_path / "c"), str(tmp_path / "hf"), "--to", "hf", "--dtype", "bfloat16", "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    (tensor,) = found["proof"]
    assert (tensor["dtype"], tensor["written_dtype"], found["left_out"]) == (
        "float32",
        "bfloat16",
        ["step", "content_metadata"],
    )
    assert tensor["before"] == tensor["after"] == shardckpt.fingerprint({"w": values["w"].bfloat16()})["w"]  # type: ignore[attr-defined]


def test_two_dtypes_for_one_pattern_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither of two --dtype for one pattern wins in silence; one that is given twice, by any name, is no error."""
    torch.save({"w": torch.arange(6.0)}, tmp_path / "a.pt")
    call = ["convert", str(tmp_path / "a.pt"), str(tmp_path / "c"), "--dtype", "bfloat16", "--dtype", "bf16"]
    assert main([*call, "--dtype", "w=float64", "--dtype", "w=float16"]) == 2
    assert "--dtype: 'w' cannot become both 'float64' and 'float16'" in capsys.readouterr().err
    assert main([*call, "--dtype", "float16"]) == 2
    assert "--dtype: '*' cannot become both 'bfloat16' and 'float16'" in capsys.readouterr().err
    assert main(call) == 0


def test_what_is_not_written_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A Hub folder lacks the optimizer: the answer counts it with a few names, and no warning repeats them."""
    tensors = {f"{name}.{n}": torch.ones(2) for name in ("model", "optimizer.state") for n in range(9)}
    shards = {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()}
    dc.save(shards, tmp_path / "c", "safetensors")
    assert main(["convert", str(tmp_path / "c"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    out = capsys.readouterr().out
    assert (out.count("optimizer.state."), caplog.text.count("optimizer")) == (4, 0)
    assert "optimizer.state.3, ... and 5 more" in out


def test_objects_are_counted_as_inspect_counts_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Copies for other libraries, which are stored as objects, are none of the checkpoint's."""
    tensor = ShardedTensor.from_rank_offsets("w", torch.ones(3))
    state = {"w": tensor, "rng": ShardedObject("rng", 1, (1,), (0,)), "lr": PlainObject("groups.0.lr", 0.5)}
    dc.save(state, tmp_path / "c", "torch_dist")
    for call in ("merge {0} {0} {0}-new", "convert {0} {0}-ep --to ep"):
        assert main(call.format(tmp_path / "c").split()) == 0
        assert "1 tensor of 12 bytes, 1 object;" in capsys.readouterr().out


@table("verb", ["convert", "merge"])
def test_what_only_other_libraries_look_for_does_not_read_as_lost(
    tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values that DST lacks are named; copies for other libraries, such as a learning rate's, are counted apart."""
    tensor = ShardedTensor.from_rank_offsets("w", torch.ones(3))
    dc.save({"w": tensor, "step": 3, "lr": PlainObject("groups.0.lr", 0.5)}, tmp_path / "c", "torch_dist")
    sources = [str(tmp_path / "c")] * (1 + (verb == "merge"))
    assert main([verb, *sources, str(tmp_path / "new"), "--to", "safetensors"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not written: ")]
    assert said == ["not written: 1 object for readers of other libraries alone"]
    assert main([verb, *sources, str(tmp_path / "hf"), "--to", "hf"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not written: ")]
    assert said == ["not written: step", "not written: 1 object for readers of other libraries alone"]


@table("verb", ["convert", "merge"])
def test_a_name_that_is_left_out_stands_for_what_is_below_it(
    tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--leave-out optimizer`` leaves no tensor of the optimizer behind, and none of another name out."""
    state = {"optimizer": {"state": {0: {"step": torch.ones(())}}, "lr": 0.1}, "optimizers": torch.ones(2), "step": 3}
    torch.save(state, tmp_path / "old.pt")
    sources = [str(tmp_path / "old.pt")] * (1 + (verb == "merge"))
    new = str(tmp_path / "new")
    assert main([verb, *sources, new, "--to", "torch_dist", "--leave-out", "optimizer"]) == 0
    with dc.open_checkpoint(new) as found:
        assert list(found) == ["optimizers"]
        assert set(found.common) - {"content_metadata"} == {"step"}
    assert main([verb, *sources, f"{new}-2", "--to", "torch_dist", "--leave-out", "optim"]) == 2
    assert "'optim'" in capsys.readouterr().err


def test_a_folder_of_the_hub_keeps_its_other_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Its configuration and tokenizer come along, and are named; no link to elsewhere, and nothing for other names."""
    (tmp_path / "secret").write_text("secret")
    hub = tmp_path / "hub"
    hub.mkdir()
    save_file({"model.w": torch.ones(2)}, hub / "model.safetensors")
    (hub / "config.json").write_text('{"model_type": "llama"}')
    (hub / "tokenizer.json").write_text("{}")
    (hub / "vocab.txt").symlink_to(tmp_path / "secret")
    assert main(["convert", str(hub), str(tmp_path / "new"), "--to", "hf", "--dtype", "bfloat16"]) == 0
    assert f"copied: {hub}/config.json, {hub}/tokenizer.json" in capsys.readouterr().out
    assert json.loads((tmp_path / "new" / "config.json").read_text())["model_type"] == "llama"
    assert {path.name for path in (tmp_path / "new").iterdir()} == {
        *("config.json", "model.safetensors", "tokenizer.json")
    }
    assert "gets no config.json" not in caplog.text
    assert main(["convert", str(hub), str(tmp_path / "part"), "--to", "hf", "--prefix", "model."]) == 0
    assert "copied" not in capsys.readouterr().out
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text('{"model_type": "own"}')
    assert main(["convert", str(hub), str(tmp_path / "own"), "--to", "hf", "--overwrite"]) == 0
    assert json.loads((tmp_path / "own" / "config.json").read_text())["model_type"] == "own"
    store = f"local://{tmp_path}/store"
    (hub / "vocab.txt").unlink()
    assert main(["convert", str(hub), store, "--to", "hf"]) == 0
    assert main(["convert", store, str(tmp_path / "back"), "--to", "hf"]) == 0
    assert (tmp_path / "back" / "tokenizer.json").is_file()


def test_ls_names_the_classes_of_a_file_and_a_call_that_reads_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It cannot be read here, which is not to be no checkpoint; no argument of Python is asked of the command."""
    path = tmp_path / "bad.pt"
    torch.save({"w": torch.ones(2), "o": _Unknown()}, path)
    main(["ls", str(path)])
    said = capsys.readouterr().out
    assert f"cannot be read here: it names {_Unknown.__module__}._Unknown, and the command imports no classes" in said
    assert "allow_globals" not in said
    assert f"`shardckpt convert {path} NEW --leave-out NAME`" in said
    assert main(["convert", str(path), str(tmp_path / "new"), "--leave-out", "o"]) == 0


@table("verb", ["ls", "inspect", "convert"])
def test_a_whole_module_becomes_its_state_dict(tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    """The call that the advice has writes a file that is read; of a module in a dict it says what it says of others."""
    path, new = tmp_path / "whole.pt", tmp_path / "NEW.pt"
    torch.save(torch.nn.Sequential(torch.nn.Linear(2, 2)), path)
    target = [str(tmp_path / "new")] if verb == "convert" else []
    main([verb, str(path), *target])
    said = "".join(capsys.readouterr())
    call = f"torch.load('{path}', weights_only=False)"
    assert f"torch.save({call}.state_dict(), 'NEW.pt')" in said
    assert "--leave-out" not in said
    torch.save(torch.load(path, weights_only=False).state_dict(), new)
    assert main([verb, str(new), *target]) == 0
    torch.save({"w": torch.ones(2), "loss": torch.nn.MSELoss()}, path)
    main([verb, str(path), *target])
    assert "state_dict()" not in "".join(capsys.readouterr())


def test_a_damaged_checkpoint_of_the_same_format_is_rescued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """What lacks a file is said to be damaged, and what is whole is written; else the error names the ways."""
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    dc.save({name: ShardedTensor.from_rank_offsets(name, torch.ones(1 << 20)) for name in "abc"}, old)
    flip(tmp_path / "old" / "__0_0.distcp", 6 << 20)
    assert main(["convert", old, new]) == 2
    said = capsys.readouterr().err
    assert f"if `shardckpt verify {old}` finds it damaged, --skip-damaged" in said
    assert main(["convert", old, new, "--leave-out", "c"]) == 2
    said = capsys.readouterr().err
    assert "tensor 'b'" in said
    assert "--skip-damaged writes the rest" in said
    assert main(["convert", old, new, "--skip-damaged"]) == 1
    assert "damaged, and left out: 1 name: b" in capsys.readouterr().out
    (tmp_path / "new" / ".metadata").unlink()
    assert main(["convert", new, f"{new}er"]) == 0
    assert f"{new} is damaged: .metadata is missing: the items of other files are written anew" in caplog.text
    assert main(["verify", f"{new}er"]) == 0


def test_a_directory_with_the_name_of_a_file_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --to torch, what is called new.pt is a directory: the last line says so, and what writes a file."""
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "new.pt")]) == 0
    assert "new.pt is a directory, whatever its name: --to torch" in capsys.readouterr().out.splitlines()[-1]
    assert main(["convert", str(tmp_path / "new.pt"), str(tmp_path / "file.pt"), "--to", "torch"]) == 0
    assert "is a directory" not in capsys.readouterr().out


class _Unknown:
    """A class that no allow-list has."""


def test_a_refused_pickle_is_read_as_the_command_advises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No verb takes classes: the error has the whole call in Python, and this call does what the verb was to do."""
    source, target = tmp_path / "bad.pt", tmp_path / "new"
    torch.save({"w": torch.ones(2), "o": _Unknown()}, source)
    for call, expected in (
        (["convert", str(source), str(target), "--to", "ep"], f"convert_checkpoint('{source}', '{target}', 'ep', "),
        (["diff", str(source), str(source)], f"diff_checkpoints('{source}', '{source}', "),
        (["inspect", str(source)], f"convert_checkpoint('{source}', 'NEW', 'torch_dist', "),
    ):
        assert main(call) == 2
        lines = [line.strip() for line in capsys.readouterr().err.splitlines()]
        assert lines[-1] == f"{expected}allow_globals=[_Unknown])"
        if call[0] == "convert":
            exec("\n".join(lines[-3:]), {})
            assert main(["verify", str(target)]) == 0
            capsys.readouterr()


class _Attack:
    """What an attack puts into a checkpoint."""

    def __reduce__(self) -> Any:
        return os.system, ("touch never",)


@pytest.mark.parametrize("verb", ["inspect", "ls", "verify", "convert"])
def test_nobody_is_told_how_to_run_an_attack(tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a pickle that names os.system, no verb says what allows it, also where it names another class, too."""
    torch.save({"o": _Unknown(), "w": _Attack()}, tmp_path / "bad.pt")
    place = tmp_path if verb == "ls" else tmp_path / "bad.pt"
    main([verb, str(place), *([str(tmp_path / "new")] * (verb == "convert"))])
    said = "".join(capsys.readouterr())
    assert f"{os.name}.system; nothing was run. That runs commands" in said
    assert "allow_globals" not in said


def _make_config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An instance of a class of a trainer's, which nobody can import once the patch is undone."""
    kind = type("Config", (), {"__module__": "trainer"})
    monkeypatch.setitem(sys.modules, "trainer", SimpleNamespace(Config=kind))
    return kind()


class _Command:
    """What runs a function when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)

    def __init__(self, path: str) -> None:
        self.path = path


@table(
    "options",
    [
        ["--leave-out", "args"],
        ["--leave-out", "args", "--to", "safetensors"],
        ["--leave-out", "args", "--to", "torch"],
        ["--leave-out", "args", "--to", "dcp"],
        ["--prefix", "model."],
        ["--to", "hf"],
    ],
)
def test_tensors_are_rescued_from_beside_foreign_objects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    """Where what has a class that is not allowed is not written, no class is imported, and the tensors are."""
    with pytest.MonkeyPatch.context() as patch:
        torch.save({"model": {"w": torch.arange(3.0)}, "args": {"config": _make_config(patch)}}, tmp_path / "a.pt")
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "new"), *options]) == 0
    said = capsys.readouterr().out
    assert said.startswith("not written: args")
    assert "1 tensor of 12 bytes, 0 objects" in said


def test_what_would_be_written_of_a_foreign_class_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of another entry than the one left out; and what runs commands is refused, left out or not."""
    with pytest.MonkeyPatch.context() as patch:
        torch.save({"w": torch.ones(3), "args": 1, "more": _make_config(patch)}, tmp_path / "a.pt")
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "new")]) == 2
    assert "--leave-out NAME of each entry that has some" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "new"), "--leave-out", "args"]) == 2
    said = capsys.readouterr().err
    assert "the common state['more'] cannot be pickled" in said
    assert "leave it out (convert --leave-out)" in said
    torch.save({"w": torch.ones(3), "args": _Command(str(tmp_path / "made"))}, tmp_path / "b.pt")
    assert main(["convert", str(tmp_path / "b.pt"), str(tmp_path / "new"), "--leave-out", "args"]) == 2
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_file_is_not_written_to_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error says which way there is: a file on this machine, or a format that is streamed."""
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    assert main(["convert", str(tmp_path / "a.pt"), "memory://bucket/b.pt", "--to", "torch"]) == 2
    assert "memory://bucket/b.pt: a file of torch.save" in (said := capsys.readouterr().err)
    assert "convert to a path, and copy the file" in said


def test_a_file_has_no_place_for_step_and_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What convert --to torch leaves out of a manager's step is said once."""
    folders.save(tmp_path, 1, loss=0.5)
    assert main(["convert", str(tmp_path / "step-1"), str(tmp_path / "a.pt"), "--to", "torch"]) == 0
    said = "".join(capsys.readouterr())
    assert said.count("content_metadata has the step and the metrics") == 1
    assert "not written: content_metadata\n" in said


def test_a_changed_file_of_torch_save_loses_no_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a file of torch.save that is converted with other names, the nesting is named, no lack of the target's."""
    torch.save({"a": {"w": torch.ones(3)}}, tmp_path / "a.pt")
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "new"), "--rename", "a=b"]) == 0
    said = capsys.readouterr().out
    assert "content_metadata has the nesting of the state dict\n" in said


def test_a_bad_destination_is_no_damage_of_the_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error of a place that cannot be written to gives no advice about what is read."""
    folders.save(tmp_path, 1)
    (tmp_path / "file").touch()
    assert main(["convert", str(tmp_path / "step-1"), str(tmp_path / "file" / "new"), "--to", "safetensors"]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path}/file is not a directory" in said
    assert "--skip-damaged" not in said


def test_what_a_lost_file_of_several_had_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--skip-damaged of a model in several .bin files writes what is in the others, and names the rest."""
    folder, files = tmp_path / "hub", {key: f"pytorch_model-0000{n}-of-00002.bin" for n, key in ((1, "a"), (2, "b"))}
    folder.mkdir()
    torch.save({"a": torch.ones(3)}, folder / files["a"])
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    assert main(["convert", str(folder), str(tmp_path / "new")]) == 2
    assert main(["convert", str(folder), str(tmp_path / "new"), "--skip-damaged"]) == 1
    assert "damaged, and left out: 1 name: b\n" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "new"), "a"]) == 0
