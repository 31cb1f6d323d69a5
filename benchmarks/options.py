"""The command line, and the two plans: what is measured by default."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.adapters import ADAPTERS, FAMILIES
from benchmarks.megatron_site import FOLDER
from benchmarks.workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

OPERATIONS = ("save", "load", "cold-load", "slice", "cold-slice", "async", "reshard", "memory", "simulate")
#: Those that a plan runs by workload and number of ranks.
_FILES = ("save", "load", "cold-load", "slice", "cold-slice", "async")
_QUICK = {
    ("llama", 1): ("save", "load", "cold-load", "async", "memory"),
    ("big", 1): ("save", "load", "slice"),
    ("tiny", 1): ("save", "load"),
    ("small", 1): ("save", "load"),
    ("llama", 4): ("save", "load"),
    ("big", 4): ("reshard",),
    ("moe", 1): ("save", "load"),
}
_FULL = {
    ("big", 1): (*_FILES, "memory"),
    ("big", 4): ("save", "load", "reshard"),
    ("tiny", 1): ("save", "load", "cold-load"),
    ("tiny", 4): ("save", "load"),
    ("small", 1): ("save", "load", "cold-load", "async", "memory"),
    ("small", 4): ("save", "load", "async"),
    ("llama", 1): (*_FILES, "memory"),
    ("llama", 4): ("save", "load", "cold-load", "async"),
    ("moe", 1): ("save", "load", "cold-load", "memory"),
    ("moe", 4): ("save", "load"),
}


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        plan: Operations by workload and number of ranks, in order.
        adapters: Names.
        scale: Factor on the bytes of every workload.
        rounds: Measurements of each operation by each adapter, interleaved.
        budget: Seconds after which no further round of a workload is begun.
        deadline: Seconds after which nothing more is begun.
        directory: Where checkpoints are written; None is a temporary directory of the system.
        results: File for the table in Markdown.
        megatron: Folder with megatron-core, filled from PyPI where it is empty.
        simulated: Numbers of ranks that are simulated; none without the operation ``simulate``.
        chunks: At most so many chunks are simulated.
    """

    plan: dict[tuple[str, int], tuple[str, ...]]
    adapters: tuple[str, ...]
    scale: float
    rounds: int
    budget: float
    deadline: float
    directory: Path | None
    results: Path | None
    megatron: Path
    simulated: tuple[int, ...]
    chunks: int

    @property
    def most_ranks(self) -> int:
        """The largest group."""
        return max((ranks for _, ranks in self.plan), default=1)


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Options from a command line."""
    given = _parser().parse_args(arguments)
    full = given.full
    default_results = Path(__file__).parent / "RESULTS.md" if full else None
    simulates = given.operations is None or "simulate" in given.operations
    return Options(
        plan=_plan(_FULL if full else _QUICK, given),
        adapters=given.adapters,
        scale=given.scale or (1.0 if full else 1 / 16),
        rounds=given.rounds or (5 if full else 3),
        budget=given.budget or (1500.0 if full or given.rounds else 12.0),
        deadline=given.deadline or (4 * 3600.0 if full else 100.0),
        directory=given.directory,
        results=given.results or default_results,
        megatron=given.megatron,
        simulated=(given.simulated_ranks or ((256, 1024, 16384) if full else (256,))) if simulates else (),
        chunks=given.chunks or (256_000 if full else 5_120),
    )


def _plan(
    default: dict[tuple[str, int], tuple[str, ...]], given: argparse.Namespace
) -> dict[tuple[str, int], tuple[str, ...]]:
    """The default plan, cut to what is asked for; operations that are named are done wherever they can be."""
    workloads = given.workloads or tuple(WORKLOADS)
    ranks = given.ranks or (1, 4)
    if given.operations is None and given.workloads is None:
        return {group: operations for group, operations in default.items() if group[1] in ranks}
    plan = {}
    for group in ((workload, number) for workload in workloads for number in ranks):
        named = given.operations or (*default.get(group, ()), "save", "load")
        plan[group] = tuple(o for o in OPERATIONS if o in named and _fits(o, group[1]))
    return {group: operations for group, operations in plan.items() if operations}


def _fits(operation: str, ranks: int) -> bool:
    """Whether an operation is one of a group of that size: resharding needs 4, memory is looked at with 1."""
    return operation != "simulate" and (operation != "reshard" or ranks == 4) and (operation != "memory" or ranks == 1)  # noqa: PLR2004


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    preset = parser.add_mutually_exclusive_group()
    preset.add_argument("--quick", action="store_true", help="a sixteenth of the bytes, within 2 minutes (default)")
    preset.add_argument("--full", action="store_true", help="everything; writes benchmarks/RESULTS.md")
    parser.add_argument("--workloads", type=_names(WORKLOADS), help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--operations", type=_names(OPERATIONS), help=f"of {', '.join(OPERATIONS)}")
    parser.add_argument(
        "--adapters",
        type=_adapters,
        default=tuple(ADAPTERS),
        help=f"of {', '.join([*ADAPTERS, *FAMILIES])}, or module:Class of your own",
    )
    parser.add_argument("--ranks", type=_numbers, help="numbers of ranks, e.g. 1,4")
    parser.add_argument("--rounds", type=int, help="measurements of each, interleaved")
    parser.add_argument("--scale", type=float, help="factor on the bytes of every workload")
    parser.add_argument("--budget", type=float, help="seconds after which no further round of a workload is begun")
    parser.add_argument("--deadline", type=float, help="seconds after which nothing more is begun")
    parser.add_argument("--directory", type=Path, help="where checkpoints are written, e.g. /dev/shm for tmpfs")
    parser.add_argument("--results", type=Path, help="file for the table in Markdown")
    parser.add_argument("--megatron", type=Path, default=FOLDER, help="folder for megatron-core")
    parser.add_argument("--simulated-ranks", type=_numbers, help="numbers of ranks that are simulated")
    parser.add_argument("--chunks", type=int, help="at most so many chunks are simulated")
    return parser


def _names(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    def parse_names(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}")
        return names

    return parse_names


def _adapters(text: str) -> tuple[str, ...]:
    names = [member for name in text.split(",") for member in FAMILIES.get(name, (name,))]
    unknown = [name for name in names if name not in ADAPTERS and ":" not in name]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}")
    return tuple(dict.fromkeys(names))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


__all__ = ["OPERATIONS", "Options", "parse"]
