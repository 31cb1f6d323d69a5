"""(safetensors, 1) at sizes at which the index is made in parts: what planning moves, and what a rank reads to load."""

from __future__ import annotations

import shutil
from array import array
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from benchmarks.simulation.figures import COLUMNS, ROWS, Figures
from benchmarks.simulation.replay import Recorder, Replay
from shardckpt.chunks import LocalPlan, collect_items
from shardckpt.chunks.owners import (
    PartMerge,
    SpecsByPart,
    address_parts,
    answer,
    drop_boxes,
    link_parts,
    merge_plans,
    number_links,
    pack_file_counts,
    route_rows,
)
from shardckpt.chunks.requested import RequestedTensors
from shardckpt.manifest import FileRecord, Manifest, Marker, Record
from shardckpt.mapping import BlockScales, ShardedTensor
from shardckpt.plugins import get_plugin_manager
from shardckpt.plugins.resolver import read_manifest
from shardckpt.storage import (
    CheckpointReader,
    CheckpointWriter,
    Columns,
    PackedShards,
    digest_vote,
    negotiate_digest,
    pack_columns,
)
from shardckpt.storage.digest import Segments
from shardckpt.strategy import PlanContext
from shardckpt_safetensors import SafetensorsSaveShardedStrategy
from shardckpt_safetensors.encoded_index import encode_index
from shardckpt_safetensors.index import read_index
from shardckpt_safetensors.index_header import make_header
from shardckpt_safetensors.index_names import INDEX_FILE
from shardckpt_safetensors.index_parts import encode_part
from shardckpt_safetensors.layout import lay_out

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.chunks import MergedPlan
    from shardckpt.storage import Column
    from shardckpt_safetensors.index_parts import EncodedPart

_SAVE_ID = "0" * 32
#: A tied tensor, and the key by which it is stored.
_ALIASES = {"output.weight": "embedding.weight"}
_BLOCK = (1, 4)


class PlanTraffic(NamedTuple):
    """What the ranks send and receive while they plan, and the parts that their owners have merged.

    Attributes:
        sent: Bytes that each rank sends.
        received: Bytes that each rank receives.
        parts: The parts of the index, by file name.
        rest: The files of all ranks.
    """

    sent: list[int]
    received: list[int]
    parts: dict[str, EncodedPart]
    rest: MergedPlan


def count_planning(
    world_size: int, shards: int, strategy: SafetensorsSaveShardedStrategy, *, linked: bool = False
) -> PlanTraffic:
    """Count what planning moves, by running all ranks through the functions of a save, each of them once.

    The first rank's plan is made from its shards. Those of the others are the same with other offsets and file names.

    Args:
        world_size: Number of ranks.
        shards: Shards of each rank: of as many tensors, cut along the first axis.
        strategy: Says how many boxes a part has.
        linked: Whether half of the tensors are the scales of the others, and one more is tied to another.
    """
    first = make_plan(0, world_size, shards, linked=linked)
    count = -(-world_size * first.stored.size // strategy.part_rows)
    aliases = _ALIASES if linked else {}
    specs = SpecsByPart(first, count)
    bare, messages = [], []
    for rank in range(world_size):
        plan = move_plan(first, rank)
        bare.append(drop_boxes(plan))
        messages.append(address_parts(route_rows(plan, rank, specs), world_size))
    merges: dict[int, PartMerge] = {}
    merged: dict[int, dict[int, MergedPlan]] = {}
    encoded: dict[str, EncodedPart] = {}

    def plan_rank(rank: int, comm: Recorder) -> MergedPlan | None:
        if comm.all_equal(b"the tied tensors") and aliases:
            comm.all_equal(b"which of them are the same memory")
        comm.largest(0)  # of gather_up_to, which sends no more than this if there is too much to gather
        comm.total(first.stored.size, linked, 0)
        plans = comm.gather(bare[rank])
        rest = merge_plans(plans) if comm.is_main else None
        comm.broadcast(pack_file_counts(plans))
        arrived = comm.all_to_all(messages[rank])
        if rank not in merges:
            merges[rank] = PartMerge(arrived)
        own = merges[rank]
        asked = comm.all_to_all(own.questions)
        answered = comm.all_to_all({other: answer(question, specs) for other, question in asked.items()})
        if rank not in merged:
            merged[rank] = own.merge(answered, aliases, count)
        parts = merged[rank]
        if linked:
            sought = comm.all_to_all(own.seek_scales(aliases, count, world_size))
            gathered = comm.gather_some(link_parts(parts, sought), given=bool(parts))
            rest = None if rest is None else number_links(rest, gathered)
        for number, part in parts.items():
            if (name := f"index_{number}.safetensors") not in encoded:
                encoded[name] = encode_part(part, strategy.page_rows)
        heads = {number: encoded[f"index_{number}.safetensors"].head for number in parts}
        comm.gather_some(heads, given=bool(heads))
        return rest

    replay = Replay(world_size)
    rest = replay.run(plan_rank)
    ordered = sorted(encoded.items(), key=lambda item: int(item[0].removeprefix("index_").partition(".")[0]))
    return PlanTraffic(replay.sent, replay.received_by, dict(ordered), rest)


def replay_planning(
    world_size: int, shards: int, strategy: SafetensorsSaveShardedStrategy, *, linked: bool = False
) -> Replay:
    """Count the same by the strategy's own ``prepare`` on all ranks, which is too slow for many."""
    replay = Replay(world_size)

    def plan(rank: int, comm: Any) -> None:
        context = PlanContext(comm=comm, save_id=_SAVE_ID)
        strategy.prepare(list_shards(rank, world_size, shards, linked=linked), {}, context)

    replay.run(plan)
    return replay


def make_plan(rank: int, world_size: int, shards: int, *, linked: bool = False) -> LocalPlan:
    """Return the plan of a rank, as a save makes it."""
    items = collect_items(list_shards(rank, world_size, shards, linked=linked), _ALIASES if linked else {})
    return lay_out(items, {}, rank, 1)[1]


def move_plan(first: LocalPlan, rank: int) -> LocalPlan:
    """Return the plan of a rank, made from that of rank 0."""
    if not rank:
        return first
    table, _ = first.stored.unpack_boxes()
    offset = table.offset + torch.tensor([rank * ROWS, 0])
    boxes = pack_columns({"whole": table.spec, "offset": offset, "extent": table.extent, "objects": []})
    columns = Columns(first.locations, "the plan of rank 0")
    same: dict[str, Column] = {name: columns.integers(name) for name in ("boxes", "objects")}
    if columns.has("scaled"):
        same |= {name: columns.texts(name) for name in ("scaled", "scaled_by")}
        same["scaled_block"] = columns.integers("scaled_block")
    locations = pack_columns({"files": [f"rank_{rank}_0.safetensors"], **same})
    return LocalPlan(PackedShards(first.stored.specs, boxes, first.stored.size), locations)


def write_index(plans: PlanTraffic, folder: Path, world_size: int, algorithm: str) -> int:
    """Write the index and the record of a checkpoint whose data files are not there; return the bytes of the index.

    Args:
        plans: What the owners have merged.
        folder: A new directory.
        world_size: Number of ranks, each of which has a data file with a table file.
        algorithm: Of the digests.
    """
    folder.mkdir(parents=True)
    with CheckpointWriter(folder, 0, algorithm=algorithm) as writer:
        for name, part in plans.parts.items():
            file = writer.create(name, len(part.data))
            for piece in part.cut():
                file.append_small((piece,), keys=0)
            writer.finish(file)
        header = make_header(_SAVE_ID, PlanContext(comm=None, save_id=_SAVE_ID).lineage)  # type: ignore[arg-type]
        heads = {name: part.head for name, part in plans.parts.items()}
        writer.write(INDEX_FILE, encode_index(plans.rest, parts=heads).to_bytes(header))
        nbytes = sum(file.size for file in writer.files)
        tables = [*writer.files, *_list_data_files(plans.rest.files, algorithm)]
        moved = {file.name: file for file in writer.move_tables(writer.files)}
        record = Record(
            save_id=_SAVE_ID,
            backend="safetensors",
            version=1,
            reader="shardckpt 0.1",
            writer={"shardckpt": "0.1.0", "torch": torch.__version__},
            world_size=world_size,
            digest_algorithm=algorithm,
            files=tuple(sorted((moved.get(file.name, file) for file in tables), key=lambda file: file.name)),
        )
        writer.write("shardckpt.json", record.dump())
        writer.write("metadata.json", Marker(sharded_backend="safetensors").model_dump_json().encode())
    return nbytes


def _list_data_files(names: list[str], algorithm: str) -> list[FileRecord]:
    """Return the records of data files of 1 GiB."""
    table = Segments([1 << 20] * 1024, range(1024), algorithm)
    digest, nbytes = table.root(), len(table.to_bytes())
    return [
        FileRecord(name=name, size=1 << 30, rank=rank, keys=1000, digest=digest, segments=nbytes)
        for rank, name in enumerate(names)
    ]


def count_opening(folder: Path, shards: list[ShardedTensor]) -> int:
    """Return the bytes that a process reads until it knows which bytes of data files it needs for these shards."""
    counted = array("q", [0])
    with _count_reads(counted):
        manifest: Manifest = read_manifest(folder, get_plugin_manager())
        with CheckpointReader(folder, manifest) as reader:
            RequestedTensors(shards, read_index(reader), reader)
    return counted[0]


@contextmanager
def _count_reads(counted: array[int]) -> Iterator[None]:
    """Count the bytes that this process reads from files: the kernel's own figure."""
    status = Path("/proc/self/io")

    def read() -> int:
        return int(status.read_text().split("rchar: ")[1].split()[0])

    own = -(read() - read())  # what a look at the figure adds to it
    before = read()
    yield
    counted[0] += read() - before - own


def simulate(ranks: int, shards: int, full: int, folder: str) -> Figures:  # noqa: ARG001 - nothing is left out
    """Plan a save of so many ranks whose index is made in parts, write the index, and open it for one rank."""
    figures = Figures()
    torch.set_num_threads(1)
    strategy = SafetensorsSaveShardedStrategy()
    for linked, which in ((True, "with ties and block scales, "), (False, "")):
        with figures.cpu(f"planning of all ranks: {which}CPU"):
            found = count_planning(ranks, shards, strategy, linked=linked)
        figures.sent(f"planning{', ' * bool(which)}{which.removesuffix(', ')}", max(found.sent))
        figures[f"planning: {which}received by a rank", "MiB"] = max(found.received) / (1 << 20)
    place = Path(folder)
    try:
        nbytes = write_index(found, place, ranks, negotiate_digest(digest_vote()))
        figures["index on disk", "MiB"] = nbytes / (1 << 20)
        wanted = list_shards(ranks // 3, ranks, shards)
        count_opening(place, wanted)  # imports what it takes
        with figures.cpu("open for one rank: CPU"):
            opened = count_opening(place, wanted)
        figures["open for one rank: read", "MiB"] = opened / (1 << 20)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    figures.peak()
    return figures


def list_shards(rank: int, ranks: int, count: int, *, linked: bool = False) -> list[ShardedTensor]:
    """Return the shards of a rank: rows of each tensor; if linked, half are codes with scales, and one more is tied."""

    def cut(key: str, data: torch.Tensor, scales: BlockScales | None = None) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(key, data, (0, rank, ranks), block_scales=scales)

    data = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device="meta")
    if not linked:
        return [cut(f"layers.{n}.weight", data) for n in range(count)]
    codes = torch.empty(ROWS, COLUMNS * _BLOCK[1], dtype=torch.uint8, device="meta")
    tied = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device="cpu")
    found = [cut(key, tied) for key in ("embedding.weight", "output.weight")]
    for n in range(count // 2):
        found.append(cut(f"layers.{n}.weight", codes, BlockScales(f"layers.{n}.scales", _BLOCK)))
        found.append(cut(f"layers.{n}.scales", data))
    return found


__all__ = ["PlanTraffic", "count_opening", "count_planning", "replay_planning", "simulate", "write_index"]
