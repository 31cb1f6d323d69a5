"""Remove keys from a stored checkpoint: plan a new index, and which payloads of the data files to keep."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING

import torch

from shardckpt.chunks import Item, MergedPlan
from shardckpt.errors import CorruptCheckpointError
from shardckpt.manifest import HUB_INDEX
from shardckpt.planning import make_bounds, make_column, sort_unique
from shardckpt.storage import HeaderEntry
from shardckpt.strategy import KeptItem, Removal
from shardckpt_safetensors.contiguous import StoredFolder
from shardckpt_safetensors.contiguous import encode_index as encode_folder_index
from shardckpt_safetensors.dtypes import declare
from shardckpt_safetensors.encoded_index import encode_index
from shardckpt_safetensors.index import read_index
from shardckpt_safetensors.index_names import CODECS, INDEX_FILE
from shardckpt_safetensors.index_parts import MOST_ROWS, encode_part, find_alignment
from shardckpt_safetensors.layout import FileItem, lay_out_file, piece_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from shardckpt.storage import CheckpointReader
    from shardckpt_safetensors.index import StoredIndex


def plan_removal(prefix: str, reader: CheckpointReader) -> Removal:
    """Plan the removal of the tensors and objects whose keys begin with a prefix; nothing is changed yet.

    A tensor with several names goes when all of them are removed; until then it has the others.
    """
    index = read_index(reader)
    index.check()
    keys = frozenset(name for name in (*index.numbers, *index.objects) if name.startswith(prefix))
    if not keys:
        return Removal(keys, {}, frozenset())
    names: dict[int, list[str]] = {}
    for name, number in index.numbers.items():
        if name not in keys:
            names.setdefault(number, []).append(name)
    places = _place_items(index)
    gone: dict[str, list[tuple[Item, FileItem]]] = {}
    kept: dict[str, list[tuple[Item, FileItem]]] = {}
    for owner, item, placed in places:
        (gone if _is_gone(owner, names, keys) else kept).setdefault(item.file, []).append((item, placed))
    dropped = frozenset(gone.keys() - kept.keys())
    rewritten: dict[str, list[KeptItem]] = {}
    heads: dict[str, bytes] = {}
    folder = StoredFolder(reader)
    entries = {
        file: folder.select(file, _list_entries(kept.get(file, ())), _list_entries(gone.get(file, ())))
        for file in folder.files
    }
    for file in sorted(gone.keys() & kept.keys()):
        stays = kept[file]
        if file in folder.files:
            heads[file], places_of = folder.lay_out(file, entries[file])
            # a removal before December 2026 left empty tensors in the index alone
            stays = [pair for pair in stays if pair[0].length or pair[0].offset in places_of]
            starts = [places_of[item.offset] for item, _ in stays]
        else:
            layout = lay_out_file([placed for _, placed in stays])
            heads[file], starts = layout.head, layout.starts
        rewritten[file] = [
            KeptItem(placed.name, item.offset, item.length, start)
            for (item, placed), start in zip(stays, starts, strict=True)
        ]
    renewed = _encode_rest(index, names, keys, rewritten, heads)
    dropped |= frozenset(index.parts) - renewed.keys()
    if any(entries.values()):
        renewed[HUB_INDEX] = encode_folder_index(entries)
    elif folder.files:
        dropped |= {HUB_INDEX}
    return Removal(keys, renewed, dropped, rewritten, heads)


def _is_gone(owner: int | str, names: Mapping[int, list[str]], keys: Collection[str]) -> bool:
    """Return whether a tensor, by its number, or an object, by its name, is removed."""
    return owner in keys if isinstance(owner, str) else owner not in names


def _list_entries(items: Iterable[tuple[Item, FileItem]]) -> list[tuple[int, HeaderEntry]]:
    return [(item.offset, HeaderEntry(*placed[:4])) for item, placed in items]


def _place_items(index: StoredIndex) -> list[tuple[int | str, Item, FileItem]]:
    """Return all payloads in the order of the files: owner, location, and how a header declares it."""
    found: list[tuple[int | str, Item, FileItem]] = []
    chunks, _ = index.select_chunks(torch.arange(len(index.keys), device="cpu"))
    every = chunks.list(slice(None), chunks.box, index.files)
    for number, chunk in zip(chunks.box.spec.tolist(), every, strict=True):
        shape = index.shapes[number]
        offset, extent = chunk.box.offset[: len(shape)], chunk.box.shape[: len(shape)]
        name = piece_name(index.keys[number], offset, extent, shape)
        found.append((number, chunk.item, FileItem(name, *declare(index.dtypes[number], extent), chunk.item.length)))
    for name, stored in index.objects.items():
        found.append((name, stored.item, FileItem(name, "U8", (stored.item.length,), stored.item.length)))
    return sorted(found, key=lambda entry: entry[1])


def _encode_rest(
    index: StoredIndex,
    names: Mapping[int, list[str]],
    keys: frozenset[str],
    rewritten: Mapping[str, list[KeptItem]],
    heads: Mapping[str, bytes],
) -> dict[str, bytes]:
    """Return the index of the items that stay, by file name: in parts if it was and is large."""
    offsets = {Item(name, item.start, item.nbytes): item.to for name, items in rewritten.items() for item in items}
    stays = sorted(names)
    chunks, bounds = index.select_chunks(make_column(stays))
    rows = zip(chunks.file.tolist(), chunks.start.tolist(), chunks.length.tolist(), strict=True)
    starts = []
    for file, start, length in rows:
        name = index.files[file]
        # an item without bytes that is not in a rewritten file is right behind its header
        starts.append(offsets.get(Item(name, start, length), start if length else len(heads.get(name, bytes(start)))))
    objects: dict[str, list[int]] = {}
    used = set(chunks.file.tolist())
    for name, stored in index.objects.items():
        if name not in keys:
            file = index.files.index(stored.item.file)
            start = offsets.get(stored.item, stored.item.offset)
            objects[name] = [file, start, stored.item.length, CODECS.index(stored.codec)]
            used.add(file)
    files = [number in used for number in range(len(index.files))]
    anew = make_column([int(used) for used in files]).cumsum(0) - 1  # files are numbered anew
    for row in objects.values():
        row[0] = int(anew[row[0]])
    place = {number: n for n, number in enumerate(stays)}
    plan = MergedPlan(
        [names[number][0] for number in stays],
        [index.dtypes[number] for number in stays],
        [index.shapes[number] for number in stays],
        bounds,
        chunks.box,
        torch.stack([anew[chunks.file], make_column(starts)], 1),
        list(compress(index.files, files)),
        objects,
        {name: place[number] for number in stays for name in names[number][1:]},
        {
            place[number]: (place[by], block)
            for number, (by, block) in index.scales.items()
            if number in place and by in place
        },
    )
    if unknown := {stored.codec for stored in index.objects.values()} - set(CODECS):
        raise CorruptCheckpointError(f"objects have codecs that this release does not know: {sorted(unknown)}")
    if not index.parts or len(plan.boxes.spec) <= MOST_ROWS:
        return {INDEX_FILE: encode_index(plan).to_bytes(index.header)}
    owners = index.find_parts(make_column(stays))
    parts = {
        index.parts[number]: encode_part(_take_tensors(plan, owners == number), unit=find_alignment(plan.locations))
        for number in sort_unique(owners).tolist()
    }
    rest = _take_tensors(plan, owners < 0)._replace(
        files=plan.files, objects=objects, aliases=plan.aliases, scales=plan.scales
    )
    root = encode_index(rest, {name: part.head for name, part in parts.items()})
    return {INDEX_FILE: root.to_bytes(index.header), **{name: part.data for name, part in parts.items()}}


def _take_tensors(plan: MergedPlan, mask: torch.Tensor) -> MergedPlan:
    """Return some tensors of a plan with their boxes, without files and objects."""
    numbers = mask.nonzero().view(-1)
    rows = mask[plan.boxes.spec]
    counts = (plan.bounds[1:] - plan.bounds[:-1])[numbers]
    box = plan.boxes.rows(rows)
    return MergedPlan(
        [*compress(plan.keys, mask.tolist())],
        [*compress(plan.dtypes, mask.tolist())],
        [*compress(plan.shapes, mask.tolist())],
        make_bounds(counts),
        box._replace(spec=torch.searchsorted(numbers, box.spec)),
        plan.locations[rows],
        [],
        {},
    )
