"""Program: the fault sets over savers that are not ours, for comparison: plain DCP, and ``torch.save`` to one file.

``python -m tests.faults.stock_savers SAVER SET FOLDER CASE COUNT [SEEDS]`` prints the report of the set's program:
``kills``, ``io`` or ``power``. A save is one call, as their documents show it; values, calls and verdicts are those of
``killer``: old, new, a mixture, or a load that is refused.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp

from tests.faults import killer
from tests.faults.injector import Injector
from tests.faults.injector import report as report_endings
from tests.faults.killer import LATER, NEW, OLD, Killer
from tests.faults.power_cutter import PowerCutter

if TYPE_CHECKING:
    from collections.abc import Callable

_FILE = "state.pt"


def state(version: int) -> dict[str, Any]:
    """Tensors that tell which save they are from, a large one among them."""
    return {
        "large": torch.arange(3 << 18, dtype=torch.float32) + version,
        "small": torch.arange(40) + version,
        "half": (torch.arange(33) + version).to(torch.bfloat16),
        **{f"bias.{n}": torch.full((8,), float(version * 10 + n)) for n in range(8)},
        "step": version,
    }


def save_by_dcp(target: Path, version: int) -> None:
    """Save by plain DCP, which makes the directory, and writes into one that is there."""
    dcp.save(state(version), checkpoint_id=target)


def load_by_dcp(target: Path) -> dict[str, Any]:
    """Load by plain DCP."""
    wanted = state(0)
    dcp.load(wanted, checkpoint_id=target)
    return wanted


def save_by_torch(target: Path, version: int) -> None:
    """Save a file by ``torch.save``."""
    target.mkdir(parents=True, exist_ok=True)
    torch.save(state(version), target / _FILE)


def load_by_torch(target: Path) -> dict[str, Any]:
    """Load the file."""
    return torch.load(target / _FILE, weights_only=True)  # type: ignore[no-any-return]


#: Saver → what saves, what loads, and the file without which nothing was saved.
SAVERS: dict[str, tuple[Callable[[Path, int], None], Callable[[Path], dict[str, Any]], str]] = {
    "dcp": (save_by_dcp, load_by_dcp, ".metadata"),
    "torch.save": (save_by_torch, load_by_torch, _FILE),
}


def differences(loaded: dict[str, Any], version: int) -> list[str]:
    """Where it is not, bit for bit, what save number ``version`` had."""
    expected = state(version)
    tensors = [key for key, value in expected.items() if isinstance(value, torch.Tensor)]
    wrong = [key for key in tensors if key not in loaded or not torch.equal(loaded[key], expected[key])]
    return [*wrong, *([] if loaded.get("step") == version else ["step"])]


class Stock(Killer):
    """Saves and loads by another saver; a mixin of the classes that kill, fail and cut."""

    saver = ""

    def _prepare(self) -> None:
        if self._case != "fresh":
            SAVERS[self.saver][0](self._pristine / "ckpt", OLD)

    def _change(self) -> None:
        self._save_once()

    def _save_once(self) -> None:
        SAVERS[self.saver][0](self._target(), NEW)

    def _state(self) -> str:
        if not (self._target() / SAVERS[self.saver][2]).exists():
            return "absent"
        try:
            loaded = SAVERS[self.saver][1](self._target())
        except BaseException as exc:  # noqa: BLE001 - DCP's CheckpointException is one; whatever it is, it is a refusal
            return f"refused: {type(exc).__name__}: {exc}"
        for name, version in (("old", OLD), ("new", NEW)):
            if not differences(loaded, version):
                return name if self._foreign_kept() else f"{name}, but other files are lost"
        return f"mixed: not new in {differences(loaded, NEW)}"

    def _later(self) -> str:
        try:
            SAVERS[self.saver][0](self._target(), LATER)
            wrong = differences(SAVERS[self.saver][1](self._target()), LATER)
        except BaseException as exc:  # noqa: BLE001 - the same
            return f"{type(exc).__name__}: {exc}"
        return f"wrong values in {wrong}" if wrong else ""

    def _warm_up(self) -> None:
        save, load, _ = SAVERS[self.saver]
        for _ in range(2):
            save(self._folder / "warm", OLD)
        load(self._folder / "warm")


class StockInjector(Stock, Injector):
    """Fails calls."""

    refusals = (BaseException,)
    _change = Injector._change


class StockCutter(Stock, PowerCutter):
    """Cuts the power."""


def main() -> None:
    """Print the report."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    Stock.saver, threat = sys.argv[1], sys.argv[2]
    folder, case, count = Path(sys.argv[3]), sys.argv[4], int(sys.argv[5])
    if threat == "kills":
        sys.argv[1:] = sys.argv[3:]
        killer.main(Stock)
    elif threat == "io":
        report_endings(StockInjector(folder, case, "foreground"), count)
    else:
        json.dump(StockCutter(folder, case, "foreground").states(count, int(sys.argv[6])), sys.stdout)


if __name__ == "__main__":
    main()
