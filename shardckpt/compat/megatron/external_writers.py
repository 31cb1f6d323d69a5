"""Saves by the storage writers of other libraries: Megatron's FileSystemWriterAsync, nvidia-resiliency-ext's."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from shardckpt.background.request import AsyncRequest
from shardckpt.distributed.comm import Comm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.checkpoint.metadata import Metadata


def make_request(writer: Any, save_state_dict_ret: Sequence[Any]) -> AsyncRequest:
    """Return the request to write the plan of another library's writer, and to finish the save.

    The writer's ``get_save_function_and_args`` returns the function that writes, the one that stages, or None, and the
    arguments of the first. ``save_state_dict_ret`` are the arguments of :func:`save_state_dict_async_finalize`.
    """
    write, preload, arguments = writer.get_save_function_and_args()
    finish = partial(save_state_dict_async_finalize, *save_state_dict_ret)
    return AsyncRequest(write, tuple(arguments), [finish], preload_fn=preload)


def save_state_dict_async_finalize(storage_writer: Any, global_metadata: Metadata | None, dist_wrapper: Any) -> None:
    """Collective: finish a save that another library's writer has written in the background.

    Args:
        storage_writer: A writer of Megatron's or nvidia-resiliency-ext's kind: ``retrieve_write_results`` returns this
            rank's write results, or its error, and ``finish`` is DCP's.
        global_metadata: The metadata to store; needed on the main rank only.
        dist_wrapper: DCP's wrapper of the ranks, with ``group``.

    Raises:
        CheckpointingException: the same on every rank: a rank has not written, or the main rank could not finish.
    """
    comm = Comm(dist_wrapper.group)
    with comm.collective_phase("collecting the write results"):
        results = storage_writer.retrieve_write_results()
        # torch's form of an error: the exception and its stack
        if isinstance(results, tuple) and results and isinstance(results[0], BaseException):
            raise results[0]
    everyone = comm.gather(results)
    with comm.collective_phase("writing the metadata"):
        if comm.is_main:
            storage_writer.finish(global_metadata, everyone)
