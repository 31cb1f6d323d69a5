"""A model's ``config.json``, with the dtype in which transformers loads the weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from shardckpt.huggingface.folder import CONFIG, CONFIG_LIMIT, read_json
from shardckpt.storage import is_there

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import torch

#: The key of the dtype, and that of transformers before 4.56.
_DTYPE, _OLDER = "dtype", "torch_dtype"
#: The dtypes in it are not those of weights.
_QUANTIZATION = "quantization_config"


def find_config(assets: Iterable[Path], target: Path | None = None) -> Path | None:
    """Return the ``config.json`` that a folder will have: that of the assets, else its own; None if there is none."""
    places = [*assets, *([] if target is None else [target / CONFIG])]
    return next((path for path in places if path.name == CONFIG and is_there(path)), None)


def read_config(assets: Iterable[Path], target: Path | None = None) -> dict[str, Any] | None:
    """Return the content of the ``config.json`` that a folder will have; None if there is none.

    Raises:
        CorruptCheckpointError: It is not a JSON object.
    """
    source = find_config(assets, target)
    return None if source is None else read_json(source, CONFIG_LIMIT)


def encode_config(source: Path, dtype: torch.dtype) -> bytes:
    """Return the text of a ``config.json`` with another dtype of the model, and of its parts (``text_config``).

    Raises:
        CorruptCheckpointError: the file is not a JSON object.
    """
    name = str(dtype).removeprefix("torch.")
    config = _replace(read_json(source, CONFIG_LIMIT), name)
    if not any(config.get(key) for key in (_DTYPE, _OLDER)):
        config[_DTYPE] = name
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _replace(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a config with every dtype in it replaced; null, which stands for the whole model's, stays."""
    changed = dict(config)
    for key, value in config.items():
        if key in (_DTYPE, _OLDER) and value is not None:
            changed[key] = name
        elif isinstance(value, dict) and key != _QUANTIZATION:
            changed[key] = _replace(value, name)
    return changed
