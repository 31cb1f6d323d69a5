from __future__ import annotations

import re
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt.errors import CheckpointingException, ConfigurationError
from shardckpt.manager import (
    AsyncMode,
    CheckpointConfig,
    CheckpointManager,
    KeepBest,
    KeepEvery,
    KeepLatest,
    KeepNear,
    KeepPinned,
    KeepRecent,
    KeepVerified,
    SaveAfter,
    SaveAt,
    SaveEvery,
    find_faults,
    setting_checks,
)
from shardckpt.manager.other_names import OTHER_NAMES, TIMEOUT_HINT, list_our_names
from tests.manager.training import Progress
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@table("mode", list(AsyncMode))
def test_a_mode_may_be_a_text(mode: AsyncMode) -> None:
    """As on torchtitan's command line, in any case; in Python it is an AsyncMode, and a checkpoint stores the text."""
    upper: Any = mode.value.upper()
    assert CheckpointConfig(async_mode=upper).async_mode is AsyncMode(upper) is mode
    config = CheckpointConfig(async_mode=mode.value)
    assert config.async_mode is CheckpointConfig(async_mode=mode).async_mode is mode
    stored = config.describe()["async_mode"]
    assert (type(stored), stored) == (str, mode.value)


@table(
    ("given", "message"),
    [
        ({"keep_latest_k": 1, "async_mode": "async"}, "keep 2 or more"),
        ({"exclude_from_loading": ("model",)}, "without the model"),
        (
            {"exclude_from_last_save": "freqs_cis", "last_save_in_hf": True, "last_save_model_only": False},
            "leave last_save_model_only True",
        ),
        ({"last_save_bare_keys": True, "steps_in_hf": True, "strategy": "safetensors"}, "names of the Hub"),
        ({"initial_load_in_hf": True}, "initial_load_path"),
        ({"keep_best_k": 2}, "best_metric"),
        ({"retention": [KeepBest("acc")], "best_metric": "loss"}, "differ from the first KeepBest"),
        ({"retention": [KeepLatest(2), KeepBest("acc")], "best_mode": "max"}, "differ from the first KeepBest"),
        ({"interval": 0}, "interval"),
        ({"async_mode": "sometimes"}, "async_mode"),
        ({"export_dtype": "int8"}, "float16"),
        ({"folders": "x"}, "folders"),
        ({"folder": ""}, "folder"),
        ({"latest_pointer": "../latest"}, "latest_pointer"),
        ({"latest_pointer": "runs/latest"}, "latest_pointer"),
        ({"latest_pointer": ".latest"}, "latest_pointer"),
        ({"latest_pointer": "latest\n"}, "latest_pointer"),
        ({"latest_pointer": "x" * 102}, "latest_pointer"),
        ({"memory_budget": "1MB"}, "1,000,000 bytes is too small: a save or a load takes at least 8MiB"),
        ({"last_save_in_hf": True, "memory_budget": "31MiB"}, "at least 32MiB"),
        ({"last_save_in_hf": True, "memory_budget": "63MiB", "folder": "s3://bucket/run"}, "at least 64MiB"),
    ],
)
def test_configurations_that_contradict_themselves(given: dict[str, Any], message: str) -> None:
    """Are refused when they are made, by name."""
    with pytest.raises((ValueError, CheckpointingException), match=message):
        CheckpointConfig(**given)


@table(("options", "words"), [({}, "there is no such folder"), ({"load_only": True}, "")])
def test_the_folder_of_assets_is_there_at_the_start(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    """What the export of the last step would miss is an error before the first, where anything is saved."""
    wrong = CheckpointConfig(
        folder=str(tmp_path / "run"), last_save_in_hf=True, hf_assets_path=str(tmp_path / "nope"), **options
    )
    with pytest.raises(CheckpointingException, match=f"hf_assets_path: .*{words}") if words else nullcontext():
        CheckpointManager(wrong, {"progress": Progress()}).close()


_WRONG = [None, -5, float("inf"), "1 gigabyte", "a\0b", "x@y", [[1]], {"policy": "KeepBest", "metric": 3}]


@table("value", [*_WRONG, torch.tensor([5, 6])])
def test_no_wrong_setting_hides_another(value: object) -> None:
    """Whatever a setting of a file is, another that is wrong is named, too."""
    for name in CheckpointConfig.model_fields:
        other = "interval" if name == "keep_latest_k" else "keep_latest_k"
        assert any(fault.message.startswith(f"{other}=-1") for fault in find_faults({name: value, other: -1})), name


def test_the_seed_s_name_for_the_last_save(tmp_path: Path) -> None:
    """Torchtitan's older ``model_weights_only`` means ``last_save_model_only``, also where its value is wrong."""
    assert not CheckpointConfig(model_weights_only=False).last_save_model_only  # type: ignore[call-arg]
    assert not CheckpointConfig.model_validate({"model_weights_only": False}).last_save_model_only
    with pytest.raises(ConfigurationError, match="last_save_model_only='weights': expected True or False"):
        CheckpointConfig(model_weights_only="weights")  # type: ignore[call-arg]


def test_no_password_is_stored() -> None:
    """What a checkpoint has of the configuration names the store, and not how to get in."""
    config = CheckpointConfig(folder="s3://user:secret@host/run", initial_load_path="/data/first")
    assert config.describe()["folder"] == "s3://user:***@host/run"
    assert config.describe()["initial_load_path"] == "/data/first"


@table(("wrong", "message"), [({"strategy": "zarrr"}, "zarrr"), ({"hf_mapping": "llamaa"}, "llamaa")])
def test_wrong_names_are_refused_before_the_training(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    """A strategy or mapping that does not exist is an error when the manager is made, not at the end."""
    with pytest.raises(CheckpointingException, match=message):
        CheckpointManager(CheckpointConfig(folder=tmp_path, **wrong), {"train_state": Progress()})


@table(
    "settings, said",
    [
        ({"max_to_keep": 3}, "there is no setting 'max_to_keep': it is keep_latest_k here"),
        ({"backend": "ep"}, "there is no setting 'backend': it is strategy here"),
        ({"keep_latst_k": 3}, "there is no setting 'keep_latst_k': did you mean keep_latest_k?"),
        ({"interval": "x"}, "interval='x': expected a whole number"),
        ({"keep_latest_k": -1}, "keep_latest_k=-1: expected 0 or more"),
        ({"async_mode": "no"}, "async_mode='no': expected 'disabled', 'async' or 'async_with_pinned_mem'"),
        ({"on_busy": "wiat"}, "on_busy='wiat': did you mean wait? expected 'wait' or 'skip'"),
        ({"strategy": 3}, "strategy=3: expected a backend, as 'safetensors', 'safetensors@1' or ('safetensors', 1)"),
        (
            {"rename": {"net": ""}},
            "rename: '' names no state. To read a model whose keys have nothing before them: rename={'': 'model'}",
        ),
        ({"rename": {"net": "net"}}, "rename: a name is given as its own new name: leave it out, or give another"),
        ({"rename": "a=b"}, "rename='a=b': expected names by name, as {'net': 'model'}"),
        ({"save_rng": None}, "save_rng=None: expected True or False"),
        *(({name: ""}, f"{name}='': expected a path or URL") for name in ("hf_assets_path", "initial_load_path")),
        (
            {"exclude_from_loading": (1,)},
            "an item of exclude_from_loading is 1: expected names of states, as ('lr_scheduler',)",
        ),
        *(({name: 600}, f"there is no setting {name!r}: {TIMEOUT_HINT}") for name in ("timeout", "timeout_secs")),
        (
            {"keep_best_k": 2, "metric_for_best_model": "loss"},
            "there is no setting 'metric_for_best_model': it is best_metric here",
        ),
        (
            {"links": 3, "keep_best_k": 2},
            "links=3: expected True or False; keep_best_k needs a best_metric: name one, as 'loss'",
        ),
    ],
)
def test_a_wrong_setting_is_said_in_plain_words(settings: dict[str, Any], said: str) -> None:
    """Another library's name gets ours, a typo the nearest, a value what it should be; all of it is one line."""
    with pytest.raises(ConfigurationError) as caught:
        CheckpointConfig(**settings)
    assert str(caught.value) == f"CheckpointConfig: {said}"


def test_no_setting_has_a_fault_in_the_words_of_another_library() -> None:
    """Whatever a setting is given, its error says in our words what is expected."""
    for name in CheckpointConfig.model_fields:
        for wrong in (object(), [1.5], {1: 2}):
            with pytest.raises(CheckpointingException) as caught:
                CheckpointConfig(**{name: wrong})
            assert name in str(caught.value) or "is not a" in str(caught.value)
            assert "valid" not in str(caught.value)
            assert "another value" not in str(caught.value)


@table(
    "make, said",
    [
        (lambda: KeepLatest("x"), "KeepLatest: count='x': expected a whole number"),  # type: ignore[arg-type]
        (lambda: KeepLatest(cuont=1), "count is missing; there is no setting 'cuont': did you mean count?"),  # type: ignore[call-arg]
        (lambda: KeepBest("loss", mode="mni"), "KeepBest: mode='mni': did you mean min?"),  # type: ignore[arg-type]
        (lambda: KeepPinned([1.5]), "KeepPinned: an item of steps is 1.5: expected a whole number"),  # type: ignore[list-item]
        (lambda: SaveAfter(-1), "SaveAfter: seconds=-1: expected more than 0"),
        (lambda: KeepLatest(1, 2), "2 is one argument too many: it takes count"),  # type: ignore[call-arg]
        (lambda: KeepLatest(1, count=2), "KeepLatest: count is given twice"),  # type: ignore[misc]
        (lambda: KeepLatest(True), "KeepLatest: count: expected a number, not True"),
    ],
)
def test_a_wrong_policy_is_said_in_plain_words(make: Callable[[], Any], said: str) -> None:
    """The policies of retention and saving say what they take as the configuration does."""
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        make()


def test_a_fault_of_a_policy_has_the_setting_and_its_value() -> None:
    """Values that are given by their place are found under the names of the settings, as those given by name are."""
    for make in (lambda: KeepBest("loss", -1, "mni"), lambda: KeepBest("loss", count=-1, mode="mni")):  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError) as caught:
            make()
        assert [(fault.setting, fault.value) for fault in caught.value.faults] == [("count", -1), ("mode", "mni")]


@table("given", ["runs/a", None, 3, [1], Progress(), {"model": Progress()}])
def test_a_manager_says_how_a_configuration_is_written(given: Any) -> None:
    """A path, or anything else in its place, is named, with the call that is right."""
    call = r"CheckpointManager\(CheckpointConfig\(folder='(runs/a|checkpoints)'\), \{'model': model, "
    with pytest.raises(ConfigurationError, match=f"config is .*: expected a CheckpointConfig, as in {call}"):
        CheckpointManager(given, {"train_state": Progress()})


def test_settings_are_given_by_name(tmp_path: Path) -> None:
    """A folder without its name is refused with the call that is right; a dict of settings is a configuration."""
    with pytest.raises(ConfigurationError, match=r"'runs/a' has none: CheckpointConfig\(folder="):
        CheckpointConfig("runs/a")  # type: ignore[misc]
    with pytest.raises(ConfigurationError, match="there is no setting 'fodler': did you mean folder"):
        CheckpointManager({"fodler": "x"}, {"train_state": Progress()})  # type: ignore[arg-type]
    with CheckpointManager({"folder": str(tmp_path)}, {"train_state": Progress()}) as manager:  # type: ignore[arg-type]
        assert manager.config == CheckpointConfig(folder=tmp_path)


@table(
    "call, said",
    [
        (lambda each: each.save("3"), "save: '3' is no step; give how many steps the training has made"),
        (lambda each: each.save(-1), "save: -1 is no step"),
        (lambda each: each.save(1 << 53), "save: 9007199254740992 is no step"),
        (lambda each: each.save({"model": 1}, 3), "save: an object of type dict is no step"),
        (lambda each: each.save(3, {"model": 1}), r"save: force=an object of type dict: .* manager.save\(3\)"),
        (
            lambda each: each.load({"model": 1}),
            "load: an object of type dict is no step; .* has the states",
        ),
        (lambda each: each.metrics("3"), "metrics: '3' is no step; give the number"),
    ],
)
def test_a_wrong_step_is_refused_before_anything_is_done(tmp_path: Path, call: Callable[[Any], Any], said: str) -> None:
    """States in the place of a step, a step as text, or states after it: what is expected, and nothing is saved."""
    with CheckpointManager(CheckpointConfig(folder=tmp_path, interval=1), {"train_state": Progress()}) as manager:
        with pytest.raises(CheckpointingException, match=said):
            call(manager)
        assert manager.steps() == []


def test_every_name_of_another_library_is_one_of_ours() -> None:
    """What an error advises exists."""
    ours = {ours for name in OTHER_NAMES for ours in list_our_names(name)}
    assert ours <= CheckpointConfig.model_fields.keys()
    assert not OTHER_NAMES.keys() & CheckpointConfig.model_fields.keys()


@table(
    ("given", "ours"),
    [
        ({"max_to_keep": 3, "save_total_limit": 4}, "keep_latest_k"),
        ({"save_steps": 3, "interval": 4}, "interval"),
        ({"model_weights_only": True, "last_save_model_only": False}, "last_save_model_only"),
    ],
)
def test_two_names_of_one_setting_are_refused(given: dict[str, Any], ours: str) -> None:
    """The error names both, and neither value is taken in silence."""
    faults = find_faults(given)
    one, other = given
    foreign, rest = (one, other) if one != ours else (other, one)
    more = "" if rest == ours else f", and so is {rest}"
    assert f"it is {ours} here{more}, which is given, too: give {ours} once" in faults[0].message
    assert (faults[0].setting, faults[0].suggestion) == (foreign, None if ours in given else ours)
    with pytest.raises(ConfigurationError, match=f"{one}.*{other}"):
        CheckpointConfig(**given)


@table(
    ("settings", "said"),
    [
        (
            {"retention": [KeepLatest(1)], "async_mode": "async"},
            "retention: KeepLatest(1) with an async_mode leaves none to fall back on: keep 2 or more",
        ),
        (
            {"steps_in_hf": True},
            (
                "steps_in_hf: TorchDistSaveShardedStrategy, the default strategy 'torch_dist', does not store "
                "Hugging Face folders: choose strategy='safetensors', or last_save_in_hf, which exports the last step"
            ),
        ),
    ],
)
def test_a_fault_names_what_is_given(settings: dict[str, Any], said: str) -> None:
    """Not the setting that it stands for, nor None for the default."""
    assert [fault.message for fault in find_faults(settings)] == [said]


def test_settings_are_checked_as_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever form a file has a switch, a strategy is asked for what the job will ask of it."""
    monkeypatch.setattr(setting_checks, "AsyncSaveStrategy", str)
    monkeypatch.setattr(setting_checks, "StoresHubFolders", str)
    assert [fault.setting for fault in find_faults({"async_mode": "Disabled", "steps_in_hf": "no"})] == []
    assert [fault.setting for fault in find_faults({"async_mode": "Async"})] == ["async_mode"]
    assert [fault.setting for fault in find_faults({"steps_in_hf": "yes"})] == ["steps_in_hf"]
    assert [fault.setting for fault in find_faults({"steps_in_hf": "yes", "load_only": "false"})] == ["steps_in_hf"]


def test_a_file_url_is_no_store() -> None:
    """An export to it needs the budget of an export to a directory."""
    CheckpointConfig(last_save_in_hf=True, memory_budget="32MiB", folder="file:///checkpoints")


def test_equal_configurations_have_one_hash() -> None:
    """A configuration is frozen, and may be the key of a dict, with ``rename``, too."""
    one, other = (
        CheckpointConfig(rename=dict(names)) for names in ([("a", "x"), ("b", "y")], [("b", "y"), ("a", "x")])
    )
    assert one == other
    assert {one: 1}[other] == 1
    assert hash(CheckpointConfig()) != hash(one)


def test_a_setting_that_is_assigned_is_refused_in_our_words() -> None:
    """The nearest name of one that there is not, and how to make a changed configuration, which works."""
    config = CheckpointConfig(interval=5, retention=[KeepLatest(2)], async_mode="async")
    with pytest.raises(ConfigurationError, match="there is no setting 'intervall': did you mean interval"):
        config.intervall = 3
    with pytest.raises(
        ConfigurationError, match=r"another one, CheckpointConfig\(\*\*{\*\*dict\(config\), 'interval': 3"
    ):
        config.interval = 3
    changed = CheckpointConfig(**{**dict(config), "interval": 3})
    assert (changed.interval, changed.retention, changed.async_mode) == (3, (KeepLatest(2),), config.async_mode)


def test_the_json_schema_has_the_policies() -> None:
    """What a configuration stores of each built-in policy has the properties that its schema requires and allows."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = CheckpointConfig.model_json_schema()
    keep = [KeepLatest(3), KeepEvery(2), KeepNear(2), KeepRecent(1), KeepBest("loss"), KeepPinned([5]), KeepVerified(1)]
    stored = CheckpointConfig(retention=keep, save_when=[SaveEvery(5), SaveAt([1]), SaveAfter(2)]).describe()
    jsonschema.validate(stored, schema)
    for setting in ("retention", "save_when"):
        assert CheckpointConfig(**{setting: stored[setting]}).describe()[setting] == stored[setting]
        for wrong in ({}, {"policy": "KeepLates"}, {"policy": "KeepLatest"}, {"policy": "SaveEvery", "intervall": 1}):
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate({setting: [wrong]}, schema)
