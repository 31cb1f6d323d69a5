"""Program: a training of several ranks that is killed again and again, and goes on each time; tells what it saw.

Ranks are forks of this process, which has imported everything: so that an attempt takes a second, not ten.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import random
import re
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.faults.forks import fork, kill_at_random
from tests.manager.training import Training
from tests.remote.servers import request

RANKS = 4
_TIMEOUT = dt.timedelta(seconds=20)
_FOR_EVER = 1 << 40


class Victim:
    """The training job.

    Args:
        folder: Of its checkpoints, or its URL.
        log: Takes a line from rank 0 for each step.
        mode: How it saves.
    """

    def __init__(self, folder: Path | str, log: Path, mode: str) -> None:
        self._folder, self._log, self._mode = folder, log, mode

    def start(self, until: int) -> list[int]:
        """Fork the ranks; their process ids."""
        store = tempfile.mktemp(prefix="store-", dir=self._log.parent)
        return [fork(partial(self._be_rank, rank, store, until)) for rank in range(RANKS)]

    def _be_rank(self, rank: int, store: str, until: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=_TIMEOUT)
        self._train(until)
        dist.destroy_process_group()

    def _train(self, until: int) -> None:
        training = Training(self._folder, async_mode=self._mode, keep_latest_k=3)
        with training.manager as manager, self._log.open("a", buffering=1) as log:
            manager.load()
            is_told = training.rank == 0
            if is_told:
                log.write(json.dumps({"resumed": training.progress.step}) + "\n")
            while training.progress.step < until:
                loss = training.step()
                if is_told:
                    log.write(json.dumps({"step": training.progress.step, "loss": loss}) + "\n")
                manager.save(training.progress.step)


def committed(folder: str) -> int:
    """The newest step that has a checkpoint, by nothing but what stands there; 0 for none."""
    found = [name for name in list_files(folder) if name.endswith("/metadata.json")]
    names = [name.removesuffix("/metadata.json") for name in found if name.count("/") == 1]  # not of generations
    return max((int(name.removeprefix("step-")) for name in names if name.startswith("step-")), default=0)


def list_files(folder: str) -> list[str]:
    """The names of all files or objects in a folder, by another way than the library's."""
    bucket, _, prefix = folder.removeprefix("s3://").partition("/")
    if not folder.startswith("s3://"):
        return [str(path.relative_to(folder)) for path in Path(folder).rglob("*")]
    answer = request(os.environ["AWS_ENDPOINT_URL"], "GET", f"{bucket}?list-type=2&prefix={prefix}/")
    return re.findall(f"<Key>{prefix}/([^<]*)</Key>", answer)


def lines(log: Path) -> list[dict[str, Any]]:
    """What rank 0 has told; of a line that it was killed in the middle of, nothing."""
    return [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]


def main() -> None:
    """Kill so many times, let it end, and print what was seen as JSON."""
    folder, log, mode, kills, seed = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
    chance = random.Random(seed)
    torch.set_num_threads(1)
    log.touch()
    victim = Victim(folder, log, mode)
    newest = []
    for _ in range(kills):
        told = len(lines(log))
        pids = victim.start(_FOR_EVER)
        while len(lines(log)) == told:  # until it has resumed: before that there is nothing to interrupt
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.8))
        kill_at_random(pids, chance)
        if folder.startswith("s3://"):
            time.sleep(0.3)  # a server goes on with the request that it has when its client is killed
        newest.append(committed(folder))
    pids = victim.start(newest[-1] + 6)
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    seen, left = lines(log), sorted({name.partition("/")[0] for name in list_files(folder)})
    print(json.dumps({"codes": codes, "newest": newest, "seen": seen, "left": left}))  # noqa: T201


if __name__ == "__main__":
    main()
