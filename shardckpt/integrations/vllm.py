"""vLLM: a model loader of load format ``shardckpt``, which reads weights from a checkpoint of any format and sharding.

vLLM finds it by the entry point ``shardckpt`` of the group ``vllm.general_plugins``, and calls :func:`register` in each
of its processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.model_executor.model_loader import (  # type: ignore[import-not-found]
    BaseModelLoader,
    register_model_loader,
)

from shardckpt.dist_checkpointing import open_checkpoint
from shardckpt.errors import CheckpointingException, KeyMismatchError, listed
from shardckpt.storage.directory import retry_if_replaced
from shardckpt.storage.memory_budget import parse_size

if TYPE_CHECKING:
    from torch import nn

LOAD_FORMAT = "shardckpt"
#: The entries that ``model_loader_extra_config`` may have.
_OPTIONS = ("checkpoint", "mapping", "prefix", "dtype", "leave_out", "memory")
_MEMORY = "256MiB"


class ShardedCheckpointLoader(BaseModelLoader):  # type: ignore[misc]
    """Fills vLLM's model from a checkpoint: ``--load-format shardckpt``.

    ``--model`` is a folder with the model's ``config.json`` and tokenizer, or its name at the Hub. The checkpoint is
    named in ``--model-loader-extra-config``::

        vllm serve Qwen/Qwen3-0.6B --load-format shardckpt
            --model-loader-extra-config '{"checkpoint": "runs/step-1000", "dtype": "bfloat16"}'

    Its entries: ``checkpoint``, a directory or URL, by default the model's folder; ``mapping``, ``prefix``, ``dtype``
    and ``leave_out`` as for :meth:`shardckpt.huggingface.ModelCheckpoint.weights`; and ``memory``, such as
    ``"256MiB"``: the bytes that are read at a time. Each worker reads all weights, as with vLLM's own loader, and its
    model takes its part of them.

    Args:
        load_config: vLLM's ``LoadConfig``.

    Raises:
        CheckpointingException: ``model_loader_extra_config`` has another entry.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self._options = dict(load_config.model_loader_extra_config or {})
        unknown = sorted(self._options.keys() - set(_OPTIONS))
        if unknown:
            raise CheckpointingException(
                f"model_loader_extra_config has {unknown}, which load format {LOAD_FORMAT!r} does not know: there are "
                f"{', '.join(_OPTIONS)}"
            )

    def download_model(self, model_config: Any) -> None:
        """Check that the checkpoint can be opened; nothing is downloaded, a store is read while weights are loaded.

        Args:
            model_config: vLLM's ``ModelConfig``.

        Raises:
            CannotLoadError: No installed strategy reads it.
        """
        with open_checkpoint(self._find_checkpoint(model_config)):
            pass

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Read the weights, and give them to the model.

        Args:
            model: vLLM's model, whose ``load_weights`` takes pairs of name and tensor.
            model_config: vLLM's ``ModelConfig``.

        Raises:
            KeyMismatchError: The checkpoint lacks weights of the model.
            CheckpointingException: It cannot be read, or is damaged.
        """
        place = self._find_checkpoint(model_config)
        options = {"memory": _MEMORY, **self._options}
        options.pop("checkpoint", None)
        memory = parse_size(options.pop("memory"), "memory")

        def attempt() -> set[str] | None:
            with open_checkpoint(place) as checkpoint:
                weights = checkpoint.weights(memory=memory, **options)
                loaded: set[str] | None = model.load_weights(weights)  # type: ignore[operator]
                return loaded

        loaded = retry_if_replaced(attempt, place)
        # As vLLM's own loader: a quantized model has parameters that no checkpoint has, and some models do not say.
        if loaded is None or getattr(model_config, "quantization", None) is not None:
            return
        missing = sorted({name for name, _ in model.named_parameters()} - loaded)
        if missing:
            raise KeyMismatchError(
                f"{place} has no weights for {listed(missing)} of the model: does it need a mapping or a prefix "
                "(model_loader_extra_config)?"
            )

    def _find_checkpoint(self, model_config: Any) -> str:
        return str(self._options.get("checkpoint") or model_config.model)


def register() -> None:
    """Register the load format; vLLM calls it in each process, and may call it again."""
    register_model_loader(LOAD_FORMAT)(ShardedCheckpointLoader)


__all__ = ["LOAD_FORMAT", "ShardedCheckpointLoader", "register"]
