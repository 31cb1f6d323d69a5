"""vllm.model_executor.model_loader: the registry of load formats, and what a loader is derived from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

_LOAD_FORMAT_TO_MODEL_LOADER: dict[str, type[BaseModelLoader]] = {}


class BaseModelLoader(ABC):
    """As vllm/model_executor/model_loader/base_loader.py; ``load_model`` gets the model, since no engine is here."""

    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config

    @abstractmethod
    def download_model(self, model_config: Any) -> None:
        """Download a model so that it can be immediately loaded."""

    @abstractmethod
    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Load weights into a model."""

    def load_model(self, model: nn.Module, model_config: Any) -> nn.Module:
        """Load a model with the given configurations."""
        self.load_weights(model, model_config)
        return model.eval()


def register_model_loader(load_format: str) -> Callable[[type[Any]], type[Any]]:
    """Register a customized vllm model loader."""

    def _wrapper(model_loader_cls: type[Any]) -> type[Any]:
        if not issubclass(model_loader_cls, BaseModelLoader):
            raise ValueError("The model loader must be a subclass of `BaseModelLoader`.")
        _LOAD_FORMAT_TO_MODEL_LOADER[load_format] = model_loader_cls
        return model_loader_cls

    return _wrapper


def get_model_loader(load_config: Any) -> BaseModelLoader:
    """Get a model loader based on the load format."""
    if load_config.load_format not in _LOAD_FORMAT_TO_MODEL_LOADER:
        raise ValueError(f"Load format `{load_config.load_format}` is not supported")
    return _LOAD_FORMAT_TO_MODEL_LOADER[load_config.load_format](load_config)
