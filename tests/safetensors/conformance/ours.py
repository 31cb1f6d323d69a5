"""Our own reader, by its public API: ``python -m tests.safetensors.conformance.ours DIRECTORY...``.

It verifies all files, then reads every tensor and the common state. Payloads of objects it does not show.
With ``--measure`` before the directories, each is read in a forked child, and its line says what that took: ``cpu`` in
seconds, ``peak`` in bytes. (Its imports take seconds: so they are paid once.)
"""

from __future__ import annotations

import ctypes
import json
import resource
import sys
from functools import partial

import torch

from shardckpt import dist_checkpointing
from shardckpt.errors import CheckpointingException, CorruptCheckpointError
from shardckpt.maintenance import verify_checkpoint
from tests.faults.forks import fork, wait
from tests.safetensors.conformance.protocol import Content, describe, run_reader

#: Names of dtypes on the page by those of torch; a torch without one of them cannot read it.
_NAMES = {
    "bool": "BOOL",
    **{f"{kind}int{bits}": f"{kind.upper() or 'I'}{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)},
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex32": "C32",
    "complex64": "C64",
    "complex128": "C128",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float4_e2m1fn_x2": "F4_E2M1_X2",
}


def _describe_tensor(tensor: torch.Tensor) -> tuple[str, list[int], bytes]:
    name = _NAMES[str(tensor.dtype).removeprefix("torch.")]
    whole = tensor.contiguous()
    return name, list(whole.shape), ctypes.string_at(whole.data_ptr(), whole.nbytes) if whole.nbytes else b""


def read_checkpoint(directory: str) -> Content:
    """Return what is in a checkpoint.

    Raises:
        CheckpointingException: it is not a valid one.
    """
    faults = [f"{result.name}: {result.fault}" for result in verify_checkpoint(directory) if result.fault]
    if faults:
        raise CorruptCheckpointError("; ".join(faults))
    with dist_checkpointing.open_checkpoint(directory) as checkpoint:
        _ = checkpoint.common, checkpoint.objects  # each access reads
        return Content({key: _describe_tensor(stored.read()) for key, stored in checkpoint.items()})


def _print_measured(directory: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF)
    line = describe(read_checkpoint, directory, CheckpointingException)
    after = resource.getrusage(resource.RUSAGE_SELF)
    line["cpu"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    line["peak"] = (after.ru_maxrss - before.ru_maxrss) * 1024
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "--measure":
        torch.set_num_threads(1)  # a forked child has no other
        describe(read_checkpoint, sys.argv[2], CheckpointingException)  # imports what is imported late
        for directory in sys.argv[2:]:
            wait([fork(partial(_print_measured, directory))], 60)
        sys.exit()
    run_reader(read_checkpoint, CheckpointingException)
