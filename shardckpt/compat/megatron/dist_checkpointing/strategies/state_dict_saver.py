"""megatron.core.dist_checkpointing.strategies.state_dict_saver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.compat.megatron.refusals import QUEUE, make_refusing_getattr
from shardckpt.distributed import Comm

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


def save_state_dict_async_finalize(storage_writer: Any, global_metadata: Metadata | None, dist_wrapper: Any) -> None:
    """Collective: finish a save that another library's writer has written in the background.

    Args:
        storage_writer: A writer of Megatron's or nvidia-resiliency-ext's kind: ``retrieve_write_results`` returns what
            this rank has written, or its error, and ``finish`` is DCP's.
        global_metadata: What to store; needed on the main rank only.
        dist_wrapper: DCP's wrapper of the ranks, with ``group``.

    Raises:
        CheckpointingException: the same on every rank: a rank has not written, or the main rank could not finish.
    """
    comm = Comm(dist_wrapper.group)
    with comm.collective_phase("collecting what was written"):
        results = storage_writer.retrieve_write_results()
        # torch's form of an error: the exception and its stack
        if isinstance(results, tuple) and results and isinstance(results[0], BaseException):
            raise results[0]
    everyone = comm.gather(results)
    with comm.collective_phase("writing the metadata"):
        if comm.is_main:
            storage_writer.finish(global_metadata, everyone)


#: What to do instead of Megatron's names that are not here.
REFUSED = {
    "_compare_dataclasses": "every save compares its plan with the last one for itself",
    "save_state_dict_async_plan": QUEUE,
    "verify_global_md_reuse": "every save checks that for itself",
}

#: What Megatron's module imports from others.
IMPORTED = {
    "strategies.filesystem_async": ("FileSystemWriterAsync",),
    "strategies.torch": ("MCoreSavePlanner",),
}

__getattr__ = make_refusing_getattr(__name__, REFUSED, IMPORTED)

__all__ = ["save_state_dict_async_finalize"]
