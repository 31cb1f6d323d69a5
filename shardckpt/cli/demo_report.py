"""What ``shardckpt demo`` prints at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.cli.table import table
from shardckpt.demo import TOLERANCE, Outcome, largest_difference, relative_difference

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.demo import Layout


def report(outcome: Outcome) -> str:
    """All that the demo has to show, as text."""
    sections = (_losses, _digests, _files, _shards, _speed, _dispatch)
    return "\n\n".join(section(outcome) for section in sections)


def _losses(outcome: Outcome) -> str:
    rows = [
        (outcome.steps + number, *(f"{value:.6f}" for value in values), f"{relative_difference(values):.1e}")
        for number, values in enumerate(zip(*outcome.losses.values(), strict=True), 1)
    ]
    fresh = " and ".join(f"{r[0].fresh_loss:.3f} ({n})" for n, r in outcome.groups.items() if n != outcome.saver)
    return (
        f"Losses after the checkpoint of {outcome.saver} at step {outcome.steps}\n"
        + table(("step", *map(str, outcome.groups), "relative difference"), rows)
        + f"\nlargest relative difference {largest_difference(outcome):.1e}, tolerance {TOLERANCE:.0e} "
        f"(float32 sums in another order)\nbefore loading, the fresh models' losses were {fresh}"
    )


def _digests(outcome: Outcome) -> str:
    saved = outcome.groups[outcome.saver][0].digests
    rows = []
    for part, digest in saved.items():
        loaded = (_same(outcome, n, part) for n in outcome.groups if n != outcome.saver)
        rows.append((part, digest[:16], *loaded))
    names = (f"loaded by {n}" for n in outcome.groups if n != outcome.saver)
    return "State bit for bit (SHA-256 of all tensors, gathered whole)\n" + table(
        ("part", f"saved by {outcome.saver}", *names), rows
    )


def _same(outcome: Outcome, layout: Layout, part: str) -> str:
    saved = outcome.groups[outcome.saver][0].digests[part]
    digests = [result.digests[part] for result in outcome.groups[layout]]
    return "the same" if all(digest == saved for digest in digests) else f"differs: {digests[0][:16]}"


def _files(outcome: Outcome) -> str:
    rows: list[tuple[object, ...]] = [(f.name, f.rank, f"{f.size:,}", f.keys) for f in outcome.record.files]
    rows.append(("total", "", f"{outcome.nbytes:,}", ""))
    return "What was written where (shardckpt.json)\n" + table(("file", "rank", "bytes", "keys"), rows)


def _shards(outcome: Outcome) -> str:
    shapes = {key: shape for key, (_, shape) in outcome.groups[outcome.saver][0].rows.items()}
    rows = [(key, tuple(shape), *_rows_of(outcome, key)) for key, shape in shapes.items()]
    rows.append(("MB of all tensors", "", *_sizes(outcome, "nbytes")))
    if any(result.read for results in outcome.groups.values() for result in results):
        rows.append(("MB read", "", *_sizes(outcome, "read")))
    return "How tensors were resharded (rows on each rank)\n" + table(
        ("key", "global shape", *map(str, outcome.groups)), rows
    )


def _rows_of(outcome: Outcome, key: str) -> Iterator[str]:
    for results in outcome.groups.values():
        yield " ".join(_slices(result.rows[key][0]) for result in results)


def _slices(rows: Sequence[Sequence[int]]) -> str:
    """As in Python: ``0:3`` are the rows 0, 1 and 2."""
    return ",".join(f"{first}:{stop}" for first, stop in rows) or "-"


def _sizes(outcome: Outcome, which: str) -> Iterator[str]:
    for results in outcome.groups.values():
        sizes = [getattr(result, which) for result in results]
        yield " ".join(f"{size / 1e6:.1f}" for size in sizes) if any(sizes) else "-"


def _speed(outcome: Outcome) -> str:
    rows = []
    for layout in outcome.groups:
        seconds = outcome.seconds(layout)
        rate = outcome.nbytes / 1e9 / max(seconds, 1e-9)
        name = "save" if layout == outcome.saver else "load"
        rows.append((name, layout, f"{seconds:.3f}", f"{outcome.nbytes / 1e6:.1f}", f"{rate:.2f}"))
    title = "Speed of the slowest rank, from call to return: a save ends with fsync and rename, a load checks digests\n"
    return title + table(("what", "by", "seconds", "MB", "GB/s"), rows)


def _dispatch(outcome: Outcome) -> str:
    rows = []
    for layout, results in outcome.groups.items():
        found = results[0].dispatch
        if found is not None:
            name = "save" if layout == outcome.saver else "load"
            rows.append((name, layout, found.backend, found.version, found.strategy, found.distribution))
    return "What the registry dispatched to\n" + table(
        ("what", "by", "backend", "version", "class", "distribution"), rows
    )


__all__ = ["report"]
