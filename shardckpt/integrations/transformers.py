"""transformers: a ``Trainer`` that saves and resumes through a CheckpointManager: ``callbacks=[...]``."""

# ruff: noqa: ARG002 - a callback is given more than it uses
from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import SAFE_WEIGHTS_NAME

from shardckpt import dist_checkpointing
from shardckpt.adapters.leaves import describe_object
from shardckpt.distributed.comm import Comm
from shardckpt.distributed.error_report import replace_text
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, parse_globals
from shardckpt.manager.manager import CheckpointManager
from shardckpt.manager.rng import RandomState
from shardckpt.manager.step_names import parse_number
from shardckpt.manifest.names import CONTENT_KEY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import TrainerControl, TrainingArguments

    from shardckpt.manager.config import CheckpointConfig
    from shardckpt.mapping.sharded_object import ShardedObject

logger = logging.getLogger(__name__)

#: The logger of the warning that a folder lacks weights.
_TRAINER = logging.getLogger("transformers.trainer")
#: The key of the Trainer's state in a checkpoint.
_STATE = "trainer_state"
#: Fields of it that differ between ranks: not saved.
_PER_RANK = ("is_local_process_zero", "is_world_process_zero")
#: Fields of it that a load restores: how far the training has come.
_PROGRESS = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
#: An attribute that the Trainer reads where a folder lacks weights. Only the models of transformers have it.
_IGNORED = "_keys_to_ignore_on_save"


class ShardedCheckpointCallback(TrainerCallback):
    """Saves model, optimizer, scheduler, Trainer state and random generators with a CheckpointManager.

    ``trainer.train(resume_from_checkpoint=callback.resume_path())`` resumes at the newest checkpoint, with the same
    batches, random numbers and weights as without the interruption. Only a data set or collator that draws random
    numbers in the training's process, as one that masks words, draws others for the first batches, which the Trainer
    fetches before it restores the generators. ``trainer.train()`` alone resumes the states, but starts at the beginning
    of the data, because a callback cannot set the position in them; a warning says so.

    Pass ``TrainingArguments(save_strategy="no")``, or the Trainer saves its own checkpoints as well, and each of these
    steps is also saved here. A step is saved when the next one begins, with the metrics of its evaluation. The last
    step is saved when the training ends (``last_save_model_only``: the model alone); with ``load_best_model_at_end``,
    when the Trainer saves it, since the model has another step's weights at the end.

    The Trainer passes a callback neither its GradScaler (fp16) nor other callbacks: their states are not saved. Where
    it shards the model itself, :meth:`resume_path` raises (``fsdp``, ``deepspeed``), and DeepSpeed cannot be used.

    Args:
        config: When, how and where to save.
        allow_globals: As for :class:`shardckpt.manager.CheckpointManager`.

    Attributes:
        manager: The manager of the current or last training.

    Example::

        callback = ShardedCheckpointCallback(CheckpointConfig(folder="run", interval=100))
        trainer = Trainer(model, TrainingArguments(save_strategy="no"), train_dataset=data, callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.resume_path())
    """

    manager: CheckpointManager | None = None

    def __init__(self, config: CheckpointConfig, *, allow_globals: Iterable[Any] = ()) -> None:
        self._config = config
        self._allow_globals = parse_globals(allow_globals)
        self._args: TrainingArguments | None = None
        #: The metrics of the last step with an evaluation, by its number.
        self._metrics: dict[int, dict[str, float]] = {}
        #: The step and folder of :meth:`resume_path`, until the training ends: `auto_find_batch_size` begins it again.
        self._resumed: tuple[int, Path] | None = None
        self._has_begun = False
        self._random: Any = None
        self._begun_at = 0
        #: Whether on_save has saved the last step: before on_train_end the Trainer may load the best model's weights.
        self._has_saved_last = False

    def resume_path(self, step: int = -1) -> str | None:
        """Collective: return what ``Trainer.train`` takes as ``resume_from_checkpoint``; call it before the training.

        Args:
            step: The step to resume from; -1 for the configuration's ``load_step``, by default the newest.

        Returns:
            A temporary folder of a few kilobytes, for one call of ``train``. It has the Trainer's state, from which the
            Trainer finds its position in the data, and no weights: they are loaded from the checkpoint when the
            training begins. So the Trainer's warning of missing keys is not logged. None where there is no checkpoint:
            the training starts from step 0.

        Raises:
            CheckpointingException: there is no checkpoint of that step, or the Trainer shards the model itself; or all
                checkpoints are damaged, as from :meth:`shardckpt.manager.CheckpointManager.load`. A newest step whose
                Trainer state is damaged is skipped with a warning; one whose weights are is an error of ``train``.
        """
        if self._args is not None and (self._args.fsdp or self._args.deepspeed):
            raise CheckpointingException(
                "with fsdp or deepspeed the Trainer reads the model from the folder that it resumes from, and only its "
                "own checkpoints contain it: call trainer.train() without it, which starts at the beginning of the data"
            )
        if step != -1:
            step = parse_number(step, "resume_path", "its number, or -1 for what load_step says")
        self._close_manager()
        read_only = {"load_only": True, "save_rng": False, "exclude_from_loading": ()}
        with CheckpointManager(self._config.model_copy(update=read_only), {}) as manager:
            step = step if step >= 0 else self._config.load_step
            if step < 0:
                resumed = self._resume_newest(manager)
            elif step in (steps := manager.steps()):
                resumed = step, self._resume_folder(step)
            else:
                raise CheckpointingException(f"{self._config.folder} has no checkpoint of step {step}; it has {steps}")
        self._forget()
        self._resumed, self._has_begun = resumed, False
        if resumed is not None:
            _TRAINER.addFilter(_is_to_be_logged)
        return None if resumed is None else str(resumed[1])

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        """Check the Trainer's arguments, and prepare the model for a folder without weights."""
        if args.deepspeed:
            raise CheckpointingException(
                "DeepSpeed does not expose the optimizer's state: leave this callback out and let the Trainer save"
            )
        self._args, model = args, parts.get("model")
        if model is not None and not hasattr(model, _IGNORED):
            setattr(model, _IGNORED, None)
            if not type(model).__module__.startswith("torch."):  # model_init makes another model for the training
                setattr(type(model), _IGNORED, None)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Collective: load the chosen or the newest checkpoint, if there is one."""
        optimizer = parts.get("optimizer")
        states = {
            "model": parts.get("model"),
            "optimizer": getattr(optimizer, "optimizer", optimizer),  # Accelerate's wrapper has torch's own
            "lr_scheduler": parts.get("lr_scheduler"),
            _STATE: _Progress(state),
        }
        position = state.global_step
        self._close_manager()
        self.manager = CheckpointManager(self._config, states, allow_globals=self._allow_globals)
        _TRAINER.removeFilter(_is_to_be_logged)
        if self._has_begun and self._resumed is not None and self._resumed[0] != position:
            self._forget()  # after a failed training the Trainer has begun another one, without the folder
        self._has_begun = True
        step = self._resumed[0] if self._resumed else -1
        seeded = RandomState().state_dict()
        try:
            is_loaded = self.manager.load(step)
        except CorruptCheckpointError as exc:
            if step < 0:
                raise
            # too late for another step: the Trainer has found its position in the data
            text = f"{exc}; to resume from another step call resume_path(<an earlier step>)"
            raise replace_text(exc, text) from exc.__cause__
        if is_loaded:
            _forget_lost_best(state)
            self._random = RandomState().state_dict()
            # a sampler that draws from the generators (group_by_length) orders the first epoch by the seed
            RandomState().load_state_dict(seeded)
            _warn_of_other_order(args, state)
        if state.global_step != position:
            logger.warning(
                "resumed at step %d, with the data from their beginning: to resume at the same batch call "
                "trainer.train(resume_from_checkpoint=callback.resume_path())",
                state.global_step,
            )
        self._begun_at = state.global_step
        self._metrics = {}

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Collective: save the previous step, if it is due."""
        if self._random is not None:  # the Trainer has used the generators to find its batch: restore them now
            RandomState().load_state_dict(self._random)
            self._random = None
        self._save(state, control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Collective: save this step, because the Trainer saves it."""
        self._has_saved_last = args.load_best_model_at_end and control.should_training_stop
        self._save(state, control, force=True, last_step=self._has_saved_last)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        """Store the metrics for the checkpoint of this step; each dataset of several has an evaluation of its own."""
        found = parts.get("metrics") or {}
        numbers = {name: value for name, value in found.items() if isinstance(value, (int, float))}
        self._metrics = {state.global_step: self._metrics.get(state.global_step, {}) | numbers}

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Collective: save the last step, unless the job was preempted; wait until all saves are durable."""
        if self.manager is None:
            return
        has_best = args.load_best_model_at_end and state.best_model_checkpoint is not None
        if has_best and not self._has_saved_last:
            logger.warning(
                "step %d is not saved as the last one: the Trainer did not save it, and the model has the best weights "
                "now, of %s (load_best_model_at_end)",
                state.global_step,
                state.best_model_checkpoint,
            )
        if not has_best and not self.manager.preempted and state.global_step > self._begun_at:
            self.manager.save(state.global_step, last_step=True, metrics=self._metrics.get(state.global_step))
        self.manager.close()
        self._forget()

    def _save(
        self, state: TrainerState, control: TrainerControl, *, force: bool = False, last_step: bool = False
    ) -> None:
        """Collective: save this step if it is due or forced; stop the training once the job is preempted."""
        manager = self.manager
        if manager is None or 0 < state.global_step <= self._begun_at:
            return
        if not manager.preempted:
            manager.save(state.global_step, force, last_step=last_step, metrics=self._metrics.get(state.global_step))
        if manager.preempted:
            control.should_training_stop = True

    def _close_manager(self) -> None:
        """Collective: commit the pending saves of a training that failed, such as one of ``auto_find_batch_size``."""
        if self.manager is not None:
            self.manager.close()

    def _resume_newest(self, manager: CheckpointManager) -> tuple[int, Path] | None:
        """Collective: return the newest step whose Trainer state is whole, with a folder to resume from."""
        damaged: list[int] = []
        while (found := manager.latest_step(damaged)) is not None:
            try:
                return found, self._resume_folder(found)
            except CorruptCheckpointError as exc:  # noqa: PERF203 - a load takes longer; every rank gets the same error
                if Comm().is_main:
                    logger.warning("step %d in %s is skipped, damaged: %s", found, self._config.folder, exc)
                damaged.append(found)
        return None

    def _resume_folder(self, step: int) -> Path:
        """Collective: return a new folder with the Trainer's state and a file of weights without any."""
        comm, path = Comm(), f"{self._config.folder}/step-{step}"
        comm.main_runs("checking the checkpoint's content", lambda: _check_content(path))
        requested = {_STATE: describe_object(None, _STATE, "unchecked")}
        # the training loads the weights: that nothing asks for them here is no news
        loaded = dist_checkpointing.load(requested, path, allow_globals=self._allow_globals, on_unused="ignore")
        with ExitStack() as on_error:
            with comm.collective_phase("making a folder to resume from"):
                folder = Path(tempfile.mkdtemp(prefix="shardckpt-resume-"))
                atexit.register(shutil.rmtree, folder, ignore_errors=True)  # of a training that fails
                on_error.callback(shutil.rmtree, folder)
                known = {field.name for field in dataclasses.fields(TrainerState)}  # another release may have others
                content = {name: value for name, value in loaded[_STATE].items() if name in known}
                TrainerState(**content).save_to_json(str(folder / TRAINER_STATE_NAME))
                # without a file of weights the Trainer refuses the folder; from an empty one it loads nothing
                safetensors.torch.save_file({}, folder / SAFE_WEIGHTS_NAME, {"format": "pt"})
            on_error.pop_all()
        return folder

    def _forget(self) -> None:
        """Remove the folder of :meth:`resume_path`."""
        if self._resumed is not None:
            shutil.rmtree(self._resumed[1], ignore_errors=True)  # a cleaner of temporary folders may have been faster
            self._resumed = None


def _warn_of_other_order(args: TrainingArguments, state: TrainerState) -> None:
    """Warn where the rest of the epoch has other batches than without the interruption."""
    # transformers 5.0 has a flag instead
    strategy = getattr(args, "train_sampling_strategy", getattr(args, "group_by_length", None))
    if strategy in ("group_by_length", True) and (state.epoch or 0) >= 1:
        logger.warning(
            "resumed at epoch %s, with other batches than without the interruption: group_by_length draws the order of "
            "each epoch from the random generators, whose states at its beginning are not saved",
            state.epoch,
        )


def _is_to_be_logged(record: logging.LogRecord) -> bool:
    """Return False for the Trainer's warning of missing keys: a folder without weights lacks all."""
    return "missing keys in the checkpoint model loaded" not in record.getMessage()


class _Progress:
    """A Trainer's state as a CheckpointManager saves it: the main rank's is stored."""

    def __init__(self, state: TrainerState) -> None:
        self._state = state

    def sharded_state_dict(self) -> ShardedObject:
        """Return the fields that are the same on all ranks, as one object."""
        content = {name: value for name, value in dataclasses.asdict(self._state).items() if name not in _PER_RANK}
        return describe_object(content, _STATE, "unchecked")

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Restore how far the training has come; limits and intervals stay as this run's arguments set them."""
        for name in _PROGRESS:
            if name in content:  # an older transformers lacks some
                setattr(self._state, name, content[name])


def _forget_lost_best(state: TrainerState) -> None:
    """Collective: forget a best checkpoint that is gone, as with another machine's disk: it cannot be loaded."""
    best, comm = state.best_model_checkpoint, Comm()
    # as the Trainer asks, without errors
    is_lost = best is not None and not os.path.isdir(best)  # noqa: PTH112
    if comm.main_runs("finding the best checkpoint", lambda: is_lost):
        if comm.is_main:
            logger.warning("the Trainer's best checkpoint %s is gone: the last weights stay at the end", best)
        state.best_model_checkpoint = None


def _check_content(path: str) -> None:
    """Raise if a training cannot resume from a checkpoint."""
    content = (dist_checkpointing.load_content_metadata(path) or {}).get(CONTENT_KEY, {})
    if content.get("model_only"):
        raise CheckpointingException(
            f"{path} has the model alone (last_save_model_only): the training that saved it had ended. To train on "
            "from its weights pass it as initial_load_path, with another folder; or call resume_path(<an earlier step>)"
        )
    if _STATE not in content.get("states", ()):
        raise CheckpointingException(
            f"{path} was not saved by a ShardedCheckpointCallback: it lacks the Trainer's state, by which the Trainer "
            "finds its position in the data"
        )


__all__ = ["ShardedCheckpointCallback"]
