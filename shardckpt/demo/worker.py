"""One rank of the demo: ``python -m shardckpt.demo.worker JOB``."""

from __future__ import annotations

import datetime as dt
import json
import math
import os
import sys
import threading
import traceback
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing, hookimpl
from shardckpt.adapters import to_sharded_state_dict
from shardckpt.demo.job import Dispatch, Job, RankResult
from shardckpt.demo.training import Trainer
from shardckpt.errors import CheckpointingException
from shardckpt.mapping import ShardedTensor
from shardckpt.plugins import host
from shardckpt.state_dict import build_copy, dict_list_map_outplace, nested_values

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.plugins import Event

_GROUP_TIMEOUT = dt.timedelta(seconds=60)
_SHOWN = (
    "model.embedding.weight",
    "model.blocks.0.temperature",
    "model.blocks.0.network.up.weight",
    "model.blocks.0.network.experts.up",
)


class Stopwatch:
    """A plugin of this process that hears of every save and load: how long it took, and who did it."""

    def __init__(self) -> None:
        self.last: Event | None = None

    @hookimpl
    def shardckpt_event(self, event: Event) -> None:
        """Keep the end of the operation as a whole."""
        if event.phase == "" and event.state == "end":
            self.last = event


class Reporter:
    """Messages to the demo, a JSON object a line."""

    def __init__(self, pipe: TextIO, *, speaks: bool) -> None:
        self._pipe = pipe
        self._speaks = speaks

    def say(self, text: str) -> None:
        """Tell of progress: rank 0 speaks for all."""
        if self._speaks:
            self.send("say", text)

    def send(self, kind: str, value: Any) -> None:
        """Send progress, the result or the error."""
        self._pipe.write(json.dumps({kind: value}) + "\n")
        self._pipe.flush()


def main(arguments: list[str]) -> int:
    """Do the job that the argument describes; 1 if it failed."""
    job = Job.parse(arguments[0])
    threading.Thread(target=_end_with_the_demo, daemon=True).start()
    with os.fdopen(job.report_fd, "w") as pipe:
        reporter = Reporter(pipe, speaks=job.rank == 0)
        try:
            with _process_group(job):
                result = _run(job, reporter)
        except Exception as exc:  # noqa: BLE001 - the demo reports whatever it is
            traceback.print_exc()
            known = isinstance(exc, CheckpointingException)
            reporter.send("error", str(exc) if known else f"{type(exc).__name__}: {exc}")
            return 1
        reporter.send("result", asdict(result))
    return 0


def _end_with_the_demo() -> None:
    """Wait until the demo's end of our standard input closes, by its death too, and end this process."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


def _run(job: Job, reporter: Reporter) -> RankResult:
    stopwatch = Stopwatch()
    host().register(stopwatch)
    trainer = Trainer(job.seed, job.rank, job.layout)
    result = RankResult(parameters=trainer.parameters, fresh_loss=trainer.loss(job.steps))
    if job.saves:
        _train_and_save(job, trainer, reporter)
    else:
        result.read = _load(job, trainer, reporter)
    _note(result, stopwatch)
    reporter.say(f"{'saved' if job.saves else 'loaded'} in {result.seconds:.2f} s; {job.more_steps} more steps")
    result.digests = trainer.digests()
    _describe(result, trainer)
    result.losses = [trainer.train() for _ in range(job.more_steps)]
    reporter.say(f"step {trainer.step}: loss {result.losses[-1]:.3f}")
    return result


def _train_and_save(job: Job, trainer: Trainer, reporter: Reporter) -> None:
    reporter.say(f"training {trainer.parameters:,} parameters for {job.steps} steps, then saving")
    while trainer.step < job.steps:
        loss = trainer.train()
        if trainer.step % 5 == 0 or trainer.step == job.steps:
            reporter.say(f"step {trainer.step} of {job.steps}: loss {loss:.3f}")
    # Imports what the save would, outside the time we take.
    dist_checkpointing.get_default_save_sharded_strategy(*trainer.strategy or ())
    trainer.save(job.checkpoint)


def _load(job: Job, trainer: Trainer, reporter: Reporter) -> int:
    """Load; the bytes that were read."""
    reporter.say(f"loading the checkpoint into a fresh model with another seed, {job.seed}")
    dist_checkpointing.get_default_load_sharded_strategy(job.checkpoint)  # imports, as above
    before = _read_so_far()
    trainer.load(job.checkpoint)
    return _read_so_far() - before


def _read_so_far() -> int:
    """Bytes that this process has read, all its threads together; 0 where the system does not count them."""
    try:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    except OSError:
        return 0
    return int(fields["rchar"])


def _note(result: RankResult, stopwatch: Stopwatch) -> None:
    """Take over what the stopwatch saw, with the registry's entry of the strategy."""
    if stopwatch.last is None:
        raise CheckpointingException("no event told of the save or load: the hook shardckpt_event was not called")
    result.seconds = stopwatch.last.seconds
    for entry in host().registry.entries():
        if stopwatch.last.strategy.endswith(f" {entry.name}"):
            result.dispatch = Dispatch(entry.backend, entry.version, entry.name, entry.distribution)


def _describe(result: RankResult, trainer: Trainer) -> None:
    """Note which rows of some tensors this rank has, and how many bytes of all."""
    for shard in nested_values(dict_list_map_outplace(build_copy, to_sharded_state_dict(trainer.state()))):
        if not isinstance(shard, ShardedTensor):
            continue
        result.nbytes += math.prod(shard.local_shape) * shard.dtype.itemsize
        if shard.key in _SHOWN:
            rows, _ = result.rows.setdefault(shard.key, ([], list(shard.global_shape)))
            first, count = shard.global_offset[0], shard.local_shape[0]
            rows.extend([[first, first + count]] if count else [])


@contextmanager
def _process_group(job: Job) -> Iterator[None]:
    """The gloo group of all ranks; none for a rank by itself."""
    torch.set_num_threads(1)
    count = job.layout.world_size
    if count == 1:
        yield
        return
    where = f"file://{job.rendezvous}"
    dist.init_process_group("gloo", init_method=where, rank=job.rank, world_size=count, timeout=_GROUP_TIMEOUT)
    yield  # after a failure the process ends as it is: leaving a broken group may wait for its other ranks
    dist.destroy_process_group()


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # nothing is left to do, and torch's way out is slow and, with gloo's threads, may abort
