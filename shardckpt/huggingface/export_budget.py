"""Split an export's memory budget into reading, its blocks, and parts on their way to a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardckpt.huggingface.blocks import WRITER_BYTES
from shardckpt.huggingface.names import SAFETENSORS
from shardckpt.storage.abilities import takes_requests
from shardckpt.storage.memory_budget import LEAST_READING, check_memory_budget, find_least_upload, parse_memory_budget

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.huggingface.planning import ExportPlan

#: The least budget of an export from a directory to a directory, in bytes.
LEAST_EXPORTING = LEAST_READING + WRITER_BYTES
#: The least budget where either is on a store, whose clients have buffers of their own; more for objects of 10 GiB.
LEAST_EXPORTING_ON_STORES = 2 * LEAST_EXPORTING
#: Of a budget on a store: reading has a quarter, writing a half, the clients the rest.
_HALF, _QUARTER = 2, 4


class ExportBudget(NamedTuple):
    """The shares of a budget; None in the place of a share where there is no budget.

    Attributes:
        whole: All bytes that a rank may hold, not counting the index.
        reading: What the checkpoint's reader may hold.
        writing: What a block, and the parts of an object on its way to a store, may take; None for a directory.
        takes_requests: Whether a store is read or written.
    """

    whole: int | None = None
    reading: int | None = None
    writing: int | None = None
    takes_requests: bool = False

    def check_plan(self, plan: ExportPlan, file_format: str, target: Path) -> None:
        """Refuse a budget that a file of the plan does not fit in; the error says the smallest that works."""
        largest = max((sum(tensor.nbytes for tensor in tensors) for _, tensors in plan.files), default=0)
        least = 0
        if file_format != SAFETENSORS:  # the tensors of a file of torch.save are in memory as a whole
            least = _HALF * largest if self.takes_requests else LEAST_READING + largest
        if self.writing is not None:
            least = max(least, _HALF * find_least_upload(largest))
        check_memory_budget(self.whole, least, f"an export to {target} takes")


def split_export_budget(memory_budget: int | str | None, source: Path, target: Path, file_format: str) -> ExportBudget:
    """Return the shares of what the caller of an export gave: bytes, text, or None.

    If it is too small, the error says the smallest that works.
    """
    budget = parse_memory_budget(memory_budget)
    if budget is None:
        return ExportBudget()
    has_requests = takes_requests(source) or takes_requests(target)
    least = LEAST_EXPORTING_ON_STORES if has_requests else LEAST_EXPORTING
    check_memory_budget(budget, least, f"an export from {source} to {target} takes")
    if not has_requests:
        return ExportBudget(budget, budget - WRITER_BYTES if file_format == SAFETENSORS else LEAST_READING)
    writing = budget // _HALF if takes_requests(target) else None
    return ExportBudget(budget, budget // _QUARTER, writing, takes_requests=True)


__all__ = ["LEAST_EXPORTING", "LEAST_EXPORTING_ON_STORES", "ExportBudget", "split_export_budget"]
