"""What torchtitan 0.3 asks of a checkpoint manager: its public methods, hooks and options, by their names there."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar


class BaseCheckpointManager(ABC):
    """Public methods do nothing while disabled, and call the hooks."""

    enable: bool
    save_future: Any

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Options, with torchtitan's defaults."""

        _owner: ClassVar[Any] = None

        enable: bool = False
        folder: str = "checkpoint"
        interval: int = 500
        initial_load_path: str | None = None
        initial_load_model_only: bool = True
        initial_load_in_hf: bool = False
        initial_load_in_hf_quantized: bool = False
        last_save_model_only: bool = True
        last_save_in_hf: bool = False
        export_dtype: str = "float32"
        keep_latest_k: int = 10
        load_step: int = -1
        exclude_from_loading: list[str] = field(default_factory=list)
        enable_first_step_checkpoint: bool = False
        create_seed_checkpoint: bool = False
        load_only: bool = False

        def build(self, **runtime: Any) -> Any:
            """The manager that the options are of."""
            return self._owner(config=dataclasses.replace(self), **runtime)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.Config._owner = cls

    def load(self, step: int = -1) -> bool:
        """Load a step."""
        return self.enable and self._load(step)

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save if it is time."""
        return self.enable and self._save(curr_step, last_step)

    def maybe_wait_for_staging(self) -> None:
        """Before the optimizer's step."""
        if self.enable:
            self._maybe_wait_for_staging()

    def maybe_wait_for_saving(self) -> None:
        """Until it is durable."""
        if self.enable and self.save_future is not None:
            self._wait_for_saving()

    def close(self) -> None:
        """At the end."""
        if getattr(self, "enable", False):
            self._close()

    @abstractmethod
    def _load(self, step: int = -1) -> bool: ...

    @abstractmethod
    def _save(self, curr_step: int, last_step: bool = False) -> bool: ...

    @abstractmethod
    def _maybe_wait_for_staging(self) -> None: ...

    @abstractmethod
    def _wait_for_saving(self) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...
