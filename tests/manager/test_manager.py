from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.errors import CheckpointingException
from shardckpt.maintenance import convert_checkpoint
from shardckpt.manager import CheckpointConfig, CheckpointManager, KeepBest, KeepLatest, KeepPinned
from shardckpt.manager.garbage_collection import collect_garbage
from shardckpt.manager.writer import StepWriter
from tests import backends
from tests.manager import jobs
from tests.manager.folders import HOLDS, names_in, steps_of
from tests.manager.training import Progress, Training
from tests.resources import refuse_threads
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.ranks import Ranks


#: For what is done after the writing: the process, which takes seconds to start, in CI.
THREAD_FIRST = pytest.mark.parametrize("mode", ["async", pytest.param("async_with_pinned_mem", marks=pytest.mark.ci)])


@pytest.mark.parametrize(
    ("saved", "loaded", "strategy"), [(4, 2, ("torch_dist", 1)), (2, 4, "torch_dist"), (2, 1, ("ep", 1)), (1, 2, None)]
)
def test_another_number_of_ranks_loads(ranks: Ranks, tmp_path: Path, saved: int, loaded: int, strategy: Any) -> None:
    """Weights, moments and counters are the same at any world size; loaders go by their reshard function."""
    config = {"strategy": strategy}
    (expected, *_) = ranks.run(saved, jobs.trained, str(tmp_path), 4, config)
    for found in ranks.run(loaded, jobs.loaded, str(tmp_path), config):
        assert all(map(torch.equal, found, expected))


def test_a_converted_step_is_resumed(ranks: Ranks, tmp_path: Path) -> None:
    """One process converts a step of several ranks: it still has the states of each, for any number of ranks."""
    (expected, *_) = ranks.run(2, jobs.trained, str(tmp_path), 4, {})
    convert_checkpoint(tmp_path / "step-4", tmp_path / "step-4", "safetensors", overwrite=True)
    for loaded in (2, 1):
        for found in ranks.run(loaded, jobs.loaded, str(tmp_path), {}):
            assert all(map(torch.equal, found, expected))


def test_states_with_tensors_come_back_from_a_file(tmp_path: Path) -> None:
    """A step that a file of `torch.save` has had is a checkpoint again, whose states load; random numbers stay."""
    kept = torch.nn.Linear(2, 2)
    ema = Progress()
    ema.history = [{"shadow": dict(kept.state_dict())}, 5]
    states = {"model": kept, "ema": ema}
    with CheckpointManager(CheckpointConfig(folder=str(tmp_path / "a"), interval=1), states) as manager:
        manager.save(1)
    convert_checkpoint(tmp_path / "a" / "step-1", tmp_path / "one.pt", "torch")
    convert_checkpoint(tmp_path / "one.pt", tmp_path / "again", "torch_dist")
    model, ema = torch.nn.Linear(2, 2), Progress()
    folder, path = str(tmp_path / "b"), str(tmp_path / "again")
    config = CheckpointConfig(folder=folder, initial_load_path=path, initial_load_model_only=False)
    before = torch.get_rng_state()
    with CheckpointManager(config, {"model": model, "ema": ema}) as manager:
        assert manager.load()
    assert torch.get_rng_state().equal(before)
    loaded, number = ema.history
    assert number == 5
    for key, value in kept.state_dict().items():
        assert value.equal(model.state_dict()[key])
        assert value.equal(loaded["shadow"][key])


def test_what_is_each_ranks_own_is_not_loaded_by_other_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """A loader without a reshard function is an error at another world size that says what to do."""
    ranks.run(4, jobs.trained, str(tmp_path), 2, {})
    messages = set(ranks.run(2, jobs.load_error, str(tmp_path), {}))
    (message,) = messages
    assert "'dataloader' was saved by 4 ranks" in message
    assert "reshard=" in message
    excluding = {"exclude_from_loading": ("dataloader",)}
    assert ranks.run(2, jobs.load_outcome, str(tmp_path), excluding) == [(2, [])] * 2


def test_what_is_each_ranks_own_is_not_saved_as_if_all_had_it(ranks: Ranks, tmp_path: Path) -> None:
    """A state that differs between ranks, not wrapped in PerRank, is an error: one rank's would be kept silently."""
    (message,) = set(ranks.run(2, jobs.own_state_without_wrapper, str(tmp_path)))
    assert "dataloader" in message
    assert "rank 1" in message


@THREAD_FIRST
def test_close_waits(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    """When close has returned, what was saved is whole in its place, whatever the mode; nothing is saved after it."""
    assert ranks.run(2, jobs.closed_without_wait, str(tmp_path), mode) == [{"step-1"}] * 2


@THREAD_FIRST
def test_the_last_save_has_no_side_effects(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    """The model alone, cast, with integers as they are; the training's own states stay, and full saves go on."""
    config = {"async_mode": mode, "export_dtype": "bfloat16"}
    for dtypes, steps, sizes in ranks.run(2, jobs.after_the_last_step, str(tmp_path), config):
        assert set(dtypes) == {torch.float32}
        assert steps == [2, 3, 4]
        assert sizes == [2]


def test_integers_and_buffers_are_not_cast(tmp_path: Path) -> None:
    """The export dtype is for floating-point numbers: BatchNorm's counter stays an integer, a float32 model is cast."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    config = CheckpointConfig(folder=tmp_path, export_dtype=torch.bfloat16)
    with CheckpointManager(config, {"model": model}) as manager:
        manager.save(7, last_step=True)
    stored = dist_checkpointing.load_plain_tensors(tmp_path / "step-7")
    assert stored.pop("model.1.num_batches_tracked").dtype == torch.int64
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}


@backends.both_in_proof
@pytest.mark.parametrize("damage", ["bytes", "missing", "marker"])
def test_the_newest_damaged_one_is_skipped(ranks: Ranks, tmp_path: Path, damage: str) -> None:
    """A warning names it and all ranks load the one before, also where the damage is found only by reading."""
    ranks.run(2, jobs.trained, str(tmp_path), 6, {})
    newest = tmp_path / "step-6"
    data = max(newest.glob(backends.current().data_files), key=lambda path: path.stat().st_size)
    if damage == "bytes":
        content = bytearray(data.read_bytes())
        content[len(content) // 4 :] = bytes(len(content) - len(content) // 4)  # tensors come last
        data.write_bytes(content)
    elif damage == "missing":
        data.unlink()
    else:
        (newest / "metadata.json").write_text("{")
    outcomes = ranks.run(2, jobs.load_outcome, str(tmp_path), {})
    assert [step for step, _ in outcomes] == [4, 4]
    assert any("step 6" in warning for warning in outcomes[0][1])


def test_retention_leaves_one_while_the_next_is_written(tmp_path: Path) -> None:
    """A save in flight counts for no policy: until it is committed, the checkpoint before it stays, whole."""
    keep_nothing: Any = lambda _: ()  # noqa: E731 - as users write them
    config = CheckpointConfig(folder=tmp_path, interval=1, async_mode="async", keep_latest_k=0)
    progress = Progress()
    with CheckpointManager(config, {"train_state": progress}) as manager:
        for step in range(1, 5):
            progress.step = step
            assert manager.save(step)  # the next call commits it
            collect_garbage(steps_of(tmp_path), [keep_nothing])
            assert [found.step for found in steps_of(tmp_path).committed()] == list(range(1, step))[-1:]
        manager.wait()
        collect_garbage(steps_of(tmp_path), [keep_nothing])
        assert names_in(tmp_path) == {"step-4", HOLDS}
        assert manager.load()


def test_the_best_are_kept(tmp_path: Path) -> None:
    """By a metric given to save; what has none, or is no number, is never the best; a new manager knows the old."""
    config = {"keep_latest_k": 1, "keep_best_k": 2, "best_metric": "loss", "interval": 1}
    losses = {1: 0.5, 2: 0.1, 3: float("nan"), 4: 0.3, 5: 0.2, 6: None, 7: 0.9}
    for step, loss in losses.items():
        training = Training(tmp_path, **config)
        with training.manager as manager:
            manager.save(step, metrics={} if loss is None else {"loss": loss})
            manager.wait()
    assert names_in(tmp_path) == {"step-2", "step-5", "step-7"}


def _every_third(steps: Mapping[int, Any]) -> list[int]:
    return [step for step in steps if step % 3 == 0]


def _retained(folder: str, steps: list[int]) -> list[int]:
    """What is left when a new run saves each step, with a loss of its own on every rank."""
    policies = [KeepLatest(1), KeepBest("loss", 1), KeepPinned([2]), _every_third]
    config = CheckpointConfig(folder=folder, retention=policies)
    for step in steps:
        with CheckpointManager(config, {"train_state": Progress()}) as manager:
            loss = abs(step - 4) if dist.get_rank() == 0 else step
            manager.save(step, force=True, metrics={"loss": loss})
            manager.wait()
    return manager.steps()


def test_policies_keep_over_restarts(ranks: Ranks, tmp_path: Path) -> None:
    """Pinned, best and chosen steps outlive the runs that saved them: the main rank's metrics come from the disk."""
    assert ranks.run(2, _retained, str(tmp_path), list(range(1, 9))) == [[2, 3, 4, 6, 8]] * 2


def test_when_it_saves(tmp_path: Path) -> None:
    """At the interval, at step 1 if that is asked for, and when forced; never twice the same step."""
    training = Training(tmp_path, interval=3)
    with training.manager as manager:
        assert [step for step in range(8) if manager.save(step)] == [3, 6]
        assert manager.save(7, force=True)
        assert not manager.save(7, force=True)
    with Training(tmp_path / "first", interval=3, enable_first_step_checkpoint=True).manager as manager:
        assert [step for step in range(5) if manager.save(step)] == [1, 3]


@table("mode", ["disabled", "async"])
def test_no_more_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Where no thread can be started, the calling one saves, removes old steps, and loads."""
    refuse_threads(monkeypatch)
    with Training(tmp_path, keep_latest_k=2, interval=1, async_mode=mode).manager as manager:
        assert all(manager.save(step) for step in (1, 2, 3))
        manager.wait()
        assert manager.steps() == [2, 3]
        assert manager.load()


def test_continuous_checkpointing_never_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While the disk hangs a step goes on: it returns False, and a warning names it; only a forced save waits."""
    answers = threading.Event()
    sync, advance = os.fsync, StepWriter.advance

    def hang(descriptor: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert answers.wait(60)
        sync(descriptor)

    def advance_and_answer(writer: StepWriter, *, blocking: bool = False) -> None:
        if blocking and writer.busy:
            answers.set()
        advance(writer, blocking=blocking)

    monkeypatch.setattr(os, "fsync", hang)
    monkeypatch.setattr(StepWriter, "advance", advance_and_answer)
    training = Training(tmp_path, interval=1, async_mode="async", on_busy="skip")
    with training.manager as manager:
        assert manager.save(1)
        for step in (2, 3):
            assert not manager.save(step)
            manager.maybe_wait_for_staging()
        assert manager.steps() == []
        assert not answers.is_set()
        assert manager.save(4, force=True)
        assert answers.is_set()
    assert names_in(tmp_path) == {"step-1", "step-4"}
    for step in (2, 3):
        assert f"step {step} is skipped: the checkpoint of step 1 is still being written" in caplog.text


def test_a_rewound_run_keeps_what_it_saves(tmp_path: Path) -> None:
    """Where an earlier step was loaded, the steps that it saves are not removed as older than those ahead."""
    with Training(tmp_path).manager as manager:
        for step in (2, 4, 6):
            manager.save(step)
    training = Training(tmp_path, load_step=2, interval=1, keep_latest_k=2)
    with training.manager as manager:
        assert manager.load()
        assert manager.save(3)
        manager.wait()
        assert manager.steps() == [2, 3, 4, 6]
        assert manager.save(4)
        manager.wait()
        assert manager.steps() == [3, 4, 6]


def test_disabled_managers_do_nothing(tmp_path: Path) -> None:
    """Neither saves nor loads nor looks; one that only loads saves nothing."""
    training = Training(tmp_path / "none", enable_checkpoint=False)
    with training.manager as manager:
        assert not manager.save(2, force=True)
        assert not manager.load()
        assert manager.steps() == []
        with pytest.raises(CheckpointingException, match=r"metrics: no step 2: this CheckpointManager saves and loads"):
            manager.metrics(2)
        manager.maybe_wait_for_staging()
        manager.wait()
    assert not (tmp_path / "none").exists()
    with Training(tmp_path, load_only=True).manager as manager:
        assert not manager.save(2, force=True, last_step=True)
        assert not manager.load()
    assert not list(tmp_path.iterdir())


def test_the_configuration_is_stored(tmp_path: Path) -> None:
    """As JSON, with step, states and metrics, in what load_content_metadata gives."""
    training = Training(tmp_path, interval=2)
    with training.manager as manager:
        manager.save(2, metrics={"loss": 0.25})
    found = dist_checkpointing.load_content_metadata(tmp_path / "step-2")
    assert found is not None
    content = found["shardckpt_manager"]
    assert content["step"] == 2
    assert content["metrics"] == {"loss": 0.25}
    assert content["states"] == ["model", "optimizer", "lr_scheduler", "dataloader", "train_state", "rng"]
    assert CheckpointConfig(**content["config"]) == manager.config


def test_states_that_are_excluded_or_new(tmp_path: Path) -> None:
    """Excluded ones stay as they are; one that the checkpoint lacks is an error until it is excluded."""
    training = Training(tmp_path)
    with training.manager:
        training.run(4)
    fresh = Training(tmp_path, exclude_from_loading=("lr_scheduler", "dataloader"))
    with fresh.manager as manager:
        assert manager.load()
    assert (fresh.progress.step, fresh.schedule.last_epoch, fresh.loader.position) == (4, 0, 0)
    ema, new = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with (
        Training(tmp_path, states={"ema": ema}).manager as manager,
        pytest.raises(CheckpointingException, match=r"no state 'ema'.*exclude_from_loading"),
    ):
        manager.load()
    with Training(tmp_path, states={"ema": ema}, exclude_from_loading=("ema",)).manager as manager:
        assert manager.load()
    with Training(tmp_path, states={"ema": ema}).manager as manager:
        manager.save(6)
    with Training(tmp_path, states={"ema": new}).manager as manager:
        assert manager.load()
    assert torch.equal(new.weight, ema.weight)
    with pytest.raises(CheckpointingException, match="'emma' is no state"):
        Training(tmp_path, exclude_from_loading=("emma",))
    with pytest.raises(CheckpointingException, match="exclude lr_scheduler, too"):
        Training(tmp_path, exclude_from_loading=("optimizer",))


def test_the_seed_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """Step 0 has the model alone, saved by one process; a run of any size begins with it, and all else afresh."""
    training = Training(tmp_path, create_seed_checkpoint=True)
    with training.manager as manager:
        assert manager.save(0)
    (found, _) = ranks.run(2, jobs.load_outcome, str(tmp_path), {})
    assert found == (0, [])
    expected = jobs.weights(training)[:4]
    for loaded in ranks.run(2, jobs.loaded, str(tmp_path), {}):
        assert all(map(torch.equal, loaded[:4], expected))


def test_where_to_begin(tmp_path: Path) -> None:
    """The initial path counts where the folder has no checkpoint; its model alone, or all of it."""
    training = Training(tmp_path / "a")
    with training.manager:
        training.run(4)
    first = str(tmp_path / "a" / "step-2")
    fresh = Training(tmp_path / "b", initial_load_path=first)
    with fresh.manager as manager:
        assert manager.load()
        assert fresh.progress.step == 0
        fresh.run(2)
    whole = Training(tmp_path / "c", initial_load_path=first, initial_load_model_only=False)
    with whole.manager as manager:
        assert manager.load()
    assert whole.progress.step == 2
    ignored = Training(tmp_path / "a", initial_load_path=first)
    with ignored.manager as manager:
        assert manager.load()
    assert ignored.progress.step == 4


def test_a_manager_takes_over_from_saves_without_one(tmp_path: Path) -> None:
    """What ``dist_checkpointing.save`` was given loads: a schedule, too, which it was given as a plain dict."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    schedule.step()
    state = {**to_sharded_state_dict(model, optimizer), "lr_scheduler": schedule.state_dict(), "iteration": 5}
    dist_checkpointing.save(state, tmp_path / "step-5")
    other = torch.nn.Linear(2, 2)
    states: dict[str, Any] = {"model": other, "optimizer": torch.optim.SGD(other.parameters(), lr=1.0, momentum=0.5)}
    states["lr_scheduler"] = torch.optim.lr_scheduler.StepLR(states["optimizer"], 1, gamma=0.5)
    with CheckpointManager(CheckpointConfig(folder=tmp_path), states) as manager:
        assert manager.load()
        assert manager.loaded_step == 5
    assert torch.equal(other.weight, model.weight)
    assert states["optimizer"].param_groups[0]["lr"] == 0.5
    assert states["lr_scheduler"].state_dict() == schedule.state_dict()
    manager = CheckpointManager(CheckpointConfig(folder=tmp_path), {**states, "iteration": Progress()})
    with manager, pytest.raises(CheckpointingException, match="has no state 'iteration'"):  # a number is no state
        manager.load()


def test_the_model_to_begin_with_has_a_name(tmp_path: Path) -> None:
    """Where no state is called model, to load the model alone is an error, and not a load of nothing."""
    with CheckpointManager(
        CheckpointConfig(folder=tmp_path / "a", interval=1), {"net": torch.nn.Linear(2, 2)}
    ) as manager:
        manager.save(1)
    config = CheckpointConfig(folder=tmp_path / "b", initial_load_path=tmp_path / "a" / "step-1")
    manager = CheckpointManager(config, {"net": torch.nn.Linear(2, 2)})
    with manager, pytest.raises(CheckpointingException, match=r"no state is named 'model'.*initial_load_model_only"):
        manager.load()


def test_a_checkpoint_of_the_model_alone_is_not_taken_for_all(tmp_path: Path) -> None:
    """A load after the last save says what to do, instead of going on with a fresh optimizer."""
    training = Training(tmp_path)
    with training.manager as manager:
        training.run(2)
        manager.save(3, last_step=True)
    with Training(tmp_path).manager as manager:
        with pytest.raises(CheckpointingException, match=r"initial_load_path(.|\n)*load\(step=2\)"):
            manager.load()
        assert manager.load(2)
    model = Training(tmp_path / "other", initial_load_path=str(tmp_path / "step-3"))
    with model.manager as manager:
        assert manager.load()
    assert all(map(torch.equal, jobs.weights(model)[:4], jobs.weights(training)[:4]))


def test_hugging_face_at_the_end_and_at_the_beginning(ranks: Ranks, tmp_path: Path) -> None:
    """The last step is exported beside its checkpoint; a new run begins with that folder."""
    config = {"last_save_in_hf": True, "export_dtype": "bfloat16"}
    ranks.run(2, jobs.after_the_last_step, str(tmp_path / "a"), config)
    folder = tmp_path / "a" / "step-3-hf"
    assert (folder / "model.safetensors").exists()
    begin = {"initial_load_path": str(folder), "initial_load_in_hf": True}
    (one, two) = ranks.run(2, jobs.begun_weights, str(tmp_path / "b"), begin)
    stored = dist_checkpointing.load_plain_tensors(tmp_path / "a" / "step-3")
    for tensor, name in zip(one, ("0.weight", "0.bias", "3.weight", "3.bias"), strict=False):
        assert torch.equal(tensor, stored[f"model.{name}"].float())
    assert all(map(torch.equal, one, two))


@table("mode", ["disabled", "async"])
def test_a_store_in_the_place_of_a_folder(tmp_path: Path, mode: str) -> None:
    """Saving, finding, loading and removing work on a URL."""
    url = f"memory://managed-{mode}/run"
    training = Training(url, interval=1, keep_latest_k=2, async_mode=mode)
    with training.manager as manager:
        training.run(5)
        manager.wait()
        assert manager.steps() == [4, 5]
    fresh = Training(url)
    with fresh.manager as manager:
        assert manager.load()
    assert fresh.progress.step == 5
    assert all(map(torch.equal, jobs.weights(fresh), jobs.weights(training)))


def test_a_step_on_a_store_can_be_saved_again(tmp_path: Path) -> None:
    """A run that was rewound comes to a step that is there already: it takes its place."""
    url = "memory://managed-again/run"
    with Training(url, interval=1).manager as manager:
        for step in (1, 2):
            manager.save(step)
    training = Training(url, interval=1, load_step=1)
    with training.manager as manager:
        assert manager.load()
        training.progress.step = 2
        assert manager.save(2)
    fresh = Training(url)
    with fresh.manager as manager:
        assert manager.load()
    assert fresh.progress.step == 2


def test_wrong_states_are_refused(tmp_path: Path) -> None:
    """By name, before anything is saved."""
    config = CheckpointConfig(folder=tmp_path)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    for states, message in (
        ({"model": object()}, "'model' is an object of type object"),
        ({"optimizer": optimizer}, "also give its modules"),
        ({"model": model, "sgd": optimizer}, "give optimizers as 'optimizer'"),
        ({"forms": model}, "other text"),
    ):
        with pytest.raises(CheckpointingException, match=message):
            CheckpointManager(config, states)


def test_only_a_step_is_discarded_after(tmp_path: Path) -> None:
    """A text, a bool or None is no step: the error says what to give, and nothing is removed."""
    training = Training(tmp_path)
    with training.manager as manager:
        training.run(2)
        manager.wait()
        before = manager.steps()
        for wrong in ("1", True, None, 1.5):
            with pytest.raises(CheckpointingException, match="is no step; give the last step that stays"):
                manager.discard_after(wrong)  # type: ignore[arg-type]
        assert manager.steps() == before


def test_a_wrong_variable_is_said_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manager is refused where a variable that it may need in hours has no value of its kind."""
    monkeypatch.setenv("SHARDCKPT_REMOTE_PART_MIB", "1")
    with pytest.raises(
        CheckpointingException, match="SHARDCKPT_REMOTE_PART_MIB='1': expected a whole number from 5 to"
    ):
        CheckpointManager(CheckpointConfig(folder=str(tmp_path)), {"model": torch.nn.Linear(1, 1)})
