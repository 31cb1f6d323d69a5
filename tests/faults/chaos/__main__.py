"""Program: the scores of our programs and of others, as JSON: ``python -m tests.faults.chaos [-o FILE] [PROGRAM ...]``.

It needs ``ckpt-chaos``, and takes 2 to 10 minutes for each program and number of ranks.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from tests.faults.chaos.matrix import measure
from tests.faults.chaos.names import OURS, SCORES, THEIRS, merge_scores


def main() -> int:
    """Measure; exit with 1 if a point of ours did not pass."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=SCORES)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("programs", nargs="*", default=[*OURS, *THEIRS], help=f"of {[*OURS, *THEIRS]}")
    args = parser.parse_args()
    worst = 0
    for program in args.programs:
        for ranks in args.ranks:
            with tempfile.TemporaryDirectory() as work:
                began = time.monotonic()
                score = measure(program, ranks, Path(work) / "matrix", jobs=args.jobs)
            seconds = round(time.monotonic() - began)
            scores = {f"{program}, {ranks} rank(s)": score._asdict() | {"seconds": seconds}}
            worst |= program in OURS and bool(score.failed or score.drifted)
            packages = ("ckpt-chaos", "torch", "transformers", "lightning")
            versions = {name: version(name) for name in packages}
            merge_scores({"versions": versions, "scores": scores}, args.output)
            print(program, ranks, score.points, score.verdicts, *score.failed, *score.drifted, flush=True)  # noqa: T201 - a command prints
    return worst


if __name__ == "__main__":
    sys.exit(main())
