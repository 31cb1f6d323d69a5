"""Other libraries' names of the settings of a CheckpointConfig, and the advice in an error of such a name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt import settings

if TYPE_CHECKING:
    from collections.abc import Collection

#: Our setting by the name that Orbax, torchtitan, Lightning, transformers or Megatron has for it. A value may have
#: several of ours, with " or " between them, and after "=" the value to give.
OTHER_NAMES = {
    "max_to_keep": "keep_latest_k",
    "save_total_limit": "keep_latest_k",
    "keep_period": "keep_every_n_steps",
    "save_retain_interval": "keep_every_n_steps",
    "save_interval_steps": "interval",
    "save_steps": "interval",
    "every_n_train_steps": "interval",
    "save_interval": "interval",
    "save_strategy": "interval or save_when",
    "train_time_interval": "save_when=SaveAfter(seconds)",
    "save_interval_policy": "save_when",
    "save_decision_policy": "save_when",
    "save_on_steps": "save_when=SaveAt([...])",
    "preservation_policy": "retention",
    "save_top_k": "keep_best_k",
    "monitor": "best_metric",
    "metric_for_best_model": "best_metric",
    "best_fn": "best_metric",
    "mode": "best_mode",
    "greater_is_better": "best_mode",
    "enable": "enable_checkpoint",
    "read_only": "load_only",
    "enable_async_checkpointing": "async_mode",
    "async_save": "async_mode",
    "directory": "folder",
    "dirpath": "folder",
    "output_dir": "folder",
    "default_root_dir": "folder",
    "save": "folder",
    "checkpoint_folder": "folder",
    "checkpoint_dir": "folder",
    "checkpoint_id": "folder",
    "path": "folder",
    "load": "initial_load_path",
    "pretrained_checkpoint": "initial_load_path",
    "save_weights_only": "last_save_model_only",
    "save_only_model": "last_save_model_only",
    "model_weights_only": "last_save_model_only",
    "resume_from_checkpoint": "load_step",
    "ckpt_step": "load_step",
    "ckpt_path": "load_step or initial_load_path",
    "save_last": "links or latest_pointer",
    "enable_jit_checkpoint": "save_on_sigterm",
    "exit_signal_handler": "save_on_sigterm",
    "ckpt_format": "strategy",
    "format": "strategy",
    "backend": "strategy",
    "sharded_strategy": "strategy",
    "strict": "on_unused",
}

#: The hint for every setting with "timeout" in its name, as Orbax, torchtitan, Megatron and torch have them.
TIMEOUT_HINT = (
    "a rank waits for the others as long as the process group's timeout says, "
    "torch.distributed.init_process_group(timeout=timedelta(...)); for an answer of a store, "
    f"{settings.REMOTE_TIMEOUT} seconds"
)


def find_hint(given: Collection[str], name: str) -> tuple[str, str | None]:
    """Return a hint for a setting that only other libraries have, and the one name of ours to give in its place.

    The hint is ``""`` where nothing is known. The name is None where several of ours may be meant, or ours is given.

    Args:
        given: The names of all settings that are given: several may stand for one of ours.
        name: The name to explain.
    """
    if "timeout" in name:
        return TIMEOUT_HINT, None
    if name not in OTHER_NAMES:
        return "", None
    ours = OTHER_NAMES[name]
    duplicates = [other for other in given if other != name and OTHER_NAMES.get(other, other) == ours]
    if not duplicates:
        names = list_our_names(name)
        return f"it is {ours} here", names[0] if len(names) == 1 and names[0] not in given else None
    more = "" if duplicates == [ours] else f", and so is {', '.join(duplicates)}"
    return f"it is {ours} here{more}, which is given, too: give {ours} once", None if ours in given else ours


def list_our_names(name: str) -> list[str]:
    """Return our names of a setting, given by one of these or another library's name."""
    return [ours.partition("=")[0] for ours in OTHER_NAMES.get(name, name).split(" or ")]
