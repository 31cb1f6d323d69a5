from __future__ import annotations

import copy
import dataclasses
import logging
import os
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import TrainerCallback, TrainerState

from shardckpt import dist_checkpointing
from shardckpt.adapters.leaves import describe_object
from shardckpt.distributed.comm import Comm
from shardckpt.errors import CheckpointingException, CorruptCheckpointError
from shardckpt.integrations import transformers as module
from shardckpt.manager import CheckpointManager, mark_checkpoint
from shardckpt.manager.marks import identify_save
from tests.integrations import small
from tests.integrations.transformers import (
    At,
    Crash,
    Model,
    callback_of,
    config_of,
    crash,
    resume,
    trainer_of,
    without_ranks,
)
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import Trainer

    from tests.ranks import Ranks

__all__ = ["without_ranks"]  # fixtures

STEPS_AN_EPOCH = 6


@pytest.mark.parametrize(
    ("crashed", "options"),
    [
        (13, {}),  # after an epoch's last step was saved
        (4, {"gradient_accumulation_steps": 2}),
        pytest.param(10, {}, marks=pytest.mark.ci),  # in an epoch
        pytest.param(10, {"lr_scheduler_type": "cosine", "warmup_steps": 4}, marks=pytest.mark.ci),
    ],
)
def test_a_resumed_training_is_the_uninterrupted_one(crashed: int, options: dict[str, Any], tmp_path: Path) -> None:
    """Shuffled data, dropout, moments, schedule: after a crash all goes on as if there had been none."""
    whole = trainer_of(tmp_path / "whole", None, **options)
    whole.train()
    with pytest.raises(Crash):
        trainer_of(tmp_path, config_of(tmp_path), At(crashed, crash), **options).train()
    trainer = trainer_of(tmp_path, config_of(tmp_path), **options)
    assert small.is_equal(resume(trainer), small.weights(whole.model))
    assert trainer.state.global_step == whole.state.global_step
    assert [log["step"] for log in trainer.state.log_history] == [log["step"] for log in whole.state.log_history]


@table(("crashed", "warned"), [(5, False), (11, True)], ids=["in the first epoch", "in the second"])
def test_an_order_drawn_from_the_generators_is_the_same_or_a_warning_says_so(
    crashed: int, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With group_by_length the first epoch goes on with its batches; of a later one a warning says that they differ."""

    def make(folder: Path, *more: Any) -> Any:
        options = {"train_sampling_strategy": "group_by_length", "num_train_epochs": 2}
        trainer = trainer_of(folder, config_of(folder), *more, **options)
        trainer.processing_class = SimpleNamespace(model_input_names=["inputs"])
        return trainer

    whole = make(tmp_path / "whole")
    whole.train()
    with pytest.raises(Crash):
        make(tmp_path, At(crashed, crash)).train()
    found = resume(make(tmp_path))
    assert warned == ("group_by_length draws the order" in caplog.text)
    assert warned or small.is_equal(found, small.weights(whole.model))


@table("by_path", [False, True])
def test_a_training_that_is_begun_again_commits_the_saves_of_the_failed_one(by_path: bool, tmp_path: Path) -> None:
    """In the same process, as with auto_find_batch_size, a save that was under way is committed and resumed from."""
    crashes = [crash]
    at_step_4 = At(4, lambda: crashes.pop()() if crashes else None)
    trainer = trainer_of(tmp_path, config_of(tmp_path, async_mode="async"), at_step_4, max_steps=5)
    with pytest.raises(Crash):
        trainer.train()
    trainer.train(resume_from_checkpoint=callback_of(trainer).resume_path() if by_path else None)
    assert callback_of(trainer)._begun_at == 3
    assert {path.name for path in (tmp_path / "ours").iterdir()} == {"step-3", "step-5"}


def test_a_smaller_batch_is_found_from_the_step_that_was_chosen(tmp_path: Path) -> None:
    """With auto_find_batch_size each attempt resumes at the step of resume_path(), and at its place in the data."""
    with pytest.raises(Crash):
        trainer_of(tmp_path, config_of(tmp_path), At(8, crash)).train()
    failures = [5, 7]  # the second comes after a step was saved
    fail: list[At] = [At(step, lambda step=step: _run_out_of_memory(failures, step)) for step in (5, 7)]
    trainer = trainer_of(tmp_path, config_of(tmp_path), *fail, auto_find_batch_size=True, max_steps=8)
    begun: list[int] = []
    trainer.add_callback(_Begins(begun))
    path = callback_of(trainer).resume_path(3)
    trainer.train(resume_from_checkpoint=path)
    assert begun == [3, 3, 3]
    assert not Path(path or "").exists()


class _Begins(TrainerCallback):
    """Notes where trainings begin."""

    def __init__(self, begun: list[int]) -> None:
        self._begun = begun

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note it."""
        self._begun.append(state.global_step)


def _run_out_of_memory(failures: list[int], step: int) -> None:
    if step in failures:
        failures.remove(step)
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")


def test_what_the_callback_draws_the_training_would_not_notice(tmp_path: Path) -> None:
    """A training with the callback has the weights of one without."""
    plain = trainer_of(tmp_path / "plain", None)
    plain.train()
    watched = trainer_of(tmp_path, config_of(tmp_path, async_mode="async"))
    watched.train()
    assert small.is_equal(small.weights(watched.model), small.weights(plain.model))
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == sorted(
        f"step-{step}" for step in range(3, 19, 3)
    )


def test_without_a_resume_path_the_data_begin_anew_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """trainer.train() alone makes only the steps that are left, and tells that the data begin anew."""
    with pytest.raises(Crash):
        trainer_of(tmp_path, config_of(tmp_path), At(10, crash)).train()
    made: list[int] = []
    trainer = trainer_of(tmp_path, config_of(tmp_path), At(10, lambda: made.append(10)), At(9, lambda: made.append(9)))
    with caplog.at_level(logging.WARNING, "shardckpt"):
        trainer.train()
    assert "resumed at step 9, with the data from their beginning" in caplog.text
    assert made == [10]
    assert trainer.state.global_step == 3 * STEPS_AN_EPOCH


def test_the_first_run_of_a_job_resumes_from_nothing(tmp_path: Path) -> None:
    """Without a checkpoint resume_path() is None, and the training begins; a step that is missing is an error."""
    trainer = trainer_of(tmp_path, config_of(tmp_path), max_steps=3)
    assert callback_of(trainer).resume_path() is None
    trainer.train()
    with pytest.raises(CheckpointingException, match=r"no checkpoint of step 2; it has \[3\]"):
        callback_of(trainer).resume_path(2)


@table("step", ["best", None, True, -2])
def test_only_a_step_is_resumed_from(tmp_path: Path, step: Any) -> None:
    """Anything else than the number of a step, as "best" of CheckpointManager.load, is an error that says so."""
    callback = module.ShardedCheckpointCallback(config_of(tmp_path))
    with pytest.raises(CheckpointingException, match=f"resume_path: {step!r} is no step; give its number, or -1"):
        callback.resume_path(step)


def test_the_folder_to_resume_from_is_for_one_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is gone when the training has ended, and holds no weights; nobody warns that keys are missing or unused."""
    with pytest.raises(Crash):
        trainer_of(tmp_path, config_of(tmp_path), At(10, crash)).train()
    trainer = trainer_of(tmp_path, config_of(tmp_path))
    cleaned = callback_of(trainer).resume_path(3)
    assert cleaned is not None
    shutil.rmtree(cleaned)  # as a cleaner of temporary folders does
    path = callback_of(trainer).resume_path(6)
    assert path is not None
    assert "unused keys" not in caplog.text
    assert sum(each.stat().st_size for each in Path(path).iterdir()) < 10_000
    with _logged(caplog, "transformers.trainer"):
        trainer.train(resume_from_checkpoint=path)
        assert "missing keys" not in caplog.text
        assert not Path(path).exists()
        logging.getLogger("transformers.trainer").warning("There were missing keys in the checkpoint model loaded: w")
    assert "missing keys" in caplog.text  # of other folders the Trainer warns as before


def test_a_training_with_model_init_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that the Trainer makes when the training begins may be a plain module of torch, too."""
    monkeypatch.delattr(Model, module._IGNORED, raising=False)  # of another test
    with pytest.raises(Crash):
        trainer_of(tmp_path, config_of(tmp_path), At(4, crash)).train()
    trainer = trainer_of(tmp_path, config_of(tmp_path), max_steps=4)
    trainer.model_init = Model
    resume(trainer)
    assert (trainer.state.global_step, callback_of(trainer)._begun_at) == (4, 3)


@contextmanager
def _logged(caplog: pytest.LogCaptureFixture, name: str) -> Iterator[None]:
    """Show caplog what a logger logs that hands nothing on."""
    logger = logging.getLogger(name)
    logger.addHandler(caplog.handler)
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)


def test_the_last_step_is_the_model_alone_unless_told(tmp_path: Path) -> None:
    """A finished training saves its model; with last_save_model_only=False a longer one goes on from it."""
    trainer_of(tmp_path, config_of(tmp_path), max_steps=6).train()
    with pytest.raises(CheckpointingException, match=r"step-6 has the model alone .*resume_path\(<an earlier step>\)"):
        resume(trainer_of(tmp_path, config_of(tmp_path), max_steps=9))
    resume(trainer_of(tmp_path, config_of(tmp_path), max_steps=9), 3)
    longer = tmp_path / "longer"
    whole = trainer_of(longer, config_of(longer, last_save_model_only=False), max_steps=6, lr_scheduler_type="constant")
    whole.train()
    trainer = trainer_of(longer, config_of(longer), max_steps=9, lr_scheduler_type="constant")
    resume(trainer)
    assert trainer.state.global_step == 9


def test_a_state_that_is_excluded_begins_anew(tmp_path: Path) -> None:
    """exclude_from_loading is heard: a resumed training may have another schedule."""
    with pytest.raises(Crash):
        trainer_of(tmp_path, config_of(tmp_path), At(7, crash)).train()
    rates: list[float] = []
    config = config_of(tmp_path, exclude_from_loading=("lr_scheduler",))
    trainer = trainer_of(tmp_path, config, At(7, lambda: rates.extend(trainer.lr_scheduler.get_last_lr())))
    resume(trainer)
    assert rates == [pytest.approx(0.05 * 17 / 18)] * len(trainer.optimizer.param_groups)


def test_another_managers_checkpoint_is_an_error(tmp_path: Path) -> None:
    """A folder whose checkpoints lack the Trainer's state is refused by name."""
    config = config_of(tmp_path)
    with CheckpointManager(config, {"model": small.model()}) as manager:
        manager.save(3)
    with pytest.raises(CheckpointingException, match="step-3 was not saved by a ShardedCheckpointCallback"):
        callback_of(trainer_of(tmp_path, config)).resume_path()


def test_what_the_trainer_saves_is_saved_here_too(tmp_path: Path) -> None:
    """With a save_strategy of its own, the Trainer's steps are ours, too."""
    trainer_of(tmp_path, config_of(tmp_path), save_strategy="steps", save_steps=4, max_steps=5).train()
    assert {path.name for path in (tmp_path / "ours").iterdir()} == {"step-3", "step-4", "step-5"}


@table("options", [{"save_strategy": "steps", "save_steps": 2}, {"save_strategy": "best"}])
def test_the_best_model_at_the_end_is_not_saved_as_the_last_step(
    options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The last step has its own weights; where the Trainer did not save it, no other's are, and a warning says so."""
    of_steps: dict[int, dict[str, torch.Tensor]] = {}
    best: dict[str, Any] = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,
    }
    trainer = trainer_of(
        tmp_path, config_of(tmp_path), eval_strategy="steps", eval_steps=2, max_steps=10, **best, **options
    )
    for step in (9, 10):
        trainer.add_callback(At(step, lambda step=step: of_steps.update({step: small.weights(trainer.model)})))
    trainer.train()
    weights, last = small.weights(trainer.model), 10 if options["save_strategy"] == "steps" else 9
    assert not torch.equal(weights["model.0.weight"], of_steps[last]["model.0.weight"])
    stored = dist_checkpointing.load_plain_tensors(tmp_path / "ours" / f"step-{last}")
    assert torch.equal(stored["model.model.0.weight"], of_steps[last]["model.0.weight"])
    assert ("step 10 is not saved as the last one" in caplog.text) == (last == 9)


def test_a_training_whose_best_model_is_gone_saves_its_last_step(tmp_path: Path) -> None:
    """On another machine, which lacks the Trainer's own checkpoints, no best weights are loaded at the end."""
    best: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "fixed", "save_strategy": "best"}

    def make(*callbacks: At) -> Trainer:
        made = trainer_of(
            tmp_path, config_of(tmp_path), *callbacks, eval_strategy="steps", eval_steps=3, max_steps=8, **best
        )
        made.compute_metrics = lambda _: {"fixed": 1.0}  # the first evaluation stays the best
        return made

    with pytest.raises(Crash):
        make(At(7, crash)).train()
    shutil.rmtree(tmp_path / "trainer")
    weights = resume(make())
    stored = dist_checkpointing.load_plain_tensors(tmp_path / "ours" / "step-8")
    assert torch.equal(stored["model.model.0.weight"], weights["model.0.weight"])


@pytest.mark.parametrize("has_main", [False, True])
def test_all_ranks_forget_a_best_model_that_the_main_rank_lacks(has_main: bool, tmp_path: Path, ranks: Ranks) -> None:
    """Nodes have disks of their own: what the main rank finds holds for all, or some would load and others wait."""
    assert ranks.run(2, _has_best, str(tmp_path), has_main) == [has_main, has_main]


def _has_best(folder: str, on_main: bool) -> bool:
    """Return whether a rank's state still has the best checkpoint: it is on the disk of the main rank, or the other."""
    is_here = Comm().is_main == on_main
    state = TrainerState(best_model_checkpoint=folder if is_here else f"{folder}/absent")
    module._forget_lost_best(state)
    return state.best_model_checkpoint is not None


def test_metrics_of_a_steps_evaluation_are_with_its_checkpoint(tmp_path: Path) -> None:
    """The best checkpoint by a metric is kept: its evaluation comes before it is saved."""
    config = config_of(tmp_path, keep_latest_k=2, keep_best_k=1, best_metric="eval_loss", best_mode="max")
    trainer = trainer_of(tmp_path, config, eval_strategy="steps", eval_steps=3)
    trainer.train()
    losses = {log["step"]: log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log}
    for path in (tmp_path / "ours").iterdir():
        content = dist_checkpointing.load_content_metadata(path)
        assert content is not None
        assert content["shardckpt_manager"]["metrics"]["eval_loss"] == losses[content["shardckpt_manager"]["step"]]
    assert f"step-{max(losses, key=lambda step: losses[step])}" in {path.name for path in (tmp_path / "ours").iterdir()}


def test_a_step_without_an_evaluation_has_no_metrics(tmp_path: Path) -> None:
    """The metrics of an earlier step are not taken for its own; those of all datasets of one are kept."""
    trainer = trainer_of(tmp_path, config_of(tmp_path), eval_strategy="steps", eval_steps=2, max_steps=10)
    data: Any = trainer.eval_dataset
    trainer.eval_dataset = {"one": data, "other": data}
    trainer.train()
    stored = {path.name: dist_checkpointing.load_content_metadata(path) or {} for path in (tmp_path / "ours").iterdir()}
    names = {name: {*content["shardckpt_manager"]["metrics"]} for name, content in stored.items()}
    assert {"eval_one_loss", "eval_other_loss"} <= names["step-6"]
    assert names["step-3"] == names["step-9"] == set()


def test_a_state_of_another_release_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint whose Trainer state has a field more, and one less, than this release of transformers."""

    def describe(progress: Any) -> Any:
        content = dataclasses.asdict(progress._state) | {"field_of_another_release": 1}
        del content["best_global_step"]
        return describe_object(content, "trainer_state", "unchecked")

    with monkeypatch.context() as patch:
        patch.setattr(module._Progress, "sharded_state_dict", describe)
        trainer_of(tmp_path, config_of(tmp_path, last_save_model_only=False), max_steps=3).train()
    trainer = trainer_of(tmp_path, config_of(tmp_path), max_steps=6)
    resume(trainer)
    assert trainer.state.global_step == 6


def test_a_preempted_training_stops_with_its_step_saved(tmp_path: Path) -> None:
    """After a SIGTERM the step is saved whole, the training ends, and a resumed one has the weights of the whole."""
    whole = trainer_of(tmp_path / "whole", None)
    whole.train()
    preempted = trainer_of(
        tmp_path, config_of(tmp_path, save_on_sigterm=True), At(4, lambda: os.kill(os.getpid(), signal.SIGTERM))
    )
    preempted.train()
    assert preempted.state.global_step < 3 * STEPS_AN_EPOCH
    trainer = trainer_of(tmp_path, config_of(tmp_path))
    assert small.is_equal(resume(trainer), small.weights(whole.model))


def test_damage_is_an_error(tmp_path: Path) -> None:
    """Where all checkpoints are damaged there is no path, nor a training from the beginning, but the error of load."""
    trainer_of(tmp_path, config_of(tmp_path), max_steps=3).train()
    (tmp_path / "ours" / "step-3" / "metadata.json").write_text("{")
    with pytest.raises(CorruptCheckpointError):
        dist_checkpointing.load({}, tmp_path / "ours" / "step-3")
    with CheckpointManager(config_of(tmp_path), {}) as manager, pytest.raises(CorruptCheckpointError) as caught:
        manager.load()
    trainer = trainer_of(tmp_path, config_of(tmp_path))
    text = "ours: no checkpoint there can be loaded, .* move them away"
    with pytest.raises(CorruptCheckpointError, match=text) as error:
        callback_of(trainer).resume_path()
    assert str(error.value) == str(caught.value)


def test_a_step_that_failed_its_verification_is_not_resumed_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two steps the newer one is marked: the path is that of the older, as load() would choose."""
    trainer_of(tmp_path, config_of(tmp_path), max_steps=6).train()
    newest = tmp_path / "ours" / "step-6"
    mark_checkpoint(newest, identify_save(newest), "failed", checked="digests", files=1, faults=["a file"])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = callback_of(trainer_of(tmp_path, config_of(tmp_path))).resume_path()
    assert path is not None
    assert '"global_step": 3' in (Path(path) / "trainer_state.json").read_text()


def test_a_trainer_that_has_trained_is_not_copied_with_its_callback(tmp_path: Path) -> None:
    """The callback of a training that has begun has a manager: a copy says what to do; a fresh one may be copied."""
    callback = callback_of(trainer := trainer_of(tmp_path, config_of(tmp_path)))
    copy.deepcopy(callback)
    trainer.train()
    with pytest.raises(CheckpointingException, match="cannot be copied or pickled"):
        copy.deepcopy(callback)
