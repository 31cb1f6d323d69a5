"""What a CheckpointManager is told: torchtitan's names and meanings, checked when they are given."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_serializer, field_validator, model_validator

from shardckpt.engine import find_saver
from shardckpt.errors import CheckpointingException
from shardckpt.huggingface import find_mapping, parse_dtype
from shardckpt.manager.retention import (
    KeepBest,
    KeepEvery,
    KeepLatest,
    RetentionPolicy,
    describe_policy,
    parse_policy,
)
from shardckpt.plugins import host
from shardckpt.storage import masked

if TYPE_CHECKING:
    from collections.abc import Collection

_Count = Annotated[int, Field(ge=0)]


class AsyncMode(str, Enum):
    """Who writes: the training itself; a thread behind it; or a process of its own, from pinned, shared memory."""

    DISABLED = "disabled"
    ASYNC = "async"
    ASYNC_WITH_PINNED_MEM = "async_with_pinned_mem"


class CheckpointConfig(BaseModel):
    """When to save, how, what to keep, and what to begin from; it is stored as JSON in every checkpoint.

    Attributes:
        enable_checkpoint: False turns every call of the manager into nothing.
        folder: Where the steps' directories ``step-<n>`` are: a directory that all ranks share, or a URL.
        interval: Steps between saves.
        keep_latest_k: So many of the newest checkpoints are kept; 0 keeps all. 1 is refused with ``async_mode``: while
            the next is written there must be one to fall back on.
        keep_every_n_steps: Steps that it divides are kept as well; 0 for none.
        keep_best_k: So many with the best ``best_metric`` are kept as well.
        best_metric: A name among the ``metrics`` that are given to ``save``; who has none is never one of the best.
        best_mode: Whether the smallest (``min``) or the largest value is the best.
        retention: Policies that take the place of the five options above: :class:`KeepLatest`, :class:`KeepEvery`,
            :class:`KeepBest`, :class:`KeepPinned`, or a function that is given the metrics by step and returns the
            steps to keep. A checkpoint that any of them keeps is kept, and so is the newest. The main rank calls them,
            in another thread than the training's.
        async_mode: See :class:`AsyncMode`.
        on_busy: What a save does whose predecessor is still being written: ``wait`` for it, or ``skip`` itself.
        last_save_model_only: Whether the save of the last step has the model alone. (The seed's name for it,
            ``model_weights_only``, is accepted.)
        last_save_in_hf: Whether the last step is also exported, to ``step-<n>-hf``, as Hugging Face tools read it.
        hf_mapping: How names become Hugging Face's; see :func:`shardckpt.huggingface.export_to_huggingface`.
        hf_assets_path: A folder of the model's other files (config, tokenizer), which an export copies.
        export_dtype: What floating-point tensors are cast to where the model is saved alone, or exported; None: not.
        exclude_from_loading: Names of states that a load leaves as they are.
        initial_load_path: A checkpoint to begin from where ``folder`` has none.
        initial_load_model_only: Whether only its model is loaded.
        initial_load_in_hf: Whether it is a Hugging Face folder.
        load_step: The step that ``load`` takes; -1 for the newest. Where it is not the newest, the later ones stay: a
            restart with -1 would take one of them, until they are removed.
        load_only: Whether nothing is ever saved.
        create_seed_checkpoint: Whether ``save(0)`` saves the model alone, for runs that begin from it.
        enable_first_step_checkpoint: Whether step 1 is saved, to see early that saving works.
        strategy: Backend, or (backend, version), that the registry knows; None for its default.
        enable_ft_dataloader_checkpoints: Under fault tolerance, whether each replica saves what each of its ranks has
            its own of (data loaders, random generators) after every step, in ``ft-replicat-<id>``. Without, that is in
            the steps' checkpoints, saved by one replica: after a load all replicas read the same data.
        check_replicas: Whether what ranks hold twice without a mesh is compared; see
            :func:`shardckpt.adapters.to_sharded_state_dict`.
        save_rng: Whether the states of the random generators are saved and loaded, as the state ``rng``: each rank's,
            to the rank of the same number; ranks that were not there keep theirs.
        save_on_sigterm: Whether a SIGTERM lets the next call of ``save`` save whatever the step is; costs a message
            between ranks a step. See ``CheckpointManager.preempted``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_enum_values=False)

    enable_checkpoint: bool = True
    folder: Annotated[str, Field(min_length=1)] = "checkpoint"
    interval: Annotated[int, Field(ge=1)] = 500
    keep_latest_k: _Count = 10
    keep_every_n_steps: _Count = 0
    keep_best_k: _Count = 0
    best_metric: str = ""
    best_mode: Literal["min", "max"] = "min"
    retention: tuple[RetentionPolicy, ...] = ()
    async_mode: AsyncMode = AsyncMode.DISABLED
    on_busy: Literal["wait", "skip"] = "wait"
    last_save_model_only: bool = True
    last_save_in_hf: bool = False
    hf_mapping: str | None = None
    hf_assets_path: str | None = None
    export_dtype: str | None = None
    exclude_from_loading: tuple[str, ...] = ()
    initial_load_path: str | None = None
    initial_load_model_only: bool = True
    initial_load_in_hf: bool = False
    load_step: Annotated[int, Field(ge=-1)] = -1
    load_only: bool = False
    create_seed_checkpoint: bool = False
    enable_first_step_checkpoint: bool = False
    strategy: str | tuple[str, int] | None = None
    enable_ft_dataloader_checkpoints: bool = True
    check_replicas: bool = True
    save_rng: bool = True
    save_on_sigterm: bool = False

    @model_validator(mode="before")
    @classmethod
    def _seed_names(cls, given: Any) -> Any:
        if isinstance(given, dict) and "model_weights_only" in given:
            given = dict(given)
            given.setdefault("last_save_model_only", given.pop("model_weights_only"))
        return given

    @field_validator("folder", "initial_load_path", "hf_assets_path", mode="before")
    @classmethod
    def _as_text(cls, path: Any) -> Any:
        return path.__fspath__() if hasattr(path, "__fspath__") else path

    @field_validator("exclude_from_loading", mode="before")
    @classmethod
    def _as_names(cls, names: Any) -> Any:
        return (names,) if isinstance(names, str) else names

    @field_validator("retention", mode="before")
    @classmethod
    def _as_policies(cls, given: Any) -> Any:
        return tuple(map(parse_policy, given if isinstance(given, (list, tuple)) else [given]))

    @field_validator("export_dtype", mode="before")
    @classmethod
    def _dtype_name(cls, dtype: Any) -> Any:
        found = parse_dtype(dtype)
        return None if found is None else str(found).removeprefix("torch.")

    @model_validator(mode="after")
    def _check(self) -> CheckpointConfig:
        for wrong, why in self._contradictions():
            if wrong:
                raise ValueError(why)
        return self

    @field_serializer("async_mode")
    def _mode_name(self, mode: AsyncMode) -> str:
        return mode.value

    @field_serializer("retention")
    def _policy_descriptions(self, policies: tuple[RetentionPolicy, ...]) -> list[Any]:
        return [describe_policy(policy) for policy in policies]

    @property
    def retention_policies(self) -> tuple[RetentionPolicy, ...]:
        """The policies of ``retention``, or of the ``keep_`` options; none where all checkpoints are kept."""
        if self.retention or not self.keep_latest_k:
            return self.retention
        policies: list[RetentionPolicy] = [KeepLatest(self.keep_latest_k)]
        if self.keep_every_n_steps:
            policies.append(KeepEvery(self.keep_every_n_steps))
        if self.keep_best_k:
            policies.append(KeepBest(self.best_metric, self.keep_best_k, self.best_mode))
        return tuple(policies)

    def is_seed(self, step: int) -> bool:
        """Whether a step's checkpoint has the model alone, for runs that begin from it."""
        return step == 0 and self.create_seed_checkpoint

    def is_due(self, step: int) -> bool:
        """Whether a step is one of those that are saved."""
        first = step == 1 and self.enable_first_step_checkpoint
        return first or self.is_seed(step) or (step > 0 and step % self.interval == 0)

    def check_names(self, states: Collection[str]) -> None:
        """Raise if there is no strategy, key mapping or state (of those in ``states``) that the configuration names."""
        unknown = set(self.exclude_from_loading) - set(states)
        if unknown:
            raise CheckpointingException(
                f"exclude_from_loading: {', '.join(sorted(map(repr, unknown)))} is no state; the states are "
                f"{', '.join(map(repr, states))}"
            )
        find_mapping(self.hf_mapping)
        if not self.load_only:
            find_saver(self.strategy, host())

    def stored(self) -> dict[str, Any]:
        """What a checkpoint has of it: JSON, without the passwords of URLs."""
        places = {name: getattr(self, name) for name in ("folder", "initial_load_path", "hf_assets_path")}
        return self.model_dump(mode="json") | {name: place and masked(place) for name, place in places.items()}

    def _contradictions(self) -> list[tuple[bool, str]]:
        is_async = self.async_mode is not AsyncMode.DISABLED
        excluded = set(self.exclude_from_loading)
        replaced = ("keep_latest_k", "keep_every_n_steps", "keep_best_k", "best_metric", "best_mode")
        given = [name for name in replaced if getattr(self, name) != type(self).model_fields[name].default]
        return [
            (
                bool(self.retention and given),
                f"retention takes the place of {', '.join(given)}: give KeepLatest, KeepEvery, KeepBest instead",
            ),
            (
                (self.keep_latest_k == 1 or KeepLatest(1) in self.retention) and is_async,
                "keep_latest_k=1 with an async_mode: there must be one to fall back on; keep 2 or more, or 0 for all",
            ),
            (bool(self.keep_best_k) != bool(self.best_metric), "keep_best_k and best_metric go together"),
            ("model" in excluded, "exclude_from_loading: a load without the model would train a fresh one"),
            (
                "optimizer" in excluded and "lr_scheduler" not in excluded,
                "exclude_from_loading has optimizer, whose state the lr_scheduler sets: exclude lr_scheduler, too",
            ),
            (self.initial_load_in_hf and not self.initial_load_path, "initial_load_in_hf needs an initial_load_path"),
            (
                self.initial_load_in_hf and not self.initial_load_model_only,
                "initial_load_in_hf: a Hugging Face folder has the model only; leave initial_load_model_only True",
            ),
            (self.load_only and self.create_seed_checkpoint, "load_only saves nothing, no seed checkpoint either"),
        ]


__all__ = ["AsyncMode", "CheckpointConfig"]
