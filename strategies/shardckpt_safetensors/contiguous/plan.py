"""Plan with all ranks which tensors are stored contiguously, and the part of each rank."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch

from shardckpt.chunks import LocalPlan, agree_on_aliases, collect_items, make_scale_columns, view_tensors
from shardckpt.errors import ShardingError, natural_order
from shardckpt.huggingface import (
    CONFIG,
    HEADS,
    Sections,
    adapt_config,
    find_config,
    find_sections,
    find_tied,
    read_asset,
    refuse_codes,
)
from shardckpt.manifest import HUB_INDEX
from shardckpt.mapping import ShardedTensor
from shardckpt.planning import Box, Boxes, Table, concat_tables, intersect, make_column, make_matrix
from shardckpt.storage import Columns, PackedShards, pack_columns
from shardckpt_safetensors.contiguous.exchange import (
    assign_owners,
    exchange_values,
    find_range,
    plan_exchange,
    select_box,
)
from shardckpt_safetensors.contiguous.layout import FolderLayout, FolderPayload, TensorInfo, split_tensor
from shardckpt_safetensors.contiguous.work import ContiguousWork
from shardckpt_safetensors.names import check_names

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from typing import TypeVar

    from shardckpt.chunks import LocalItems, Sources
    from shardckpt.distributed import Comm
    from shardckpt.huggingface import HubTensor
    from shardckpt.mapping import CommonStateDict, ShardedBase
    from shardckpt.storage import Column
    from shardckpt.strategy import PlanContext
    from shardckpt_safetensors.contiguous.exchange import ExchangePlan
    from shardckpt_safetensors.contiguous.options import ContiguousOptions

    T = TypeVar("T")
    U = TypeVar("U")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ContiguousPlan:
    """A rank's part of a plan for contiguous tensors; it holds no values.

    Attributes:
        layout: The files.
        is_contiguous: For each of the rank's shards, whether it is of a tensor that is stored contiguously.
        sources: Where the values of the rank's boxes come from, among those shards.
        held: These boxes.
        exchange: The rank's writes, sends and receives.
        work: Its writes, without the small files.
        ties: The keys of the rank's contiguous tensors that share their memory.
    """

    layout: FolderLayout
    is_contiguous: list[bool]
    sources: Sources
    held: list[Box]
    exchange: ExchangePlan
    work: ContiguousWork
    ties: list[tuple[str, ...]]

    def split(self, shards: Sequence[ShardedBase]) -> tuple[list[ShardedBase], list[ShardedBase]]:
        """Return the shards of contiguous tensors, and the others."""
        pairs = list(zip(shards, self.is_contiguous, strict=True))
        return [shard for shard, is_one in pairs if is_one], [shard for shard, is_one in pairs if not is_one]

    def collect(self, shards: Sequence[ShardedBase], comm: Comm) -> list[torch.Tensor]:
        """Collective: return the tensors that the rank writes: views, and buffers with received values.

        ``shards`` are the shards of contiguous tensors, with the same metadata as when the plan was made.
        """
        with comm.local_phase("selecting contiguous tensors"):
            # the local tensor of a shard may lack axes of extent 1 that the global one begins with
            found = zip(view_tensors(self.sources, shards), self.held, strict=True)
            values = [value if value.shape == box.shape else value.view(box.shape) for value, box in found]
            views = [select_box(values[item], box, self.held[item]) for item, box in self.exchange.views]
        return [*views, *exchange_values(self.layout, self.exchange, views, comm)]

    def add_to(self, plan: LocalPlan, items: LocalItems, objects: Collection[str]) -> LocalPlan:
        """Return the plan of a rank's items with all contiguous tensors: on one rank, which lists them for all."""
        layout = self.layout
        tensors, payloads = layout.tensors, layout.payloads
        axes = max((len(shape) for shape in (*items.shapes, *(info.shape for info in tensors))), default=0)
        contiguous = Table(
            make_column([payload.tensor_number + len(items.keys) for payload in payloads]),
            make_matrix([payload.box.offset for payload in payloads], axes, 0),
            make_matrix([payload.box.shape for payload in payloads], axes, 1),
        )
        columns = Columns(plan.locations, "the plan of this rank")
        files, boxes = columns.texts("files"), columns.integers("boxes")
        places = make_matrix(layout.places, 2, 0)
        places[:, 0] += len(files)
        locations: dict[str, Column] = {
            "files": [*files, *layout.file_names],
            "boxes": torch.cat([boxes, places]),
            "objects": columns.integers("objects"),
        }
        stored = PackedShards.pack(
            [*items.keys, *(info.key for info in tensors)],
            [*items.dtypes, *(info.dtype for info in tensors)],
            [*items.shapes, *(info.shape for info in tensors)],
            concat_tables([items.boxes.table(), contiguous]),
            objects,
        )
        scales = items.scales | {info.key: info.scales for info in tensors if info.scales is not None}
        return LocalPlan(stored, pack_columns(locations | make_scale_columns(scales)))

    def small_files(self, options: ContiguousOptions) -> dict[str, bytes]:
        """Return the files that only the main rank writes: the index of the folder, and copies of other files."""
        tensors = [payload.hub_tensor for payload in self.layout.payloads]
        others = {HUB_INDEX: self.layout.encode_index(), **{path.name: read_asset(path) for path in options.assets}}
        config = find_config(options.assets)
        if config is not None:
            refuse_codes(tensor.name for tensor in tensors)
            pair = find_tied(config, tensors) if options.store_aliases else None
            if pair is not None:
                logger.warning(
                    "%s says that %r and %r are one (tie_word_embeddings), and the model has two tensors: engines take "
                    "either; give the config.json of a model that does not tie them",
                    config.source,
                    pair[0].name,
                    pair[1].name,
                )
            adapted = adapt_config(config, tensors, add_dtype=False, raise_on_vocabulary=False)
            others |= {} if adapted is None else {CONFIG: adapted}
        return others


def plan_contiguous(
    shards: Sequence[ShardedBase], common: CommonStateDict, options: ContiguousOptions, context: PlanContext
) -> ContiguousPlan | None:
    """Collective: plan which tensors are stored contiguously, and each rank's writes; None on all ranks if none is.

    ``options`` are the same on every rank. It is a ShardingError if ranks disagree on a tensor, or one that is to be
    stored contiguously cannot be.
    """
    comm = context.comm
    with comm.local_phase("choosing contiguous tensors"):
        mine = {
            s.key: TensorInfo(s.key, s.dtype, tuple(s.global_shape), s.block_scales)
            for s in shards
            if isinstance(s, ShardedTensor)
        }
        # an optimizer that has not taken a step has no tensors yet, but options: objects, or common state
        keys = sorted({*(shard.key for shard in shards), *(f"{key}." for key in common)})
    sections = (
        _combine(keys, lambda everyone: find_sections(sorted({*chain(*everyone)})), "looking for the model", comm)
        if options.prefix is None
        else Sections(options.prefix, frozenset())
    )
    with comm.local_phase("choosing contiguous tensors"):
        chosen = [info for key, info in sorted(mine.items()) if options.choose(key, sections) != "boxes"]
    tensors = _combine(chosen, _unite, "comparing the tensors of all ranks", comm)
    with comm.local_phase("choosing contiguous tensors"):
        folder_tensors = _split_tensors(tensors, sections, options)
        votes = _vote(folder_tensors, shards)
    # one number a tensor: on the ranks together, the largest says whether any rank has it otherwise than in a range
    scattered = comm.largest(*votes.values()) if votes else []
    in_range = {key: not vote for key, vote in zip(votes, scattered, strict=True)}
    shared = comm.all_equal(str(context.staging).encode())  # a save to a store: each rank writes to its own directory
    with comm.local_phase("looking for tied tensors"):
        tensors = [t for t in tensors if in_range.get(t.key) or options.choose(t.key, sections) == "contiguous"]
        chosen_keys = {tensor.key for tensor in tensors}
        is_contiguous = [isinstance(shard, ShardedTensor) and shard.key in chosen_keys for shard in shards]
        mine_contiguous = [shard for shard, is_one in zip(shards, is_contiguous, strict=True) if is_one]
        ties = options.find_ties(mine_contiguous)
    aliases = _find_tied_head(agree_on_aliases(ties, mine_contiguous, comm), folder_tensors, options, comm)
    with comm.local_phase("laying out contiguous tensors"):
        tensors = [tensor for tensor in tensors if tensor.key not in aliases]
        numbered = [
            FolderPayload(*found, number) for number, t in enumerate(tensors) for found in folder_tensors[t.key]
        ]
        layout = FolderLayout(tensors, numbered, options.limit)
        numbers = {tensor.key: number for number, tensor in enumerate(tensors)}
        items = collect_items(mine_contiguous, aliases)
        _check_same(items, tensors, numbers)
        stored = PackedShards.pack(items.keys, items.dtypes, items.shapes, items.boxes.table(), ())
        boxes = Boxes([numbers[items.keys[n]] for n in items.boxes.spec], items.boxes.offsets, items.boxes.extents)
        flags = [in_range[tensor.key] for tensor in tensors]
        owners, of_files = assign_owners(layout, flags, comm.world_size, shared=shared)
    if not tensors:
        return None
    exchange = plan_exchange(layout, boxes, flags, owners, comm, shared=shared)
    with comm.local_phase("laying out contiguous tensors"):
        keys = [tensors[boxes.spec[view.item]].key for view in exchange.views]
        keys += [f"contiguous tensors of {layout.file_names[buffer.file]}" for buffer in exchange.buffers]
        heads = {n: file.frame[0].data for n, file in enumerate(layout.files) if of_files[n] == comm.rank}
        files = [(name, file.size) for name, file in zip(layout.file_names, layout.files, strict=True)]
        viewed = Boxes(
            [items.boxes.spec[view.item] for view in exchange.views],
            [view.box.offset for view in exchange.views],
            [view.box.shape for view in exchange.views],
        )
        views = PackedShards.pack(items.keys, items.dtypes, items.shapes, viewed.table(), ())
        work = ContiguousWork(files, heads, exchange.writes, keys, stored, views, {}, aliases)
        held = list(map(Box, boxes.offsets, boxes.extents))
    return ContiguousPlan(layout, is_contiguous, items.sources, held, exchange, work, ties)


def _find_tied_head(
    aliases: Mapping[str, str],
    folder_tensors: Mapping[str, Sequence[tuple[HubTensor, Box]]],
    options: ContiguousOptions,
    comm: Comm,
) -> dict[str, str]:
    """Collective: return the output layer's key, and the key by which it is stored, if the folder need not have both.

    ``save_pretrained`` of transformers leaves ``lm_head.weight`` out then, and readers of the folder make it of the
    embedding, because ``config.json`` says ``tie_word_embeddings``. Of other tied tensors no file of the folder says
    that they are tied: each is stored, or a tool would start with random values for the missing name.
    """

    def says_tied() -> bool:
        config = find_config(options.assets)
        return config is not None and config.is_tied

    tied = {*aliases, *aliases.values()}
    head = next(
        (key for key in sorted(tied) if len(folder_tensors[key]) == 1 and folder_tensors[key][0][0].name in HEADS), None
    )
    if head is None:
        return {}
    stored = aliases.get(head, head)
    others = sorted(key for key in {stored, *aliases} - {head} if aliases.get(key, key) == stored)
    return {head: others[0]} if comm.main_runs("reading the assets", says_tied) else {}


def _combine(mine: T, unite: Callable[[Sequence[T]], U], name: str, comm: Comm) -> U:
    """Collective: return the result of a function of all ranks' values."""
    if comm.all_equal(repr(mine).encode()):  # as with FSDP: no rank needs to receive the others' values
        return unite([mine])
    everyone = comm.gather(mine)
    return comm.main_runs(name, lambda: unite(everyone))


def _unite(everyone: Sequence[Sequence[TensorInfo]]) -> list[TensorInfo]:
    """Return the tensors of all ranks, layer 2 before layer 10."""
    found: dict[str, tuple[TensorInfo, int]] = {}
    for rank, infos in enumerate(everyone):
        for info in infos:
            first, at = found.setdefault(info.key, (info, rank))
            if first != info:
                raise ShardingError(
                    f"tensor {info.key!r}: ranks disagree on it: {first} on rank {at}, {info} on rank {rank}"
                )
    return sorted((info for info, _ in found.values()), key=lambda info: natural_order(info.key))


def _split_tensors(
    tensors: Sequence[TensorInfo], sections: Sections, options: ContiguousOptions
) -> dict[str, list[tuple[HubTensor, Box]]]:
    """Return the folder's tensors of each tensor that can be stored contiguously, each with its box.

    It is a ShardingError if one that must be cannot, or two would have one name.
    """
    found: dict[str, list[tuple[HubTensor, Box]]] = {}
    keys: dict[str, str] = {}  # by the name in the folder
    for info in tensors:
        check_names([info.key])
        split = split_tensor(info, sections.model, options.mapping)
        if split.obstacle and options.choose(info.key, sections) == "contiguous":
            raise ShardingError(
                f"tensor {info.key!r} cannot be stored contiguously: it {split.obstacle}; give it the layout 'boxes', "
                "or 'auto'"
            )
        if split.parts:
            found[info.key] = split.parts
        for hub_tensor, _ in split.parts:
            if (other := keys.setdefault(hub_tensor.name, info.key)) != info.key:
                raise ShardingError(
                    f"{info.key!r} and {other!r} would both be {hub_tensor.name!r} in the folder: "
                    "give one of them layout='boxes', or another mapping"
                )
    return found


def _vote(folder_tensors: dict[str, list[tuple[HubTensor, Box]]], shards: Sequence[ShardedBase]) -> dict[str, int]:
    """Return for each tensor whether this rank has it otherwise than in ranges of the folder's tensors."""
    votes = dict.fromkeys(folder_tensors, 0)
    items = collect_items([s for s in shards if isinstance(s, ShardedTensor) and s.key in folder_tensors])
    for number, offset, extent in zip(items.boxes.spec, items.boxes.offsets, items.boxes.extents, strict=True):
        held = Box(offset, extent)
        for _, box in folder_tensors[items.keys[number]]:
            common = intersect(held, box)
            if common is not None:
                votes[items.keys[number]] |= find_range(common, box) is None
    return votes


def _check_same(items: LocalItems, tensors: Sequence[TensorInfo], numbers: dict[str, int]) -> None:
    """Raise if this rank's boxes of a tensor disagree on it."""
    for info in map(TensorInfo, items.keys, items.dtypes, items.shapes, map(items.scales.get, items.keys)):
        expected = tensors[numbers[info.key]]
        if info != expected:
            raise ShardingError(f"tensor {info.key!r}: its shards disagree on it: {expected}, {info}")
