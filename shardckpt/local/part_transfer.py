"""Parts of local checkpoints from disk to disk over the process group, a chunk at a time; no rank has one in memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.errors import CheckpointingException
from shardckpt.local.part_copy import Head, Incoming, Outgoing
from shardckpt.storage import is_free
from shardckpt.tensors import packed, view_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardckpt.distributed import Comm
    from shardckpt.local.parts import PartFolder, PartId

_Tensors = list[tuple[torch.Tensor, int]]


class Route(NamedTuple):
    """A part that goes from one rank's disk to another's."""

    part: PartId
    source: int
    target: int


def transfer_parts(routes: Sequence[Route], folder: PartFolder, comm: Comm) -> dict[Route, str]:
    """Collective: copy parts from disk to disk; what fails of one leaves the others alone.

    Args:
        routes: What goes where; the same on every rank.
        folder: This rank's disk. A part that is there already is replaced when the new one is whole.
        comm: The ranks.

    Returns:
        Why, of each copy that failed; the same on every rank. All others are durable.

    Raises:
        CommunicationError: a rank died.
    """
    transfer = _PartTransfer(routes, folder, comm)
    try:
        transfer.open()
        transfer.exchange_heads()
        transfer.begin()
        transfer.stream()
        transfer.finish()
    finally:
        transfer.close()
    return transfer.faults


class _PartTransfer:
    """Copies under way, in steps that all ranks take together: its public methods are collective."""

    def __init__(self, routes: Sequence[Route], folder: PartFolder, comm: Comm) -> None:
        self._routes = routes
        self._folder = folder
        self._comm = comm
        self._outgoing: dict[PartId, Outgoing] = {}
        self._incoming: dict[Route, Incoming] = {}
        self._heads: dict[Route, Head] = {}
        #: What failed on this rank.
        self._own: dict[Route, str] = {}
        #: What failed on any rank, as far as all know.
        self.faults: dict[Route, str] = {}

    def open(self) -> None:
        """Open what this rank sends."""
        with self._comm.local_phase("opening parts to copy"):
            for part in {route.part for route in self._sent()}:
                self._try(self._routes_of(part), partial(self._open, part))
        self._exchange_faults()

    def exchange_heads(self) -> None:
        """Get the JSON files of what this rank receives: they say what else comes."""
        lengths: dict[PartId, tuple[int, int]] = {}
        for found in self._comm.all_gather({part: out.head.lengths for part, out in self._outgoing.items()}):
            lengths.update(found)
        arriving = {
            route: torch.empty(sum(lengths[route.part]), dtype=torch.uint8, device="cpu") for route in self._received()
        }
        self._comm.exchange(
            [(packed(b"".join(self._outgoing[route.part].head)), route.target) for route in self._sent()],
            [(tensor, route.source) for route, tensor in arriving.items()],
        )
        for route, tensor in arriving.items():
            length = lengths[route.part][0]
            memory = view_tensor(tensor)
            self._heads[route] = Head(bytes(memory[:length]), bytes(memory[length:]))

    def begin(self) -> None:
        """Make the places for what this rank receives."""
        with self._comm.local_phase("beginning copies"):
            for route in list(self._received()):
                self._try([route], partial(self._begin, route))
        self._exchange_faults()

    def stream(self) -> None:
        """Let all chunks travel: while one does, the next is read and the one before is written."""
        own = [self._outgoing[route.part].chunks for route in self._sent()]
        own += [self._incoming[route].chunks for route in self._received()]
        (rounds,) = self._comm.largest(max(map(len, own), default=0))
        with ThreadPoolExecutor(2, "shardckpt-copy") as pool:
            reading, writing = pool.submit(self._read, 0), None
            for number in range(rounds):
                reading.result()
                reading = pool.submit(self._read, number + 1)
                self._comm.exchange(*self._travelling(number))
                if writing is not None:
                    writing.result()
                writing = pool.submit(self._write, number)

    def finish(self) -> None:
        """Make what has come durable, and publish it."""
        with self._comm.local_phase("finishing copies"):
            for route in list(self._received()):
                self._try([route], partial(self._publish, route))
        self._exchange_faults()

    def close(self) -> None:
        """Leave nothing of copies that failed."""
        for part in self._incoming.values():
            part.close()

    def _sent(self) -> Iterator[Route]:
        return (route for route in self._routes if route.source == self._comm.rank and route not in self.faults)

    def _received(self) -> Iterator[Route]:
        return (route for route in self._routes if route.target == self._comm.rank and route not in self.faults)

    def _routes_of(self, part: PartId) -> list[Route]:
        return [route for route in self._sent() if route.part == part]

    def _open(self, part: PartId) -> None:
        self._outgoing[part] = Outgoing(self._folder.path(part))

    def _begin(self, route: Route) -> None:
        self._incoming[route] = Incoming(self._folder.path(route.part), self._heads[route], f"rank {route.source}")

    def _publish(self, route: Route) -> None:
        part = self._incoming[route]
        part.complete()
        if not is_free(self._folder.path(route.part)):
            self._folder.remove([route.part])
        part.publish()

    def _read(self, number: int) -> None:
        for part in {route.part for route in self._sent()}:
            outgoing = self._outgoing[part]
            if number < len(outgoing.chunks):
                self._try(self._routes_of(part), partial(outgoing.read, number))

    def _write(self, number: int) -> None:
        for route in self._received():
            incoming = self._incoming[route]
            if number < len(incoming.chunks):
                self._try([route], partial(incoming.write, number))

    def _travelling(self, number: int) -> tuple[_Tensors, _Tensors]:
        sent = [(self._outgoing[route.part], route.target) for route in self._sent()]
        received = [(self._incoming[route], route.source) for route in self._received()]
        return (
            [(part.buffers.tensor(number), rank) for part, rank in sent if number < len(part.chunks)],
            [(part.buffers.tensor(number), rank) for part, rank in received if number < len(part.chunks)],
        )

    def _try(self, routes: list[Route], action: Callable[[], None]) -> None:
        """Do something for routes none of which has failed here; a failure is theirs, and the others go on."""
        if any(route in self._own for route in routes):
            return
        try:
            action()
        except Exception as exc:  # noqa: BLE001 - all ranks hear of it when the others are done
            text = str(exc) if isinstance(exc, CheckpointingException) else f"{type(exc).__name__}: {exc}"
            self._own.update(dict.fromkeys(routes, f"rank {self._comm.rank}: {text}"))

    def _exchange_faults(self) -> None:
        """Collective: add what has failed on any rank to the faults that all know."""
        for found in self._comm.all_gather(self._own):
            for route, why in found.items():
                known = self.faults.get(route, "")
                self.faults[route] = known if why in known else f"{known}; {why}".removeprefix("; ")


__all__ = ["Route", "transfer_parts"]
