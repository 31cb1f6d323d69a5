"""Folders of PEFT that have a LoRA adapter and no model: its names, and whether its configuration and tensors agree.

``peft_model.save_pretrained`` writes ``adapter_config.json`` and ``adapter_model.safetensors``. The facts are those of
PEFT 0.18 to 0.21 (``get_peft_model_state_dict``, ``get_pattern_key``, ``check_target_module_exists``).
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from shardckpt.errors import KeyMismatchError, listed
from shardckpt.plugins.key_mapping import Identity

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from shardckpt.huggingface.header import FileTensor
    from shardckpt.planning.boxes import Ints
    from shardckpt.plugins.key_mapping import KeyMapEntry

#: The prefix of names in a folder.
_ROOT = "base_model.model."
#: Names in a model: of layers, of parameters (embeddings), and of modules that are trained as a whole. The part between
#: is the adapter's name, which folders do not have.
_LAYER = re.compile(r"(.+\.lora_(?:A|B|magnitude_vector))\.([^.]+)\.(weight|bias)")
_PARAMETER = re.compile(r"(.+\.(?:lora_embedding_[AB]|trainable_tokens_delta))\.([^.]+)")
_SAVED_MODULE = re.compile(r"(.+)\.modules_to_save\.([^.]+)\.(.+)")
#: A part of the name of an adapter's tensor, in a model and in a folder, unless its module is trained as a whole.
_OWN = re.compile(r"\.(?:lora_|trainable_tokens_delta)")
#: Names in a folder of the two factors of a module: of linear layers and convolutions, and of embeddings.
_FACTOR = re.compile(r"(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?")
#: A name of modules that means itself; others are regular expressions, of whoever wrote the folder, and are not run.
_PLAIN = re.compile(r"[\w.-]+")


#: The mapping's name; ``peft:NAME`` names the mapping of one of several adapters.
PEFT = "peft"


def find_adapter_mapping(mapping: object) -> AdapterNames | None:
    """Return the mapping that a caller's argument names, if it is an adapter's."""
    if isinstance(mapping, AdapterNames):
        return mapping
    name, _, adapter = mapping.partition(":") if isinstance(mapping, str) else ("", "", "")
    return AdapterNames(adapter) if name == PEFT else None


class AdapterNames(Identity):
    """The mapping from the names of a model of PEFT to the names in an adapter's folder; the base model has none there.

    ``adapter`` is its name in the model; ``""`` for the only one. ``stored`` are the names in a folder that is loaded,
    which may have the base model's embedding, too.
    """

    def __init__(self, adapter: str = "", stored: Collection[str] = ()) -> None:
        self._adapter = adapter
        self._stored = stored

    def find_parts(self, keys: Iterable[str]) -> set[str]:
        """Return the names of the adapters that keys are of."""
        return {adapter for key in keys if (adapter := _split_name(key)[0])}

    def for_folder(self, stored: Collection[str], parts: Collection[str]) -> AdapterNames:
        """Return the mapping for a load from a folder with these names, into a model with these adapters."""
        self.check_parts(parts)
        return AdapterNames(self._adapter, stored)

    def links(self, key: str, shape: Ints) -> Sequence[KeyMapEntry]:
        """Return one entry, of the whole tensor; none for a tensor of the base model, or of another adapter."""
        name = self.find_name(key)
        return super().links(name, shape) if name else ()

    def find_name(self, key: str) -> str:
        """Return the name that a folder has for a key; ``""`` if it has none."""
        adapter, name = _split_name(key)
        if not name:
            return key if key in self._stored else ""
        return name if not adapter or adapter == (self._adapter or adapter) else ""

    def check_parts(self, parts: Collection[str]) -> None:
        """Raise KeyMismatchError if a model has several adapters, and none was named, or none of that name."""
        found = sorted(parts)
        if len(found) > 1 and not self._adapter:
            raise KeyMismatchError(f"there are several adapters, {listed(found)}: name one, mapping='peft:{found[0]}'")
        if found and self._adapter and self._adapter not in found:
            raise KeyMismatchError(f"there is no adapter {self._adapter!r}, but {listed(found)}")

    def is_of_base(self, key: str) -> bool:
        """Return whether a tensor of a model is not the adapter's."""
        return not _split_name(key)[1]


def find_adapter_key(keys: Iterable[str]) -> str:
    """Return the first key with an adapter's name in it; ``""`` if there is none."""
    return next((key for key in keys if _OWN.search(key) and _split_name(key)[0]), "")


def _split_name(key: str) -> tuple[str, str]:
    """Return the adapter's name in a key, and the name in a folder; two empty ones for a tensor of the base model."""
    if found := _SAVED_MODULE.fullmatch(key):
        return found[2], f"{found[1]}.{found[3]}"
    if found := _LAYER.fullmatch(key):
        # PEFT's folders have a magnitude in its form before it was a layer's weight
        return found[2], found[1] if found[1].endswith("magnitude_vector") else f"{found[1]}.{found[3]}"
    if found := _PARAMETER.fullmatch(key):
        return found[2], found[1]
    return "", key if _OWN.search(key) else ""


def review_adapter(config: Mapping[str, Any], tensors: Mapping[str, FileTensor]) -> tuple[str, str]:
    """Compare the content of ``adapter_config.json`` with the tensors of the adapter, by names, shapes and dtypes.

    Return why PEFT would load it differently than it was trained, ``""`` if it would not, and remarks.
    """
    kind = config.get("peft_type")
    if kind != "LORA":
        return "", f"not compared with the tensors: peft_type is {kind!r}, and LORA alone is known"
    factors: dict[str, dict[str, FileTensor]] = {}
    for name, tensor in tensors.items():
        if found := _FACTOR.fullmatch(name):
            factors.setdefault(found[1].removeprefix(_ROOT), {})[found[2]] = tensor
    faults = [
        *_find_wrong_names(tensors, factors),
        *_find_halves(factors),
        *_find_wrong_ranks(config, factors),
        *_find_wrong_dtypes(tensors),
    ]
    wrong, note = _compare_targets(config.get("target_modules"), factors, config)
    kinds = Counter(tensor.kind for tensor in tensors.values())
    notes = [note, f"its tensors are {', '.join(f'{kind} ({n})' for kind, n in kinds.items())}" * (len(kinds) > 1)]
    return "; ".join(filter(None, [*faults, wrong])), "; ".join(filter(None, notes))


def _find_wrong_names(tensors: Iterable[str], factors: Mapping[str, Any]) -> Iterator[str]:
    wrong = sorted(name for name in tensors if not name.startswith(_ROOT) or _split_name(name)[0])
    if wrong:
        yield f"PEFT finds no place for {listed(wrong)}: names are {_ROOT}MODULE.lora_A.weight, without the adapter's"
    elif not factors:
        yield "adapter_model.safetensors has no tensor of LoRA"


def _find_halves(factors: Mapping[str, Mapping[str, FileTensor]]) -> Iterator[str]:
    for letter, other in ("AB", "BA"):
        if alone := sorted(name for name, pair in factors.items() if letter not in pair):
            yield f"lora_{letter} is missing for lora_{other} of {listed(alone)}"


def _find_wrong_ranks(config: Mapping[str, Any], factors: Mapping[str, Mapping[str, FileTensor]]) -> Iterator[str]:
    rank, patterns = config.get("r"), config.get("rank_pattern") or {}
    if type(rank) is not int or not isinstance(patterns, dict):
        yield f"its r is {rank!r} and its rank_pattern {patterns!r:.80}: a number, and numbers by names, are wanted"
        return
    for module, pair in sorted(factors.items()):
        said = next((value for name, value in patterns.items() if _matches(module, name)), rank)
        if config.get("target_parameters") or (said is rank and not all(map(_PLAIN.fullmatch, patterns))):
            continue  # factors of all experts in one, or a regular expression that may match
        found = {letter: tensor.shape["AB".index(letter)] for letter, tensor in pair.items() if len(tensor.shape) > 1}
        if set(found.values()) - {said}:
            shapes = ", ".join(f"lora_{letter} of shape {tensor.shape}" for letter, tensor in sorted(pair.items()))
            yield f"it says rank {said} of {module!r}, which has {shapes}"


def _find_wrong_dtypes(tensors: Mapping[str, FileTensor]) -> Iterator[str]:
    wrong = sorted(f"{name} ({t.kind})" for name, t in tensors.items() if t.dtype and not t.dtype.is_floating_point)
    if wrong:
        yield f"a factor is of floating point, unlike {listed(wrong)}"


def _compare_targets(targets: Any, factors: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[str, str]:
    """Return why PEFT drops tensors of modules that ``target_modules`` does not name, and which names match nothing."""
    if not targets and config.get("target_parameters"):
        return "", ""
    if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
        return "", f"not compared with the modules: target_modules is {targets!r:.80}"
    unnamed = sorted(module for module in factors if not any(_matches(module, target) for target in targets))
    unused = sorted(target for target in targets if not any(_matches(module, target) for module in factors))
    fault = f"target_modules does not name {listed(unnamed)}, whose tensors PEFT leaves out" if unnamed else ""
    return fault, f"of target_modules no tensor has {listed(unused)}" if unused else ""


def _matches(module: str, name: str) -> bool:
    """Return whether a name means a module: its whole name, or the last parts of it."""
    return f".{module}".endswith(f".{name}")
