"""Megatron's planners for ``dcp.save`` and ``dcp.load`` on top of ours: its keywords, attributes and methods."""

from __future__ import annotations

import dataclasses
import io
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.errors import CheckpointingException
from shardckpt_torch_dist import ShardedLoadPlanner, ShardedSavePlanner

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItem

    from shardckpt.mapping.sharded_tensor import ShardedTensor


class MCoreSavePlanner(ShardedSavePlanner):
    """Plans ShardedTensors and ShardedObjects of every rank; a BytesIO among other values is stored as it is.

    Args:
        flatten_state_dict: As for DCP's DefaultSavePlanner.
        flatten_sharded_tensors: As for DCP's DefaultSavePlanner.
        dedup_replicated_tensors: True is refused together with the next; otherwise without effect: DCP writes one copy.
        can_run_decentralized_global_plan: Whether :meth:`create_decentralized_global_plan` may be called instead of
            ``create_global_plan``. It needs ``flatten_state_dict=False``.
        **kwargs: As for DCP's DefaultSavePlanner.

    Raises:
        CheckpointingException: The arguments contradict each other.

    Example::

        planner = MCoreSavePlanner(flatten_state_dict=False)
        dcp.save(state, storage_writer=CheckpointStorageWriter(path), planner=planner)
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        *,
        dedup_replicated_tensors: bool | None = None,
        can_run_decentralized_global_plan: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(flatten_state_dict, flatten_sharded_tensors, **kwargs)
        self.can_run_decentralized_global_plan = can_run_decentralized_global_plan
        if can_run_decentralized_global_plan:
            if dedup_replicated_tensors:
                raise CheckpointingException(
                    "dedup_replicated_tensors=True needs the plans of all ranks: pass "
                    "can_run_decentralized_global_plan=False with it"
                )
            self._refuse_flattening()

    def create_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """Return a rank's plan as it is. Needs no other rank: the caller answers for it that no two store one item.

        Raises:
            CheckpointingException: Paths of a flattened state dict are in the plan, which ranks would have to merge.
        """
        self._refuse_flattening()
        if local_plan.planner_data:
            raise CheckpointingException(
                f"the plan has planner_data of {len(local_plan.planner_data)} keys, which ranks would have to merge: "
                "call create_global_plan with the plans of all ranks"
            )
        return local_plan

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - DCP's name
        """Return a BytesIO as it is, an archive of ``torch.save``; pickle other objects."""
        return object if isinstance(object, io.BytesIO) else super().transform_object(write_item, object)

    def _refuse_flattening(self) -> None:
        if self.flatten_state_dict:
            raise CheckpointingException(
                "a decentralized global plan has no paths of a flattened state dict: pass flatten_state_dict=False, or "
                "can_run_decentralized_global_plan=False"
            )


class MCoreLoadPlanner(ShardedLoadPlanner):
    """Fills ShardedTensors and ShardedObjects; the shapes of more tensors can be checked, and may differ, by arguments.

    Args:
        flatten_state_dict: As for DCP's DefaultLoadPlanner.
        flatten_sharded_tensors: As for DCP's DefaultLoadPlanner.
        allow_partial_load: As for DCP's DefaultLoadPlanner.
        shapes_validation_sharded_tensors: Descriptions of tensors that must be stored in their global shapes. The
            ShardedTensors of the state dict are always checked.
        allow_shape_mismatch_sharded_tensors: Descriptions of tensors that may be stored in another global shape, by
            key. Common elements are loaded; others of a ShardedTensor are zeros, and of a plain tensor stay.
        **kwargs: As for :class:`shardckpt_torch_dist.ShardedLoadPlanner`.

    Example::

        planner = MCoreLoadPlanner(flatten_state_dict=False)
        dcp.load(state, storage_reader=CheckpointStorageReader(path), planner=planner)
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
        *,
        shapes_validation_sharded_tensors: Iterable[ShardedTensor] = (),
        allow_shape_mismatch_sharded_tensors: Mapping[str, ShardedTensor] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            flatten_state_dict,
            flatten_sharded_tensors,
            allow_partial_load,
            allow_shape_mismatch=allow_shape_mismatch_sharded_tensors or (),
            **kwargs,
        )
        self.shapes_validation_sharded_tensors = shapes_validation_sharded_tensors
        self.allow_shape_mismatch_sharded_tensors = allow_shape_mismatch_sharded_tensors

    def create_local_plan(self) -> LoadPlan:
        """Return this rank's plan, after a check of the shapes.

        Raises:
            CheckpointingException: As :meth:`shardckpt_torch_dist.ShardedLoadPlanner.create_local_plan`.
        """
        if self.metadata is None:
            raise CheckpointingException("the planner was given no metadata: the storage reader has none")
        self._validate_global_shapes(self.metadata, self.shapes_validation_sharded_tensors)
        with self._temporarily_bypass_shape_validation():
            return super().create_local_plan()

    def _validate_global_shapes(self, metadata: Metadata, sharded_tensors: Iterable[ShardedTensor]) -> None:
        """Raise one error that names all tensors that are not stored, or in another global shape."""
        self.validate_global_shapes(metadata, sharded_tensors)

    @contextmanager
    def _temporarily_bypass_shape_validation(self) -> Iterator[None]:
        """Show DCP the tensors that may differ in the shapes that are wanted; the reader's metadata stays as it is."""
        given = self.metadata
        if given is None or not self.allow_shape_mismatch_sharded_tensors:
            yield
            return
        entries: dict[str, Any] = dict(given.state_dict_metadata)
        for key, shard in self.allow_shape_mismatch_sharded_tensors.items():
            if key in entries:  # another is an error of the plan
                entries[key] = dataclasses.replace(entries[key], size=torch.Size(shard.global_shape))
        self.metadata = dataclasses.replace(given, state_dict_metadata=entries)
        try:
            yield
        finally:
            self.metadata = given
