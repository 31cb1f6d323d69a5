"""Copy parts of local checkpoints from disk to disk over the process group, a message at a time to bound memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.commit.commit import is_free
from shardckpt.errors import CheckpointingException
from shardckpt.local.part_copy import Head, Incoming, Outgoing
from shardckpt.tensors.raw_memory import pack_bytes, view_tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardckpt.distributed.comm import Comm
    from shardckpt.local.parts import PartFolder, PartId

_Tensors = list[tuple[torch.Tensor, int]]


class Route(NamedTuple):
    """The copy of a part from the disk of rank ``source`` to the disk of rank ``target``."""

    part: PartId
    source: int
    target: int


def transfer_parts(routes: Sequence[Route], folder: PartFolder, comm: Comm) -> dict[Route, str]:
    """Collective: copy parts from disk to disk; the failure of one copy does not stop the others.

    Return the reason for each copy that failed; the same on every rank, as are the ``routes``. All other copies are
    durable. A part that exists on this rank's disk is replaced when the new one is complete.
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
    """Copies that are being made, in collective steps that every rank calls in this order."""

    def __init__(self, routes: Sequence[Route], folder: PartFolder, comm: Comm) -> None:
        self._routes = routes
        self._folder = folder
        self._comm = comm
        self._outgoing: dict[PartId, Outgoing] = {}
        self._incoming: dict[Route, Incoming] = {}
        self._heads: dict[Route, Head] = {}
        #: The copies that failed on this rank, with the reason.
        self._own: dict[Route, str] = {}
        #: The copies that failed on any rank, with the reasons; the same on every rank. No later step touches them.
        self.faults: dict[Route, str] = {}

    def open(self) -> None:
        """Collective: open the parts that this rank sends."""
        with self._comm.local_phase("opening parts to copy"):
            for part in {route.part for route in self._list_sent()}:
                with self._note_faults(self._list_routes(part)):
                    self._outgoing[part] = Outgoing(self._folder.path(part))
        self._exchange_faults()

    def exchange_heads(self) -> None:
        """Collective: receive the JSON files of the parts, which list the files that follow."""
        lengths: dict[PartId, list[int]] = {}
        for found in self._comm.all_gather({part: [*map(len, out.head)] for part, out in self._outgoing.items()}):
            lengths.update(found)
        arriving = {
            route: torch.empty(sum(lengths[route.part]), dtype=torch.uint8, device="cpu")
            for route in self._list_received()
        }
        # to the ranks that receive the parts alone: a record has an entry for each tensor, and may be large
        self._comm.exchange(
            [(pack_bytes(b"".join(self._outgoing[route.part].head)), route.target) for route in self._list_sent()],
            [(tensor, route.source) for route, tensor in arriving.items()],
        )
        for route, tensor in arriving.items():
            memory, length = bytes(view_tensor(tensor)), lengths[route.part][0]
            self._heads[route] = Head(memory[:length], memory[length:])

    def begin(self) -> None:
        """Collective: create the staging directories of the parts that this rank receives."""
        with self._comm.local_phase("beginning copies"):
            for route in self._list_received():
                with self._note_faults([route]):
                    target = self._folder.path(route.part)
                    self._incoming[route] = Incoming(target, self._heads[route], f"rank {route.source}")
        self._exchange_faults()

    def stream(self) -> None:
        """Collective: send all messages; while one is sent, the next is read and the one before is written."""
        own = [self._outgoing[route.part].messages for route in self._list_sent()]
        own += [self._incoming[route].messages for route in self._list_received()]
        # every rank takes part in as many exchanges as the longest copy needs, also with nothing to send
        (rounds,) = self._comm.largest(max(map(len, own), default=0))
        with ThreadPoolExecutor(2, "shardckpt-copy") as pool:
            reading, writing = pool.submit(self._read, 0), None
            # two buffers: a read must end before its message is sent, and a write before its buffer is reused
            for number in range(rounds):
                reading.result()
                reading = pool.submit(self._read, number + 1)
                self._comm.exchange(*self._list_messages(number))
                if writing is not None:
                    writing.result()
                writing = pool.submit(self._write, number)

    def finish(self) -> None:
        """Collective: make the received parts durable, and publish them."""
        with self._comm.local_phase("finishing copies"):
            for route in self._without_own_faults(self._list_received()):
                with self._note_faults([route]):
                    part = self._incoming[route]
                    part.complete()
                    # a damaged part is replaced only now, when the new one is complete and durable
                    if not is_free(self._folder.path(route.part)):
                        self._folder.remove([route.part])
                    part.publish()
        self._exchange_faults()

    def close(self) -> None:
        """Remove the leftovers of failed copies on this rank's disk."""
        for part in self._incoming.values():
            part.close()

    def _list_sent(self) -> Iterator[Route]:
        return (route for route in self._routes if route.source == self._comm.rank and route not in self.faults)

    def _list_received(self) -> Iterator[Route]:
        return (route for route in self._routes if route.target == self._comm.rank and route not in self.faults)

    def _list_routes(self, part: PartId) -> list[Route]:
        return [route for route in self._list_sent() if route.part == part]

    def _without_own_faults(self, routes: Iterable[Route]) -> list[Route]:
        """Leave out the routes that have failed here: their ranks go on exchanging messages until all know of it."""
        return [route for route in routes if route not in self._own]

    def _read(self, number: int) -> None:
        for part in {route.part for route in self._without_own_faults(self._list_sent())}:
            outgoing = self._outgoing[part]
            if number < len(outgoing.messages):
                with self._note_faults(self._list_routes(part)):
                    outgoing.read(number)

    def _write(self, number: int) -> None:
        for route in self._without_own_faults(self._list_received()):
            incoming = self._incoming[route]
            if number < len(incoming.messages):
                with self._note_faults([route]):
                    incoming.write(number)

    def _list_messages(self, number: int) -> tuple[_Tensors, _Tensors]:
        """Return the tensors of message ``number`` that this rank sends and receives, each with the other rank."""
        sent = [(self._outgoing[route.part], route.target) for route in self._list_sent()]
        received = [(self._incoming[route], route.source) for route in self._list_received()]
        return (
            [(part.buffers.tensor(number), rank) for part, rank in sent if number < len(part.messages)],
            [(part.buffers.tensor(number), rank) for part, rank in received if number < len(part.messages)],
        )

    @contextmanager
    def _note_faults(self, routes: Iterable[Route]) -> Iterator[None]:
        """Note an error of the block as the failure of some routes, so that the other copies go on."""
        try:
            yield
        except Exception as exc:  # noqa: BLE001 - all ranks get it by _exchange_faults
            text = str(exc) if isinstance(exc, CheckpointingException) else f"{type(exc).__name__}: {exc}"
            self._own.update(dict.fromkeys(routes, f"rank {self._comm.rank}: {text}"))

    def _exchange_faults(self) -> None:
        """Collective: add the copies that have failed on any rank to ``faults``, on all ranks."""
        for found in self._comm.all_gather(self._own):
            for route, why in found.items():
                before = self.faults.get(route, "")
                self.faults[route] = before if why in before else f"{before}; {why}".removeprefix("; ")
