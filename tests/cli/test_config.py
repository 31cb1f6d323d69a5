"""``shardckpt config``: the settings of a manager."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt import settings
from shardckpt.cli import main
from shardckpt.deepspeed.load import DeepSpeedLoadStrategy
from shardckpt.errors import CheckpointingException
from shardckpt.huggingface import HuggingFaceLoadStrategy, TorchFileLoadStrategy
from shardckpt.manager import CheckpointConfig, CheckpointManager, setting_checks
from shardckpt.plugins import get_plugin_manager
from shardckpt.plugins.resolver import FOREIGN_BACKENDS
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


def test_every_setting_is_listed_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each, in plain text, and the same as JSON."""
    assert main(["config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2 : lines.index("")]] == [*CheckpointConfig.model_fields]
    assert "interval                          500           Steps between two saves" in lines
    assert not any(sign in line for line in lines for sign in ("``", ":class:", ":func:"))
    assert main(["config", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found if "default" in each] == [*CheckpointConfig.model_fields]
    assert all(each["text"].strip() for each in found)


def test_settings_are_listed_without_docstrings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under ``python -OO``, which drops them, their defaults are shown."""
    monkeypatch.setattr("inspect.getdoc", lambda _: None)
    assert main(["config", "interval"]) == 0
    assert capsys.readouterr().out.startswith("interval = 500")


def test_a_setting_by_another_librarys_name(capsys: pytest.CaptureFixture[str]) -> None:
    """The whole text of ours is shown; a name that nobody knows is an error with the nearest."""
    assert main(["config", "max_to_keep"]) == 0
    assert capsys.readouterr().out.startswith("keep_latest_k = 10\n    How many of the newest checkpoints to keep")
    assert main(["config", "save_strategy"]) == 0
    assert re.findall(r"^(\w+) = ", capsys.readouterr().out, re.MULTILINE) == ["interval", "save_when"]
    assert main(["config", "save_steps", "interval"]) == 0
    assert capsys.readouterr().out.count("interval = 500") == 1
    assert main(["config", "intervl"]) == 2
    assert "there is no setting 'intervl' (did you mean interval? settings: " in capsys.readouterr().err
    assert main(["config", "timeout"]) == 2
    assert "init_process_group(timeout=" in capsys.readouterr().err
    assert main(["config", "max_to_kep"]) == 2
    assert "there is no setting 'max_to_kep' (did you mean max_to_keep? settings: accept, " in capsys.readouterr().err


def test_every_variable_is_listed_with_its_value(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in force, whether it is set or not; a wrong value and a misspelt name say so, and what was meant."""
    for name in (each for each in [*os.environ] if each.startswith("SHARDCKPT_")):
        monkeypatch.delenv(name)
    monkeypatch.setenv("SHARDCKPT_IO_THREADS", "3")
    monkeypatch.setenv("SHARDCKPT_REMOTE_PARTS", "many")
    monkeypatch.setenv("SHARDCKPT_REMOTE_THREDS", "8")
    assert main(["config", "--json"]) == 1
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out) if "value" in each}
    known = {value for name, value in vars(settings).items() if name.isupper() and name[0] != "_"}
    assert {*found} == {*known, "SHARDCKPT_REMOTE_THREDS"}
    assert [found[f"SHARDCKPT_{name}"]["value"] for name in ("IO_THREADS", "DIRECT_IO", "PLUGINS")] == ["3", "1", "-"]
    assert "'many': expected a whole number" in found["SHARDCKPT_REMOTE_PARTS"]["text"]
    assert found["SHARDCKPT_REMOTE_THREDS"]["text"] == "nothing reads it: did you mean SHARDCKPT_REMOTE_THREADS?"
    assert main(["config"]) == 1
    assert any(line.startswith("SHARDCKPT_IO_THREADS        3") for line in capsys.readouterr().out.splitlines())
    assert main(["config", "SHARDCKPT_IO_THREADS"]) == 0
    assert capsys.readouterr().out.startswith("SHARDCKPT_IO_THREADS = 3\n    Threads per rank")
    assert main(["config", "SHARDCKPT_REMOTE_PARTS"]) == 1
    assert "'many': expected a whole number" in capsys.readouterr().out
    assert main(["config", "SHARDCKPT_IO_TREADS"]) == 2
    assert "did you mean SHARDCKPT_IO_THREADS?" in capsys.readouterr().err


_WRONG = """[train.checkpoint]
folder = "runs"
intervall = 3
async_mode = "asyn"
keep_latest_k = -1
retention = [{policy = "KeepLates", count = 3}, {policy = "KeepLatest", cnt = 1}]
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="TOML takes Python 3.11")
def test_a_file_of_settings_is_checked_without_a_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each wrong setting is a line: the nearest right name, or what is expected; what is right is one line."""
    (tmp_path / "wrong.toml").write_text(_WRONG)
    assert main(["config", "--check", str(tmp_path / "wrong.toml"), "--section", "train.checkpoint"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("wrong.toml: 6 wrong settings of a CheckpointConfig")
    for words in (
        "keep_latest_k=-1: expected 0 or more",
        'in JSON {"policy": "KeepLatest", "count": 3}; did you mean KeepLatest?',
        "retention takes the place of keep_latest_k: give KeepLatest, KeepEvery, KeepBest instead",
        "retention: KeepLatest: count is missing; there is no setting 'cnt': did you mean count?",
        "async_mode='asyn': did you mean async? expected 'disabled', 'async' or 'async_with_pinned_mem'",
        "there is no setting 'intervall': did you mean interval?",
    ):
        assert any(line.endswith(words) for line in lines), words
    assert main(["config", "--check", str(tmp_path / "wrong.toml"), "--section", "train.checkpint"]) == 2
    assert "no section 'checkpint' (did you mean checkpoint?" in capsys.readouterr().err
    assert main(["config", "--check", str(tmp_path / "wrong.toml")]) == 2
    assert "are in the table 'train.checkpoint': --section train.checkpoint" in capsys.readouterr().err
    assert main(["config", "--check", str(tmp_path / "wrong.toml"), "--section", "train"]) == 2
    assert "are in the table 'checkpoint': --section train.checkpoint" in capsys.readouterr().err
    right = {"folder": "runs", "retention": [{"policy": "KeepLatest", "count": 3}], "strategy": "torch_dist"}
    (tmp_path / "right.json").write_text(json.dumps(right))
    assert main(["config", "--check", str(tmp_path / "right.json")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path / 'right.json'}: a CheckpointConfig, 3 settings: all right"
    ]


def test_names_and_contradictions_of_a_file_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A strategy or mapping that is not installed, all contradictions, and files that cannot be read."""
    for settings_, words in (
        ({"strategy": "torch_dst", "hf_mapping": "lama"}, ["did you mean torch_dist?", "did you mean llama?"]),
        (
            {"async_mode": "async", "keep_latest_k": 1, "keep_best_k": 2},
            ["keep_latest_k=1 with", "a best_metric: name one"],
        ),
        ([1], ["is no table of settings"]),
        (
            {
                "strategy": "safetensor",
                "hf_mapping": "lama",
                "keep_latest_k": -1,
                "async_mode": "async",
                "load_only": True,
                "create_seed_checkpoint": True,
            },
            ["did you mean safetensors?", "did you mean llama?", "keep_latest_k=-1", "load_only saves nothing"],
        ),
        ({"steps_in_hf": True}, ["does not store Hugging Face folders"]),
        (
            {"steps_in_hf": True, "accept": ["safetensors"], "strategy": "torch_dist"},
            ["steps_in_hf: ", "which accept does not allow"],
        ),
        (
            {"folder": "ftp2://user:secret@host/run", "best_metric": "eval_loss:min", "accept": ["a@b"]},
            [
                "folder: cannot open ftp2://user:***@host/run: no installed plugin serves ftp2://",
                "'eval_loss';",
                "'a@b'",
            ],
        ),
        (
            {"retention": [{"policy": "KeepBest", "metric": "acc:max"}], "initial_load_path": "x2://y/z"},
            ["name alone is 'acc'; whether less is better is best_mode='max'", "initial_load_path: cannot open x2://"],
        ),
        ({"strategy": 3, "best_metric": 1, "keep_best_k": 2}, ["strategy=3", "best_metric=1"]),
        (
            {"memory_budget": "1 gigabyte", "export_dtype": "int8", "interval": 0, "strategy": "torch_dist@9"},
            ["memory_budget='1 gigabyte'", "export_dtype='int8'", "interval=0", "strategy: "],
        ),
    ):
        (tmp_path / "a.json").write_text(json.dumps(settings_))
        assert main(["config", "--check", str(tmp_path / "a.json")]) == 2
        errors = capsys.readouterr().err
        assert f"a.json: {len(words)} wrong setting" in errors
        assert all(each in errors for each in words)
    for words in (["--section", "a"], ["interval", "--check", str(tmp_path / "a.json")]):
        assert main(["config", *words]) == 2
        assert "--check" in capsys.readouterr().err
    (tmp_path / "a.json").write_text("{")
    for name, word in (("a.json", "JSONDecodeError"), ("b.json", "FileNotFoundError"), ("a.ini", ".toml")):
        assert main(["config", "--check", str(tmp_path / name)]) == 2
        assert word in capsys.readouterr().err


def test_what_contradicts_is_told_with_what_is_wrong_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One round tells all: also of a policy that is wrong, and of assets that lack what is looked up in them."""
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "tokenizer.json").write_text("{}")
    given = {
        "retention": [{"policy": "KeepLates"}],
        "keep_latest_k": -3,
        "save_when": [{"policy": "SaveEvery", "interval": 5}],
        "interval": 7,
        "load_only": True,
        "create_seed_checkpoint": True,
        "hf_cut_vocabulary": True,
        "hf_mapping": "megatron",
        "hf_assets_path": str(tmp_path / "assets"),
    }
    (tmp_path / "a.json").write_text(json.dumps(given))
    assert main(["config", "--check", str(tmp_path / "a.json")]) == 2
    said = capsys.readouterr().err
    assert "a.json: 6 wrong settings" in said
    for words in (
        "did you mean KeepLatest?",
        "keep_latest_k=-3",
        "retention takes the place of keep_latest_k",
        "save_when takes the place of interval",
        "load_only saves nothing",
        "hf_assets_path: cut_vocabulary",
    ):
        assert words in said, words


def test_faults_are_records_of_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its setting, what was given without a password, the text, and the suggestion, null if there is none."""
    monkeypatch.setenv("SHARDCKPT_IO_TREADS", "3")
    given = {
        "intervall": 3,
        "max_to_keep": 5,
        "async_mode": "asyn",
        "interval": 0,
        "strategy": "safetensor",
        "keep_best_k": 2,
        "folder": "ftp2://user:secret@host/run",
    }
    (tmp_path / "a.json").write_text(json.dumps(given))
    assert main(["config", "--check", str(tmp_path / "a.json"), "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    found = {each.pop("setting"): each for each in error["faults"]}
    assert all(each["message"] in error["message"] for each in found.values())
    assert {name: (each["value"], each["suggestion"]) for name, each in found.items()} == {
        "intervall": (3, None),  # interval is given already
        "max_to_keep": (5, "keep_latest_k"),
        "async_mode": ("asyn", "async"),
        "interval": (0, None),
        "strategy": ("safetensor", "safetensors"),
        "keep_best_k": (2, None),
        "folder": ("ftp2://user:***@host/run", None),
        "SHARDCKPT_IO_TREADS": ("3", "SHARDCKPT_IO_THREADS"),
    }
    assert {name: each["file"] for name, each in found.items()} == {
        name: "" if name == "SHARDCKPT_IO_TREADS" else str(tmp_path / "a.json") for name in found
    }


def test_each_fault_of_several_files_says_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of one that cannot be read; a variable of this machine is a fault of none, and of right files the code 1."""
    pytest.importorskip("yaml")
    for name, text in {
        "cut.json": "{",
        "empty.yaml": "",
        "right.json": '{"interval": 3}',
        "noted.json": '{"enable_checkpoint": false}',
        "wrong.json": json.dumps(
            {"retention": [{"policy": "KeepLatest", "count": 2}], "keep_best_k": 2, "interval": 5, "intervall": 3}
        ),
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["config", "--check", "cut.json", "right.json", "empty.yaml", "wrong.json", "--json"]) == 2
    faults = json.loads(capsys.readouterr().out)["error"]["faults"]
    assert [(each["file"], each["setting"]) for each in faults] == [
        ("cut.json", ""),
        ("empty.yaml", ""),
        ("wrong.json", "intervall"),
        ("wrong.json", "retention"),
        ("wrong.json", "keep_best_k"),
    ]
    assert faults[0]["message"].startswith("cut.json cannot be read: JSONDecodeError")
    assert faults[1]["message"] == "empty.yaml is empty: expected settings by name, as 'interval: 500'"
    assert faults[2]["suggestion"] is None  # interval is given already
    assert faults[3]["value"] == [{"policy": "KeepLatest", "count": 2}]
    monkeypatch.setenv("SHARDCKPT_IO_TREADS", "3")
    assert main(["config", "--check", "wrong.json", "cut.json"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("wrong.json: 3 wrong settings of a CheckpointConfig")
    assert lines[4].strip().startswith("cut.json cannot be read")
    assert lines[5].strip() == "the environment: 1 wrong variable"
    assert main(["config", "--check", "right.json", "noted.json", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [each["file"] for each in found["files"]] == ["right.json", "noted.json"]
    assert [each["file"] for each in found["files"][1]["notes"]] == ["noted.json"]
    assert [each["setting"] for each in found["variables"]] == ["SHARDCKPT_IO_TREADS"]


def test_a_file_that_settings_name_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mapping's Python file is looked for, its code is not run, and the answer says so."""
    ran = tmp_path / "ran"
    (tmp_path / "rules.py").write_text(f"open({str(ran)!r}, 'w').close()\nMAPPING = {{'a': 'b'}}\n")
    (tmp_path / "a.json").write_text(json.dumps({"hf_mapping": f"{tmp_path}/rules.py:MAPPING"}))
    assert main(["config", "--check", str(tmp_path / "a.json")]) == 0
    assert not ran.exists()
    assert f"hf_mapping: {tmp_path}/rules.py is code, and was not run" in capsys.readouterr().out
    assert main(["config", "--check", str(tmp_path / "a.json"), "--json"]) == 0
    (note,) = json.loads(capsys.readouterr().out)["files"][0]["notes"]
    assert (note["setting"], note["value"]) == ("hf_mapping", f"{tmp_path}/rules.py:MAPPING")
    for name, words in (("rule.py:MAPPING", "there is no file"), ("rules.py:a-b", "FILE.py:MAPPING")):
        (tmp_path / "a.json").write_text(json.dumps({"hf_mapping": f"{tmp_path}/{name}"}))
        assert main(["config", "--check", str(tmp_path / "a.json")]) == 2
        assert words in capsys.readouterr().err
    assert not ran.exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '{"interval": 3, "interval": 5}'),
        ("a.json", '{"a": {"interval": 3, "interval": 5}}'),
        ("a.yaml", "interval: 3\ninterval: 5\n"),
        ("a.yaml", "a:\n- {interval: 3, interval: 5}\n"),
    ],
)
def test_a_setting_that_a_file_has_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    """It is an error, as a parser would take one of the two."""
    if name.endswith(".yaml"):
        pytest.importorskip("yaml")
    (tmp_path / name).write_text(text)
    assert main(["config", "--check", str(tmp_path / name)]) == 2
    assert re.search(r"'interval'.*twice|twice.*'interval'", capsys.readouterr().err)


def test_a_value_is_merged_in_yaml(tmp_path: Path) -> None:
    """A key beside ``<<`` takes the place of a merged one, and is there once."""
    pytest.importorskip("yaml")
    text = "b: &b {interval: 3, folder: x}\na: {d: &d {<<: *b, interval: 5}, c: {<<: *d, interval: 7}}\n"
    (tmp_path / "a.yaml").write_text(text)
    assert main(["config", "--check", str(tmp_path / "a.yaml"), "--section", "a.c"]) == 0


def test_only_tables_are_sections(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong section lists the tables of the file, not its values; a value is no section."""
    (tmp_path / "a.json").write_text(json.dumps({"seed": 1, "train": {"checkpoint": {}, "lr": 0.1}}))
    for section, words in (
        ("trian", "no section 'trian' (did you mean train? sections: train)"),
        ("seed", "no section 'seed' (sections: train)"),
        ("train.lr", "no section 'lr' (sections: checkpoint)"),
        ("train.checkpoint.x", "no section 'x' (sections: none)"),
    ):
        assert main(["config", "--check", str(tmp_path / "a.json"), "--section", section]) == 2
        assert words in capsys.readouterr().err


def test_a_plugin_to_disable_that_is_none_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``config`` and ``strategies`` say so, with the nearest; a name of one is fine."""
    monkeypatch.setenv("SHARDCKPT_DISABLED_PLUGINS", "obstor")
    assert main(["config", "SHARDCKPT_DISABLED_PLUGINS"]) == 1
    assert "names 'obstor', and no plugin is called so: did you mean obstore?" in capsys.readouterr().out
    assert main(["strategies"]) == 0
    assert "names 'obstor', and no plugin is called so: did you mean obstore?" in capsys.readouterr().out
    assert main(["strategies", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["warnings"]) == 1
    monkeypatch.setenv("SHARDCKPT_DISABLED_PLUGINS", "obstore")
    assert main(["config", "SHARDCKPT_DISABLED_PLUGINS"]) == 0


def test_a_file_of_stores_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is missing, is no table of buckets, or has an option that S3 does not is wrong; a right one is fine."""
    monkeypatch.setenv("SHARDCKPT_STORES", str(tmp_path / "stores.json"))
    for stores, words in (
        (None, "cannot read it"),
        ({"bucket": {}}, 'expected {"s3://bucket"'),
        ({"s3://bucket": {"endpont": "http://a"}}, "did you mean endpoint?"),
        ({"s3://bucket": {"endpoint": "http://a"}, "gs://other": {"any": "x"}}, ""),
    ):
        if stores is not None:
            (tmp_path / "stores.json").write_text(json.dumps(stores))
        assert main(["config", "SHARDCKPT_STORES"]) == (1 if words else 0)
        assert words in " ".join(capsys.readouterr().out.split())


def test_a_folder_of_assets_that_is_here_has_the_size_of_the_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where rows are to be cut by its config.json, a folder without one is wrong; one that is elsewhere may have it."""
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "tokenizer.json").write_text("{}")
    given = {"hf_cut_vocabulary": True, "hf_mapping": "megatron", "last_save_in_hf": True}
    codes = []
    for name in ("assets", "elsewhere"):
        (tmp_path / "a.json").write_text(json.dumps({**given, "hf_assets_path": str(tmp_path / name)}))
        codes.append(main(["config", "--check", str(tmp_path / "a.json")]))
    assert codes == [2, 0]
    assert "hf_assets_path: cut_vocabulary (--cut-vocabulary) takes" in capsys.readouterr().err
    (tmp_path / "assets" / "config.json").write_text('{"model_type": "llama", "vocab_size": 60}')
    (tmp_path / "a.json").write_text(json.dumps({**given, "hf_assets_path": str(tmp_path / "assets")}))
    assert main(["config", "--check", str(tmp_path / "a.json")]) == 0


def test_formats_that_nothing_reads_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt backend to accept is wrong in a file, and in SHARDCKPT_ACCEPT, before a job fails at its load."""
    (tmp_path / "run.json").write_text('{"accept": ["torch_dit", "safetensors@9", "huggingface"]}')
    assert main(["config", "--check", str(tmp_path / "run.json")]) == 2
    said = capsys.readouterr().err
    assert said.count("no installed strategy reads 'torch_dit': did you mean torch_dist?") == 1
    assert said.count("no installed strategy reads 'safetensors' of version 9: there are versions 1") == 1
    assert "huggingface" not in said.partition("torch_dit")[0]
    monkeypatch.setenv("SHARDCKPT_ACCEPT", "torch_dit")
    assert main(["config", "SHARDCKPT_ACCEPT"]) == 1
    assert "did you mean torch_dist?" in capsys.readouterr().out
    monkeypatch.setenv("SHARDCKPT_ACCEPT", "torch_dist@1,ep")
    assert main(["config", "SHARDCKPT_ACCEPT"]) == 0


def test_a_truth_is_no_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`interval: yes` of YAML is not an interval of 1; a setting that is a truth takes it."""
    (tmp_path / "run.yaml").write_text("interval: yes\nkeep_latest_k: true\nlinks: yes\n")
    assert main(["config", "--check", str(tmp_path / "run.yaml")]) == 2
    said = capsys.readouterr().err
    assert "interval" in said
    assert "keep_latest_k" in said
    assert said.count(": expected a number, not True") == 2
    assert "links" not in said


def test_foreign_backends_are_those_of_their_readers() -> None:
    """What may be accepted of other libraries' formats are the names by which their readers ask."""
    readers = (DeepSpeedLoadStrategy, HuggingFaceLoadStrategy, TorchFileLoadStrategy)
    assert {reader.backend for reader in readers} == FOREIGN_BACKENDS
    assert {reader.version for reader in readers} == {1}


def test_a_plugin_that_cannot_be_imported_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SHARDCKPT_PLUGINS with a module that is none is a wrong value, as a wrong name to disable is."""
    monkeypatch.setenv("SHARDCKPT_PLUGINS", "no_such_module")
    get_plugin_manager.cache_clear()
    try:
        assert main(["config", "SHARDCKPT_PLUGINS"]) == 1
    finally:
        get_plugin_manager.cache_clear()
    assert "no_such_module: ModuleNotFoundError" in capsys.readouterr().out


def test_steps_that_no_load_would_accept_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that saves what it may not read is refused at its start, and by the check: not at its first restart."""
    (tmp_path / "run.json").write_text('{"accept": ["safetensors"], "strategy": "torch_dist"}')
    assert main(["config", "--check", str(tmp_path / "run.json")]) == 2
    assert "steps would be saved as torch_dist@1, which accept does not allow" in capsys.readouterr().err
    states = {"model": torch.nn.Linear(2, 2)}
    with pytest.raises(CheckpointingException, match="which accept does not allow"):
        CheckpointManager(CheckpointConfig(folder=tmp_path, accept=("safetensors",)), states)
    CheckpointManager(CheckpointConfig(folder=tmp_path, accept=("safetensors",), load_only=True), states).close()
    monkeypatch.setenv("SHARDCKPT_ACCEPT", "safetensors")
    with pytest.raises(CheckpointingException, match="which SHARDCKPT_ACCEPT does not allow: the job could"):
        CheckpointManager(CheckpointConfig(folder=tmp_path), states)
    CheckpointManager(CheckpointConfig(folder=tmp_path, strategy="safetensors"), states).close()


def test_a_misspelt_variable_is_named_as_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing installed has the name that SHARDCKPT_ACCEPT allows, the error of the job asks for the nearest."""
    monkeypatch.setenv("SHARDCKPT_ACCEPT", "safetensor")
    unknown = r"no installed strategy reads 'safetensor': did you mean safetensors\? there are .*"
    with pytest.raises(CheckpointingException, match=rf"which SHARDCKPT_ACCEPT does not allow \({unknown}\): the job"):
        CheckpointManager(CheckpointConfig(folder=tmp_path), {"model": torch.nn.Linear(2, 2)})


@table(
    "folder, said",
    [
        ("{}/a.json", "is a file: give the directory"),
        ("s3://", "names no bucket"),
        ("s3:", r"a local directory of that name can be given as /"),
        ("s3://:", "names no bucket"),
        ("{}" + f"/{'a' * 200}" * 25, "cannot access "),
    ],
)
def test_a_folder_that_can_be_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str, said: str
) -> None:
    """By the check of its settings, and by the manager before the training."""
    file, given = tmp_path / "a.json", folder.format(tmp_path)
    file.write_text(json.dumps({"folder": given}))
    assert main(["config", "--check", str(file)]) == 2
    assert said in capsys.readouterr().err
    with pytest.raises(CheckpointingException, match=said):
        CheckpointManager(CheckpointConfig(folder=given), {"model": torch.nn.Linear(2, 2)})


def test_a_local_folder_may_end_with_a_colon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As one that is called after the time of day: only a scheme alone names no directory."""
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"folder": f"{tmp_path}/run-10:30:"}))
    assert main(["config", "--check", str(file)]) == 0
    assert "all right" in capsys.readouterr().out
    with CheckpointManager(CheckpointConfig(folder=f"{tmp_path}/run-10:30:"), {"model": torch.nn.Linear(2, 2)}) as one:
        assert one.save(1, force=True)


def test_check_looks_at_what_a_training_meets_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong variables, and a strategy that saves in the foreground alone; what only loads needs none of a policy."""
    file = tmp_path / "a.json"
    with monkeypatch.context() as patched:
        patched.setattr(setting_checks, "AsyncSaveStrategy", str)
        file.write_text(json.dumps({"strategy": "torch_dist", "async_mode": "async"}))
        assert main(["config", "--check", str(file)]) == 2
    assert "the strategy 'torch_dist', saves in the foreground only" in capsys.readouterr().err
    file.write_text(json.dumps({"strategy": "torch_dist", "load_only": True, "links": True, "folder": "memory://a"}))
    monkeypatch.setenv("SHARDCKPT_ACCEPT", "safetensors")
    assert main(["config", "--check", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{file}: a CheckpointConfig, 4 settings: all right, with 1 note",
        "links: memory://a is on a store, which has none",
    ]
    file.write_text(json.dumps({"strategy": "torch_dist", "load_only": True, "links": True, "folder": "file:///a"}))
    assert main(["config", "--check", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{file}: a CheckpointConfig, 4 settings: all right"]
    monkeypatch.delenv("SHARDCKPT_ACCEPT")
    file.write_text(json.dumps({"enable_checkpoint": False, "on_busy": "skip"}))
    assert main(["config", "--check", str(file)]) == 0
    assert "all right, with 2 notes" in capsys.readouterr().out
    file.write_text(json.dumps({"folder": "s3:/bucket/run"}))
    assert main(["config", "--check", str(file)]) == 2
    assert "s3:/bucket/run looks like a URL that lacks a slash: give s3://bucket/run" in capsys.readouterr().err
    for folder, why in (
        ("a\0b", "'a\\x00b' has a null byte"),
        ("x" * 300, "has 300 bytes, and file systems allow 255"),
    ):
        file.write_text(json.dumps({"folder": folder, "interval": 0}))
        assert main(["config", "--check", str(file)]) == 2
        said = capsys.readouterr().err
        assert why in said
        assert "2 wrong settings" in said
    file.write_text(json.dumps({"exclude_from_loading": ["lr_schedular", "ema"], "rename": {"net": "modle.net"}}))
    assert main(["config", "--check", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"{setting}: {name!r}: did you mean {near}? A training without a state of that name fails at its start"
        for setting, name, near in (
            ("exclude_from_loading", "lr_schedular", "lr_scheduler"),
            ("rename", "modle.net", "model"),
        )
    ]
    file.write_text(json.dumps({"folder": "s3:/bucket/run"}))
    monkeypatch.setenv("SHARDCKPT_IO_THREADS", "many")
    monkeypatch.setenv("SHARDCKPT_ACEPT", "zarr")
    assert main(["config", "--check", str(file)]) == 2
    said = capsys.readouterr().err
    assert all(name in said for name in ("SHARDCKPT_IO_THREADS", "SHARDCKPT_ACEPT"))


def test_check_notes_what_two_files_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that two jobs would save to is a note about the second; a variable in a path is one, too.

    A job that only loads, as an evaluation, shares a folder rightly.
    """
    monkeypatch.chdir(tmp_path)
    folders = {"a": "runs/x", "b": f"{tmp_path}/runs/../runs/x/", "c": "s3://b/${RUN}", "d": "s3://b/r"}
    for name, folder in folders.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"folder": folder}))
    (tmp_path / "eval.json").write_text(json.dumps({"folder": "runs/x", "load_only": True}))
    assert main(["config", "--check", "eval.json", "a.json", "eval.json", "b.json", "c.json", "d.json"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "eval.json: a CheckpointConfig, 2 settings: all right",
        "a.json: a CheckpointConfig, 1 setting: all right",
        "eval.json: a CheckpointConfig, 2 settings: all right",
        "b.json: a CheckpointConfig, 1 setting: all right, with 1 note",
        "folder: a.json has it, too: two jobs in one folder replace, load and remove each other's steps",
        "c.json: a CheckpointConfig, 1 setting: all right, with 1 note",
        "folder: ${RUN} is a part of the name: no variable is expanded in it",
        "d.json: a CheckpointConfig, 1 setting: all right",
    ]
