"""Program: damage what plain DCP and ``torch.save`` have written, and say what a load finds, for comparison.

``python -m tests.faults.stock_damager SAVER FOLDER SET COUNT`` prints findings as ``damager`` does: ``payload`` flips
bits of the largest tensor, ``files`` does to whole files what ``damager`` does. There is no verify.
"""

from __future__ import annotations

import json
import random
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tests.faults.damager import Damager, Finding
from tests.faults.stock_savers import SAVERS, differences, state

if TYPE_CHECKING:
    from collections.abc import Iterator


class StockDamager(Damager):
    """Damages a save of version 1, again and again."""

    def __init__(self, saver: str, folder: Path) -> None:
        save, self._load, _ = SAVERS[saver]
        self._path, self._other = folder / "1", folder / "2"
        save(self._path, 1)
        save(self._other, 2)
        self._files = sorted(path.name for path in self._path.iterdir())

    def payload(self, count: int) -> Iterator[Finding]:
        """Flip bits of the largest tensor."""
        bits = state(1)["large"].numpy().tobytes()
        (path,) = (path for path in self._path.iterdir() if bits in path.read_bytes())
        begin = path.read_bytes().index(bits)
        generator = random.Random(path.name)
        drawn = [generator.randrange(8 * begin, 8 * (begin + len(bits))) for _ in range(count)]
        return self._flips(path.name, drawn, "large")

    def files(self, count: int) -> Iterator[Finding]:
        """Cut, lengthen, lose and replace whole files."""
        return self._change_files()

    def _find(self, damage: str, files: list[str], key: str = "") -> Finding:
        (file,) = files
        try:
            wrong = differences(self._load(self._path), 1)
            load = f"WRONG: {wrong}" if wrong else ""
        except BaseException as exc:  # noqa: BLE001 - DCP's CheckpointException is one; whatever it is, it is a refusal
            load = f"{type(exc).__name__}: {exc}"
        return Finding(damage, file, key, load[:300], file in load and key in load, {}, is_blamed=True)


def main() -> None:
    """Print the findings."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    saver, folder, name, count = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    damager = StockDamager(saver, folder)
    found = {"payload": damager.payload, "files": damager.files}[name](count)
    json.dump([asdict(finding) for finding in found], sys.stdout)


if __name__ == "__main__":
    main()
