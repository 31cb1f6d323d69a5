"""Split an export's memory budget into reading, its blocks, and parts on their way to a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardckpt.huggingface.blocks import WRITER_BYTES
from shardckpt.huggingface.names import SAFETENSORS
from shardckpt.storage.abilities import has_local_files
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
        is_local: Whether no store is read or written.
    """

    whole: int | None = None
    reading: int | None = None
    writing: int | None = None
    is_local: bool = True

    def check_plan(self, plan: ExportPlan, file_format: str, target: Path) -> None:
        """Refuse a budget that a file of the plan does not fit in; the error says the smallest that works."""
        largest = max((sum(tensor.nbytes for tensor in tensors) for _, tensors in plan.files), default=0)
        least = 0
        if file_format != SAFETENSORS:  # the tensors of a file of torch.save are in memory as a whole
            least = LEAST_READING + largest if self.is_local else _HALF * largest
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
    is_local = has_local_files(source) and has_local_files(target)
    least = LEAST_EXPORTING if is_local else LEAST_EXPORTING_ON_STORES
    check_memory_budget(budget, least, f"an export from {source} to {target} takes")
    if is_local:
        return ExportBudget(budget, budget - WRITER_BYTES if file_format == SAFETENSORS else LEAST_READING)
    return ExportBudget(
        budget, budget // _QUARTER, None if has_local_files(target) else budget // _HALF, is_local=False
    )


__all__ = ["LEAST_EXPORTING", "LEAST_EXPORTING_ON_STORES", "ExportBudget", "split_export_budget"]
