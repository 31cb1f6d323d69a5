"""Read a model's config.json, compare it with the tensors, and rewrite dtype and quantization where it is wrong."""

from __future__ import annotations

import json
import logging
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt.errors import CheckpointingException
from shardckpt.huggingface.assets import read_asset
from shardckpt.huggingface.casts import find_model_dtype
from shardckpt.huggingface.dtypes import is_castable
from shardckpt.huggingface.folder import CONFIG, parse_object
from shardckpt.storage.filesystem import is_there

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from shardckpt.huggingface.hub_tensor import HubTensor

logger = logging.getLogger(__name__)

_DTYPE, _DTYPE_BEFORE_4_56 = "dtype", "torch_dtype"  # the key of transformers 4.56, and the one before
_DTYPES = (_DTYPE, _DTYPE_BEFORE_4_56)
#: The keys of settings by which weights are quantized. A dtype in these settings is not the dtype of weights.
QUANTIZATIONS = ("quantization_config", "compression_config")
#: The integer dtypes of codes in quantized weights. A tensor of one axis in such a dtype has counts or indices instead.
_CODES = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32)
#: Ends of names that only quantized models have: GPTQ and AWQ, bitsandbytes, 8-bit KV caches. No other scale counts:
#: codes next to a scale count by their dtype, and ordinary models have scales, such as CLIP's ``logit_scale``.
_QUANTIZED_ENDS = (".qweight", ".absmax", ".k_scale", ".v_scale", ".kv_scale", ".output_scale")
#: The end of the key of a part's config: ``vision_config``.
_PART = "_config"
#: The keys of language models, whose tensors often have no prefix.
_LANGUAGE_PARTS = ("text_config", "llm_config", "language_config")
#: How components of tensor names begin, where not only with the name of the part: ``vision_tower``, ``visual``.
_PREFIXES_OF_PARTS = {"vision": ("vision", "visual")}
_VOCABULARY, _TIED = "vocab_size", "tie_word_embeddings"
#: The prefixes of the embedding and the output layer in models of the Hub.
_PREFIXES = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")
_EMBEDDINGS = tuple(f"{prefix}embed_tokens.weight" for prefix in _PREFIXES)
HEADS = tuple(f"{prefix}lm_head.weight" for prefix in _PREFIXES)
#: The tensors with a row for each entry of the vocabulary.
_BY_VOCABULARY = {*_EMBEDDINGS, *HEADS}


class ModelConfig(NamedTuple):
    """The content of a ``config.json``, and the file that it was read from."""

    source: Path
    content: dict[str, Any]

    @property
    def is_tied(self) -> bool:
        """Whether the config says that the output layer is the embedding."""
        return bool(_look_up(self.content, _TIED))


def find_config(assets: Iterable[Path], target: Path | None = None) -> ModelConfig | None:
    """Return the ``config.json`` of the assets, else the one in the target folder; None if neither has one."""
    places = [*assets, *([] if target is None else [target / CONFIG])]
    source = next((path for path in places if path.name == CONFIG and is_there(path)), None)
    return None if source is None else ModelConfig(source, parse_object(read_asset(source), source))


def read_config(assets: Iterable[Path], target: Path | None = None) -> dict[str, Any] | None:
    """Return the content of the config that :func:`find_config` finds; None if there is no config."""
    found = find_config(assets, target)
    return None if found is None else found.content


def adapt_config(
    config: ModelConfig, tensors: Sequence[HubTensor], *, add_dtype: bool, raise_on_vocabulary: bool = True
) -> bytes | None:
    """Return the text of a ``config.json`` with the dtype of the tensors; without quantization if no tensor has any.

    None if the config needs no change.

    Args:
        add_dtype: Whether a config without a dtype gets one.
        raise_on_vocabulary: Whether a vocabulary size that contradicts the tensors is an error, and not a warning.

    Raises:
        CheckpointingException: The embedding or the output layer has other rows than the vocabulary.
    """
    source, content = config
    fault = _compare_vocabulary(config, tensors)
    if fault:
        fault += (
            ". Give the config.json of this model (assets=, --assets), or leave out rows with which Megatron pads the "
            "vocabulary (cut_vocabulary=True, --cut-vocabulary, with a mapping)"
        )
        if raise_on_vocabulary:
            raise CheckpointingException(fault)
        logger.warning("%s", fault)
    adapted = content if _are_quantized(tensors) else _drop_quantization(content, source)
    adapted = _replace_dtypes(adapted, tensors)
    common_dtype = _name_common_dtype(tensors)
    if add_dtype and common_dtype is not None and not any(adapted.get(key) for key in _DTYPES):
        adapted[_DTYPE] = common_dtype
    return None if adapted == content else (json.dumps(adapted, indent=2, ensure_ascii=False) + "\n").encode()


def find_tied(config: ModelConfig, tensors: Iterable[HubTensor]) -> tuple[HubTensor, HubTensor] | None:
    """Return the embedding and the output layer, if a config ties the two and both are among the tensors."""
    if not config.is_tied:
        return None
    found = {tensor.name: tensor for tensor in tensors}
    embedding, head = (next((found[n] for n in names if n in found), None) for names in (_EMBEDDINGS, HEADS))
    if embedding is None or head is None:
        return None
    return (embedding, head) if len(embedding.shape) == len(head.shape) > 0 else None


def describe_contradiction(config: ModelConfig, tensors: Sequence[HubTensor]) -> str:
    """Return why no tool can load tensors with a config; ``""`` if the config does not contradict the tensors.

    A tensor with more rows than the vocabulary is no contradiction: some classes pad the vocabulary.
    """
    faults = [_compare_vocabulary(config, tensors, allow_more=True)]
    key = next((key for key in QUANTIZATIONS if config.content.get(key)), "")
    if key and not _are_quantized(tensors):
        faults.append(f"the config says how weights are quantized ({key}), and no weight is quantized")
    return "; ".join(filter(None, faults))


def describe_dtype(config: ModelConfig, tensors: Iterable[HubTensor]) -> str:
    """Return how the dtype in a config differs from the tensors' dtype; ``""`` if both are the same."""
    stored, said = _name_common_dtype(tensors), _look_up(config.content, *_DTYPES)
    if not said or stored is None or str(said).removeprefix("torch.") == stored:
        return ""
    return f"the config says {said}, and the weights are {stored}: engines convert the weights when they load them"


def _look_up(config: dict[str, Any], *keys: str) -> Any:
    """Return the first value of some keys in a config, else in its ``text_config``; null is no value."""
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, dict) else [config]
    return next((part[key] for part in parts for key in keys if part.get(key) is not None), None)


def _compare_vocabulary(config: ModelConfig, tensors: Iterable[HubTensor], *, allow_more: bool = False) -> str:
    """Return how the rows of the embedding or the output layer differ from the vocabulary; ``""`` if none differ."""
    size = _look_up(config.content, _VOCABULARY)
    if type(size) is not int:
        return ""
    counts = {tensor.name: tensor.shape[0] for tensor in tensors if tensor.name in _BY_VOCABULARY and tensor.shape}
    for name, rows in counts.items():
        difference = f"{config.source} has {_VOCABULARY} {size}, and {name!r} has {rows} rows"
        if rows < size:
            return f"{difference}: no tool loads such a folder"
        if rows > size and not allow_more:
            return f"{difference}: only a class that pads its vocabulary loads such a folder"
    return ""


def _are_quantized(tensors: Iterable[HubTensor]) -> bool:
    """Return whether some tensors are 8-bit floats or codes, or have names that only quantized models have."""
    return any(
        (tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point)
        or (tensor.dtype in _CODES and len(tensor.shape) > 1)
        or tensor.name.endswith(_QUANTIZED_ENDS)
        for tensor in tensors
    )


def _drop_quantization(config: dict[str, Any], source: Path) -> dict[str, Any]:
    """Return a config without the settings of quantization, also in its parts; warn if there were some."""
    kept = {key: value for key, value in config.items() if key not in QUANTIZATIONS}
    if len(kept) < len(config):
        logger.warning(
            "%s says how weights are quantized, and no weight is: the folder's config.json leaves it out", source
        )
    parts = {key: value for key, value in kept.items() if key.endswith(_PART) and isinstance(value, dict)}
    return {**kept, **{key: _drop_quantization(value, source) for key, value in parts.items()}}


def _replace_dtypes(config: dict[str, Any], tensors: Sequence[HubTensor]) -> dict[str, Any]:
    """Return a config with the dtype of the tensors; each part gets the dtype of its own tensors. A null stays."""
    replaced = dict(config)
    dtype = _name_common_dtype(tensors)
    for key, value in config.items():
        if key in _DTYPES and value is not None and dtype is not None:
            replaced[key] = dtype
        elif isinstance(value, dict) and key not in QUANTIZATIONS:
            replaced[key] = _replace_dtypes(value, _select_part(config, key, tensors))
    return replaced


def _select_part(config: dict[str, Any], key: str, tensors: Sequence[HubTensor]) -> Sequence[HubTensor]:
    """Return the tensors of a part of a model; none if names and dtypes do not tell the dtype of the part."""
    own = [tensor for tensor in tensors if _is_of_part(tensor, key)]
    if not own and key in _LANGUAGE_PARTS:  # the tensors that no other part has
        parts = [other for other in config if other.endswith(_PART)]
        own = [tensor for tensor in tensors if not any(_is_of_part(tensor, part) for part in parts)]
    # a part with unknown names has the dtype that all tensors have; of several dtypes it may have any
    is_uniform = len({tensor.dtype for tensor in tensors if is_castable(tensor.dtype)}) == 1
    return own or (tensors if is_uniform else [])


def _is_of_part(tensor: HubTensor, key: str) -> bool:
    """Return whether a tensor is of the part with a key in the config, by the components of the tensor's name."""
    part = key.removesuffix(_PART)
    prefixes = _PREFIXES_OF_PARTS.get(part, (part,))
    return any(component.startswith(prefixes) for component in tensor.name.split("."))


def _name_common_dtype(tensors: Iterable[HubTensor]) -> str | None:
    """Return the name of the dtype that most elements of floating-point tensors have; None without such tensors."""
    dtype = find_model_dtype((tensor.dtype, math.prod(tensor.shape)) for tensor in tensors)
    return None if dtype is None else str(dtype).removeprefix("torch.")
