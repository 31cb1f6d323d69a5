"""A state dict of one rank whose tensors can be taken out and put back: the unit of local, in-memory checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.distributed import Comm
from shardckpt.engine import MISSING, LoadTemplate
from shardckpt.errors import CheckpointingException, KeyMismatchError
from shardckpt.local.memory_shards import fetch_shards, keep_share
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.parallel import check_algorithm
from shardckpt.planning import check_dtypes, check_shapes, shard_id
from shardckpt.state_dict import dict_list_map_outplace, nested_values, split_for_save
from shardckpt.tensors import fill
from shardckpt.validation import (
    StrictHandling,
    choose_main_replicas,
    compare_keys,
    parse_strict_flag,
    stored_key,
    validate_shards,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch
    from torch.distributed import ProcessGroup

    from shardckpt.local.memory_shards import KeptShards
    from shardckpt.mapping import ShardedBase, ShardedStateDict, StateDict

_ALGORITHMS = ("fully_parallel", "atomic")


class TensorAwareStateDict:
    """One rank's part of a state dict: common state, and shards whose tensors may be elsewhere for a while.

    It has the methods of nvidia-resiliency-ext's ``TensorAwareStateDict`` and needs nothing of that package.

    Args:
        common: The state that is not sharded.
        sharded_state_dict: A nest of ShardedTensors and ShardedObjects, of its own; those tensors that another rank
            keeps have no data.
        homes: The kinds of device to which :meth:`restore_tensor_device` brings the tensors; by default where they are.
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
        """Collective: take this rank's part of a state dict; the argument stays, its tensors are shared, not copied.

        Args:
            sharded_state_dict: As for :func:`shardckpt.dist_checkpointing.save`.
            algo: ``"fully_parallel"``: of the tensors that ranks of the group replicate each rank keeps its share.
                ``"atomic"``: each rank keeps all of its own.
            parallelization_group: The ranks that hold copies of each other's shards; by default all.
            cached_metadata: What this gave back last time: while no rank has other shards, nothing is assigned anew.

        Returns:
            The part, and what to pass as ``cached_metadata`` next time (None for ``"atomic"``).

        Raises:
            CheckpointingException: the same on every rank.
        """
        comm = Comm()
        with comm.local_phase("taking a state dict"):
            with comm.collective_phase("preparing the state dict"):
                _check_algo(algo)
                nest, common = split_for_save(sharded_state_dict)
                _check_filled(nest)
            settled = iter(choose_main_replicas(list(nested_values(nest)), comm, compare=False))
            nest = dict_list_map_outplace(lambda _: next(settled), nest)
            if not comm.all_true(cached_metadata is not None):
                validate_shards(list(nested_values(nest)), comm)
            if algo == "atomic":
                return cls(common, nest), None
            comm.sync_errors()
            with comm.collective_phase("assigning the shards"):
                group = Comm(parallelization_group)
                with group.collective_phase("assigning the shards"):
                    kept = keep_share(list(_tensors_of(nest)), group, cached_metadata)
            return cls(common, nest), kept

    def to_state_dict(
        self,
        sharded_state_dict: ShardedStateDict,
        algo: str = "atomic",
        exchange_algo: str = "broadcast",
        validate_access_integrity: bool = True,
        parallelization_group: ProcessGroup | None = None,
        strict: str | bool | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
        return_mismatch_keys: bool = False,
        *,
        allow_dtype_cast: bool = False,
    ) -> Any:
        """Collective: return the state dict again, of the form that is asked for.

        Shards must be cut as they were when this was made: nothing is resharded.

        Args:
            sharded_state_dict: As for :func:`shardckpt.dist_checkpointing.load`: tensors are filled in place where
                there are some, else this object's own are handed out. If it is empty, only the common state is.
            algo: As for :meth:`from_state_dict`; ``"fully_parallel"`` gets from other ranks what this one lacks.
            exchange_algo: How shards travel; see
                :class:`~shardckpt.parallel.load.FullyParallelLoadStrategyWrapper`.
            validate_access_integrity: Check that the wanted shards of all ranks cover every tensor exactly once.
            parallelization_group: The group that was given to :meth:`from_state_dict`.
            strict: What to do about keys that do not match.
            return_mismatch_keys: Give back ``(state_dict, missing_keys, unexpected_keys)``.
            allow_dtype_cast: As for :func:`shardckpt.dist_checkpointing.load`.

        Raises:
            CheckpointingException: the same on every rank.
        """
        if not sharded_state_dict:
            self._check_tensors("to_state_dict")
            return dict_list_map_outplace(lambda leaf: leaf, self.common)
        comm = Comm()
        with comm.local_phase("giving a state dict back"):
            with comm.collective_phase("preparing the state dict"):
                self._check_tensors("to_state_dict")
                _check_algo(algo)
                check_algorithm(exchange_algo)
                template, mode = _checked_template(sharded_state_dict), parse_strict_flag(strict)
            template.shards = choose_main_replicas(template.shards, comm, compare=False)
            if validate_access_integrity:
                validate_shards(template.shards, comm)
            kept_keys = frozenset(map(stored_key, nested_values(self.sharded_state_dict)))
            left_out = template.absent(kept_keys, stored_key)
            wanted = [shard for number, shard in enumerate(template.shards) if number not in left_out]
            mismatch = compare_keys(wanted, kept_keys, mode, comm)
            available = [shard for shard in wanted if stored_key(shard) not in mismatch.unexpected]
            with comm.collective_phase("comparing shapes"):
                described = list(self._described_tensors())
                check_shapes(available, {shard.key: tuple(shard.global_shape) for shard in described})
                check_dtypes(available, {shard.key: shard.dtype for shard in described}, allow_cast=allow_dtype_cast)
            with comm.collective_phase("collecting shards"):
                group = Comm(parallelization_group) if algo == "fully_parallel" else Comm(alone=True)
                with group.collective_phase("collecting shards"):
                    collected = self._collected(available, group, exchange_algo)
            with comm.collective_phase("assembling the state dict"):
                found = iter([_delivered(shard, collected) for shard in available])
                values = [
                    MISSING if number in left_out or stored_key(shard) in mismatch.unexpected else next(found)
                    for number, shard in enumerate(template.shards)
                ]
                state_dict = template.fill(values, self.common)
        return (state_dict, set(mismatch.missing), set(mismatch.unexpected)) if return_mismatch_keys else state_dict

    @property
    def common_state_dict(self) -> StateDict:
        """The state that is not sharded."""
        return self.common

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
        """Take the tensors out; what remains is small, and can be pickled and sent."""
        taken = list(self.tensors)
        self._popped = [tensor.device.type for tensor in taken]
        for shard in self._kept:
            shard.data = None
        return taken

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors in the places of those that :meth:`pop_tensors` took, in its order, on whatever device they are.

        Raises:
            CheckpointingException: they are not as many, or one has another shape or dtype; nothing is put in then.
        """
        self._check_hollow("insert_tensors")
        given = list(tensor_data)
        if len(given) != len(self._kept):
            raise CheckpointingException(f"insert_tensors: {len(given)} tensors for {len(self._kept)} places")
        for shard, tensor in zip(self._kept, given, strict=True):
            if tuple(tensor.shape) != shard.data_shape or tensor.dtype != shard.dtype:
                raise CheckpointingException(
                    f"insert_tensors: a tensor of {tensor.dtype} and shape {tuple(tensor.shape)} for {shard!r}"
                )
        for shard, tensor in zip(self._kept, given, strict=True):
            shard.data = tensor
        self._popped = None

    def init_tensors(self) -> None:
        """Put new, unfilled tensors in the places of those that were taken, on the same kinds of device."""
        self._check_hollow("init_tensors")
        for shard, device in zip(self._kept, self._popped or (), strict=True):
            shard.init_data(device)
        self._popped = None

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Replace the tensors by copies on the CPU; the originals stay as they are for whoever has them.

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
            non_blocking: Do not wait for the copies; those who use them on the device's current stream need not.
        """
        self._check_tensors("restore_tensor_device")
        for shard, home in zip(self._kept, self.homes, strict=True):
            if shard.data is not None and shard.data.device.type != home:
                shard.data = shard.data.to(home, non_blocking=non_blocking)

    def _collected(self, wanted: Sequence[ShardedBase], group: Comm, algorithm: str) -> dict[Any, Any]:
        """Collective: return the values of wanted shards, and of all that this rank keeps, by shard id."""
        kept = {shard_id(shard): shard.data for shard in self._kept if shard.data is not None}
        tensors = {shard_id(shard): shard for shard in wanted if isinstance(shard, ShardedTensor)}
        lacking = {shard: tensor for shard, tensor in tensors.items() if shard not in kept}
        objects = {
            shard_id(leaf): leaf.data
            for leaf in nested_values(self.sharded_state_dict)
            if isinstance(leaf, ShardedObject)
        }
        return {**objects, **kept, **fetch_shards(kept, lacking, group, algorithm)}

    def _described_tensors(self) -> Iterator[ShardedTensor]:
        return _tensors_of(self.sharded_state_dict)

    def _check_tensors(self, action: str) -> None:
        if self.is_hollow:
            raise CheckpointingException(f"{action}: the tensors are out; insert_tensors() puts them back")

    def _check_hollow(self, action: str) -> None:
        if not self.is_hollow:
            raise CheckpointingException(f"{action}: the tensors are in place; pop_tensors() takes them out")


def _tensors_of(nest: Any) -> Iterator[ShardedTensor]:
    return (leaf for leaf in nested_values(nest) if isinstance(leaf, ShardedTensor))


def _check_algo(algo: str) -> None:
    if algo not in _ALGORITHMS:
        raise CheckpointingException(f"no algo {algo!r}: it is one of {', '.join(_ALGORITHMS)}")


def _checked_template(sharded_state_dict: ShardedStateDict) -> LoadTemplate:
    template = LoadTemplate(sharded_state_dict)
    for shard in template.shards:
        shard.validate_metadata_integrity()
    return template


def _check_filled(nest: ShardedStateDict) -> None:
    for shard in _tensors_of(nest):
        if shard.data is None:
            raise CheckpointingException(f"ShardedTensor {shard.key!r} has no data to keep")


def _delivered(shard: ShardedBase, collected: dict[Any, Any]) -> Any:
    """A wanted value, in the caller's own tensor where there is one."""
    if not isinstance(shard, ShardedTensor):
        return _object(shard, collected)
    value: torch.Tensor = collected[shard_id(shard)]
    if shard.data is None:
        return value.to(shard.dtype)
    if value is not shard.data:
        fill(shard.key, shard.data, value)
    return shard.data


def _object(shard: ShardedBase, collected: dict[Any, Any]) -> Any:
    if shard_id(shard) not in collected:
        raise KeyMismatchError(
            f"object {stored_key(shard)!r} is not among what this rank keeps: it was not there when it was made"
        )
    return collected[shard_id(shard)]


__all__ = ["TensorAwareStateDict"]
