"""Which verdicts a reader gets right: ``python -m tests.safetensors.conformance [--hostile] COMMAND...``.

The command gets one directory as its last argument. It prints one line of JSON and exits with 0, ``{"verdict": "valid",
"tensors": {name: [dtype, shape, SHA-256 of the bytes in row-major order]}}``, or with 1, ``{"verdict": "invalid",
"why": ...}``. ``"objects": {name: [codec, SHA-256 of the payload]}`` is compared, too, where it is printed.
An answer may cost 1 s of CPU and 200 MB more than
``no_tensors``, a valid entry. ``--hostile`` takes generated headers in place of the corpus; ``--entry NAME`` one entry.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.safetensors.conformance.corpus import Case, find_fault, read_cases, unpack_corpus
from tests.safetensors.conformance.runner import measure_start, run_within_limits

_SMALLEST = "no_tensors"


def _write_cases(folder: Path, *, hostile: bool) -> list[Case]:
    if not hostile:
        unpack_corpus(folder)
        return read_cases()
    # in another process: its memory would count as that of all that this one starts
    subprocess.run([sys.executable, "-m", "tests.safetensors.conformance.fuzz", str(folder)], check=True)
    return [Case(path.name, "invalid", path.name.replace("_", " ")) for path in sorted(folder.iterdir())]


def main(arguments: list[str]) -> int:
    """Run a command on all entries, print a table, and return the exit status: 0 if all is right."""
    parser = argparse.ArgumentParser("tests.safetensors.conformance", description=__doc__)
    parser.add_argument("--hostile", action="store_true")
    parser.add_argument("--entry")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    wrong, rows = 0, []
    with tempfile.TemporaryDirectory() as folder:
        cases = [c for c in _write_cases(Path(folder), hostile=options.hostile) if options.entry in (None, c.name)]
        # a valid entry: a reader that finds no checkpoint may not have imported all that it needs
        unpack_corpus(Path(folder), only=_SMALLEST)
        start = measure_start(options.command, Path(folder) / _SMALLEST)
        for case in cases:
            run = run_within_limits(options.command, Path(folder) / case.name, start)
            fault = "; ".join(filter(None, (find_fault(case, run.line), run.find_excess(start))))
            wrong += bool(fault)
            rows.append((run.cpu - start.cpu, run.peak - start.peak))
            sys.stdout.write(f"| {case.name} | {case.verdict} | {fault or 'right'} | {run.cpu - start.cpu:.2f} s ")
            sys.stdout.write(f"| {(run.peak - start.peak) / 1e6:.1f} MB | {run.line.get('why', '')} |\n")
    cpu, peak = (max(column) for column in zip(*rows, strict=True))
    sys.stdout.write(f"{len(cases) - wrong} of {len(cases)} right; the start takes {start.cpu:.2f} s and ")
    sys.stdout.write(f"{start.peak / 1e6:.0f} MB, an answer at most {cpu:.2f} s and {peak / 1e6:.1f} MB more\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
