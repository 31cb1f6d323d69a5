"""The groups of processes, by what they need, and how adapters' failures are taken."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from benchmarks.adapters import ADAPTERS
from benchmarks.group import LeftOutError, RankFailedError, RankGroup, Spawner
from benchmarks.megatron_site import python_path
from benchmarks.messages import Layout
from benchmarks.results import Results, Row
from tests.sites import SiteError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from typing_extensions import Self

    from benchmarks.messages import Sample
    from benchmarks.options import Options

_MEGATRON, _PLAIN = "megatron", "plain"
#: Seconds after which a call has failed.
_CALL_TIMEOUT = 900.0
#: Enough that every adapter has imported and made what it makes once.
_REHEARSAL = 0.0001


class Bench:
    """What the parts of a run share; a context manager that ends all processes.

    Args:
        options: What to measure.
        folder: An empty directory for checkpoints.
        scratch: An empty directory for all else, with a short path: libraries make sockets there.
    """

    def __init__(self, options: Options, folder: Path, scratch: Path) -> None:
        self.options = options
        self.folder = folder
        self._scratch = scratch
        self.results = Results()
        #: What was left out, and what failed.
        self.notes: list[str] = []
        #: Whether an adapter raised or brought back wrong bytes.
        self.failed = False
        self.about: dict[str, dict[str, Any]] = {}
        self._broken: set[str] = set()
        self._spawners: dict[str, Spawner] = {}
        self._groups: dict[str, RankGroup] = {}
        self._start()
        self._began = time.monotonic()
        self._layout: Layout | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for group in self._groups.values():
            group.close()
        for spawner in self._spawners.values():
            spawner.close()

    @property
    def adapters(self) -> list[str]:
        """Those that can be had."""
        names = [name for name in self.options.adapters if name not in self._broken]
        return [name for name in names if _environment(name) in self._spawners]

    def new_group(self, adapter: str, size: int) -> RankGroup:
        """Processes for an adapter that nothing else runs in; to be closed."""
        return RankGroup(self._spawners[_environment(adapter)], size, _CALL_TIMEOUT)

    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() - self._began > self.options.deadline

    def setup(self, layout: Layout) -> None:
        """Have all ranks hold a layout's state; processes that cannot start are left out from then on."""
        self._layout = layout
        for kind, spawner in list(self._spawners.items()):
            group = self._groups.setdefault(kind, RankGroup(spawner, self.options.most_ranks, _CALL_TIMEOUT))
            try:
                group.setup(layout)
            except RankFailedError as exc:
                self.fail(f"{kind} processes FAILED to start", exc)
                spawner.close()
                del self._spawners[kind]

    def leave(self) -> None:
        """Have all ranks free their memory."""
        for group in self._groups.values():
            group.call(self.options.most_ranks, "leave")

    def rehearse(self) -> None:
        """Have every adapter save and load a little, in every process; who fails, or loses a bit, is left out."""
        world = self.options.most_ranks
        self.setup(Layout("llama", _REHEARSAL, world))
        for adapter in self.adapters:
            path = str(self.folder / f"rehearsal-{adapter.replace(':', '-')}")
            for method in ("about", "save", "check"):
                answer = self.attempt(adapter, world, method, *([path] if method != "about" else []))
                if answer is None:
                    self._broken.add(adapter)
                    break
                if method == "about":
                    self.about[adapter] = answer[0]

    def can(self, adapter: str, operation: str, world: int) -> bool:
        """Whether an adapter does an operation."""
        answer = self.attempt(adapter, 1, "can", operation, world)
        return answer is not None and answer[0]

    def attempt(self, adapter: str, world: int, method: str, *args: Any, **kwargs: Any) -> list[Any] | None:
        """Call an adapter's method on ranks; None and a note if it fails."""
        group = self._groups[_environment(adapter)]
        try:
            return group.call(world, method, adapter, *args, **kwargs)
        except LeftOutError as exc:
            self.note(f"{adapter}: {exc}")
        except RankFailedError as exc:
            self.fail(f"{adapter} FAILED in {method}", exc)
            if self._layout is not None:
                group.setup(self._layout)
        return None

    def note(self, text: str) -> None:
        """Remember something for the end of the report, once."""
        if text not in self.notes:
            self.notes.append(text)

    def fail(self, what: str, why: Exception) -> None:
        """Note a failure, tell its whole story on standard error, and end with an error."""
        self.failed = True
        self.note(f"{what}: {str(why).splitlines()[-1]}")
        print(f"{what}: {why}", file=sys.stderr)

    def record(self, row: Row, adapter: str, value: float) -> None:
        """Note one measurement."""
        self.results.add(row, adapter, value)

    def _start(self) -> None:
        """Start what ranks are forked from: one process for megatron, one for all others."""
        environments: dict[str, dict[str, str]] = {_PLAIN: {}}
        if _MEGATRON in self.options.adapters:
            try:
                environments[_MEGATRON] = {"PYTHONPATH": python_path(self.options.megatron)}
            except (SiteError, OSError) as exc:
                self.note(f"megatron is left out: {exc}")
        for kind, environment in environments.items():
            names = [name for name in self.options.adapters if _environment(name) == kind and name in ADAPTERS]
            modules = dict.fromkeys(ADAPTERS[name].partition(":")[0] for name in names)
            self._spawners[kind] = Spawner(list(modules), environment, self._scratch / kind)


def seconds(samples: list[Sample]) -> float:
    """From the barrier to the end of the slowest rank."""
    return max(sample.end for sample in samples) - min(sample.start for sample in samples)


def blocked(samples: list[Sample]) -> float:
    """The same until the state may change."""
    return max(sample.blocked for sample in samples) - min(sample.start for sample in samples)


def rotated(adapters: list[str], number: int) -> Iterator[str]:
    """The adapters, another one first in every round."""
    start = number % max(1, len(adapters))
    yield from (*adapters[start:], *adapters[:start])


def _environment(adapter: str) -> str:
    return _MEGATRON if adapter == _MEGATRON else _PLAIN


__all__ = ["Bench", "blocked", "rotated", "seconds"]
