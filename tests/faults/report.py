"""Program: run the fault sets again, and write what they found.

``python -m tests.faults.report [--only io,damage] [--points N]`` writes ``tests/faults/REPORT.md``. It runs the
programs that the tests run, one for each row, and keeps the rows in ``report.json``: a run of some sets replaces their
rows, and leaves the others with the day and revision of theirs. It needs Linux and strace.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from tests.faults.report_sets import BAD, STOCK, FaultSet, list_sets
from tests.faults.report_text import EXPLANATIONS, INTRODUCTION

_HERE = Path(__file__).parent
_ALL = 1_000_000
#: Columns that are no outcomes of a fault.
_NO_POINTS = {"missed", "saves", "reads"}
_MACHINE = (
    f"torch {torch.__version__}, Python {platform.python_version()}, Linux {platform.release()}, {os.cpu_count()} cores"
)


@dataclass
class Row:
    """A row of the report.

    Attributes:
        threat: The set.
        subject: The format, or another saver.
        case: What is done, and what was there before.
        outcomes: How often each outcome came.
        note: What else was measured.
        seconds: How long it took.
        command: What makes it, and the others of its set, again.
        day: When it was run.
        revision: Of the tree that was run.
        machine: On which it was run.
    """

    threat: str
    subject: str
    case: str
    outcomes: dict[str, int]
    note: str
    seconds: float
    command: str
    day: str
    revision: str
    machine: str = field(default=_MACHINE)

    @property
    def name(self) -> tuple[str, str, str]:
        """What no other row has."""
        return self.threat, self.subject, self.case

    def count_points(self) -> int:
        """How many faults came."""
        none = _NO_POINTS - ({"missed"} if self.threat == "damage" else set())  # there, the damage was missed
        return sum(count for name, count in self.outcomes.items() if name not in none)

    def count_bad(self) -> int:
        """How many points broke a promise of ours."""
        bad = BAD | ({"missed"} if self.threat == "damage" else set())
        return 0 if self.subject in STOCK else sum(self.outcomes.get(name, 0) for name in bad)


def run_set(fault_set: FaultSet, points: int) -> Row:
    """Run a set."""
    started = time.monotonic()
    outcomes, note = fault_set.run(points)
    return Row(
        fault_set.threat,
        fault_set.subject,
        fault_set.case,
        dict(outcomes),
        note,
        round(time.monotonic() - started, 1),
        f"python -m tests.faults.report --only {fault_set.threat}" + (f" --points {points}" if points < _ALL else ""),
        f"{dt.datetime.now(dt.timezone.utc):%Y-%m-%d}",
        _describe_revision(),
    )


def _describe_revision() -> str:
    """The commit, and whether anything but the report is not of it."""
    revision = _ask_git("rev-parse", "--short", "HEAD")
    changed = _ask_git("status", "--porcelain", "--", ":/", ":!REPORT.md", ":!report.json", ":!chaos/scores.json")
    return f"{revision}-dirty" if changed else revision


def _ask_git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, cwd=_HERE).stdout.strip()


def _read_rows(path: Path) -> list[Row]:
    return [Row(**each) for each in json.loads(path.read_text())] if path.exists() else []


def write_report(rows: list[Row], sets: list[FaultSet]) -> str:
    """The report's text."""
    lines = ["# What the fault sets found", "", "```bash", *dict.fromkeys(row.command for row in rows), "```", ""]
    lines += [*INTRODUCTION.splitlines(), ""]
    by_name = {row.name: row for row in rows}
    threats = list(dict.fromkeys(fault_set.threat for fault_set in sets))
    lines += ["| set | rows | points of ours | bad | points of others | seconds |", "|---|---|---|---|---|---|"]
    for threat in threats:
        found = [row for row in rows if row.threat == threat]
        ours = sum(row.count_points() for row in found if row.subject not in STOCK)
        others = sum(row.count_points() for row in found if row.subject in STOCK)
        bad = sum(row.count_bad() for row in found)
        seconds = math.fsum(row.seconds for row in found)  # as sum rounds from Python 3.12 on
        lines.append(f"| [{threat}](#{threat}) | {len(found)} | {ours} | {bad} | {others} | {seconds:.0f} |")
    for threat in threats:
        lines += ["", f"## {threat}", "", *EXPLANATIONS[threat].splitlines(), ""]
        shown = [fault_set for fault_set in sets if fault_set.threat == threat]
        columns = shown[0].columns
        lines += [
            "| subject | case | points | " + " | ".join(columns) + " | seconds | run |",
            "|" + "---|" * (len(columns) + 5),
        ]
        notes = []
        for fault_set in shown:
            row = by_name.get((fault_set.threat, fault_set.subject, fault_set.case))
            if row is None:
                lines.append(f"| {fault_set.subject} | {fault_set.case} | not run |" + " |" * (len(columns) + 2))
                continue
            counts = " | ".join(str(row.outcomes.get(name, 0)) for name in columns)
            run = f"{row.day} {row.revision}"
            lines.append(
                f"| {row.subject} | {row.case} | {row.count_points()} | {counts} | {row.seconds:.0f} | {run} |"
            )
            notes += [f"- {row.subject}, {row.case}: {row.note}"] if row.note else []
        lines += ["", *notes] if notes else []
    lines += ["", "## Machine", ""]
    lines += [f"- {machine}" for machine in dict.fromkeys(row.machine for row in rows)]
    return "\n".join([*lines, ""])


def main() -> int:
    """Run what is asked for, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.report", description="Run the fault sets again.")
    sets = list_sets()
    names = ", ".join(dict.fromkeys(fault_set.threat for fault_set in sets))
    parser.add_argument("--only", default="", help=f"sets, by commas: {names}")
    parser.add_argument("--subject", default="", help="formats and savers, by commas")
    parser.add_argument("--case", default="", help="rows whose case has this text")
    parser.add_argument("--missing", action="store_true", help="only rows that an interrupted run has not come to")
    parser.add_argument("--points", type=int, default=_ALL, help="at most so many points in a row (default: all)")
    parser.add_argument("--rows", type=Path, default=_HERE / "report.json", help="where rows are kept")
    options = parser.parse_args()
    wanted = [s for s in sets if not options.only or s.threat in options.only.split(",")]
    wanted = [s for s in wanted if not options.subject or s.subject in options.subject.split(",")]
    wanted = [s for s in wanted if options.case in s.case]
    if options.missing:
        there = {row.name for row in _read_rows(options.rows)}
        wanted = [s for s in wanted if (s.threat, s.subject, s.case) not in there]
    bad: Counter[str] = Counter()
    for fault_set in wanted:
        row = run_set(fault_set, options.points)
        sys.stderr.write(f"{row}\n")
        bad.update({row.threat: row.count_bad()})
        # after each row: a run that is interrupted leaves what it found
        rows = [*(each for each in _read_rows(options.rows) if each.name != row.name), row]
        options.rows.write_text(json.dumps([asdict(each) for each in rows], indent=0) + "\n")
        (_HERE / "REPORT.md").write_text(write_report(rows, sets))
    return 1 if bad.total() else 0


if __name__ == "__main__":
    sys.exit(main())
