"""The settings of a CheckpointManager, with torchtitan's names and meanings, validated when they are given."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from shardckpt.engine.locations import expand_home
from shardckpt.errors import (
    CheckpointingException,
    ConfigurationError,
    SettingFault,
    ask_nearest,
    show_given,
)
from shardckpt.huggingface.adapters import find_adapter_mapping
from shardckpt.huggingface.dtypes import parse_dtype
from shardckpt.huggingface.export_budget import LEAST_EXPORTING, LEAST_EXPORTING_ON_STORES
from shardckpt.huggingface.models import find_mapping
from shardckpt.manager.faults import describe_unknown, list_faults, make_fault, refuse_truth
from shardckpt.manager.other_names import find_hint
from shardckpt.manager.retention import (
    RETENTION,
    KeepBest,
    KeepEvery,
    KeepLatest,
    MetricName,
    RetentionPolicy,
)
from shardckpt.manager.save_policies import SAVING
from shardckpt.manager.setting_checks import check_assets, find_step_saver, list_accepts
from shardckpt.manager.step_names import parse_step
from shardckpt.manager.steps import MODEL_PREFIX
from shardckpt.manifest.names import LINKS
from shardckpt.plugins.registry import parse_keys
from shardckpt.storage.memory_budget import LEAST_READING, explain_small_budget, parse_memory_budget, parse_size
from shardckpt.storage.store_errors import mask_password
from shardckpt.strategy import StoresHubFolders

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardckpt.strategy import SaveStrategy

_PlacePath = Annotated[str, Field(min_length=1)]
_Count = Annotated[int, Field(ge=0)]


class AsyncMode(str, Enum):
    """Who writes a checkpoint: see ``async_mode`` of :class:`CheckpointConfig`."""

    DISABLED = "disabled"
    ASYNC = "async"
    ASYNC_WITH_PINNED_MEM = "async_with_pinned_mem"

    @classmethod
    def _missing_(cls, value: object) -> AsyncMode | None:
        """Accept any case, as torchtitan does."""
        name = value.lower() if isinstance(value, str) else None
        return next((mode for mode in cls if mode.value == name), None)


def _find_signal(given: Any) -> str:
    """Return the name of a signal that is given by name or number; ``""`` if there is none."""
    if isinstance(given, bool):  # Python takes True for 1, which is SIGHUP
        return ""
    try:
        return (signal.Signals[given] if isinstance(given, str) else signal.Signals(given)).name
    except (KeyError, ValueError):
        return ""


class CheckpointConfig(BaseModel):
    """When and how to save, what to keep, and what to start from. Every checkpoint stores it as JSON.

    Attributes:
        enable_checkpoint: If False, the manager's methods do nothing.
        folder: The parent of the directories ``step-<n>``: a directory that all ranks share, or a URL.
        interval: Steps between two saves.
        save_when: Policies instead of ``interval``: :class:`SaveEvery`, :class:`SaveAt`, :class:`SaveAfter`, and
            functions that are given a :class:`Moment` (step, seconds since the last save, metrics) and return whether
            to save. A step that any of them chooses is saved. With policies other than the first two classes, the main
            rank decides, and each step costs one message between ranks.
        keep_latest_k: How many of the newest checkpoints to keep; 0 keeps all. 1 is an error with an async mode: a load
            must be able to fall back on an older one if the newest is damaged.
        keep_every_n_steps: Also keep the steps that are multiples of this; 0 for none.
        keep_best_k: Also keep this many checkpoints with the best ``best_metric``; 0 for none.
        best_metric: A name among the ``metrics`` that ``save`` is given, for ``keep_best_k``, ``load("best")`` and
            ``best_step``. A checkpoint without it is never the best one. Leave it out where ``retention`` has a
            :class:`KeepBest`: the metric of the first one is used.
        best_mode: Whether the smallest (``min``) or the largest (``max``) value is the best.
        retention: Policies instead of the three ``keep_`` options above: :class:`KeepLatest`, :class:`KeepEvery`,
            :class:`KeepNear`, :class:`KeepRecent`, :class:`KeepBest`, :class:`KeepPinned`, or a function that takes the
            metrics by step and returns the steps to keep. A checkpoint is kept if any policy keeps it, if it is leased
            or pinned, or if it is the newest. Only the main rank calls the policies, in a background thread.
        latest_pointer: Name of a file in ``folder``, such as ``latest``, that always has the name of the newest step's
            directory, for other tools; None for no file. A load does not read it.
        links: Whether ``folder`` has the symbolic links ``latest`` and, with a best metric, ``best``. Each save and
            removal updates them; they do not keep a step from being removed. On a store there are no links, and a
            warning says so. The commands of ``shardckpt`` that read a checkpoint take ``FOLDER/latest`` and
            ``FOLDER/best`` everywhere, also without links.
        async_mode: Who writes a checkpoint. ``disabled``: the training process, in ``save``. ``async``: a thread of
            that process. ``async_with_pinned_mem``: another process, which reads from pinned, shared memory. Case does
            not matter.
        on_busy: What ``save`` does while the previous checkpoint is still being written: ``wait`` for it, or ``skip``
            the step.
        on_full: What ``save`` does if the file system has no space for the step. ``error``: raise. ``prune``: first
            remove the steps that the policies will not keep once the new one is complete, but never the newest existing
            one. If a write still finds no space, steps are removed then, and the step is written once more; a
            background save is not written again, but the next save has the space.
        on_other_job: What happens if another live job saves to ``folder``. ``warn``: ``save`` warns once. ``error``:
            ``save`` raises, and so does making a manager.
        max_failed_saves: How many saves in a row may fail because of the file system or the store
            (:class:`StorageError`). Each of these failures is a warning, ``save`` returns False, and the next due step
            is tried; one more is an error. 0: the first is an error. Always errors, since no later save makes up for
            them: failures of other kinds, of the last step, of a step that is saved because of a signal, and those that
            ``close`` finds.
        quota: The most bytes that ``folder`` may hold, in a directory or on a store, or text such as ``"500GB"``. A
            step that would exceed it is refused before a byte is written, or makes room, as ``on_full`` says. Each save
            first counts the bytes in ``folder``; the size of the step is forecast from its tensors, and from an earlier
            step's bytes besides tensors.
        last_save_model_only: Whether the last step saves the model alone. torchtitan's older name
            ``model_weights_only`` is accepted.
        last_save_bare_keys: Whether the keys of the model's tensors lack the prefix ``model.`` where the last step
            saves the model alone, as in torchtitan's checkpoints; stock ``dcp.load`` then loads them into a model's
            state dict.
        steps_in_hf: Whether the directory of every step is also a Hugging Face folder, which transformers and vLLM
            load: the model's tensors are stored contiguous, under their names of the Hub, with copies of the files of
            ``hf_assets_path``. Needs a strategy that supports it, such as ``"safetensors"``.
        last_save_in_hf: Whether the last step is also exported to ``step-<n>-hf``, for Hugging Face tools. With
            ``steps_in_hf`` the step is such a folder already, and nothing is exported unless ``export_dtype`` asks for
            a cast.
        hf_mapping: The key mapping to Hugging Face's names; see :func:`shardckpt.huggingface.export_to_huggingface`.
        hf_cut_vocabulary: Whether an export leaves out the rows with which Megatron pads the vocabulary beyond the
            ``vocab_size`` of the ``config.json`` in ``hf_assets_path``; if False, it refuses them.
        hf_assets_path: A folder with the model's other files (config, tokenizer), which an export copies.
        export_dtype: The dtype to which floating-point tensors are cast when the model is saved alone or exported,
            except those that :func:`shardckpt.huggingface.export_to_huggingface` does not cast; None keeps their
            dtypes. Other saves, and ``steps_in_hf``, cast nothing.
        exclude_from_last_save: Names of tensors of the model that are left out where the model is saved alone, and of
            its export: ``("freqs_cis",)``. A name is a tensor's full name or its end after a dot. A load into the model
            leaves these tensors as they are where the checkpoint lacks them.
        exclude_from_loading: Names of states that ``load`` does not change.
        rename: The names of states, by their names in checkpoints that no manager has saved: ``{"net": "model", "opt":
            "optimizer"}``; parts of a state have dotted names. These need no entry: any name of the one optimizer,
            ``state_dict`` and ``model_state_dict``, all of these inside one entry (``app``), and a model at the top
            level (``{"": "model"}``).
        keep_options: Names of options in the optimizers' ``param_groups`` whose live values stay while the rest is
            loaded, such as ``("lr", "weight_decay")``; ``"all"`` for all options of the groups. A scheduler whose state
            is loaded sets ``lr`` again at its next step: exclude it from loading, too. See
            :func:`shardckpt.adapters.load_into`.
        initial_load_path: A checkpoint to start from if ``folder`` has none.
        initial_load_model_only: Whether only the model of ``initial_load_path`` is loaded.
        initial_load_in_hf: Whether ``initial_load_path`` is a Hugging Face folder.
        load_step: The step that ``load`` loads; -1 for the newest. Later steps are not removed: a restart with -1
            loads the newest of them, unless ``discard_after`` removes them.
        load_only: If True, ``save`` does nothing.
        create_seed_checkpoint: Whether ``save(0)`` saves the model alone, as a start for other runs.
        step_0_model_only: Whether the model alone is loaded from step 0, even if that has other states, as torchtitan's
            manager does. A seed checkpoint has only the model.
        enable_first_step_checkpoint: Whether step 1 is saved, to see early that saving works.
        strategy: A registered backend, ``"backend@version"`` or (backend, version); None for the default.
        fingerprints: Whether each step stores the fingerprints of its tensors; see
            :func:`shardckpt.dist_checkpointing.save`. The strategy must compute them; shardckpt's own do.
        enable_ft_dataloader_checkpoints: With fault tolerance, whether each replica saves its own :class:`PerRank`
            states (data loaders, random generators) after every step, to ``ft-replicat-<id>``. If False, the steps'
            checkpoints contain those of one replica, and after a load all replicas read the same data.
        check_replicas: Whether to compare values that several ranks hold without a device mesh; see
            :func:`shardckpt.adapters.to_sharded_state_dict`.
        dequantize: Whether the values of quantized parameters are saved, not their codes and scales; see
            :func:`shardckpt.adapters.to_sharded_state_dict`. Checkpoints for the Hub, and those that are cast to
            ``export_dtype``, always have values; the base model of an exported adapter keeps its codes.
        save_rng: Whether to save and load the states of each rank's random generators, as the state ``rng``. With more
            ranks than were saved, the additional ranks keep their live states.
        fully_parallel_load: Whether a tensor that several ranks need is read by one of them, which sends it to the
            others. Applies to steps and to ``initial_load_path``; see ``fully_parallel`` of
            :func:`shardckpt.dist_checkpointing.load`.
        memory_budget: The most bytes that each rank may hold at a time besides its tensors, or text such as
            ``"256MiB"``: in a save (with the copies of async modes), in a load, and in the export of
            ``last_save_in_hf``; see :func:`shardckpt.dist_checkpointing.save` and ``load``.
        allow_dtype_cast: Whether a load casts values to dtypes that cannot hold them, as torch does; see
            :func:`shardckpt.dist_checkpointing.load`.
        resize: Patterns of the keys of tensors whose stored shape may differ from the live one, such as
            ``("*embed_tokens.weight*",)`` for a vocabulary that has grown; see
            :func:`shardckpt.dist_checkpointing.load`.
        accept: The strategies whose checkpoints may be loaded, ``initial_load_path`` included: ``"safetensors"``,
            ``("safetensors", "ep@1")``, ``"huggingface"``; None for all. A checkpoint of another strategy, or of one
            that ``SHARDCKPT_ACCEPT`` leaves out, is an error. See ``shardckpt/plugins/README.md``.
        on_unused: What a load does about unused tensors and objects of the checkpoint: those of a loaded state that
            nothing requests, and those of states that the manager does not have. ``"warn"`` once, ``"error"``, or
            ``"ignore"``. Excluded states do not count; where the model alone is loaded, only the model does.
        show_progress: Whether the main rank shows the progress of each of its saves on standard error: a bar on a
            terminal, with the extra ``cli``, else a line every ten seconds.
        save_on_sigterm: Whether a SIGTERM makes the next call of ``save`` save its step. Another SIGTERM, such as
            torchrun's, does nothing until that step is committed, the manager is closed, or 30 s have passed since the
            first; then it ends the process as usual. Costs one message between ranks a step. See
            ``CheckpointManager.preempted``.
        save_on_signals: Signals that are handled as ``save_on_sigterm`` handles SIGTERM, by name or number:
            ``("SIGTERM", "SIGUSR1")``. With an empty tuple no signal is handled, but ``CheckpointManager.request_save``
            works.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    if not TYPE_CHECKING:  # a type checker knows the settings from the fields

        def __new__(cls, *unnamed: Any, **_: Any) -> Any:
            """Refuse settings without a name. Not in ``__init__``: help() would show that it takes them."""
            if unnamed:
                raise ConfigurationError(
                    f"CheckpointConfig: settings are given by name, and {show_given(unnamed[0])} has none: "
                    "CheckpointConfig(folder='checkpoints', interval=500)"
                )
            return super().__new__(cls)

        def __init__(self, **settings: Any) -> None:
            # not in a validator: errors look up the given settings by the names that pydantic knows
            if "model_weights_only" in settings and "last_save_model_only" not in settings:
                settings["last_save_model_only"] = settings.pop("model_weights_only")
            try:
                super().__init__(**settings)
            except ValidationError as exc:
                faults = _list_all_faults(type(self), settings, exc)
                raise ConfigurationError.list_all(f"{type(self).__name__}: ", faults) from exc

        def __setattr__(self, name: str, value: Any) -> None:
            if name.startswith("_"):  # of a subclass, or pydantic's own
                super().__setattr__(name, value)
                return
            known = name in type(self).model_fields
            new = f"CheckpointConfig(**{{**dict(config), {name!r}: {show_given(value)}}})"
            raise ConfigurationError(
                f"{type(self).__name__}: settings do not change, since a manager may use them: make another one, {new}"
                if known
                else describe_unknown(name, [*type(self).model_fields], partial(find_hint, ())).message
            )

    def __hash__(self) -> int:
        """Return the hash of all settings; a mapping, which has none, is hashed by its items."""
        return hash(tuple(tuple(sorted(value.items())) if isinstance(value, Mapping) else value for _, value in self))

    enable_checkpoint: bool = True
    folder: _PlacePath = "checkpoint"
    interval: Annotated[int, Field(ge=1)] = 500
    save_when: Annotated[Sequence[Any], SAVING] = ()
    keep_latest_k: _Count = 10
    keep_every_n_steps: _Count = 0
    keep_best_k: _Count = 0
    best_metric: MetricName = ""
    best_mode: Literal["min", "max"] = "min"
    # Any, as for `save_when`: a type checker infers list[object] for a list of policies and functions.
    retention: Annotated[Sequence[Any], RETENTION] = ()
    latest_pointer: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,100}$")] | None = None
    links: bool = False
    # The texts, too: tyro, which reads torchtitan's command lines, takes an enum by the names of its members alone.
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] | AsyncMode = AsyncMode.DISABLED
    on_busy: Literal["wait", "skip"] = "wait"
    on_full: Literal["error", "prune"] = "error"
    on_other_job: Literal["warn", "error"] = "warn"
    max_failed_saves: _Count = 0
    quota: int | str | None = None
    last_save_model_only: bool = True
    last_save_bare_keys: bool = False
    steps_in_hf: bool = False
    last_save_in_hf: bool = False
    hf_mapping: str | None = None
    hf_cut_vocabulary: bool = False
    hf_assets_path: _PlacePath | None = None
    export_dtype: str | None = None
    exclude_from_last_save: tuple[str, ...] = ()
    exclude_from_loading: tuple[str, ...] = ()
    rename: Mapping[str, str] = Field(default_factory=dict)
    keep_options: tuple[str, ...] = ()
    initial_load_path: _PlacePath | None = None
    initial_load_model_only: bool = True
    initial_load_in_hf: bool = False
    load_step: Annotated[int, Field(ge=-1)] = -1
    load_only: bool = False
    create_seed_checkpoint: bool = False
    step_0_model_only: bool = False
    enable_first_step_checkpoint: bool = False
    strategy: str | tuple[str, int] | None = None
    fingerprints: bool = False
    enable_ft_dataloader_checkpoints: bool = True
    check_replicas: bool = True
    dequantize: bool = False
    save_rng: bool = True
    fully_parallel_load: bool = False
    memory_budget: int | str | None = None
    allow_dtype_cast: bool = False
    resize: tuple[str, ...] = ()
    accept: tuple[str, ...] | None = None
    on_unused: Literal["warn", "error", "ignore"] = "warn"
    show_progress: bool = False
    save_on_sigterm: bool = False
    save_on_signals: tuple[str, ...] | None = None

    @field_validator("folder", "initial_load_path", "hf_assets_path", mode="before")
    @classmethod
    def _expand_paths(cls, path: Any) -> Any:
        return expand_home(path) if isinstance(path, (str, os.PathLike)) else path

    @field_validator("exclude_from_last_save", "exclude_from_loading", "keep_options", mode="before")
    @classmethod
    def _parse_names(cls, names: Any) -> Any:
        return (names,) if isinstance(names, str) else names

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_for_number(cls, given: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[str(info.field_name)].annotation
        kinds = {annotation, *get_args(annotation)}
        return refuse_truth(given) if kinds & {int, float} and bool not in kinds else given

    @field_validator("accept", mode="before")
    @classmethod
    def _parse_accept(cls, given: Any) -> Any:
        if given is None:
            return None
        try:
            keys = parse_keys(given)
        except CheckpointingException as exc:
            raise ValueError(str(exc)) from exc
        return tuple(backend if version is None else f"{backend}@{version}" for backend, version in keys)

    @field_validator("save_on_signals", mode="before")
    @classmethod
    def _parse_signals(cls, given: Any) -> Any:
        if given is None:
            return None
        listed = given if isinstance(given, (list, tuple, set, frozenset)) else [given]
        names = [*map(_find_signal, listed)]
        faults = [
            f"save_on_signals: {unknown!r} is no signal of this system; "
            f"{ask_nearest(unknown, signal.Signals.__members__)}SIGUSR1 and SIGTERM are"
            for unknown, name in zip(listed, names, strict=True)
            if not name
        ]
        faults += [
            f"save_on_signals: no process can handle {name}; choose SIGTERM or SIGUSR1"
            for name in names
            if name in ("SIGKILL", "SIGSTOP")
        ]
        if faults:
            raise ValueError("\n".join(faults))
        return tuple(names)

    @field_validator("export_dtype", mode="before")
    @classmethod
    def _parse_export_dtype(cls, dtype: Any) -> Any:
        found = parse_dtype(dtype, "export_dtype")
        return None if found is None else str(found).removeprefix("torch.")

    @field_validator("quota", "memory_budget")
    @classmethod
    def _check_sizes(cls, size: int | str | None, info: ValidationInfo) -> int | str | None:
        if size is not None:
            parse_size(size, str(info.field_name))
        return size

    @field_validator("async_mode", mode="before")
    @classmethod
    def _lower_mode(cls, mode: Any) -> Any:
        return mode.lower() if isinstance(mode, str) else mode

    @field_validator("async_mode")
    @classmethod
    def _parse_mode(cls, mode: str) -> AsyncMode:
        return AsyncMode(mode)

    @field_serializer("async_mode", when_used="json")
    def _name_mode(self, mode: AsyncMode) -> str:
        return mode.value  # pydantic 2.7 leaves an enum in a union with texts as it is

    @property
    def retention_policies(self) -> tuple[RetentionPolicy, ...]:
        """The policies of ``retention``, or else of the ``keep_`` options; empty if all checkpoints are kept."""
        if self.retention or not self.keep_latest_k:
            return tuple(self.retention)
        policies: list[RetentionPolicy] = [KeepLatest(self.keep_latest_k)]
        if self.keep_every_n_steps:
            policies.append(KeepEvery(self.keep_every_n_steps))
        if self.keep_best_k:
            policies.append(KeepBest(self.best_metric, self.keep_best_k, self.best_mode))
        return tuple(policies)

    @property
    def signals(self) -> tuple[signal.Signals, ...]:
        """The signals of ``save_on_sigterm`` and ``save_on_signals``."""
        names = dict.fromkeys(("SIGTERM",) * self.save_on_sigterm + (self.save_on_signals or ()))
        return tuple(signal.Signals[name] for name in names)

    @property
    def saves_on_request(self) -> bool:
        """Whether ranks agree at each step on whether a signal or a request wants it saved."""
        return self.save_on_sigterm or self.save_on_signals is not None

    @property
    def last_model_prefix(self) -> str:
        """The prefix of the model's keys in the last save."""
        return "" if self.last_save_model_only and self.last_save_bare_keys else MODEL_PREFIX

    def stores_values(self, *, last_step: bool, model_only: bool) -> bool:
        """Return whether a save stores quantized parameters as values, which the Hub and a cast need."""
        is_exported = last_step and self.last_save_in_hf and find_adapter_mapping(self.hf_mapping) is None
        return self.dequantize or self.steps_in_hf or is_exported or (model_only and self.export_dtype is not None)

    def is_seed(self, step: int) -> bool:
        """Return whether the checkpoint of a step is the seed checkpoint, which has the model alone."""
        return step == 0 and self.create_seed_checkpoint

    def is_due(self, step: int) -> bool:
        """Return whether a step is due as the seed, the first, or one of the interval; ``save_when`` is not asked."""
        first = step == 1 and self.enable_first_step_checkpoint
        return first or self.is_seed(step) or (not self.save_when and step > 0 and step % self.interval == 0)

    def check_names(self, states: Collection[str]) -> None:
        """Check that every name in the configuration exists: states, key mapping, strategy.

        Args:
            states: The names of the states.

        Raises:
            CheckpointingException: A name does not exist; the error lists the names that do.
        """
        unknown = set(self.exclude_from_loading) - set(states)
        if unknown:
            raise CheckpointingException(
                f"exclude_from_loading: {', '.join(sorted(map(repr, unknown)))} is no state; "
                f"{ask_nearest(min(unknown), states)}the states are {', '.join(map(repr, states))}"
            )
        if "optimizer" in self.exclude_from_loading and "lr_scheduler" in {*states} - {*self.exclude_from_loading}:
            raise CheckpointingException(
                "exclude_from_loading has optimizer, whose state the lr_scheduler sets: exclude lr_scheduler, too"
            )
        find_mapping(self.hf_mapping)
        if not self.load_only:
            self.make_saver(None)

    def check_assets(self) -> None:
        """Check that the folder of ``hf_assets_path`` has the files that the export of the last step copies and reads.

        Raises:
            CheckpointingException: it does not exist, cannot be listed, has nothing to copy, or lacks the
                ``config.json`` that ``hf_cut_vocabulary`` needs.
        """
        if self.last_save_in_hf and self.hf_assets_path and not self.load_only:
            check_assets(self.hf_assets_path, self.hf_mapping, cut_vocabulary=self.hf_cut_vocabulary)

    def make_saver(self, prefix: str | None) -> SaveStrategy:
        """Return the strategy that saves the steps.

        Args:
            prefix: The prefix of the model's keys, for ``steps_in_hf``; None if it is to be found by the keys.

        Raises:
            CheckpointingException: there is none, or its checkpoints cannot be Hugging Face folders.
        """
        is_async = self.async_mode is not AsyncMode.DISABLED
        accepts = list_accepts(self.accept)
        saver = find_step_saver(self.strategy, accepts, in_hf=self.steps_in_hf, is_async=is_async)
        if self.steps_in_hf and isinstance(saver, StoresHubFolders):
            return saver.store_hub_folders(prefix, self.hf_mapping, self.hf_assets_path)
        return saver

    def describe(self) -> dict[str, Any]:
        """Return the options as a checkpoint stores them: JSON values, URLs without their passwords."""
        paths = {name: getattr(self, name) for name in ("folder", "initial_load_path", "hf_assets_path")}
        return self.model_dump(mode="json") | {name: path and mask_password(path) for name, path in paths.items()}

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> CheckpointConfig:
        is_async = self.async_mode is not AsyncMode.DISABLED
        excluded = set(self.exclude_from_loading)
        kept = next((policy for policy in self.retention if isinstance(policy, KeepBest)), None)
        # Each text begins with a setting, and gives advice after its last colon.
        contradictions: list[tuple[Any, str]] = [
            # The newest complete checkpoint always stays; but if it proves damaged, there must be one before it.
            (
                is_async and self.keep_latest_k == 1,
                "keep_latest_k=1 with an async_mode leaves none to fall back on: keep 2 or more, or 0 for all",
            ),
            (
                is_async and KeepLatest(1) in self.retention,
                "retention: KeepLatest(1) with an async_mode leaves none to fall back on: keep 2 or more",
            ),
            (
                self.latest_pointer and parse_step(self.latest_pointer) is not None,
                f"latest_pointer: {self.latest_pointer!r} is the name of a step's directory: choose another",
            ),
            (
                self.links and self.latest_pointer in LINKS,
                f"links: the file of latest_pointer has the name of a link, {self.latest_pointer!r}: choose another",
            ),
            (
                kept and (self.best_metric not in ("", kept.metric) or self.best_mode not in ("min", kept.mode)),
                (
                    "best_metric and best_mode differ from the first KeepBest of retention, which says which step is "
                    "the best: leave both out, or put their KeepBest first"
                ),
            ),
            (
                self.hf_cut_vocabulary and not (self.hf_mapping and self.hf_assets_path),
                "hf_cut_vocabulary needs the vocab_size: give hf_mapping, and hf_assets_path with a config.json",
            ),
            (self.keep_best_k and not self.best_metric, "keep_best_k needs a best_metric: name one, as 'loss'"),
            (
                self.exclude_from_last_save and self.last_save_in_hf and not self.last_save_model_only,
                "exclude_from_last_save: an export has the tensors of the last save: leave last_save_model_only True",
            ),
            (
                self.last_save_bare_keys and self.steps_in_hf,
                "last_save_bare_keys: with steps_in_hf, tensors have their names of the Hub: leave it False",
            ),
            (
                "model" in excluded,
                "exclude_from_loading: a load without the model would train a fresh one: leave 'model' out",
            ),
            (
                any(not new.partition(".")[0] for new in self.rename.values()),
                "rename: '' names no state. To read a model whose keys have nothing before them: rename={'': 'model'}",
            ),
            (
                any(old == new for old, new in self.rename.items()),
                "rename: a name is given as its own new name: leave it out, or give another",
            ),
            (
                self.initial_load_in_hf and not self.initial_load_path,
                "initial_load_in_hf needs an initial_load_path: give that of a Hugging Face folder",
            ),
            (
                self.initial_load_in_hf and not self.initial_load_model_only,
                "initial_load_in_hf: a Hugging Face folder has the model only: leave initial_load_model_only True",
            ),
            (
                self.load_only and self.create_seed_checkpoint,
                "load_only saves nothing, no seed checkpoint either: leave create_seed_checkpoint False",
            ),
        ]
        given = dict(self)
        texts = [*_find_superseded(given), *(text for is_wrong, text in contradictions if is_wrong)]
        texts += filter(None, [self._explain_small_budget()])
        if texts:
            raise ConfigurationError.list_all("", [_make_contradiction(given, text) for text in texts])
        return self

    def _explain_small_budget(self) -> str:
        """Return why ``memory_budget`` is too small for the settings; ``""`` if it is not."""
        if self.last_save_in_hf:
            is_url = "://" in self.folder and not self.folder.lower().startswith("file://")
            least = LEAST_EXPORTING_ON_STORES if is_url else LEAST_EXPORTING
            action, advice = "the export of last_save_in_hf takes", ""
        else:
            least, action = LEAST_READING, "a save or a load takes"
            advice = " on each rank; a save to a URL takes more, and an async_mode a copy of the rank's tensors, too"
        return explain_small_budget(parse_memory_budget(self.memory_budget), least, action, advice)


def _make_contradiction(given: Mapping[str, Any], text: str) -> SettingFault:
    return make_fault(given, re.split(r"\W", text)[0], text)


def _find_superseded(given: Mapping[str, Any]) -> list[str]:
    """Return errors of settings that are given next to the policies that replace them; their values may be wrong."""
    fields = CheckpointConfig.model_fields
    limits = ("keep_latest_k", "keep_every_n_steps", "keep_best_k")
    texts = []
    for name, others, advice in (
        ("retention", limits, "give KeepLatest, KeepEvery, KeepBest instead"),
        ("save_when", ("interval",), "give SaveEvery instead"),
    ):
        defaults = {other: fields[other].default for other in others}
        # by their texts: a wrong value may be an array, which is neither equal nor different
        replaced = [other for other in others if repr(given.get(other, defaults[other])) != repr(defaults[other])]
        policies = given.get(name)
        if isinstance(policies, list | tuple) and policies and replaced:
            texts.append(f"{name} takes the place of {', '.join(replaced)}: {advice}")
    return texts


def _list_all_faults(
    kind: type[CheckpointConfig], given: Mapping[str, Any], error: ValidationError
) -> list[SettingFault]:
    """Return the faults that pydantic found, and contradictions among the other settings, which it does not check."""
    faults = list_faults(error, given, [*kind.model_fields], partial(find_hint, given))
    wrong = find_wrong_settings(error)
    others: list[SettingFault] = []
    if wrong:
        try:
            kind(**{name: value for name, value in given.items() if name not in wrong})
        except ConfigurationError as exc:
            # leave out faults that name a wrong setting, or one meant by a wrong name: they may go when that is mended
            unsure = {*wrong, *(fault.suggestion for fault in faults)}
            others += [fault for fault in exc.faults if unsure.isdisjoint(re.findall(r"\w+", fault.message))]
        others += [_make_contradiction(given, text) for text in _find_superseded(given)]
    return [*{fault.message: fault for fault in (*faults, *others)}.values()]


def find_wrong_settings(error: ValidationError) -> set[str]:
    """Return the names of the settings that are wrong by themselves, not in combination with others."""
    return {str(fault["loc"][0]) for fault in error.errors() if fault["loc"]}


def parse_config(given: Any) -> CheckpointConfig:
    """Return the configuration that a manager is given, or the one of the settings that it is given by name.

    Raises:
        ConfigurationError: It is given something else, or a wrong setting.
    """
    if isinstance(given, CheckpointConfig):
        return given
    if isinstance(given, Mapping) and not any(hasattr(value, "state_dict") for value in given.values()):
        return CheckpointConfig(**{str(name): value for name, value in given.items()})
    folder = str(given) if isinstance(given, str | os.PathLike) else "checkpoints"
    raise ConfigurationError(
        f"CheckpointManager: config is {show_given(given)}: expected a CheckpointConfig, as in "
        f"CheckpointManager(CheckpointConfig(folder={folder!r}), {{'model': model, 'optimizer': optimizer}})"
    )
