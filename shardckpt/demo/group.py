"""Processes that are the ranks of one training job: started, listened to, and ended here."""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from shardckpt.demo.job import Job, RankResult
from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_LAST_WORDS = 2.0  # seconds that the other ranks have to say their reason after the first failure
_LOG_LINES = 4
_QUIET = "ignore:Failed to initialize NumPy"  # torch says so where numpy is not installed; nothing here needs it


class RankProcess:
    """A rank: its process, its messages, and the file that takes all its output."""

    def __init__(self, job: Job, log: Path) -> None:
        self.name = f"rank {job.rank} of {job.layout.world_size}"
        self.result: RankResult | None = None
        self.failure = ""
        self._log = log
        self.pipe, child_pipe = os.pipe()
        self._unread = b""
        job = dataclasses.replace(job, report_fd=child_pipe)
        command = [sys.executable, "-W", _QUIET, "-m", "shardckpt.demo.worker", job.dump()]
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(  # noqa: S603 - our own module with our own arguments
                    command,
                    stdin=subprocess.PIPE,  # closed by our end, whatever it is: then the rank ends too
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(child_pipe,),
                )
        except BaseException:
            os.close(self.pipe)
            raise
        finally:
            os.close(child_pipe)

    def receive(self) -> list[str] | None:
        """What the rank has to say since the last time; None once it has ended."""
        data = os.read(self.pipe, 1 << 16)
        if not data:
            self._ended()
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [text for line in lines if (text := self._take(json.loads(line)))]

    def end(self) -> None:
        """End the process if it is still there."""
        self._process.kill()
        self._process.communicate()
        os.close(self.pipe)

    def _take(self, message: dict[str, Any]) -> str:
        if "result" in message:
            self.result = RankResult.parse(message["result"])
        self.failure = message.get("error", self.failure)
        return str(message.get("say", ""))

    def _ended(self) -> None:
        code = self._process.wait()
        if self.result is None and not self.failure:
            lines = self._log.read_text(errors="replace").strip().splitlines()[-_LOG_LINES:]
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit status {code}"
            self.failure = "\n".join([f"the process {how}", *lines])


def run_ranks(jobs: Sequence[Job], directory: Path, limit: float, say: Callable[[str], None]) -> list[RankResult]:
    """Run a rank a job, and wait for all of them; none is left behind.

    Args:
        jobs: What each rank does.
        directory: Where their logs go.
        limit: When they are ended by force, by the clock of :func:`time.monotonic`.
        say: Told of their progress.

    Raises:
        CheckpointingException: a rank failed, or they took too long.
    """
    ranks: list[RankProcess] = []
    try:
        for job in jobs:
            group = str(job.layout).replace(" ", "-")
            ranks.append(RankProcess(job, directory / f"{group}-rank-{job.rank}.log"))
        _listen(ranks, limit, say)
    finally:
        for rank in ranks:
            rank.end()
    failures: dict[str, list[str]] = {}
    for rank in ranks:
        if rank.failure:
            failures.setdefault(rank.failure, []).append(rank.name)
    if failures:
        raise CheckpointingException("\n".join(f"{', '.join(who)}: {why}" for why, who in failures.items()))
    return [rank.result for rank in ranks if rank.result is not None]


def _listen(ranks: Sequence[RankProcess], limit: float, say: Callable[[str], None]) -> None:
    """Pass messages on until every rank has ended, or one has failed and the others had time to say why."""
    failed = False
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.pipe, selectors.EVENT_READ, rank)
        while selector.get_map() and (left := limit - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                said = key.data.receive()
                if said is None:
                    selector.unregister(key.fileobj)
                for text in said or ():
                    say(text)
            if not failed and any(rank.failure for rank in ranks):
                failed, limit = True, time.monotonic() + _LAST_WORDS
        if selector.get_map() and not failed:
            names = ", ".join(key.data.name for key in selector.get_map().values())
            raise CheckpointingException(f"{names} did not end in time: ended by force")


__all__ = ["run_ranks"]
