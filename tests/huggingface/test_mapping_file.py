from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt.cli import main
from shardckpt.errors import CheckpointingException, KeyMismatchError
from shardckpt.huggingface import Rule, RuleMapping, export_to_huggingface
from shardckpt.huggingface.models import find_mapping
from shardckpt.maintenance import convert_checkpoint, diff_checkpoints, merge_checkpoints
from tests.huggingface.samples import read, save
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

STATE = {
    "decoder.0.norm": torch.ones(3),
    "decoder.0.fc": torch.arange(8.0).reshape(4, 2),
    "decoder.0.turned": torch.arange(6.0).reshape(3, 2),
    "cache": torch.ones(1),
}
RULES = {
    "decoder.{layer}.norm": "model.{layer}.norm",
    "decoder.{layer}.fc": ["model.{layer}.gate", "model.{layer}.up"],
    "decoder.{layer}.turned": {"hub": "model.{layer}.turned", "transposed": True},
    "cache": None,
}
PYTHON = f"""
from shardckpt.huggingface import Rule, RuleMapping
MAPPING = {RULES!r}
LISTED = [Rule("decoder.{{layer}}.norm", ("norm.{{layer}}",))]
MADE = RuleMapping(LISTED)
NUMBER = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with rules in JSON and in Python, and a checkpoint."""
    (tmp_path / "rules.json").write_text(json.dumps(RULES))
    (tmp_path / "rules.py").write_text(PYTHON)
    save(tmp_path / "c", STATE)
    return tmp_path


def _check(found: dict[str, torch.Tensor]) -> None:
    assert found.keys() == {"model.0.norm", "model.0.gate", "model.0.up", "model.0.turned"}
    assert torch.equal(found["model.0.up"], STATE["decoder.0.fc"][2:])
    assert torch.equal(found["model.0.turned"], STATE["decoder.0.turned"].T)


@table("text", ["rules.json", "rules.py", "rules.py:MAPPING"])
def test_a_file_of_rules_is_a_mapping_without_a_distribution(text: str, folder: Path) -> None:
    """Every verb that writes names of the Hub takes rules in JSON or Python: renamed, cut, swapped, not written."""
    mapping = str(folder / text)
    for verb in ("export", "convert", "merge"):
        sources = [str(folder / "c")] * (2 if verb == "merge" else 1)
        to = [] if verb == "export" else ["--to", "hf"]
        target = folder / f"{text.replace(':', '')}-{verb}"
        assert main([verb, *sources, str(target), *to, "--mapping", mapping]) == 0
        _check(read(target))
        assert main(["diff", str(folder / "c"), str(target), "--mapping", mapping]) == 1  # the cache is not there


def test_a_python_file_may_have_rules_or_a_mapping(folder: Path) -> None:
    """A list of rules and a KeyMapping serve like a dict."""
    for name in ("LISTED", "MADE"):
        (link,) = find_mapping(f"{folder}/rules.py:{name}").links("decoder.5.norm", (3,))
        assert link.name == "norm.5"


@table(
    ("text", "content", "error"),
    [
        ("none.json", None, r"there is no file .*none\.json"),
        ("a.json", "[1]", "not a JSON object"),
        ("a.json", '{"a": 3}', r"a\.json: 'a' has 3; expected a name in the folder"),
        ("a.json", '{"a": {"hub": "b", "tranposed": true}}', "expected a name in the folder"),
        ("a.json", '{"a.{x}": "b.{y}"}', r"a\.json: .*'y', which the stored name lacks"),
        ("a.json", '{"a": {}}', "expected a name in the folder"),
        ("a.json", '{"a": {"hub": "b", "split": "kv"}}', "expected a name in the folder"),
        ("a.json", '{"a": {"hub": "b", "split": ["qkv"]}}', "expected a name in the folder"),
        ("a.json:X", "{}", "for Python files"),
        ("a.py", "X = 1", r"a\.py has no MAPPING; it has X"),
        ("a.py:X", "X = 1", "is a int: expected a KeyMapping, a list of Rules, or a dict"),
        ("a.py:X", "X = []", "is a list: expected a KeyMapping"),
        ("a.py", "1 / 0", r"a\.py failed: ZeroDivisionError"),
    ],
)
def test_a_file_that_has_no_mapping_is_an_error(text: str, content: str | None, error: str, tmp_path: Path) -> None:
    """What is wrong in a file of rules is said with the file and the entry."""
    if content is not None:
        (tmp_path / text.partition(":")[0]).write_text(content)
    with pytest.raises(CheckpointingException, match=error):
        find_mapping(f"{tmp_path}/{text}")


def test_a_file_may_part_queries_keys_and_values_and_keep_a_dtype(tmp_path: Path) -> None:
    """Rules in JSON split rows by the config's groups, cut a padded vocabulary, and leave a dtype: as built-in ones."""
    rules = {
        "qkv": {"hub": ["q", "k", "v"], "split": "qkv"},
        "words": {"hub": "embed", "split": "vocabulary"},
        "bias": {"hub": "bias", "keep_dtype": True},
    }
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    (tmp_path / "assets").mkdir()
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 3}
    (tmp_path / "assets" / "config.json").write_text(json.dumps(config))
    save(tmp_path / "c", {"qkv": torch.arange(8.0), "words": torch.arange(4.0), "bias": torch.ones(1)})
    command = ["export", str(tmp_path / "c"), str(tmp_path / "hf"), "--mapping", str(tmp_path / "rules.json")]
    options = ["--assets", str(tmp_path / "assets"), "--cut-vocabulary", "--strict", "--dtype", "bfloat16"]
    assert main([*command, *options]) == 0
    found = read(tmp_path / "hf")
    values = {"q": [0, 1, 4, 5], "k": [2, 6], "v": [3, 7], "embed": [0, 1, 2], "bias": [1]}
    assert {name: tensor.tolist() for name, tensor in found.items()} == values
    assert found["bias"].dtype == torch.float32


def test_tensors_that_no_rule_matches_are_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An export warns of tensors that keep their names, and of rules that matched nothing; strict, it fails before."""
    mapping = RuleMapping([Rule("decoder.{layer}.norm", ("model.{layer}.norm",)), Rule("decodr.{layer}.fc", ("a",))])
    exported = export_to_huggingface(folder / "c", folder / "hf", mapping=mapping)
    unmatched = ("cache", "decoder.0.fc", "decoder.0.turned")
    assert exported.unmatched == unmatched
    assert "3 of 4 tensors matched no rule of the mapping: cache, decoder.0.fc, decoder.0.turned" in caplog.text
    assert "rules that matched no tensor: decodr.{layer}.fc" in caplog.text
    assert read(folder / "hf").keys() == {"model.0.norm", *unmatched}
    args: dict[str, Any] = {"mapping": mapping, "strict": True}
    for attempt in (
        lambda: export_to_huggingface(folder / "c", folder / "new", **args),
        lambda: convert_checkpoint(folder / "c", folder / "new", "hf", **args),
        lambda: convert_checkpoint(folder / "c", folder / "new", "ep", **args),
        lambda: merge_checkpoints([folder / "c", folder / "c"], folder / "new", "hf", **args),
    ):
        with pytest.raises(KeyMismatchError, match="3 of 4 tensors matched no rule"):
            attempt()
    assert not (folder / "new").exists()


def test_a_mapping_of_another_model_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where no tensor matches a rule, nothing would be mapped: an error, before anything is written."""
    for verb in (["export"], ["convert", "--to", "hf"], ["convert", "--to", "ep"]):
        assert main([*verb, str(folder / "c"), str(folder / "new"), "--mapping", "llama"]) == 2
        said = capsys.readouterr().err
        assert "4 of 4 tensors matched no rule of the mapping: " in said
        assert "The mapping is of another model, or the keys have another prefix" in said
    assert not (folder / "new").exists()


def test_names_that_are_the_hubs_already_are_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tensor whose name is one of the folder's by a rule passes a strict export without a word."""
    save(tmp_path / "c", {"model.0.norm": torch.ones(2), "decoder.1.norm": torch.zeros(2)})
    mapping = RuleMapping([Rule("decoder.{layer}.norm", ("model.{layer}.norm",))])
    assert export_to_huggingface(tmp_path / "c", tmp_path / "hf", mapping=mapping, strict=True).unmatched == ()
    assert "matched no rule" not in caplog.text


def test_an_export_by_a_mapping_has_no_optimizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The optimizer's state, by the names of Megatron, is left out with a word, and is no tensor that lacks a rule."""
    save(tmp_path / "c", {"a": torch.ones(2), "optimizer.state.exp_avg.a": torch.ones(2)})
    export_to_huggingface(tmp_path / "c", tmp_path / "hf", mapping=RuleMapping([Rule("a", ("b",))]), strict=True)
    assert read(tmp_path / "hf").keys() == {"b"}
    assert "1 tensor of the optimizer's state" in caplog.text


def test_the_report_in_json_has_the_tensors_without_a_rule(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`convert --json` lists them, and `--strict` makes them an error with exit code 2."""
    (folder / "few.json").write_text('{"cache": null}')
    command = ["convert", str(folder / "c"), str(folder / "hf"), "--to", "hf", "--mapping", str(folder / "few.json")]
    assert main([*command, "--json"]) == 0
    expected = ["decoder.0.fc", "decoder.0.norm", "decoder.0.turned"]
    assert json.loads(capsys.readouterr().out)["unmatched"] == expected
    assert main([*command, "--strict", "--overwrite"]) == 2
    assert "3 of 4 tensors matched no rule" in capsys.readouterr().err


def test_a_path_names_a_file_as_its_text_does(tmp_path: Path) -> None:
    """A Path is a file of rules, by which two exports of a model are compared, too."""
    save(tmp_path / "c", {"a": torch.ones(2)})
    (tmp_path / "rules.json").write_text('{"a": "b"}')
    export_to_huggingface(tmp_path / "c", tmp_path / "hf", mapping=tmp_path / "rules.json")  # type: ignore[arg-type]
    for mapping in (tmp_path / "rules.json", str(tmp_path / "rules.json")):
        assert diff_checkpoints(tmp_path / "c", tmp_path / "hf", mapping=mapping).are_same  # type: ignore[arg-type]
    with pytest.raises(CheckpointingException, match="no mapping for models of type 'lama'"):
        diff_checkpoints(tmp_path / "c", tmp_path / "hf", mapping="lama")


def test_a_class_of_mappings_is_no_mapping(tmp_path: Path) -> None:
    """It has the methods, and no rules: the error says to make one, of a file's, too; a name too long is an error."""
    save(tmp_path / "c", {"a": torch.ones(2)})
    with pytest.raises(CheckpointingException, match="the mapping is the class RuleMapping: give an object of it"):
        export_to_huggingface(tmp_path / "c", tmp_path / "hf", mapping=RuleMapping)  # type: ignore[arg-type]
    (tmp_path / "m.py").write_text("from shardckpt.huggingface import RuleMapping as MAPPING")
    with pytest.raises(CheckpointingException, match=r"mapping .*/m\.py is a .*: expected a KeyMapping"):
        export_to_huggingface(tmp_path / "c", tmp_path / "hf", mapping=f"{tmp_path}/m.py")
    with pytest.raises(CheckpointingException, match=r"cannot access x+\.json: File name too long"):
        find_mapping(f"{'x' * 300}.json")
    assert not (tmp_path / "hf").exists()


def test_a_name_twice_in_a_file_of_rules_is_an_error(tmp_path: Path) -> None:
    """The first of the two would be lost without a word."""
    (tmp_path / "rules.json").write_text('{"a": "b", "a": "c"}')
    with pytest.raises(CheckpointingException, match=r"rules\.json: .*'a'"):
        find_mapping(str(tmp_path / "rules.json"))
