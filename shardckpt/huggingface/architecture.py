"""Whether the class that a folder's ``config.json`` names can load its weights: transformers is asked."""

from __future__ import annotations

import importlib.util
import logging
import re
import threading
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.errors import listed
from shardckpt.huggingface.config import HEADS, QUANTIZATIONS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from shardckpt.planning.boxes import Ints

#: Attributes of the loading info of ``from_pretrained``, and our words: without these tensors the model is another one.
_FAULTS = {"missing_keys": "missing", "mismatched_keys": "of another shape"}
#: The same of tensors that no loader takes: of a head or layers that the class does not have.
_NOTES = {"unexpected_keys": "unknown"}
#: The text of transformers' RuntimeError about parts that cannot be joined to the tensors of its class.
_CONVERSION = "conversion of the weights"
#: Loggers that tell of packages that are no concern of a folder, when transformers is imported.
_NOISY = ("torchao", "torch.utils._pytree")
#: A load changes transformers' and torch's defaults for all threads, and puts them back.
_LOCK = threading.Lock()
_owns_process = False
_NO_CLASS = "it names no class (architectures)"


class Fit(NamedTuple):
    """The fit of weights to a class.

    ``fault`` names the tensors that the class misses or refuses; ``""`` if there are none, or it was not tried.
    ``said`` says what fits, which tensors the class does not know, or why it was not tried. ``has_unknown`` says
    whether there are such tensors.
    """

    fault: str
    said: str
    has_unknown: bool = False


@contextmanager
def own_process() -> Iterator[None]:
    """Declare that this process runs nothing but the block: that it is a command's process."""
    global _owns_process  # noqa: PLW0603 - a fact of the process
    before, _owns_process = _owns_process, True
    try:
        yield
    finally:
        _owns_process = before


def try_class(folder: Path, config: Mapping[str, Any], shapes: Mapping[str, Ints]) -> Fit:
    """Return how the weights of a folder, on this machine, fit the model's class. No code in the folder is run.

    The class is built without memory, and no value is read: 0.1 s for a model of 600 MB, plus transformers' import.
    """
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    why_not = _explain_untried(name or str(config.get("model_type") or ""), config)
    if why_not:
        return Fit("", f"names and shapes were not compared: {why_not}")
    try:
        found, told = _load_without_values(folder, name or _find_class(config, shapes))
    except ImportError as exc:
        what = name or "class of its type"
        return Fit("", f"names and shapes were not compared: transformers has no {what}, or misses a package ({exc})")
    except Exception as exc:  # noqa: BLE001 - memory, devices, a release that does not know a setting
        if isinstance(exc, RuntimeError) and _CONVERSION in str(exc):
            odd = listed(_find_odd_shapes(shapes)) or "some have another shape, or are missing"
            return Fit(f"{name or 'the class'} of transformers cannot join the weights: {odd}", "")
        return Fit("", f"names and shapes were not compared: transformers says {type(exc).__name__} ({exc})")
    fault, note = (_describe_told(told, kinds, found) for kinds in (_FAULTS, _NOTES))
    if fault and not name and shapes.keys().isdisjoint(HEADS):  # a class with another head may have no such tensors
        return Fit("", f"names and shapes were not compared: {_NO_CLASS}")
    return Fit(fault, note or (not fault) * f"{found} of transformers has these names and shapes", bool(note))


def _describe_told(told: Mapping[str, Collection[Any]], kinds: Mapping[str, str], name: str) -> str:
    found = [f"{len(told[key])} {what} ({listed(_name_keys(told[key]))})" for key, what in kinds.items() if told[key]]
    return f"of the tensors of {name} of transformers, {', '.join(found)}" if found else ""


def _explain_untried(name: str, config: Mapping[str, Any]) -> str:
    if not name:
        return _NO_CLASS
    if "auto_map" in config:
        return "its code is in the folder, and is not run"
    if any(config.get(key) for key in QUANTIZATIONS):
        return "transformers needs the devices and packages of its quantization"
    if not all(map(importlib.util.find_spec, ("transformers", "accelerate"))):
        return f"{name} needs transformers and accelerate, which are not installed"
    # a load changes torch's defaults for all threads, a training's, too
    if not _owns_process and threading.current_thread() is not threading.main_thread():
        return "it is for the main thread of a process to build a model's class"
    return ""


def _find_class(config: Mapping[str, Any], shapes: Mapping[str, Ints]) -> str:
    """Return the class of a config that names none: the base of its model type, or with an output layer more."""
    with _LOCK, _quietly():
        from transformers.models.auto import modeling_auto as known

        has_head = not shapes.keys().isdisjoint(HEADS)
        classes: Any = known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if has_head else known.MODEL_MAPPING_NAMES
        found = classes.get(config.get("model_type"))
    if not isinstance(found, str):  # there are several, or none
        raise ImportError(f"model_type {config.get('model_type')!r}")
    return found


def _find_odd_shapes(shapes: Mapping[str, Ints]) -> list[str]:
    """Return the tensors of experts that have another shape than most of their kind, with both shapes."""
    kinds: dict[str, dict[str, Ints]] = {}
    for name, shape in shapes.items():
        if ".experts." in name:
            kinds.setdefault(re.sub(r"\.\d+\.", ".*.", name), {})[name] = shape
    usual = {kind: Counter(found.values()).most_common(1)[0][0] for kind, found in kinds.items()}
    return [
        f"{name}: {shape} for {usual[kind]}"
        for kind, found in kinds.items()
        for name, shape in found.items()
        if shape != usual[kind]
    ]


def _load_without_values(folder: Path, name: str) -> tuple[str, dict[str, Collection[Any]]]:
    """Return the class, and transformers' loading info of a load of a folder into it.

    If transformers has no such class, that is an ImportError.
    """
    with _LOCK, _quietly():
        import transformers
        from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

        kind: Any = getattr(transformers, name, None)
        if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
            raise ImportError(f"version {transformers.__version__}")
        if is_deepspeed_zero3_enabled():  # type: ignore[no-untyped-call]
            raise ImportError("DeepSpeed's ZeRO-3 is on in this process")
        # mismatched ones are told, too, and not raised
        loaded: Any = kind.from_pretrained(
            str(folder),
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            local_files_only=True,
            use_safetensors=True,
        )
    return name, dict(loaded[1])


def _name_keys(keys: Collection[Any]) -> list[str]:
    """Return names of tensors; of one of another shape, transformers tells both shapes, too."""
    return sorted(key if isinstance(key, str) else f"{key[0]}: {tuple(key[1])} for {tuple(key[2])}" for key in keys)


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep transformers from a report of its own and from bars, and its imports from warnings."""
    loggers = [logging.getLogger(name) for name in _NOISY]
    levels = [each.level for each in loggers]
    try:
        for each in loggers:
            each.setLevel(logging.ERROR)
        from transformers.utils import logging as library

        level, has_bars = library.get_verbosity(), library.is_progress_bar_enabled()
        try:
            library.set_verbosity(logging.CRITICAL)
            library.disable_progress_bar()  # type: ignore[no-untyped-call]
            yield
        finally:
            library.set_verbosity(level)
            if has_bars:
                library.enable_progress_bar()  # type: ignore[no-untyped-call]
    finally:
        for each, before in zip(loggers, levels, strict=True):
            each.setLevel(before)
