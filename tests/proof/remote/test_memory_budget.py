"""What a memory budget bounds, measured: the peak of a process that loads, saves or exports more than it."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from shardckpt import dist_checkpointing as dc
from shardckpt import settings
from shardckpt.huggingface import load_from_huggingface
from tests.remote.servers import BUCKET, moto_server, variables
from tests.states import entire

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process's memory is Linux's"),
]

_MIB = 1 << 20
#: MiB of the state that is loaded or saved.
_STATE = 64

#: Does all once with a small state, so that imports and pools are there; prints by how many bytes the memory then grows
#: beside the tensors, all of which are touched before.
_MEASURE = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from shardckpt import ShardedTensor, dist_checkpointing as dc
from shardckpt.huggingface import export_to_huggingface, load_from_huggingface

what, place, budget, mib = sys.argv[1], sys.argv[2], sys.argv[3] or None, int(sys.argv[4])
rank, is_parallel = int(os.environ.get("RANK", 0)), "RANK" in os.environ
if is_parallel:  # all ranks want all: one reads, and the others receive
    dist.init_process_group("gloo", init_method=f"file://{place}-group", rank=rank, world_size=2)

def peak():
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmHWM")).split()[1]) << 10

def make(mib):
    rows = mib * 64
    # entire tensors, columns of one, and one that is cast: what is read in place, and through buffers
    half = torch.zeros(rows, 1024)
    state = {
        "whole": ShardedTensor.from_rank_offsets("whole", torch.zeros(rows, 2048), replica_id=rank),
        "columns": ShardedTensor.from_rank_offsets("columns", torch.zeros(1024, rows).t(), replica_id=rank),
        "cast": ShardedTensor.from_rank_offsets(
            "cast", half if what.startswith("save") else half.bfloat16(), replica_id=rank
        ),
    }
    return state

def do(state, place):
    if what == "load":
        dc.load(state, place, memory_budget=budget, fully_parallel=is_parallel)
    elif what == "hf":
        load_from_huggingface(state, place, memory_budget=budget, fully_parallel=is_parallel)
    elif what.startswith("export"):
        # one file, and a cast of each tensor, if there is a name after "export-"
        options = {"dtype": what.partition("-")[2] or None, "max_shard_size": "5GB"}
        export_to_huggingface(place, place + "-hf", memory_budget=budget, **options)
    else:
        dc.save(state, place, memory_budget=budget)

do({} if what.startswith("export") else make(1), place + "-small")
state = {} if what.startswith("export") else make(mib)
Path("/proc/self/clear_refs").write_text("5")
before = peak()
do(state, place + "-large")
print(peak() - before)
if what in ("load", "hf"):
    for key, shard in state.items():
        values = shard.data.float()
        assert values[0, 0] == 1 and values[-1, -1] == 2, key
if is_parallel:
    dist.barrier()
    dist.destroy_process_group()
"""


def _make(mib: int) -> dict[str, torch.Tensor]:
    """Tensors with a one at their start and a two at their end."""
    rows = mib * 64
    tensors = {"whole": torch.zeros(rows, 2048), "columns": torch.zeros(rows, 1024), "cast": torch.zeros(rows, 1024)}
    for tensor in tensors.values():
        tensor[0, 0], tensor[-1, -1] = 1, 2
    return tensors


def _measure(
    what: str,
    place: str,
    budget: int | None,
    environment: dict[str, str] | None = None,
    *,
    ranks: Sequence[int | None] = (None,),
) -> int:
    """Return by how many bytes the memory of a process grows; of several ranks, that of the one with the most."""
    command = [sys.executable, "-c", _MEASURE, what, place, f"{budget}MiB" if budget else "", str(_STATE)]
    given = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}

    def run(rank: int | None) -> int:
        own = given if rank is None else {**given, "RANK": str(rank)}
        done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    with ThreadPoolExecutor(len(ranks)) as threads:
        return max(threads.map(run, ranks))


def _save_in_process(url: str, environment: dict[str, str]) -> None:
    """Save what is loaded or exported; no client is used in this process."""
    program = "import sys\nfrom tests.remote.test_memory_budget import _make\nfrom tests.states import entire\n"
    program += "from shardckpt import dist_checkpointing as dc\n"
    program += f"for name, mib in (('small', 1), ('large', {_STATE})):\n"
    program += "    dc.save(entire(_make(mib)), f'{sys.argv[1]}-{name}')\n"
    _run_program(program, url, environment)


def _run_program(program: str, argument: str, environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", program, argument]
    subprocess.run(command, env={**os.environ, **environment}, check=True, timeout=200)


def _check_folder(folder: str) -> None:
    """The folder has the values of :func:`_make`."""
    state = entire({key: torch.zeros_like(value) for key, value in _make(_STATE).items()})
    loaded = load_from_huggingface(state, folder)
    for key, expected in _make(_STATE).items():
        assert torch.equal(loaded[key], expected), key


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    """The environment by which a process finds a real S3 server."""
    with moto_server() as endpoint:
        # else botocore adds checksums after the body
        yield {**variables(endpoint), "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required"}


@pytest.mark.parametrize("backend", ["torch_dist", "safetensors"])
def test_a_load_from_a_directory(tmp_path: Path, backend: str) -> None:
    """64 MiB are loaded from a directory within 8 MiB: in place, by columns, and with a cast."""
    for name, mib in (("small", 1), ("large", _STATE)):
        dc.save(entire(_make(mib)), f"{tmp_path}/step-{name}", backend)
    assert _measure("load", f"{tmp_path}/step", 8) < 8 * _MIB


def test_a_load_from_a_hugging_face_folder(tmp_path: Path) -> None:
    """64 MiB are loaded from a Hugging Face folder within 8 MiB."""
    for name, mib in (("small", 1), ("large", _STATE)):
        (tmp_path / f"hf-{name}").mkdir()
        safetensors.torch.save_file(_make(mib), tmp_path / f"hf-{name}" / "model.safetensors")
    assert _measure("hf", f"{tmp_path}/hf", 8) < 8 * _MIB


def test_a_load_from_a_folder_of_plain_dcp(tmp_path: Path) -> None:
    """64 MiB are loaded within 8 MiB from what torch.distributed.checkpoint has saved."""
    for name, mib in (("small", 1), ("large", _STATE)):
        dcp.save(_make(mib), checkpoint_id=f"{tmp_path}/dcp-{name}")
    assert _measure("load", f"{tmp_path}/dcp", 8) < 8 * _MIB


@pytest.mark.parametrize("what", ["load", "hf"])
def test_a_fully_parallel_load(tmp_path: Path, what: str) -> None:
    """Two ranks that both want 128 MiB, of which each reads a half and receives the other, keep to 16 MiB each."""
    for name, mib in (("small", 1), ("large", _STATE)):
        if what == "load":
            dc.save(entire(_make(mib)), f"{tmp_path}/step-{name}")
        else:
            (tmp_path / f"step-{name}").mkdir()
            safetensors.torch.save_file(_make(mib), tmp_path / f"step-{name}" / "model.safetensors")
    assert _measure(what, f"{tmp_path}/step", 16, ranks=(0, 1)) < 16 * _MIB


@pytest.mark.parametrize("what", ["export", "export-bfloat16"])
def test_an_export_to_a_directory(tmp_path: Path, what: str) -> None:
    """128 MiB are exported to a Hugging Face folder within 32 MiB, with a cast, too, and the folder has the values."""
    for name, mib in (("small", 1), ("large", _STATE)):
        dc.save(entire(_make(mib)), f"{tmp_path}/step-{name}")
    assert _measure(what, f"{tmp_path}/step", 32) < 32 * _MIB
    _check_folder(f"{tmp_path}/step-large-hf")


@pytest.mark.parametrize("what", ["export", "export-bfloat16"])
def test_an_export_without_a_budget(tmp_path: Path, what: str) -> None:
    """What is exported without a memory budget, 512 MiB, takes less than 64 MiB."""
    for name, mib in (("small", 1), ("large", 512)):
        dc.save(entire(_make(mib)), f"{tmp_path}/step-{name}")
    assert _measure(what, f"{tmp_path}/step", None) < 64 * _MIB


@pytest.mark.parametrize("client", ["obstore", pytest.param("s3fs", marks=pytest.mark.proof)])
def test_an_export_to_s3(server: dict[str, str], client: str) -> None:
    """128 MiB are exported from S3 to S3 within 64 MiB: streamed by obstore, and spooled for s3fs."""
    environment = {**server, **({settings.DISABLED_PLUGINS: "obstore"} if client == "s3fs" else {})}
    url = f"s3://{BUCKET}/export-{client}/step"
    _save_in_process(url, environment)
    assert _measure("export", url, 64, environment) < 64 * _MIB
    program = "import sys\nfrom tests.remote.test_memory_budget import _check_folder\n_check_folder(sys.argv[1])\n"
    _run_program(program, f"{url}-large-hf", environment)


@pytest.mark.parametrize("client", ["obstore", pytest.param("s3fs", marks=pytest.mark.proof)])
def test_saves_to_s3_and_loads_from_it(server: dict[str, str], client: str) -> None:
    """A save of 64 MiB to S3, and a load of them, keep to 32 MiB: streamed by obstore, and spooled for s3fs."""
    environment = {**server, **({settings.DISABLED_PLUGINS: "obstore"} if client == "s3fs" else {})}
    url = f"s3://{BUCKET}/budget-{client}/step"
    assert _measure("save", url, 32, environment) < 32 * _MIB
    loaded = f"s3://{BUCKET}/budget-{client}-loaded/step"
    _save_in_process(loaded, environment)
    assert _measure("load", loaded, 32, environment) < 32 * _MIB
