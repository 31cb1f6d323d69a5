"""Appending tensors to files: runs of small ones by one call, all others one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.chunks import append_run, append_tensor, cut_runs
from shardckpt.storage import SMALL_RECORD, CheckpointWriter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@given(sizes=st.lists(st.sampled_from([0, 1, 64, SMALL_RECORD, SMALL_RECORD + 1, 1 << 20]), max_size=400))
def test_runs_have_each_tensor_once(sizes: list[int]) -> None:
    """Runs have all tensors, in their order; one of more than 64 KiB is alone in its run, and no run is very long."""
    runs = list(cut_runs(sizes))
    assert [number for run in runs for number in run] == list(range(len(sizes)))
    assert all(0 < len(run) <= 128 for run in runs)
    assert all(len(run) == 1 for run in runs if max(sizes[n] for n in run) > SMALL_RECORD)


def _write(folder: Path, name: str, tensors: Sequence[torch.Tensor], *, runs: bool) -> object:
    keys = [f"key{n}" for n in range(len(tensors))]
    frames = [(b"h" * (n % 3), b"t" * (n % 5)) for n in range(len(tensors))]
    with CheckpointWriter(folder, 0) as writer:
        file = writer.create(name)
        if runs:
            append_run(file, tensors, keys, frames)
        else:
            for tensor, key, (head, tail) in zip(tensors, keys, frames, strict=True):
                append_tensor(file, tensor, key, head, tail)
        return writer.finish(file).model_copy(update={"name": ""})


def test_a_run_is_what_its_tensors_are_one_by_one(tmp_path: Path) -> None:
    """Plain tensors, and runs with views, empty and 0-D ones among them: the same bytes, digests and number of keys."""
    values = torch.randn(30, 40)
    plain = [torch.full((n,), float(n)) for n in range(20)]
    odd = [values.t(), values[:, 3:5], torch.empty(0, 3), torch.tensor(2.5), torch.complex(values, values).conj()]
    for number, tensors in enumerate((plain, [*plain, *odd], odd[:1], plain[:1], [])):
        expected = _write(tmp_path, f"single{number}", tensors, runs=False)
        assert _write(tmp_path, f"run{number}", tensors, runs=True) == expected
        assert (tmp_path / f"run{number}").read_bytes() == (tmp_path / f"single{number}").read_bytes()
