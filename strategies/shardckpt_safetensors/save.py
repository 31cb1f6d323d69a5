"""Save as (safetensors, 1): data files of each rank; the index and the common state by the main rank."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

from shardckpt.chunks import ChunkSaveStrategy, has_scales, merge_by_owners, merge_plans
from shardckpt.errors import CheckpointingException, ShardingError, listed
from shardckpt.huggingface import find_adapter_mapping, find_mapping, read_config
from shardckpt.parallel import assign_main_replicas
from shardckpt.storage import Columns, parse_size
from shardckpt_safetensors.contiguous import ContiguousOptions, choose_assets, parse_patterns, plan_contiguous
from shardckpt_safetensors.encoded_index import EncodedIndex, encode_index
from shardckpt_safetensors.index_parts import ALIGN, PAGE_ROWS, encode_part, find_alignment
from shardckpt_safetensors.layout import lay_out
from shardckpt_safetensors.objects import encode_object, encode_tree_file
from shardckpt_safetensors.write_plan import Payload, WritePlan

if TYPE_CHECKING:
    import os
    from collections.abc import Hashable, Mapping, Sequence

    from shardckpt.chunks import ChunkWork, LocalItems, LocalPlan, SavePlan
    from shardckpt.distributed import Comm
    from shardckpt.mapping import CommonStateDict, ShardedBase
    from shardckpt.plugins import KeyMapping
    from shardckpt.strategy import PlanContext, PreparedSave
    from shardckpt_safetensors.contiguous import ContiguousPlan, Layout


class _Plan(NamedTuple):
    """A rank's part of a plan: of boxes and objects, and of contiguous tensors, if there are any."""

    boxes: SavePlan[EncodedIndex, Payload]
    contiguous: ContiguousPlan | None


class SafetensorsSaveShardedStrategy(ChunkSaveStrategy[EncodedIndex, Payload]):
    """Writes safetensors files and an index of columns; objects and common state as JSON and tensors, never as pickles.

    Args:
        keep_only_main_replica: Whether only the main replica of a shard may be written. If False, any rank with a copy
            may write it, and the bytes are balanced over all ranks.
        thread_count: Number of files per rank, balanced by bytes. By default one; on file systems known to write only
            through the page cache, as many as can be written concurrently, each of at least 32 MiB.
        store_aliases: Whether tied tensors are stored once, under the first of their keys, and the others are aliases
            of it. Tied are tensors that are the same memory (address, shape, strides, dtype) and the same shards on
            all ranks that have one of them. If False, each key has values of its own in the files. Of contiguous
            tensors ``lm_head.weight`` alone is stored so, if the ``config.json`` of ``assets`` says
            ``tie_word_embeddings``.
        layout: How tensors are stored. ``"boxes"``: each rank's boxes in files of its own. ``"contiguous"``: each
            tensor in one piece, under the names of a Hugging Face folder, with its index, so that inference tools open
            the checkpoint as it is; ranks exchange tensors that are cut otherwise than along the first axis.
            ``"auto"``: contiguous where that needs no exchange, else boxes. ``"contiguous"`` and ``"auto"`` are for the
            keys that begin with ``prefix``. Or a dict of these by pattern of keys (:mod:`fnmatch`), of which the first
            that matches counts; boxes where none does.
        prefix: Prefix of the model's keys, which the names in the folder lack. By default the model's prefix, as
            :func:`shardckpt.huggingface.export_to_huggingface` finds it; its optimizers' tensors are stored in boxes.
        mapping: How names and shapes change, as for :func:`shardckpt.huggingface.export_to_huggingface`: a tensor of
            all experts becomes one for each expert in the files. Tensors that it transposes are stored in boxes only.
        max_shard_size: Bytes of contiguous tensors in a file, ``"5GB"`` (10^9) or ``"5GiB"``.
        assets: A folder with the model's other files (config, tokenizer), or a list of files, which are copied.

    Raises:
        CheckpointingException: An argument is not one of these.

    Example::

        dist_checkpointing.save(state, path, SafetensorsSaveShardedStrategy(layout="contiguous", assets="Qwen3-8B"))
        AutoModelForCausalLM.from_pretrained(path)
    """

    backend = "safetensors"
    version = 1
    reader = "shardckpt 0.1"
    caches_plan = True

    #: Bytes of the plans of all ranks that go to the main rank, at most: about a million boxes. Where they would be
    #: more, the ranks make the index in parts, and no rank receives more than this.
    gathered_bytes: ClassVar[int] = 60 << 20
    #: Boxes in a part of the index, on average, and in a page of a part.
    part_rows: ClassVar[int] = 1 << 17
    page_rows: ClassVar[int] = PAGE_ROWS

    def __init__(
        self,
        *,
        keep_only_main_replica: bool = True,
        thread_count: int | None = None,
        store_aliases: bool = True,
        layout: Layout | Mapping[str, Layout] = "boxes",
        prefix: str | None = None,
        mapping: str | KeyMapping | None = None,
        max_shard_size: int | str = "5GB",
        assets: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    ) -> None:
        super().__init__(keep_only_main_replica=keep_only_main_replica, thread_count=thread_count)
        self.finds_aliases = store_aliases
        if find_adapter_mapping(mapping) is not None:
            raise CheckpointingException(
                f"mapping={mapping!r} leaves the base model out, which a checkpoint has: give no mapping, and export "
                "the adapter (last_save_in_hf=True, or export_to_huggingface with this mapping)"
            )
        files = choose_assets(assets)
        self._options = ContiguousOptions(
            patterns=parse_patterns(layout),
            prefix=prefix,
            mapping=find_mapping(mapping, partial(read_config, files)),
            limit=parse_size(max_shard_size),
            assets=files,
            store_aliases=store_aliases,
        )
        self._mapping = mapping
        #: The contiguous tensors of a save, while it is planned.
        self._contiguous: ContiguousPlan | None = None
        # a mapping of the caller's may be compared by its values, which may change: then plans are this instance's
        named = mapping is None or isinstance(mapping, str)
        options = self._options
        self._plan_key = (options.patterns, prefix, mapping, options.limit, options.assets) if named else None
        if self._options.assets and not self._options.patterns:
            raise CheckpointingException(
                "assets are copied next to contiguous tensors, and layout='boxes' has none: pass layout='contiguous' "
                "or 'auto'"
            )

    def store_hub_folders(
        self, prefix: str | None, mapping: str | KeyMapping | None, assets: str | None
    ) -> SafetensorsSaveShardedStrategy:
        """Return one like this with ``layout="contiguous"``; see :class:`shardckpt.strategy.StoresHubFolders`."""
        return SafetensorsSaveShardedStrategy(
            keep_only_main_replica=self._main_only,
            thread_count=self._files,
            store_aliases=self.finds_aliases,
            layout="contiguous",
            prefix=prefix,
            mapping=mapping,
            assets=assets,
        )

    @property
    def agreed_options(self) -> Mapping[str, object]:
        """The base's, and those for which ranks look for ties and write files together."""
        options, mapping = self._options, self._mapping
        return {
            **super().agreed_options,
            "store_aliases": bool(self.finds_aliases),
            "layout": dict(options.patterns) or "boxes",
            "prefix": options.prefix,
            "mapping": mapping if mapping is None or isinstance(mapping, str) else type(mapping).__qualname__,
            "max_shard_size": options.limit,
        }

    @property
    def plan_cache_key(self) -> Hashable:
        """The key of the plan besides the shards: the class and its options."""
        return (super().plan_cache_key, self.finds_aliases, self._plan_key) if self._plan_key is not None else self

    def prepare(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: PlanContext) -> PreparedSave:
        """Collective: plan with all ranks; values of contiguous tensors that other ranks write are sent to them.

        Returns this rank's part of the save, to be written without other ranks. It is a ShardingError if ranks disagree
        on a tensor, its boxes do not fill it, or the format cannot hold a key, a dtype or a value.
        """
        if not self._options.patterns:
            prepared = super().prepare(shards, common, context)
            return replace(prepared, plan=_Plan(prepared.plan, None))
        # a copy: several saves may have one strategy, and each lays out its own tensors
        saver = copy(self)
        if not self._main_only:
            shards = assign_main_replicas(shards, context.comm)
            saver._main_only = True  # noqa: SLF001 - its own class; they are assigned, and need not be once more
        contiguous = saver._contiguous = plan_contiguous(shards, common, self._options, context)  # noqa: SLF001 - as above
        rest = shards if contiguous is None else contiguous.split(shards)[1]
        prepared = super(SafetensorsSaveShardedStrategy, saver).prepare(rest, common, context)
        return self._add_contiguous(prepared, _Plan(prepared.plan, contiguous), shards, context)

    def replan(  # type: ignore[override] # its own plan has the base's
        self, plan: _Plan, shards: Sequence[ShardedBase], common: CommonStateDict, context: PlanContext
    ) -> PreparedSave | None:
        """Collective: prepare a save by an earlier plan of this rank, for shards with the same metadata.

        It is None on all ranks if an encoded object has another size now, other tensors are tied, or another number of
        files is better.
        """
        contiguous, rest = ([], shards) if plan.contiguous is None else plan.contiguous.split(shards)
        if plan.contiguous is not None:
            with context.comm.local_phase("looking for tied tensors"):
                same = self._options.find_ties(contiguous) == plan.contiguous.ties
            if not context.comm.all_true(same):
                return None
        boxes = super().replan(plan.boxes, rest, common, context)
        return None if boxes is None else self._add_contiguous(boxes, plan, shards, context)

    def _add_contiguous(
        self, boxes: PreparedSave, plan: _Plan, shards: Sequence[ShardedBase], context: PlanContext
    ) -> PreparedSave:
        """Collective: return a save of boxes with the values of the contiguous tensors."""
        contiguous, work = plan.contiguous, cast("WritePlan", boxes.work)
        if contiguous is not None:
            with context.comm.local_phase("reading the assets"):
                others = contiguous.small_files(self._options) if context.comm.is_main else {}
            values = contiguous.collect(contiguous.split(shards)[0], context.comm)
            work = replace(work, tensors=[*work.tensors, *values], contiguous=replace(contiguous.work, others=others))
        return replace(boxes, work=work, plan=plan)

    def encode_objects(
        self,
        objects: Mapping[str, int],
        shards: Sequence[Any],
        context: PlanContext,  # noqa: ARG002 - nothing that a caller could allow: no value is pickled
    ) -> dict[str, Payload]:
        """Return the payloads of a rank's objects; arguments as of the base."""
        payloads: dict[int, Payload] = {}  # one object may have many keys: the options of an optimizer's group
        named: dict[int, tuple[str, Any]] = {}
        for key, number in objects.items():
            named.setdefault(id(shards[number].data), (f"object {key!r}", shards[number].data))
        faults = []
        for same, (what, data) in named.items():
            try:
                payloads[same] = Payload(*encode_object(data, what))
            except ShardingError as exc:  # noqa: PERF203 - to name the other refused ones
                faults.append(str(exc))
        if faults:
            raise ShardingError(listed(faults, "\n"))
        return {key: payloads[id(shards[number].data)] for key, number in objects.items()}

    def encode_common(self, common: CommonStateDict, context: PlanContext) -> bytes:  # noqa: ARG002 - as above
        """Return the file with the common state; arguments as of the base."""
        return encode_tree_file(common, "the common state")

    def measure(self, encoded: Payload) -> tuple[str, int]:
        """Return the codec and the size in bytes; arguments as of the base."""
        return encoded.codec, len(encoded.data)

    def lay_out(
        self,
        items: LocalItems,
        objects: Mapping[str, Payload],
        shards: Sequence[ShardedBase],  # noqa: ARG002 - the items have all that this format stores
        rank: int,
        files: int,
    ) -> tuple[WritePlan, LocalPlan]:
        """Return the plan of a rank's writes, and its form for the main rank; arguments as of the base."""
        work, plan = lay_out(items, objects, rank, files)
        if self._contiguous is not None:
            work = replace(work, contiguous=self._contiguous.work, keys=[*work.keys, *self._contiguous.work.keys])
            plan = self._contiguous.add_to(plan, items, objects) if rank == 0 else plan
        return work, plan

    def merge(
        self, work: ChunkWork[EncodedIndex, Payload], plan: LocalPlan, aliases: Mapping[str, str], comm: Comm
    ) -> tuple[ChunkWork[EncodedIndex, Payload], EncodedIndex | None]:
        """Collective: make the index, in parts if it is large: each is made by the rank that owns it; see the base."""
        if self._contiguous is not None:
            aliases = {**aliases, **self._contiguous.work.aliases}
        plans = comm.gather_up_to(self.gathered_bytes, plan)
        if plans is not None and not (comm.world_size == 1 and plan.nbytes > self.gathered_bytes):
            with comm.local_phase("planning for all ranks"):
                return work, self.make_index(plans, aliases) if comm.is_main else None
        with comm.local_phase("planning for all ranks"):
            is_unaligned = find_alignment(Columns(plan.locations, "a plan").integers("boxes")) < ALIGN
        rows, scaled, unaligned = comm.total(plan.stored.size, has_scales(plan), is_unaligned)
        owned = merge_by_owners(plan, max(1, -(-rows // self.part_rows)), comm, aliases, scaled=bool(scaled))
        with comm.local_phase("planning for all ranks"):
            unit = 1 if unaligned else ALIGN
            parts = {number: encode_part(part, self.page_rows, unit) for number, part in owned.parts.items()}
        heads = comm.gather_some({number: part.head for number, part in parts.items()}, given=bool(parts))
        with comm.local_phase("planning for all ranks"):
            named = {_name_part(n): head for n, head in sorted(item for some in heads for item in some.items())}
            index = None if owned.rest is None else encode_index(owned.rest, named)
        return replace(cast("WritePlan", work), parts={_name_part(n): part for n, part in parts.items()}), index

    def make_index(self, plans: Sequence[LocalPlan], aliases: Mapping[str, str]) -> EncodedIndex:
        """Return the index of all ranks' plans; arguments as of the base."""
        return encode_index(merge_plans(plans, aliases))


def _name_part(number: int) -> str:
    return f"index_{number}.safetensors"
