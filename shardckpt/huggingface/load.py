"""Load weights from a Hugging Face folder into shards of any layout."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardckpt.distributed.comm import Comm
from shardckpt.distributed.error_report import replace_text
from shardckpt.engine.load_template import LoadTemplate
from shardckpt.engine.loading import load_checkpoint, report_ignored
from shardckpt.engine.locations import locate
from shardckpt.engine.opening import OpenCheckpoint
from shardckpt.engine.operation import Operation
from shardckpt.engine.resizing import allow_resizing
from shardckpt.errors import (
    CheckpointingException,
    KeyMismatchError,
    NotACheckpointError,
    listed,
)
from shardckpt.huggingface.adapters import PEFT
from shardckpt.huggingface.config import ModelConfig
from shardckpt.huggingface.folder import CONFIG, check_same_folder, read_folder
from shardckpt.huggingface.load_strategy import HuggingFaceLoadStrategy
from shardckpt.huggingface.megatron import MEGATRON_NAME
from shardckpt.huggingface.models import find_mapping
from shardckpt.manifest.models import Manifest
from shardckpt.mapping.factory import ShardedTensorFactory
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.mapping.unstored import StoredNames
from shardckpt.parallel.load import share_reading, split_budget
from shardckpt.plugins.key_mapping import MapsPart
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.plugins.resolver import check_policy, read_manifest
from shardckpt.state_dict import nested_values
from shardckpt.storage.directory import open_directory, real_path, retry_if_replaced
from shardckpt.storage.reader import CheckpointReader
from shardckpt.strategy import LoadContext
from shardckpt.tensors.inner import get_outer_key
from shardckpt.validation.arguments import check_annotated
from shardckpt.validation.keys import StrictHandling

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Iterable

    import torch
    from torch.distributed import ProcessGroup

    from shardckpt.huggingface.folder import Folder
    from shardckpt.mapping.base import ShardedBase, ShardedStateDict
    from shardckpt.plugins.key_mapping import KeyMapping

logger = logging.getLogger(__name__)


def load_from_huggingface(
    sharded_state_dict: ShardedStateDict,
    folder: str | os.PathLike[str],
    *,
    mapping: str | KeyMapping | None = None,
    prefix: str = "",
    strict: bool = True,
    optional: Collection[str] = (),
    validate_access_integrity: bool = True,
    process_group: ProcessGroup | None = None,
    fully_parallel: bool = False,
    memory_budget: int | str | None = None,
    allow_dtype_cast: bool = False,
    resize: Collection[str] = (),
) -> Any:
    """Collective: fill shards of any layout from a Hugging Face folder; each rank reads only bytes of its shards.

    Floating-point values are cast to the dtype of the shard. 8-bit weights with block scales (``weight_scale_inv``) are
    dequantized, unless the shard has their 8-bit dtype.

    Example::

        state = to_sharded_state_dict(model)
        load_into(load_from_huggingface(state, "Qwen3-30B-A3B", mapping="qwen3_moe"), model)

    Args:
        sharded_state_dict: As for :func:`shardckpt.dist_checkpointing.load`, with tensors only; for a model,
            ``shardckpt.adapters.to_sharded_state_dict(model)``. Objects ``..._extra_state``, as Megatron's modules have
            them, are left out of the result and logged. A warning names tensors that no shard describes.
        folder: The folder (``model.safetensors``, or several files and ``model.safetensors.index.json``), a snapshot
            in the Hugging Face cache, or the URL of a folder.
        mapping: How the folder's names and shapes map to the keys: as for :func:`export_to_huggingface`.
        prefix: Prefix of the keys that the folder's names do not have.
        strict: Whether the folder must have every requested tensor. If False, tensors that it lacks keep their values,
            are left out of the result, and are logged. A weight that shares its memory with one that the folder has
            (a tied weight) never counts as missing.
        optional: Names of tensors that the folder may lack, for which ``strict`` is False: keys, or their ends after a
            dot.
        validate_access_integrity: Check that the shards of all ranks cover every tensor exactly once.
        process_group: The ranks that load; by default all, or this process alone without torch.distributed.
        fully_parallel: Read tensors that several ranks want once; as for :func:`shardckpt.dist_checkpointing.load`.
        memory_budget: As for :func:`shardckpt.dist_checkpointing.load`.
        allow_dtype_cast: As for :func:`shardckpt.dist_checkpointing.load`.
        resize: As for :func:`shardckpt.dist_checkpointing.load`.

    Returns:
        The state dict with its tensors filled. Tensors of the folder that no shard requests are not read.

    Raises:
        NotACheckpointError: ``folder`` is not a Hugging Face folder of safetensors.
        RefusedByPolicyError: ``SHARDCKPT_ACCEPT`` leaves ``huggingface`` out.
        CheckpointReplacedError: exports replaced the folder in every attempt.
        KeyMismatchError: a requested tensor is not in the folder.
        ShapeMismatchError: a tensor has another shape in the folder.
        DtypeMismatchError: values do not fit a wanted dtype.
        CheckpointingException: any other failure; the same on every rank.
    """
    comm = Comm(process_group)
    with comm.local_phase("reading the arguments"):
        check_annotated(load_from_huggingface, locals())
        find_mapping(mapping)
        budget, reading = split_budget(memory_budget, fully_parallel=fully_parallel)
        resized = tuple(resize)
        optional_ends = tuple(f".{name}" for name in optional) if strict else ("",)  # every name has the empty end
        # without digests: the folder stores none
        manifest = Manifest(backend=HuggingFaceLoadStrategy.backend, version=HuggingFaceLoadStrategy.version)

    def attempt() -> Any:
        with comm.local_phase("reading the arguments"):
            path = locate(folder, get_plugin_manager())
        operation = Operation("load", path, comm, get_plugin_manager())
        with operation.collective_span():
            with operation.local_phase("opening the folder"):
                place = open_directory(path)
            with operation.local_phase("reading the headers"):
                found = comm.main_runs("reading the headers", lambda: _read(place))
            with operation.local_phase("preparing the state dict"):
                check_same_folder(place, found)
                check_policy(path, manifest)
                template = _make_template(sharded_state_dict)
                wanted = allow_resizing(template.shards, {}, resized)
                if strict:
                    _refuse_objects(wanted, path)
                chosen = _choose_mapping(mapping, found, [shard.key.removeprefix(prefix) for shard in wanted], comm)
                strategy = HuggingFaceLoadStrategy(found, chosen, prefix, wanted)
                _refuse_missing(strategy, path, mapping, optional_ends)
            ignored = template.find_ignored_tensors({})  # a folder has no common state that could have them
            (most_ignored,) = comm.largest(len(ignored))
            if most_ignored:
                report_ignored(ignored, most_ignored, "warn", comm)
            if strategy.is_partial:
                _refuse_unplaced(strategy, path, operation, strict=strict)
            at = Path(found.directory) if found.directory else place
            with CheckpointReader(at, manifest, memory_budget=reading) as reader:
                checkpoint = OpenCheckpoint(strategy, LoadContext(reader, comm), operation, has_own_keys=True)
                if fully_parallel:
                    checkpoint = share_reading(checkpoint, budget)
                loaded, _ = load_checkpoint(
                    sharded_state_dict,
                    checkpoint,
                    validate=validate_access_integrity,
                    # required names were looked for; in a part of a model all others are absent
                    strict=StrictHandling.IGNORE_ALL if strategy.is_partial else StrictHandling.LOG_UNEXPECTED,
                    allow_dtype_cast=allow_dtype_cast,
                    filled_by_twins=strategy.absent,
                    resize=resized,
                )
                # after the reads: an export may have put another folder in place since
                reader.check_unchanged()
        return loaded

    return retry_if_replaced(attempt, folder)


def _make_template(requested: ShardedStateDict) -> LoadTemplate:
    """Return the template of a load; shards of quantized parameters ask for values, since no folder has their codes."""

    def name_quantized() -> StoredNames:
        factories = (leaf for leaf in nested_values(requested) if isinstance(leaf, ShardedTensorFactory))
        found = {each.key: (each.data.dtype, tuple(each.data.shape)) for each in factories if _is_quantized(each)}
        return StoredNames(found, ())

    return LoadTemplate(requested, name_quantized)


def _is_quantized(factory: ShardedTensorFactory) -> bool:
    """Return whether a tensor is stored by those inside it."""
    shards = (each for each in nested_values(factory.build()) if isinstance(each, ShardedTensor))
    return any(get_outer_key(shard.key) == factory.key for shard in shards)


def _choose_mapping(mapping: str | KeyMapping | None, folder: Folder, keys: Iterable[str], comm: Comm) -> KeyMapping:
    """Collective: return the mapping of a folder, by default an adapter's where it has one."""
    # rows that pad the vocabulary are the trainer's: they are as allow_shape_mismatch says
    default = PEFT if folder.adapter is not None else None
    found = find_mapping(default if mapping is None else mapping, lambda: folder.config, "keep")
    # it decides which collectives a rank calls
    comm.agree(mapping="of a part of a model" if isinstance(found, MapsPart) else "of a model")
    if not isinstance(found, MapsPart):
        return found
    everyone = comm.all_gather(found.find_parts(keys))  # a stage of a pipeline may have none
    return found.for_folder(folder.tensors, {part for parts in everyone for part in parts})


def _refuse_missing(
    strategy: HuggingFaceLoadStrategy, path: Path, mapping: str | KeyMapping | None, optional_ends: tuple[str, ...]
) -> None:
    """Raise KeyMismatchError if the folder lacks names that tensors need, except those with ``optional_ends``."""
    left = {key for key in strategy.missing if f".{key}".endswith(optional_ends)}
    if left and strategy.is_partial:  # of another folder the load says so
        logger.warning("not in the adapter's folder, and so as they were: %s", listed(sorted(left), limit=5))
    missing = sorted({name for key, names in strategy.missing.items() if key not in left for name in names})
    if missing:
        raise KeyMismatchError(
            f"{path} lacks {listed([*map(repr, missing)])}, which the requested tensors need; "
            f"huggingface_index(folder) lists what it has. {_advise(missing, mapping, strategy.folder)}"
        )


def _refuse_unplaced(strategy: HuggingFaceLoadStrategy, path: Path, operation: Operation, *, strict: bool) -> None:
    """Collective: warn of tensors of a folder for which no rank's model has a place; KeyMismatchError if all are."""
    stored, own = sorted(strategy.folder.tensors), strategy.used
    # a stage of a pipeline has a place for some alone
    is_used = operation.comm.largest(*(name in own for name in stored)) if stored else []
    unused = [name for name, used in zip(stored, is_used, strict=True) if not used]
    with operation.local_phase("comparing names"):
        if strict and len(unused) == len(stored):
            what = (
                "is an adapter of PEFT, and the model has no place for any of its tensors: make the model by "
                "peft.get_peft_model first, or give the folder of the base model"
                if strategy.folder.adapter is not None
                else "has no tensor by the names that mapping='peft' gives to those of the model: leave the mapping out"
            )
            raise KeyMismatchError(f"{path} {what}")
    if unused and operation.comm.is_main:
        logger.warning("unused tensors of the adapter, for which the model has no place: %s", listed(unused, limit=5))


def _refuse_objects(shards: Iterable[ShardedBase], path: Path) -> None:
    """Raise for objects that would be lost; ``_extra_state`` of modules no folder has, and a model goes without."""
    objects = {shard.key for shard in shards if isinstance(shard, ShardedObject)}
    lost = sorted(key for key in objects if not key.endswith("_extra_state"))
    if lost:
        raise KeyMismatchError(
            f"{path}: a Hugging Face folder has tensors and no objects: leave {listed(lost)} out of the state dict; "
            "strict=False leaves out all that it lacks"
        )


def _read(place: Path) -> Folder:
    """Read the headers of a folder; of another checkpoint, the error names the call that reads it."""
    try:
        return read_folder(place)
    except NotACheckpointError as exc:
        try:
            found = read_manifest(real_path(place), get_plugin_manager())
        except CheckpointingException:
            advice = "convert_checkpoint(SOURCE, NEW, 'hf') makes one of other checkpoints, and of files of torch.save"
        else:
            advice = (
                f"It is a checkpoint ({found.backend} {found.version}): load it by dist_checkpointing.load, or as "
                "initial_load_path with initial_load_in_hf=False; export_to_huggingface makes such a folder of it"
            )
        raise replace_text(exc, f"{exc}. {advice}") from exc.__cause__


def _advise(missing: Collection[str], mapping: str | KeyMapping | None, folder: Folder) -> str:
    """Return why names are missing, or which mapping gives other names."""
    if ModelConfig(Path(CONFIG), folder.config).is_tied and any(name.endswith("lm_head.weight") for name in missing):
        return (
            "config.json says that the output layer is the embedding (tie_word_embeddings), so that the folder has one "
            "of them: build the model so, or load with strict=False, and give the output layer the embedding's values"
        )
    if MEGATRON_NAME in missing:
        return "That is Megatron's name: give mapping='megatron'"
    if mapping is not None:
        return "Names that the mapping leaves as they are match no rule of it"
    return (
        "If names differ, give a mapping: load_from_huggingface(mapping=..., prefix=...) or "
        "CheckpointConfig(hf_mapping=...); if the model computes them: "
        "load_from_huggingface(optional=...) or CheckpointConfig(exclude_from_last_save=...)"
    )


def huggingface_index(folder: str | os.PathLike[str]) -> dict[str, tuple[torch.dtype | None, tuple[int, ...]]]:
    """List the tensors of a Hugging Face folder; only headers are read. Needs no other rank.

    Args:
        folder: As for :func:`load_from_huggingface`.

    Returns:
        ``{name: (dtype, shape)}``; the dtype is None if this torch lacks it.

    Raises:
        CheckpointingException: as for :func:`load_from_huggingface`.
    """
    found = read_hub_folder(folder)
    return {name: (tensor.dtype, tensor.shape) for name, tensor in found.tensors.items()}


def read_hub_folder(folder: str | os.PathLike[str]) -> Folder:
    """Read the content of a Hugging Face folder; only headers are read. Needs no other rank."""
    return retry_if_replaced(lambda: _read(open_directory(locate(folder, get_plugin_manager()))), folder)
