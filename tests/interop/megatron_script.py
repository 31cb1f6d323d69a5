"""Saves and loads with a release of megatron-core, in processes of its own: the tests' never import it.

Run as ``python -m tests.interop.megatron_script`` with a release of megatron-core on PYTHONPATH. Every line of standard
input is a job, ``[world_size, action, arguments]`` in JSON; the answer is a line with a traceback or null a rank.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import faulthandler
import json
import multiprocessing
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from tests.interop.writers import WRITERS, Writer

RANKS = 4
# A save of 4 ranks takes 10 s on a quiet machine: it starts processes that import torch. Limits are 20 times that.
GROUP_TIMEOUT = 200.0  # seconds that a rank waits in a collective
END_TIMEOUT = 10.0  # seconds that a rank has to end
JOB_TIMEOUT = 240.0  # seconds after which a job is ended with a traceback of where it hangs


def patch_libraries() -> None:
    """Let releases of every age run with today's libraries and without an accelerator; bytes on disk stay theirs."""
    import numpy as np
    import torch
    import torch.distributed.checkpoint.filesystem as fs

    torch.set_num_threads(1)
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_, **__: None
    cuda.empty_cache = lambda *_, **__: None
    torch.serialization.add_safe_globals([argparse.Namespace])  # until 0.10 common.pt is read as torch.load likes
    vars(np)["product"] = np.prod  # called until 0.13; gone from numpy 2
    write_item: Any = fs._write_item
    defaults = fs._StorageWriterTransforms(), fs.SerializationFormat.TORCH_SAVE

    def write_item_of_any_age(*args: Any) -> Any:
        """Until 0.13 it is called as torch 2.6 had it: (stream, data, item, storage key)."""
        with_transforms = args if isinstance(args[0], fs._StorageWriterTransforms) else (defaults[0], *args)
        return write_item(*with_transforms, *defaults[len(with_transforms) - 4 :])

    fs._write_item = write_item_of_any_age


def save(path: str) -> None:
    """Save the sample, with values of Megatron's own classes in the common state."""
    from megatron.core import dist_checkpointing as dc
    from megatron.core.dist_checkpointing import mapping
    from megatron.core.enums import ModelType
    from megatron.core.optimizer import OptimizerConfig

    from tests.interop import sample

    me = _release()
    state = sample.state(mapping, *_whereabouts(), filled=True, uneven=me.uneven)
    if me.flattened:
        state["flattened"] = sample.flattened(mapping, _whereabouts()[0])
    state["megatron"] = {"kind": ModelType.encoder_or_decoder, "config": OptimizerConfig(lr=0.25)}
    _make_directory(path)
    dc.save(state, path, **({"content_metadata": sample.CONTENT_METADATA} if me.content_metadata else {}))


def save_uneven(path: str, key: str) -> None:
    """Save one tensor with shards of unequal size, if this release can."""
    from megatron.core import dist_checkpointing as dc
    from megatron.core.dist_checkpointing import mapping

    from tests.interop import sample

    _make_directory(path)
    dc.save({key: sample.uneven_shards(mapping, *_whereabouts(), key)}, path)


def load(path: str, writer: str = "shardckpt") -> None:
    """Load the sample under this world's sharding, compare every value, and query the rest."""
    from megatron.core import dist_checkpointing as dc
    from megatron.core.dist_checkpointing import mapping

    from tests.interop import sample

    rank, world = _whereabouts()
    uneven = _release().uneven
    loaded = dc.load(sample.state(mapping, rank, world, filled=False, uneven=uneven), path)
    sample.check(loaded, sample.state(mapping, rank, world, filled=True, uneven=uneven), mapping)
    query(path, writer)


def query(path: str, writer: str = "shardckpt") -> None:
    """Ask for all that Megatron can have without describing it, and compare it with what the writer saved."""
    from megatron.core import dist_checkpointing as dc

    from tests.interop import sample

    has_content = WRITERS[writer].content_metadata
    assert dc.check_is_distributed_checkpoint(path)
    common = dc.load_common_state_dict(path)
    common.pop("megatron", None)  # what save() puts there besides the sample
    sample.check_equal(common, sample.stored_common(content_metadata=has_content), "common")
    if hasattr(dc, "load_content_metadata"):
        assert dc.load_content_metadata(path) == (sample.CONTENT_METADATA if has_content else None)
    described = {key: (tuple(t.global_shape), t.dtype) for key, t in dc.load_tensors_metadata(path).items()}
    described.pop("flattened", None)  # save() puts it there too; 0.16 has lost its true shape
    assert described == {key: (tuple(t.shape), t.dtype) for key, t in sample.whole_tensors().items()}
    plain = dc.load_plain_tensors(path)  # common values too, says 0.16.1
    sample.check_tensors({key: plain[key] for key in sample.whole_tensors()})


def release(expected: str) -> None:
    """Megatron is the release that it is taken for."""
    import megatron.core

    found = megatron.core.__version__
    assert found == expected, f"{megatron.core.__file__} is {found}, not {expected}"


def plain_dcp_load(path: str) -> None:
    """Load the sample with plain DCP, which finds Megatron's classes here."""
    from tests.interop import plain_dcp

    plain_dcp.load(path)


def call(script: str, function: str, *arguments: str) -> None:
    """Call a function of a script that imports Megatron."""
    runpy.run_path(script)[function](*arguments)


ACTIONS = {action.__name__: action for action in (save, save_uneven, load, query, release, plain_dcp_load, call)}


class Ranks:
    """Four forked processes that wait for jobs."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self._pipes, self._workers = [], []
        for _ in range(RANKS):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(theirs,))
            worker.start()
            theirs.close()
            self._pipes.append(ours)
            self._workers.append(worker)

    def run(self, world: int, *job: Any) -> list[str | None]:
        """A traceback or None a rank."""
        for rank, pipe in enumerate(self._pipes[:world]):
            pipe.send((rank, world, *job))
        return [_answer(pipe) for pipe in self._pipes[:world]]

    def close(self) -> None:
        """Let the ranks end."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it died
                pipe.send(None)
        for worker in self._workers:
            worker.join(END_TIMEOUT)
            worker.kill()


def main() -> None:
    """Start the ranks, and hand them the jobs that come in."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever Megatron prints is no answer
    patch_libraries()
    import megatron.core  # noqa: F401 - once, before the ranks are forked

    ranks = Ranks()
    with tempfile.TemporaryDirectory() as stores:
        for line in sys.stdin:
            world, action, arguments = json.loads(line)
            found = ranks.run(world, f"file://{stores}/{os.urandom(8).hex()}", action, arguments)
            if any(found):  # a save after one that failed takes that one's results for its own
                ranks.close()
                ranks = Ranks()
            answers.write(json.dumps(found) + "\n")
            answers.flush()
    ranks.close()


def _answer(pipe: Any) -> str | None:
    if not pipe.poll(JOB_TIMEOUT + 10):
        return "the rank did not answer"
    try:
        return pipe.recv()  # type: ignore[no-any-return]
    except EOFError:
        return "the rank died; its standard error says why"


def _serve(pipe: Any) -> None:
    """A rank: does jobs until there are no more."""
    while (job := pipe.recv()) is not None:
        faulthandler.dump_traceback_later(JOB_TIMEOUT, exit=True)
        pipe.send(_outcome(*job))
        faulthandler.cancel_dump_traceback_later()


def _outcome(rank: int, world: int, store: str, action: str, arguments: list[str]) -> str | None:
    import torch.distributed as dist

    timeout = dt.timedelta(seconds=GROUP_TIMEOUT)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timeout)
    try:
        ACTIONS[action](*arguments)
    except BaseException:  # noqa: BLE001 - torch's CheckpointException is one
        return traceback.format_exc()
    finally:
        dist.destroy_process_group()
    return None


def _whereabouts() -> tuple[int, int]:
    import torch.distributed as dist

    return dist.get_rank(), dist.get_world_size()


def _release() -> Writer:
    """What is known of the release that runs here."""
    import megatron.core

    return WRITERS[megatron.core.__version__]


def _make_directory(path: str) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        Path(path).mkdir(parents=True)
    dist.barrier()


if __name__ == "__main__":
    main()
