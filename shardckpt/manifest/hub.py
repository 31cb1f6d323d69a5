"""Names of files in a folder of the Hub, and of the files that transformers' Trainer saves with a model: no torch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

#: Of weights: the only file, the index of several files, and an adapter of PEFT.
HUB_WEIGHTS = "model.safetensors"
HUB_INDEX = f"{HUB_WEIGHTS}.index.json"
HUB_ADAPTER = "adapter_model.safetensors"
HUB_FILES = frozenset({HUB_WEIGHTS, HUB_INDEX, HUB_ADAPTER})
#: Describe a model and an adapter.
HUB_CONFIG = "config.json"
HUB_ADAPTER_CONFIG = "adapter_config.json"
#: Where the Trainer keeps the step and the log of a training; it writes it last, and a resume reads it first.
TRAINER_STATE = "trainer_state.json"
#: The file that the Trainer saves with each model.
TRAINER_ARGUMENTS = "training_args.bin"
#: The files that accelerate saves with each model, one a rank.
_RANDOM_STATES = re.compile(r"random_states_\d+\.pkl")
#: Files of a training that transformers and accelerate save with its weights: no weights, whatever the suffix.
#: ``custom_checkpoint_<n>.pkl`` has an object that the program registers with accelerate.
_OF_TRAINING = re.compile(
    r"(optimizer|scheduler|scaler|rng_state|random_states|training_args|sampler|dl_state_dict)[^/]*\.(pt|pth|bin|pkl)"
    r"|custom_checkpoint_\d+\.pkl"
)
#: Files that are no weights; anything else may be, or be a folder of them.
_TEXTS = re.compile(
    r"\..*|LICENSE|NOTICE|README|USE_POLICY|latest|.*(?<!\.index)\.(json|jsonl|txt|md|jinja|py|ya?ml|model|tiktoken|log|csv|png)"
)
_STEP = re.compile(r"checkpoint-\d+")
#: Model and optimizer of FSDP, sharded and whole, and both of DeepSpeed.
_PART = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+|pytorch_model_fsdp\.bin|global_step\d+")
#: The optimizer's state in a Trainer's step, by itself, sharded by FSDP, and DeepSpeed's.
_OPTIMIZER = re.compile(r"(optimizer|pytorch_model_fsdp|global_step).*")


def is_of_training(name: str) -> bool:
    """Return whether a Trainer saves a file of this name with a model: its optimizer, its random numbers."""
    return _OF_TRAINING.fullmatch(name) is not None


def find_trainer_parts(names: Collection[str]) -> list[str]:
    """Return the folders and files of a step of a Trainer, or of accelerate, that are checkpoints of their own.

    They are FSDP's and DeepSpeed's, the model first; none of a step with ``model.safetensors`` alone, nor of any other
    folder.
    """
    if TRAINER_ARGUMENTS not in names and TRAINER_STATE not in names and not _has_random_states(names):
        return []
    return sorted(filter(_PART.fullmatch, names), key=lambda name: (name.startswith("optimizer"), name))


def explain_lost_model(parts: Sequence[str]) -> str:
    """Return the fault of a Trainer's step with an optimizer and no model; ``""`` if its first part is a model."""
    if not parts or not parts[0].startswith("optimizer"):
        return ""
    return f"pytorch_model_fsdp_{parts[0].rpartition('_')[2]} is missing, the model of {parts[0]}"


def explain_unfinished_step(step: str, names: Collection[str]) -> str:
    """Return how a directory shows that a Trainer was killed while it saved this step; ``""`` if it does not.

    Args:
        step: The name of the directory.
        names: The names of the files and folders in it.
    """
    if not _STEP.fullmatch(step) or TRAINER_ARGUMENTS not in names or TRAINER_STATE in names:
        return ""
    return f"{TRAINER_STATE} is missing, which transformers' Trainer writes last: the save did not end"


def explain_step_without_optimizer(step: str, names: Collection[str]) -> str:
    """Describe a Trainer's step with a model and no optimizer, which a resume misses; ``""`` for any other."""
    if not _STEP.fullmatch(step) or TRAINER_STATE not in names or any(map(_OPTIMIZER.fullmatch, names)):
        return ""
    return "the model only, without optimizer.pt: a resume begins with a new optimizer"


def _has_random_states(names: Iterable[str]) -> bool:
    return any(map(_RANDOM_STATES.fullmatch, names))


def lacks_weights(names: Iterable[str]) -> bool:
    """Return whether a folder has the files that are saved with a model's weights, and no weights: these were lost.

    Args:
        names: The names of its files and folders.
    """
    names = frozenset(names)
    has_description = HUB_CONFIG in names or TRAINER_STATE in names or _has_random_states(names)
    is_saved_with_weights = "generation_config.json" in names or any(map(is_of_training, names))
    if HUB_ADAPTER_CONFIG not in names and not (has_description and is_saved_with_weights):
        return False
    return all(is_of_training(name) or _TEXTS.fullmatch(name) for name in names)
