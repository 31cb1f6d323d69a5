"""Options of all exports under the names of the Hub."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.errors import check_choice
from shardckpt.huggingface.assets import list_assets
from shardckpt.huggingface.casts import Casts, parse_casts
from shardckpt.huggingface.config import read_config
from shardckpt.huggingface.models import find_mapping
from shardckpt.huggingface.names import BIN, SAFETENSORS, parse_leave_out
from shardckpt.storage.memory_budget import parse_size
from shardckpt.validation.arguments import check_annotated

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    import torch

    from shardckpt.plugins.key_mapping import KeyMapping


class ExportOptions(NamedTuple):
    """Options of an export: the arguments of :func:`shardckpt.huggingface.export_to_huggingface`, parsed.

    ``limit`` are the bytes of tensors in a file, ``assets`` the files to copy.
    """

    prefix: str | None
    mapping: KeyMapping
    casts: Casts
    limit: int
    file_format: str
    leave_out: frozenset[str]
    strict: bool
    assets: tuple[Path, ...]


def parse_options(
    folder: Path | None,
    *,
    prefix: str | None = None,
    mapping: str | KeyMapping | None = None,
    dtype: torch.dtype | str | Mapping[str, torch.dtype | str] | None = None,
    keep: Collection[str] = (),
    max_shard_size: int | str = "5GB",
    format: str = SAFETENSORS,  # noqa: A002 - the user's word for it
    assets: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    leave_out: Collection[str] = (),
    strict: bool = False,
    cut_vocabulary: bool = False,
) -> ExportOptions:
    """Parse a caller's options; the other arguments are as for :func:`shardckpt.huggingface.export_to_huggingface`.

    ``folder`` is the one that is written, whose ``config.json`` counts if none is among the assets; None if no folder
    is written, and no config counts.
    """
    check_annotated(parse_options, locals())
    check_choice("format", format, (SAFETENSORS, BIN))
    copied = () if assets is None else tuple(list_assets(assets, mapping))
    config = None if folder is None else partial(read_config, copied, folder)
    return ExportOptions(
        prefix,
        find_mapping(mapping, config, "cut" if cut_vocabulary else "refuse"),
        parse_casts(dtype, keep),
        parse_size(max_shard_size),
        format,
        parse_leave_out(leave_out),
        strict,
        copied,
    )
