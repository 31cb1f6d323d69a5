"""Export a checkpoint of any strategy as a Hugging Face folder: atomically, in bounded memory."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.distributed.comm import Comm
from shardckpt.engine.damage import hide_damaged
from shardckpt.engine.locations import locate, refuse_overlap
from shardckpt.engine.opening import LoadOptions, open_checkpoint
from shardckpt.engine.operation import Operation
from shardckpt.engine.renaming import list_names, parse_renames, rename_stored
from shardckpt.huggingface.export_budget import split_export_budget
from shardckpt.huggingface.names import SAFETENSORS
from shardckpt.huggingface.options import parse_options
from shardckpt.huggingface.planning import ExportPlan, LeftOut, plan_export
from shardckpt.huggingface.store_export import find_export
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.storage.directory import replaced_error, retry_if_replaced
from shardckpt.validation.arguments import check_annotated

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Mapping

    import torch
    from torch.distributed import ProcessGroup

    from shardckpt.plugins.key_mapping import KeyMapping

    PathLike = str | os.PathLike[str]


class ExportedTensor(NamedTuple):
    """A tensor that an export has written: its name, file and bytes, and the keys of the tensors that make it up."""

    name: str
    file: str
    nbytes: int
    keys: tuple[str, ...]


class Exported(NamedTuple):
    """The weights that an export has written.

    Attributes:
        files: Name, number of tensors and bytes of tensors of each file.
        total_size: Bytes of all tensors.
        unmatched: Keys of tensors that the mapping does not know, which have kept their names.
        left_out: Keys of stored items that are not written: the optimizer's state, tensors that are not the model's,
            and items that have no place in a folder or that the mapping leaves out.
        cast: The stored dtype of each tensor that was cast, by name.
        kept: Names of tensors that were not cast where others were, since they would have lost by it.
        tensors: Each tensor, with its file and the keys that it had in the checkpoint.
        damaged: Names of tensors and objects that could not be read, and so were not written.
    """

    files: tuple[tuple[str, int, int], ...]
    total_size: int
    unmatched: tuple[str, ...] = ()
    left_out: LeftOut = LeftOut()
    cast: Mapping[str, torch.dtype] = MappingProxyType({})
    kept: tuple[str, ...] = ()
    tensors: tuple[ExportedTensor, ...] = ()
    damaged: tuple[str, ...] = ()


def export_to_huggingface(
    checkpoint_dir: PathLike,
    target: PathLike,
    *,
    prefix: str | None = None,
    mapping: str | KeyMapping | None = None,
    dtype: torch.dtype | str | Mapping[str, torch.dtype | str] | None = None,
    keep: Collection[str] = (),
    max_shard_size: int | str = "5GB",
    format: str = SAFETENSORS,  # noqa: A002 - the user's word for it
    assets: PathLike | None = None,
    leave_out: Collection[str] = (),
    strict: bool = False,
    cut_vocabulary: bool = False,
    overwrite: bool = False,
    process_group: ProcessGroup | None = None,
    memory_budget: int | str | None = None,
    rename: Mapping[str, str] | None = None,
    skip_damaged: bool = False,
) -> Exported:
    """Collective: write a checkpoint's tensors as a Hugging Face folder; its bytes do not depend on the sharding.

    The folder has ``model.safetensors``, or ``model-00001-of-0000n.safetensors`` and ``model.safetensors.index.json``.
    Tensors are read and written in blocks: about 64 MiB of memory a rank at any size of tensors (``bin``: the largest
    file), or what ``memory_budget`` says. Every rank writes full files, balanced by bytes, so more ranks than files do
    not help. The folder is complete at ``target`` when this returns; after an error, a directory has not changed.

    The model alone is written: not the optimizer's state, objects, and tensors that the mapping leaves out. Warnings
    name them, and tensors that are not cast. Tensors that match no rule of the mapping keep their names; a warning
    names them. The folder's ``config.json`` names the dtype of the tensors, and how they are quantized.

    Example::

        export_to_huggingface("checkpoints/step-100", "Qwen3-30B-A3B", mapping="qwen3_moe", dtype="bfloat16")

    Args:
        checkpoint_dir: A checkpoint: a directory or a URL.
        target: The folder: a directory that all ranks see, or a URL; absent or empty unless ``overwrite``. To a URL of
            a store that streams writes nothing goes to local disks. A store cannot exchange folders: weights that are
            there are deleted first, and until the new index, or the only file, is written, which is last, nothing
            loads.
        prefix: Prefix of the keys to export, which is removed; by default the model's prefix, which is found by its
            optimizers' parameters and by the names that trainers give it (``model.``, ``app.model.``, ``state_dict.``).
        mapping: How names and shapes change: the ``model_type`` of a model (``"llama"``, ``"qwen3_moe"``, or one that a
            plugin's ``shardckpt_key_mapping`` knows), with Megatron's names if ``config.json`` is in ``assets``; a
            file, ``"rules.json"``, ``"rules.py:MAPPING"`` or the model's ``"config.json"``; ``"peft"`` or
            ``"peft:NAME"`` for a LoRA adapter alone, whose ``adapter_config.json`` is in ``assets``; a KeyMapping; or
            None for the same names.
        dtype: The dtype that floating-point tensors of 16 bits or more are cast to, except scales of 8-bit weights, and
            tensors that hold more than the model's weights do, by their dtype or by their role: buffers of float64,
            float32 among weights of bfloat16, ``e_score_correction_bias`` and ``A_log``. A dict of dtypes by patterns
            of names casts these, too: ``{"*": "bfloat16", "*.A_log": "bfloat16"}``.
        keep: Patterns of names, as of :mod:`fnmatch`, that are not cast.
        max_shard_size: Bytes of tensors in a file, ``"5GB"`` (10^9) or ``"5GiB"``; a larger tensor gets its own file.
        format: ``safetensors`` or ``bin`` (for ``torch.load``).
        assets: A folder of the model's other files (config, tokenizer), or its URL, which are copied; within one store,
            by the store itself. The ``config.json`` among them must have this model's vocabulary, and tie the
            embedding and the output layer only where they are equal.
        leave_out: Names in the folder that are not written: a ``lm_head.weight`` that is tied to the embedding.
        strict: Whether tensors that match no rule of the mapping are an error, before anything is written; and, before
            the commit, tensors that the class in ``config.json`` misses or has in other shapes, where transformers
            says.
        cut_vocabulary: Whether to leave out rows of the embedding and the output that the config's ``vocab_size`` does
            not count, with which Megatron pads them; else they are an error.
        overwrite: Replace a folder in one step: files that loaders would take with the new weights go (other weights
            that they load, adapters, and with ``assets`` the old configuration and tokenizer), all else in it stays.
        process_group: The ranks that write; by default all, or this process alone without torch.distributed.
        memory_budget: Bytes, or text such as ``"64MiB"``, that each rank may hold at a time: blocks, requests, parts on
            their way to a store; of ``bin`` also the tensors of a file. At least 32 MiB, 64 where a store is read or
            written. The index, which is in memory as a whole, and assets do not count. By default as many as are fast.
        rename: Prefixes of keys of the checkpoint, and their new names, applied before all else: ``{"app.model":
            "model"}``.
        skip_damaged: Whether tensors that are missing or damaged are not written, and named in the answer; else they
            are an error. One rank reads all of the checkpoint once more for it.

    Returns:
        The files that all ranks have written.

    Raises:
        CannotLoadError: no installed strategy reads the checkpoint.
        KeyMismatchError: ``strict``, and a tensor matches no rule of the mapping.
        CheckpointingException: any other failure; the same on every rank.
    """
    comm = Comm(process_group)
    with comm.local_phase("reading the arguments"):
        check_annotated(export_to_huggingface, locals())
        source, folder = (locate(path, get_plugin_manager()) for path in (checkpoint_dir, target))
        refuse_overlap([source], folder)
        options = parse_options(
            folder,
            prefix=prefix,
            mapping=mapping,
            dtype=dtype,
            keep=keep,
            max_shard_size=max_shard_size,
            format=format,
            assets=assets,
            leave_out=leave_out,
            strict=strict,
            cut_vocabulary=cut_vocabulary,
        )
        budget = split_export_budget(memory_budget, source, folder, options.file_format)
        names = parse_renames(rename)
    comm.agree(
        checkpoint_dir=str(source),
        target=str(folder),
        rename=sorted(names.items()),
        format=format,  # each rank writes its own files by it
        skip_damaged=skip_damaged,
    )

    def attempt() -> tuple[ExportPlan, tuple[str, ...]]:
        damaged: tuple[str, ...] = ()
        operation = Operation("export", folder, comm, get_plugin_manager())
        with operation.collective_span(), ExitStack() as stack:
            with operation.local_phase("opening the checkpoint"):
                checkpoint = stack.enter_context(
                    # alone: ranks read different tensors, and only the plan is common. No check at the end: the
                    # export makes it before its commit, and a checkpoint that changes after that is no error
                    open_checkpoint(
                        source,
                        Comm(alone=True),
                        get_plugin_manager(),
                        LoadOptions(memory_budget=budget.reading, crcs="parts"),
                        check=False,
                    )
                )
                if names:
                    checkpoint = rename_stored(checkpoint, names, list_names(checkpoint))
                if skip_damaged:
                    checkpoint.context.reader.accept_cut_files()  # on each rank: one alone looks for damage
                    damaged = comm.main_runs("looking for damage", lambda: tuple(hide_damaged(checkpoint).damaged))
                    checkpoint = replace(checkpoint, damaged=damaged)
                record = checkpoint.context.reader.manifest.record
                save_id = "" if record is None else record.self_digest  # another library's checkpoint has none
            with operation.local_phase("planning the export"):
                plan, planned_id = comm.main_runs(
                    "planning the export", lambda: (plan_export(checkpoint.index(), options, str(source)), save_id)
                )
                if comm.is_main:
                    plan.left_out.warn()  # a conversion has it in its report
                if planned_id != save_id:
                    raise replaced_error(source, "this rank has opened another save than the main rank")
                budget.check_plan(plan, options.file_format, folder)
            operation.start_progress(lambda: plan.total_size)
            operation.share_progress(checkpoint.operation)
            find_export(folder)(
                operation, source, folder, plan, options, checkpoint, overwrite, writing=budget.writing
            ).run()
        return plan, damaged

    plan, damaged = retry_if_replaced(attempt, source)
    planned = plan.planned
    return Exported(
        files=tuple((name, len(tensors), sum(tensor.nbytes for tensor in tensors)) for name, tensors in plan.files),
        total_size=plan.total_size,
        unmatched=tuple(planned.unmatched),
        left_out=plan.left_out,
        cast=planned.cast,
        kept=tuple(planned.kept),
        tensors=tuple(
            ExportedTensor(tensor.name, file, tensor.nbytes, tuple(dict.fromkeys(part.key for part in tensor.parts)))
            for file, tensors in plan.files
            for tensor in tensors
        ),
        damaged=damaged,
    )
