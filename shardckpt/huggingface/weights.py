"""A stored checkpoint that gives the weights of its model, one after the other, under the Hub's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.engine.lazy import StoredCheckpoint
from shardckpt.engine.streaming import STREAM_BYTES
from shardckpt.errors import prefix_error
from shardckpt.huggingface.hub_tensor import read_hub_boxes
from shardckpt.huggingface.options import parse_options
from shardckpt.huggingface.planning import choose_model, plan_tensors
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.planning.batches import batch_by_bytes
from shardckpt.planning.boxes import Box
from shardckpt.storage.memory_budget import parse_size
from shardckpt.validation.arguments import check_annotated

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    import torch

    from shardckpt.huggingface.hub_tensor import HubTensor
    from shardckpt.plugins.key_mapping import KeyMapping


class ModelCheckpoint(StoredCheckpoint):
    """A stored checkpoint, with :meth:`weights`; ``shardckpt.dist_checkpointing.open_checkpoint`` yields it."""

    def weights(
        self,
        mapping: str | KeyMapping | None = None,
        *,
        prefix: str | None = None,
        dtype: torch.dtype | str | Mapping[str, torch.dtype | str] | None = None,
        keep: Collection[str] = (),
        optimizer: bool = False,
        leave_out: Collection[str] = (),
        memory: int | str = STREAM_BYTES,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return an iterator of the model's weights, whole, under the names of the Hub, for evaluation and serving.

        Whatever the number of ranks that have saved it, and the format. Each tensor is read once, in the order of the
        index; tensors that fit into ``memory`` together are read together, each file from front to back. Items that
        have digests are checked, unless ``SHARDCKPT_VERIFY_READS`` says otherwise.

        Example::

            with open_checkpoint("step-100") as checkpoint:
                model.load_state_dict(dict(checkpoint.weights()))  # or one by one, as an engine takes them
                engine.load_weights(checkpoint.weights("qwen3_moe", dtype="bfloat16"))

        Args:
            prefix: Prefix of the keys to read, which is removed; by default the model's prefix, which is found next to
                its optimizers (``model.``, ``app.model.``).
            optimizer: Also the optimizer's state; by default it is left out.
            leave_out: Names, of the Hub, that are not read: a ``lm_head.weight`` that is tied to the embedding.
            memory: Bytes of tensors that are read at a time; a larger tensor is read alone.

        Returns:
            Name, and a CPU tensor of the stored dtype, or of ``dtype``. Its memory is its own.

        Raises:
            KeyMismatchError: No tensor is stored whose key begins with the prefix.
            CheckpointingException: An argument is wrong, a tensor is not stored as a whole, or it is damaged; values
                that were read before are right.
        """
        check_annotated(ModelCheckpoint.weights, locals())
        options = parse_options(None, prefix=prefix, mapping=mapping, dtype=dtype, keep=keep, leave_out=leave_out)
        stored = [shard for shard in self._index if isinstance(shard, ShardedTensor)]
        prefix, chosen, _ = choose_model(stored, options, optimizer=optimizer)
        found = plan_tensors(chosen, options._replace(prefix=prefix)).tensors
        if not found:
            directory = self._checkpoint.context.reader.directory
            raise prefix_error(f"{directory}: no weight", prefix, (shard.key for shard in stored))
        return self._read_weights(list(found.values()), parse_size(memory, "memory"))

    def _read_weights(self, tensors: list[HubTensor], memory: int) -> Iterator[tuple[str, torch.Tensor]]:
        for batch in batch_by_bytes(tensors, lambda tensor: tensor.nbytes, memory):
            values = read_hub_boxes([(tensor, Box.from_shape(tensor.shape)) for tensor in batch], self._checkpoint)
            for tensor in batch:
                # popped: a tensor that the caller has dropped is not kept until the batch ends
                yield tensor.name, values.pop(0)
