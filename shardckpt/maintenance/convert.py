"""Rewriting a checkpoint in another format, in bounded memory: anything that is read to anything that is written."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from shardckpt.commit.upload import is_under_way
from shardckpt.engine.locations import locate, refuse_overlap
from shardckpt.engine.renaming import parse_renames
from shardckpt.engine.saving import find_saver
from shardckpt.errors import CheckpointingException, UnknownBackendError, UnsafePickleError, parse_globals
from shardckpt.huggingface.assets import list_assets
from shardckpt.huggingface.folder import CONFIG, resolve_link
from shardckpt.huggingface.models import MegatronMapping
from shardckpt.huggingface.options import parse_options
from shardckpt.huggingface.rules import RuleMapping
from shardckpt.huggingface.whole_folder import TrainerNames
from shardckpt.maintenance.conversion import DCP, FILE, FOLDER, Conversion, ConversionReport
from shardckpt.maintenance.sources import identify_source, open_source, read_hub_config
from shardckpt.plugins.entries import StrategyAction
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.storage.abilities import has_links, has_local_files, lacks_directory, takes_requests
from shardckpt.storage.directory import retry_if_replaced
from shardckpt.storage.filesystem import is_there
from shardckpt.storage.memory_budget import LEAST_READING, check_memory_budget, parse_size
from shardckpt.strategy import SaveStrategy
from shardckpt.stubs.stub import make_stub_class
from shardckpt.validation.arguments import check_annotated

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    import torch

    from shardckpt.engine.opening import OpenCheckpoint
    from shardckpt.maintenance.conversion import SourceOpener
    from shardckpt.plugins.key_mapping import KeyMapping
    from shardckpt.plugins.manager import PluginManager

#: The budget if the caller names none.
_BUDGET = "256MiB"
#: Of a budget tensors in memory have a half; reader and writer have a quarter each. To a store the writer has the half.
_HALF, _QUARTER = 2, 4
#: The least memory that :func:`run_conversion` accepts, in bytes of tensors.
_LEAST_MEMORY = 16 << 20
#: The least budget of a conversion to a store, whose parts are larger than blocks of a file.
_LEAST_FOR_STORES = 64 << 20


def convert_checkpoint(
    old: str | os.PathLike[str],
    new: str | os.PathLike[str],
    to: Any,
    *,
    memory_budget: int | str = _BUDGET,
    overwrite: bool = False,
    mapping: str | KeyMapping | None = None,
    dtype: torch.dtype | str | Mapping[str, torch.dtype | str] | None = None,
    keep: Collection[str] = (),
    prefix: str | None = None,
    strict: bool = False,
    cut_vocabulary: bool = False,
    leave_out: Collection[str] = (),
    assets: str | os.PathLike[str] | None = None,
    max_shard_size: int | str = "5GB",
    allow_globals: tuple[Any, ...] = (),
    rename: Mapping[str, str] | None = None,
    skip_damaged: bool = False,
) -> ConversionReport:
    """Write the checkpoint at ``old`` in another format at ``new``, completely or not at all. Not collective.

    Keys, shapes, dtypes and bits stay, as do objects, common state and ``content_metadata``, unless an option or the
    format says otherwise: the report names the items that were left out. A tensor may be stored in other boxes than
    before. All bytes that are read are checked against their digests, if there are any. The written files are read
    again before the commit, and their fingerprints are compared with the fingerprints of the values from ``old``. A
    checkpoint at ``new`` has the fingerprints of tensors whose shapes stay, whether ``old`` has any or not.

    A conversion that was killed is continued, if it ran on this host since its last boot, from the same source, with
    the same options, and ``to`` is no strategy; the result is the same, except for the save's id. Else its leftovers
    are removed, with a warning. At a URL the complete objects are kept; there it starts anew where the store does not
    stream writes or has no conditional ones, and over a Hugging Face folder. The proof covers all.

    Args:
        old: A checkpoint that an installed strategy reads, a Hugging Face folder, or a file of
            ``torch.save`` or safetensors: a path, or, except for files, a URL. It is not changed, unless it is ``new``.
        new: Directory or URL of the new checkpoint: absent or empty, or see ``overwrite``. For ``"torch"`` a
            file of this machine.
        to: The target's format: a SaveStrategy, a backend, or (backend, version); ``"dcp"``, the first backend whose
            values stock ``dcp.load`` reads, with the values of the common state under their paths; ``"hf"``, a Hugging
            Face folder of the tensors; or ``"torch"``, a file of ``torch.save`` with plain tensors and builtin
            containers.
        memory_budget: Bytes, or text such as ``"256MiB"``, that may be in memory at a time: a half for tensors, of
            which larger ones are stored in several boxes, and the rest for buffers of the reader and the writer; a
            quarter where ``new`` is a URL, to which tensors are streamed. At least 32 MiB; 64 for a URL. Not counted
            are the index, the objects and the common state, which are in memory as a whole; nor the tensors that a
            strategy copies and keeps until it has all of them.
        overwrite: As for :func:`migrate_checkpoint`; for ``"hf"``, replace the weights in a folder; for ``"torch"``,
            replace the file.
        mapping: How names and shapes change: as for :func:`shardckpt.huggingface.export_to_huggingface`. ``"megatron"``
            goes both ways: from a Hugging Face folder to any other format it gives tensors Megatron's names and shapes.
        dtype: The dtype to which floating-point tensors are cast: as for
            :func:`shardckpt.huggingface.export_to_huggingface`, as ``keep`` is.
        keep: Patterns of names that are not cast.
        prefix: If given, only tensors whose keys begin with it are written, without it; no objects, no common state.
            For ``"hf"`` the default is as for :func:`shardckpt.huggingface.export_to_huggingface`.
        strict: Whether tensors that match no rule of the mapping are an error, before anything is written.
        cut_vocabulary: As for :func:`shardckpt.huggingface.export_to_huggingface`.
        leave_out: Names of tensors in the target that are not written, of objects, and of entries of the common state;
            except for ``"hf"``, a name also stands for everything below it: ``optimizer`` for ``optimizer.state.w``.
            These may have values of any class: a class that is not allowed is not imported.
        assets: For ``"hf"``: a folder of the model's other files, which are copied; by default ``old``, if it is a
            Hugging Face folder whose names do not change, and ``new`` has no ``config.json`` of its own.
        max_shard_size: For ``"hf"``: bytes of tensors in a file.
        allow_globals: Classes and functions that pickled objects may name, besides those that every load accepts.
        rename: Prefixes of keys, and of paths of the common state, of ``old``, and their new names, applied before
            all else: ``{"optim": "optimizer", "app.model": "model"}``.
        skip_damaged: Whether tensors, objects and a common state that are missing or damaged are not written, and named
            in the report; else they are an error. All of ``old`` is read once more for it. Its index must be sound;
            ``metadata.json``, or with all else there ``shardckpt.json``, too, may be lost.

    Returns:
        A report of the written items, with the proof.

    Raises:
        UnknownBackendError: no installed strategy saves ``to``.
        KeyMismatchError: ``old`` has nothing of a name of ``rename``, or two things would have one name.
        CannotLoadError: nothing that is installed reads ``old``, or it only looks like a format that is read.
        CorruptCheckpointError: ``old`` is damaged, or the written values differ from those that were read; the target
            is removed.
        CheckpointingException: ``old`` is a checkpoint of that format already, and both are directories; or the new
            format refuses a tensor or object, which the error names.

    Example::

        convert_checkpoint("step-1", "step-1-ep", "ep")
        convert_checkpoint("Qwen3-0.6B", "start", "dcp")
    """
    check_annotated(convert_checkpoint, locals())
    if rename and mapping == "megatron" and to != FOLDER:
        raise CheckpointingException(
            "rename (--rename) and mapping='megatron', which reads a Hugging Face folder by the Hub's names, do not go "
            "together: convert twice, first with one of them"
        )
    budget = parse_size(memory_budget, "memory_budget")
    sends = takes_requests(locate(new, get_plugin_manager()))
    least = _LEAST_FOR_STORES if sends else _QUARTER * LEAST_READING
    check_memory_budget(budget, least, f"to convert {old} takes")
    return run_conversion(
        old,
        new,
        to,
        open_source,
        memory=budget // (_QUARTER if sends else _HALF),
        buffers=(budget // _QUARTER, budget // (_HALF if sends else _QUARTER)),
        overwrite=overwrite,
        mapping=mapping,
        dtype=dtype,
        keep=keep,
        prefix=prefix,
        strict=strict,
        cut_vocabulary=cut_vocabulary,
        leave_out=leave_out,
        assets=assets,
        max_shard_size=max_shard_size,
        allow_globals=allow_globals,
        rename=rename,
        skip_damaged=skip_damaged,
    )


def run_conversion(
    old: str | os.PathLike[str],
    new: str | os.PathLike[str],
    to: Any,
    opener: SourceOpener,
    *,
    memory: int,
    overwrite: bool,
    allow_globals: tuple[Any, ...],
    identify: Callable[[OpenCheckpoint], str] | None = None,
    buffers: tuple[int | None, int | None] = (None, None),
    rename: Mapping[str, str] | None = None,
    others: Sequence[str | os.PathLike[str]] = (),
    skip_damaged: bool = False,
    **written: Any,
) -> ConversionReport:
    """Convert the checkpoint that ``opener`` opens at ``old``; the arguments are :func:`convert_checkpoint`'s.

    ``others`` are the other sources of a merge. ``identify`` returns an identity of the values that ``opener`` has
    opened, or ``""``: by it a killed conversion is continued. By default, it is the identity of the checkpoint at
    ``old``. ``memory`` is for tensors; ``buffers`` are the bytes that reading and writing may hold next to them.
    ``written`` has the arguments of :func:`shardckpt.huggingface.parse_options`.
    """
    rename, allow_globals = parse_renames(rename), parse_globals(allow_globals)
    if memory < _LEAST_MEMORY:
        raise CheckpointingException(
            f"memory={memory} bytes for converting {old}: at least {_LEAST_MEMORY >> 20} MiB are needed"
        )
    if written["cut_vocabulary"] and to != FOLDER and written["mapping"] == "megatron":
        raise CheckpointingException(
            "cut_vocabulary (--cut-vocabulary) leaves out rows with which Megatron pads the vocabulary, when a Hugging "
            f"Face folder is written (to='hf', --to hf), not with to={to!r}: a folder of the Hub has none; leave it "
            "out"
        )
    plugins = get_plugin_manager()
    written["assets"] = _find_assets(old, new, to, plugins, is_renamed=bool(rename), **written)
    saver = None if to in (FOLDER, FILE) else _find_saver(to, plugins)
    if written["assets"] and to != FOLDER:
        raise CheckpointingException(
            f"assets={written['assets']!r} are copied to Hugging Face folders alone, not with to={to!r}"
        )
    options = parse_options(locate(new, plugins) if to == FOLDER else None, **written)

    def attempt(allowed: tuple[Any, ...] = allow_globals) -> ConversionReport:
        target = locate(new, plugins)
        if to == FILE and not has_local_files(target):
            raise CheckpointingException(
                f"{target}: a file of torch.save (to='torch', --to torch) has checksums before its tensors that are "
                "known behind them, and so is written on this machine: convert to a path, and copy the file; "
                "'safetensors', 'dcp' and 'hf' are streamed to a URL"
            )
        kind = to if isinstance(to, str) else ""
        source = locate(old, plugins)
        refuse_overlap([source], target, in_place=saver is not None)
        sources = [source, *(locate(other, plugins) for other in others)]
        trainer = None if rename else _find_trainer(sources, options.mapping, to, plugins)
        planned = options if trainer is None or to == FOLDER else options._replace(mapping=TrainerNames(trainer))
        return Conversion(
            source,
            target,
            kind,
            saver,
            plugins,
            memory,
            planned,
            allowed,
            overwrite=overwrite,
            is_resumable=not isinstance(to, SaveStrategy),  # the options of an instance are not known
            opener=opener,
            identify=identify or partial(identify_source, source),
            buffers=buffers,
            rename=rename,
            trainer=trainer,
            is_merge=bool(others),
            skip_damaged=skip_damaged,
        ).run()

    try:
        return retry_if_replaced(attempt, old)
    except UnsafePickleError as exc:
        is_partial = to == FOLDER or options.prefix or options.leave_out
        if not is_partial or not exc.refused or not exc.can_be_allowed:
            raise
        # perhaps only items that are not written need these classes; a stub that is to be pickled is an error
        stubs = tuple((make_stub_class(*name.rpartition(".")[::2]), name) for name in exc.refused)
    return retry_if_replaced(lambda: attempt((*allow_globals, *stubs)), old)


def _find_trainer(sources: Sequence[Path], mapping: KeyMapping, to: Any, plugins: PluginManager) -> RuleMapping | None:
    """Return the mapping by which Hugging Face folders are read, under a trainer's names; None if none is to be."""
    if not isinstance(mapping, MegatronMapping if to != FOLDER else RuleMapping):
        return None
    configs = [read_hub_config(source, plugins) for source in sources]
    found = [config for config in configs if config is not None]
    if isinstance(mapping, MegatronMapping):
        return mapping.with_config(found[0], "keep") if found else None
    # the names that are written are the folders' own, unless other sources have a trainer's
    return mapping if found and len(found) < len(configs) else None


def _find_assets(
    old: str | os.PathLike[str],
    new: str | os.PathLike[str],
    to: Any,
    plugins: PluginManager,
    *,
    is_renamed: bool,
    assets: str | os.PathLike[str] | None,
    prefix: str | None,
    mapping: str | KeyMapping | None,
    **_: Any,
) -> str | os.PathLike[str] | list[Path] | None:
    """Return the assets that were given, or else the source's, if names stay, and the target has no configuration."""
    source = locate(old, plugins)
    if to != FOLDER or assets is not None or is_renamed or prefix or mapping or lacks_directory(source):
        return assets
    target = locate(new, plugins)
    if (
        (is_there(target / CONFIG) and not is_under_way(target))  # else a killed conversion wrote it
        or not is_there(source / CONFIG)
        or read_hub_config(source, plugins) is None
    ):
        return None
    if not has_links(source):
        return old
    # these files were not named by the caller: a link of a downloaded folder must not lead to others of this machine
    return [path for path in list_assets(old) if not path.is_symlink() or resolve_link(source, path.name) != path]


#: Other libraries' names of the formats that no strategy writes; a plugin's backend may have the same name.
_OTHER_NAMES = {"huggingface": FOLDER, "transformers": FOLDER, "pt": FILE, "pytorch": FILE, "torch_save": FILE}


def _find_saver(to: Any, plugins: PluginManager) -> SaveStrategy:
    if to == DCP:
        return _find_dcp_saver(plugins)
    if isinstance(to, str) and to in _OTHER_NAMES and not plugins.registry.entries(StrategyAction.SAVE_SHARDED, to):
        raise UnknownBackendError(f"{to!r} is no format to write: did you mean {_OTHER_NAMES[to]}?")
    return find_saver(to, plugins, others=(DCP, FOLDER, FILE))


def _find_dcp_saver(plugins: PluginManager) -> SaveStrategy:
    """Return the default strategy, or the first other one, whose checkpoints stock DCP reads."""
    default = find_saver(None, plugins)
    if default.stores_plain_objects:
        return default
    for entry in plugins.registry.entries(StrategyAction.SAVE_SHARDED):
        saver: SaveStrategy = entry.create()
        if saver.stores_plain_objects:
            return saver
    raise UnknownBackendError("no installed strategy saves a format that stock torch.distributed.checkpoint loads")
