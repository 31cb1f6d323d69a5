"""Split an export's memory budget between reading the checkpoint and writing the files."""

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
#: The least budget where either is on a store; a file of 10 GiB or more has larger parts, and needs more.
LEAST_EXPORTING_ON_STORES = 2 * LEAST_EXPORTING
#: On a store, a half of the budget is for writing and a quarter for reading; the rest is for the clients' own buffers.
_WRITING_DIVISOR, _READING_DIVISOR = 2, 4


class ExportBudget(NamedTuple):
    """The shares of a budget, in bytes; they are None without a budget.

    Attributes:
        whole: The bytes that a rank may hold, not counting the index.
        reading: The bytes that the checkpoint's reader may hold.
        writing: The bytes that blocks and parts of uploads may hold; None for a directory, whose blocks have a fixed
            size.
        takes_requests: Whether a store is read or written.
    """

    whole: int | None = None
    reading: int | None = None
    writing: int | None = None
    takes_requests: bool = False

    def check_plan(self, plan: ExportPlan, file_format: str, target: Path) -> None:
        """Refuse a budget that is too small for a file of the plan; the error says the smallest that works."""
        largest = max((sum(tensor.nbytes for tensor in tensors) for _, tensors in plan.files), default=0)
        least = 0
        if file_format != SAFETENSORS:  # all tensors of a file of torch.save are in memory at a time
            least = _WRITING_DIVISOR * largest if self.takes_requests else LEAST_READING + largest
        if self.writing is not None:
            least = max(least, _WRITING_DIVISOR * find_least_upload(largest))
        check_memory_budget(self.whole, least, f"an export to {target} takes")


def split_export_budget(memory_budget: int | str | None, source: Path, target: Path, file_format: str) -> ExportBudget:
    """Split the budget that a caller gave: bytes, text such as ``"64MiB"``, or None.

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
    writing = budget // _WRITING_DIVISOR if takes_requests(target) else None
    return ExportBudget(budget, budget // _READING_DIVISOR, writing, takes_requests=True)
