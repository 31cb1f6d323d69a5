"""One rank's part of a state dict, whose tensors can be taken out and put back, for local checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardckpt.distributed.comm import Comm
from shardckpt.engine.load_template import MISSING, LoadTemplate
from shardckpt.engine.loading import refuse_unfillable, report_ignored
from shardckpt.errors import CheckpointingException, KeyMismatchError, list_given, show_given
from shardckpt.local.memory_shards import KeptShards, describe_shards, fetch_shards, keep_share
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.mapping.unstored import StoredNames
from shardckpt.parallel.transfers import check_algorithm
from shardckpt.planning.dtypes import check_dtypes, refuse_changed_values
from shardckpt.planning.shapes import check_shapes
from shardckpt.planning.shard_copies import shard_id
from shardckpt.state_dict import dict_list_map_outplace, nested_values, split_for_save
from shardckpt.tensors.wrappers import fill
from shardckpt.validation.arguments import check_annotated
from shardckpt.validation.keys import StrictHandling, compare_keys, name_keys, parse_strict_flag, stored_key
from shardckpt.validation.replicas import choose_main_replicas
from shardckpt.validation.sharding import validate_shards

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence, ValuesView

    from torch.distributed import ProcessGroup

    from shardckpt.mapping.base import ShardedBase, ShardedStateDict, StateDict

_ALGORITHMS = ("fully_parallel", "atomic")


class TensorAwareStateDict:
    """One rank's part of a state dict: common state, and shards whose tensors can be taken out and put back.

    It has the methods of nvidia-resiliency-ext's ``TensorAwareStateDict`` and does not need that package.

    Example:
        Keep a copy in CPU memory, and restore it later::

            state, cache = TensorAwareStateDict.from_state_dict(sharded_state_dict)
            state.copy_tensors_to_cpu()
            ...
            state_dict = state.to_state_dict(sharded_state_dict, algo="fully_parallel")

    Args:
        common: The state that is not sharded.
        sharded_state_dict: A nested dict of ShardedTensors and ShardedObjects, which this object may change. Tensors
            that another rank keeps have no data.
        homes: For each tensor, the kind of device to which :meth:`restore_tensor_device` moves it; by default the
            kind that it is on.
    """

    def __init__(
        self, common: StateDict, sharded_state_dict: ShardedStateDict, homes: Sequence[str] | None = None
    ) -> None:
        self.common = common
        self.sharded_state_dict = sharded_state_dict
        self._kept = [shard for shard in self._described_tensors() if shard.data is not None]
        here = [shard.data.device.type for shard in self._kept if shard.data is not None]
        self.homes = here if homes is None else list(homes)
        #: Kinds of device that the tensors were on when they were taken out.
        self._popped: list[str] | None = None

    @classmethod
    def from_state_dict(
        cls,
        sharded_state_dict: ShardedStateDict,
        algo: str = "fully_parallel",
        parallelization_group: ProcessGroup | None = None,
        cached_metadata: KeptShards | None = None,
    ) -> tuple[TensorAwareStateDict, KeptShards | None]:
        """Collective: make this rank's part of a state dict, which is not changed; its tensors are shared, not copied.

        Args:
            sharded_state_dict: As for :func:`shardckpt.dist_checkpointing.save`.
            algo: ``"fully_parallel"``: of a tensor that ranks of the group replicate one of them keeps its data.
                ``"atomic"``: each rank keeps all of its own.
            parallelization_group: The ranks that hold copies of each other's shards; by default all.
            cached_metadata: The second value that this returned last time, a :class:`shardckpt.local.KeptShards`. If
                all ranks have the same shards as then, they are not validated again, and the assignment is reused.

        Returns:
            The part, and the ``cached_metadata`` for the next call (None for ``"atomic"``).

        Raises:
            CheckpointingException: the same on every rank.
        """
        comm = Comm()
        with comm.local_phase("making a tensor-aware state dict"):
            with comm.collective_phase("preparing the state dict"):
                _check_algo(algo)
                if not isinstance(cached_metadata, KeptShards | None):
                    raise CheckpointingException(
                        f"cached_metadata is {show_given(cached_metadata)}: expected the second value of a call before"
                    )
                sharded, common = split_for_save(sharded_state_dict)
                for shard in _list_tensors(sharded):
                    if shard.data is None:
                        raise CheckpointingException(f"ShardedTensor {shard.key!r} has no data to keep")
            shards = choose_main_replicas(list(nested_values(sharded)), comm, compare=False)
            chosen = iter(shards)
            sharded = dict_list_map_outplace(lambda _: next(chosen), sharded)
            described = describe_shards(shards)
            # those of the cache were validated when it was made
            if not comm.all_true(cached_metadata is not None and cached_metadata.described == described):
                cached_metadata = None
                validate_shards(shards, comm)
            if algo == "atomic":
                return cls(common, sharded), None
            # before the first collective of another group, whose ranks would wait for one that failed
            comm.sync_errors()
            # two phases: ranks of other groups must learn of an error, too
            with comm.collective_phase("assigning the shards"):
                group = Comm(parallelization_group)
                with group.collective_phase("assigning the shards"):
                    kept = keep_share(list(_list_tensors(sharded)), group, cached_metadata, described)
            return cls(common, sharded), kept

    def to_state_dict(
        self,
        sharded_state_dict: ShardedStateDict | None,
        algo: str = "atomic",
        exchange_algo: str = "broadcast",
        validate_access_integrity: bool = True,
        parallelization_group: ProcessGroup | None = None,
        strict: str | bool | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
        return_mismatch_keys: bool = False,
        *,
        allow_dtype_cast: bool = False,
    ) -> Any:
        """Collective: restore the state dict, in the form of a load template.

        Nothing is resharded: shards must have the same offsets and shapes as when this object was made.

        Args:
            sharded_state_dict: The load template, as for :func:`shardckpt.dist_checkpointing.load`. Tensors that have
                data are filled in place; for others the result has this object's own tensors. If it is empty or
                None, the result is the common state, and other ranks need not call this.
            algo: As for :meth:`from_state_dict`; with ``"fully_parallel"`` other ranks send what this one lacks.
            exchange_algo: How ranks exchange shards; see
                :class:`~shardckpt.parallel.load.FullyParallelLoadStrategyWrapper`.
            validate_access_integrity: Check that the wanted shards of all ranks cover every tensor exactly once.
            parallelization_group: The group that was given to :meth:`from_state_dict`.
            strict: What to do about keys that do not match.
            return_mismatch_keys: Whether to return the keys that do not match, too.
            allow_dtype_cast: As for :func:`shardckpt.dist_checkpointing.load`.

        Returns:
            The state dict, or ``(state_dict, missing_keys, unexpected_keys)``.

        Raises:
            CheckpointingException: the same on every rank.
        """
        is_empty = sharded_state_dict is None or sharded_state_dict == {}
        if is_empty and not return_mismatch_keys:  # as Megatron's, without the other ranks
            self._check_tensors("to_state_dict")
            return dict_list_map_outplace(lambda leaf: leaf, self.common)
        comm = Comm()
        with comm.local_phase("restoring a state dict"):
            with comm.collective_phase("preparing the state dict"):
                check_annotated(TensorAwareStateDict.to_state_dict, locals())
                self._check_tensors("to_state_dict")
                _check_algo(algo)
                check_algorithm(exchange_algo)
                wanted = {} if sharded_state_dict is None else sharded_state_dict
                template, mode = LoadTemplate(wanted, self._name_kept), parse_strict_flag(strict)
                for shard in template.shards:
                    shard.validate_metadata_integrity()
                refuse_unfillable(template.shards)
            template.shards = choose_main_replicas(template.shards, comm, compare=False)
            if validate_access_integrity:
                validate_shards(template.shards, comm)
            kept_keys = name_keys(nested_values(self.sharded_state_dict))
            # ranks keep different shards: whether a shard is left over is asked of those of all ranks
            everyone = comm.all_gather(kept_keys) if mode.checks_all else []
            everywhere = {name: key for keys in everyone for name, key in keys.items()}
            mismatch = compare_keys(template.shards, kept_keys, mode, comm, everywhere)
            available = [shard for shard in template.shards if stored_key(shard) not in mismatch.absent]
            with comm.collective_phase("comparing shapes"):
                # of all this rank's shards: those whose tensors other ranks keep are still described here
                described = list(self._described_tensors())
                check_shapes(available, {shard.key: tuple(shard.global_shape) for shard in described})
                check_dtypes(available, {shard.key: shard.dtype for shard in described}, allow_cast=allow_dtype_cast)
                ignored = template.find_ignored_tensors(self.common)
            (most_ignored,) = comm.largest(len(ignored))
            if most_ignored:
                report_ignored(ignored, most_ignored, "warn", comm)
            with comm.collective_phase("collecting shards"):
                group = Comm(parallelization_group) if algo == "fully_parallel" else Comm(alone=True)
                with group.collective_phase("collecting shards"):
                    kept = {shard_id(shard): shard.data for shard in self._kept if shard.data is not None}
                    tensors = {shard_id(shard): shard for shard in available if isinstance(shard, ShardedTensor)}
                    lacking = {shard: tensor for shard, tensor in tensors.items() if shard not in kept}
                    fetched = fetch_shards(kept, lacking, group, exchange_algo)
                leaves = nested_values(self.sharded_state_dict)
                objects = {shard_id(leaf): leaf.data for leaf in leaves if isinstance(leaf, ShardedObject)}
                collected: dict[Any, Any] = {**objects, **kept, **fetched}
            with comm.collective_phase("assembling the state dict"):
                values = [
                    MISSING
                    if stored_key(shard) in mismatch.absent
                    else _fill_destination(shard, collected, allow_cast=allow_dtype_cast)
                    for shard in template.shards
                ]
                # containers of its own: a training changes its state
                state_dict = template.fill(values, dict_list_map_outplace(lambda leaf: leaf, self.common))
        return (state_dict, set(mismatch.missing), set(mismatch.unexpected)) if return_mismatch_keys else state_dict

    @property
    def common_state_dict(self) -> StateDict:
        """The state that is not sharded."""
        return self.common

    def values(self) -> ValuesView[Any]:
        """Return the two parts: the common state, and the nested dict of shards."""
        return {"common": self.common, "sharded_state_dict": self.sharded_state_dict}.values()

    @property
    def is_hollow(self) -> bool:
        """Whether the tensors have been taken out."""
        return self._popped is not None

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that this rank keeps."""
        self._check_tensors("tensors")
        return (shard.data for shard in self._kept if shard.data is not None)

    def pop_tensors(self) -> list[torch.Tensor]:
        """Take the tensors out of this object, which then is small, and can be pickled and sent.

        Returns:
            The tensors that this rank keeps, in the order in which :meth:`insert_tensors` takes them.
        """
        taken = list(self.tensors)
        self._popped = [tensor.device.type for tensor in taken]
        for shard in self._kept:
            shard.data = None
        return taken

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors in the places of those that :meth:`pop_tensors` took out.

        Args:
            tensor_data: Tensors of the same shapes and dtypes in the same order, on any device.

        Raises:
            CheckpointingException: their number, or the shape or dtype of one, is wrong; then none is put in.
        """
        self._check_hollow("insert_tensors")
        given = list_given(tensor_data)
        if len(given) != len(self._kept):
            raise CheckpointingException(f"insert_tensors: {len(given)} tensors for {len(self._kept)} places")
        for shard, tensor in zip(self._kept, given, strict=True):
            if not isinstance(tensor, torch.Tensor):
                raise CheckpointingException(f"insert_tensors: {show_given(tensor)} in place of {shard!r}")
            if tuple(tensor.shape) != shard.data_shape or tensor.dtype != shard.dtype:
                raise CheckpointingException(
                    f"insert_tensors: a tensor of {tensor.dtype} and shape {tuple(tensor.shape)} for {shard!r}"
                )
        for shard, tensor in zip(self._kept, given, strict=True):
            shard.data = tensor
        self._popped = None

    def init_tensors(self) -> None:
        """Put new, uninitialized tensors in the places of those that were taken out, on the same kinds of device."""
        self._check_hollow("init_tensors")
        for shard, device in zip(self._kept, self._popped or (), strict=True):
            shard.init_data(device)
        self._popped = None

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Replace the tensors by copies on the CPU; the originals are not changed.

        Args:
            non_blocking: Do not wait for copies from a device; the caller synchronizes it before they are used.
        """
        self._check_tensors("copy_tensors_to_cpu")
        for shard, home in zip(self._kept, self.homes, strict=True):
            data = shard.data
            if data is not None and (data.device.type != "cpu" or home == "cpu"):  # else it is a copy already
                shard.data = data.detach().to("cpu", non_blocking=non_blocking, copy=True)

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Move each tensor back to the kind of device that it was on when this was made.

        Args:
            non_blocking: Do not wait for the copies; work on the device's current stream comes after them anyway.
        """
        self._check_tensors("restore_tensor_device")
        for shard, home in zip(self._kept, self.homes, strict=True):
            if shard.data is not None and shard.data.device.type != home:
                shard.data = shard.data.to(home, non_blocking=non_blocking)

    def _name_kept(self) -> StoredNames:
        shards = list(nested_values(self.sharded_state_dict))
        tensors = {s.key: (s.dtype, tuple(s.global_shape)) for s in shards if isinstance(s, ShardedTensor)}
        return StoredNames(tensors, dict.fromkeys(sorted(s.key for s in shards if isinstance(s, ShardedObject))))

    def _described_tensors(self) -> Iterator[ShardedTensor]:
        return _list_tensors(self.sharded_state_dict)

    def _check_tensors(self, action: str) -> None:
        if self.is_hollow:
            raise CheckpointingException(f"{action}: the tensors are out; insert_tensors() puts them back")

    def _check_hollow(self, action: str) -> None:
        if not self.is_hollow:
            raise CheckpointingException(f"{action}: the tensors are in place; pop_tensors() takes them out")


def _list_tensors(sharded: Any) -> Iterator[ShardedTensor]:
    return (leaf for leaf in nested_values(sharded) if isinstance(leaf, ShardedTensor))


def _check_algo(algo: str) -> None:
    if algo not in _ALGORITHMS:
        raise CheckpointingException(f"no algo {algo!r}: it is one of {', '.join(_ALGORITHMS)}")


def _fill_destination(shard: ShardedBase, collected: dict[Any, Any], *, allow_cast: bool) -> Any:
    """Return the value of a wanted shard, in the caller's own tensor if there is one."""
    if shard_id(shard) not in collected:  # tensors that no rank keeps were found by fetch_shards
        raise KeyMismatchError(
            f"this rank keeps no object {stored_key(shard)!r}: it was not in the state dict when this object was made"
        )
    value = collected[shard_id(shard)]
    if not isinstance(shard, ShardedTensor):
        return value
    if not allow_cast:
        refuse_changed_values(shard.key, value, shard.dtype)
    if shard.data is None:
        return value.to(shard.dtype)
    if value is not shard.data:
        fill(shard.key, shard.data, value)
    return shard.data
