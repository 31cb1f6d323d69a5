"""Which files of a folder engines load, by their rules, where there are more than one model's."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from shardckpt.huggingface.names import ADAPTER, SAFETENSORS, file_names, index_name

if TYPE_CHECKING:
    from collections.abc import Collection

#: Mistral's own layout, which vLLM takes instead of the Hub's where such a file is there.
MISTRAL = "consolidated*.safetensors"


def list_hub_files(names: Collection[str], indexed: Collection[str]) -> set[str]:
    """Return the files that transformers loads: those that the index names, else the only file.

    ``modeling_utils._get_resolved_checkpoint_files`` of transformers: ``model.safetensors`` goes before the index.

    Args:
        names: The files in the folder.
        indexed: Those that its index names; none without an index.
    """
    only = file_names(1, SAFETENSORS)[0]
    return {only} if only in names else set(indexed)


def list_engine_files(names: Collection[str], indexed: Collection[str]) -> set[str]:
    """Return the files that SGLang loads, and vLLM unless Mistral's are there: all that an index, if any, names.

    ``DefaultModelLoader._prepare_weights`` and ``filter_duplicate_safetensors_files`` of both.
    """
    found = {name for name in names if fnmatchcase(name, "*.safetensors")}
    return found & set(indexed) if indexed else found


def review_files(names: Collection[str], indexed: Collection[str]) -> dict[str, str]:
    """Return what engines make of files that are no weights of the folder's model, by their names.

    Args:
        names: The files in the folder.
        indexed: Those that its index names; none without an index.
    """
    model = list_hub_files(names, indexed)
    notes = {}
    for name in sorted(set(names) - model):
        if fnmatchcase(name, MISTRAL):
            notes[name] = "vLLM loads this, Mistral's layout, in the place of the Hub's weights"
        elif name in list_engine_files(names, indexed):
            notes[name] = "vLLM and SGLang load it, too; transformers does not"
        elif name == ADAPTER:
            notes[name] = "transformers (with peft) adds this adapter to the weights"
        elif fnmatchcase(name, "*.safetensors") and not name.startswith("adapter_model"):
            notes[name] = f"no engine loads it: {index_name(SAFETENSORS)} does not name it"
    if file_names(1, SAFETENSORS)[0] in names and indexed and not model & set(indexed):
        notes[index_name(SAFETENSORS)] = "transformers loads model.safetensors, vLLM and SGLang what this index names"
    return notes
