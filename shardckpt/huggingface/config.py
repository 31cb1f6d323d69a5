"""A model's ``config.json``: it says of the weights in its folder what they are, or is refused."""

from __future__ import annotations

import json
import logging
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt.errors import CheckpointingException
from shardckpt.huggingface.assets import read_asset
from shardckpt.huggingface.casts import find_model_dtype
from shardckpt.huggingface.folder import CONFIG, parse_object
from shardckpt.storage.filesystem import is_there

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from shardckpt.huggingface.hub_tensor import HubTensor

logger = logging.getLogger(__name__)

#: The key of the dtype, and that of transformers before 4.56.
_DTYPE, _OLDER = "dtype", "torch_dtype"
#: What says how weights are quantized; the dtypes in it are not those of weights.
QUANTIZATIONS = ("quantization_config", "compression_config")
#: Ends of names of quantized weights' parts: of fp8 with scales, compressed-tensors, GPTQ and AWQ, MXFP4, bitsandbytes.
_QUANTIZED_ENDS = ("_scale_inv", "_scale", "_scales", "_packed", "_blocks", ".qweight", ".scales", ".absmax", ".SCB")
#: The dtypes of packed codes.
_CODES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint32)
#: The keys of a part's config end with it: ``vision_config``.
_PART = "_config"
_VOCABULARY, _TIED = "vocab_size", "tie_word_embeddings"
#: Where models of the Hub have their embedding, and their output layer.
_PREFIXES = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")
_EMBEDDINGS = tuple(f"{prefix}embed_tokens.weight" for prefix in _PREFIXES)
HEADS = tuple(f"{prefix}lm_head.weight" for prefix in _PREFIXES)


class ModelConfig(NamedTuple):
    """A ``config.json``: where it was read, and its content."""

    source: Path
    content: dict[str, Any]

    @property
    def is_tied(self) -> bool:
        """Whether it says that the output layer is the embedding."""
        return bool(_look_up(self.content, _TIED))


def find_config(assets: Iterable[Path], target: Path | None = None) -> ModelConfig | None:
    """Return the ``config.json`` that a folder will have: that of the assets, else its own; None if there is none."""
    places = [*assets, *([] if target is None else [target / CONFIG])]
    source = next((path for path in places if path.name == CONFIG and is_there(path)), None)
    return None if source is None else ModelConfig(source, parse_object(read_asset(source), source))


def read_config(assets: Iterable[Path], target: Path | None = None) -> dict[str, Any] | None:
    """Return the content of what :func:`find_config` finds; None if it finds none."""
    found = find_config(assets, target)
    return None if found is None else found.content


def adapt_config(
    config: ModelConfig, tensors: Sequence[HubTensor], *, is_cast: bool, refuses: bool = True
) -> bytes | None:
    """Return the text of a ``config.json`` that is true of tensors; None if the file is true as it is.

    It says their dtype, and whether they are quantized. ``is_cast`` says whether a config without a dtype gets one,
    ``refuses`` whether another vocabulary than that of the tensors is an error, and not a warning.
    """
    source, content = config
    wrong = _compare_vocabulary(config, tensors)
    if wrong:
        wrong += (
            ". Give the config.json of this model (assets=, --assets), or leave out rows with which Megatron pads the "
            "vocabulary (cut_vocabulary=True, --cut-vocabulary, with a mapping)"
        )
    if wrong and refuses:
        raise CheckpointingException(wrong)
    if wrong:
        logger.warning("%s", wrong)
    adapted = content if _are_quantized(tensors) else _drop_quantization(content, source)
    adapted = _replace_dtypes(adapted, tensors)
    main = _find_dtype(tensors)
    if is_cast and main is not None and not any(adapted.get(key) for key in (_DTYPE, _OLDER)):
        adapted[_DTYPE] = main
    return None if adapted == content else (json.dumps(adapted, indent=2, ensure_ascii=False) + "\n").encode()


def find_tied(config: ModelConfig, tensors: Iterable[HubTensor]) -> tuple[HubTensor, HubTensor] | None:
    """Return the embedding and the output layer, if both are there and a config says that they are one."""
    if not config.is_tied:
        return None
    found = {tensor.name: tensor for tensor in tensors}
    pair = [next((found[name] for name in names if name in found), None) for names in (_EMBEDDINGS, HEADS)]
    if pair[0] is None or pair[1] is None or len(pair[0].shape) != len(pair[1].shape) or not pair[0].shape:
        return None
    return pair[0], pair[1]


def _look_up(config: dict[str, Any], key: str) -> Any:
    """Return a value of a config, or of its ``text_config``."""
    text = config.get("text_config")
    return config.get(key, text.get(key) if isinstance(text, dict) else None)


def describe_contradiction(config: ModelConfig, tensors: Sequence[HubTensor]) -> str:
    """Return what a config says of tensors that is wrong, and keeps tools from loading them; empty if nothing is.

    More rows than the vocabulary has are for the class to judge: some models have more.
    """
    wrong = _compare_vocabulary(config, tensors, allows_more=True)
    says = next((key for key in QUANTIZATIONS if config.content.get(key)), "")
    if says and not _are_quantized(tensors):
        wrong += f"{'; ' * bool(wrong)}it says how weights are quantized ({says}), and none is"
    return wrong


def describe_dtype(config: ModelConfig, tensors: Iterable[HubTensor]) -> str:
    """Return in which other dtype than theirs engines load tensors, because a config says so; empty if in none."""
    stored = _find_dtype(tensors)
    said = next((str(value) for key in (_DTYPE, _OLDER) if (value := _look_up(config.content, key))), "")
    if not said or stored is None or said.removeprefix("torch.") == stored:
        return ""
    return f"engines load the weights, which are {stored}, as {said}: it says so"


def _compare_vocabulary(config: ModelConfig, tensors: Iterable[HubTensor], *, allows_more: bool = False) -> str:
    """Return what is wrong with the rows of the embedding or the output layer; empty if nothing is."""
    size = _look_up(config.content, _VOCABULARY)
    for tensor in tensors:
        rows = tensor.shape[0] if tensor.name in (*_EMBEDDINGS, *HEADS) and tensor.shape else None
        if type(size) is int and rows is not None and (rows < size or (rows > size and not allows_more)):
            return (
                f"{config.source} has {_VOCABULARY} {size}, and {tensor.name!r} has {rows} rows: no tool "
                "loads such a folder"
            )
    return ""


def _are_quantized(tensors: Iterable[HubTensor]) -> bool:
    """Return whether some tensors are codes, or their scales."""
    return any(
        (tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point)
        or (tensor.dtype in _CODES and len(tensor.shape) > 1)
        or tensor.name.endswith(_QUANTIZED_ENDS)
        for tensor in tensors
    )


def _drop_quantization(config: dict[str, Any], source: Path) -> dict[str, Any]:
    """Return a config that does not say that weights are quantized, after a warning if it did."""
    kept = {key: value for key, value in config.items() if key not in QUANTIZATIONS}
    if len(kept) < len(config):
        logger.warning("%s says how weights are quantized, and these are not: the folder's does not say so", source)
    parts = {key: value for key, value in kept.items() if key.endswith(_PART) and isinstance(value, dict)}
    return {**kept, **{key: _drop_quantization(value, source) for key, value in parts.items()}}


def _replace_dtypes(config: dict[str, Any], tensors: Sequence[HubTensor]) -> dict[str, Any]:
    """Return a config with the dtype of the weights, in each of its parts that of the part's; null stays."""
    changed = dict(config)
    dtype = _find_dtype(tensors)
    for key, value in config.items():
        if key in (_DTYPE, _OLDER) and value is not None and dtype is not None:
            changed[key] = dtype
        elif isinstance(value, dict) and key not in QUANTIZATIONS:
            stem = key.removesuffix(_PART)
            own = [t for t in tensors if any(part.startswith(stem) for part in t.name.split("."))]
            changed[key] = _replace_dtypes(value, own or tensors)
    return changed


def _find_dtype(tensors: Iterable[HubTensor]) -> str | None:
    """Return the name of the dtype that most elements of floating-point tensors have."""
    found = find_model_dtype((tensor.dtype, math.prod(tensor.shape)) for tensor in tensors)
    return None if found is None else str(found).removeprefix("torch.")
