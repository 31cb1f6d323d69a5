"""Conversions to S3 that are killed, and run again."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from shardckpt import settings
from shardckpt.cli import main
from shardckpt.maintenance.sources import open_any
from shardckpt.plugins import get_plugin_manager
from shardckpt.plugins.stores import open_folder
from tests import programs
from tests.maintenance.resumption import MIB, make_source
from tests.remote.servers import BUCKET
from tests.tables import in_proof

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

#: Converts, or merges with itself, in objects of 3 MiB, and is killed when the journal has so many objects. Else it
#: prints how many bytes it has gone on with, and how many it has sent.
_RUN = """
import os, signal, sys
from shardckpt.integrations.obstore import streamed_object
from shardckpt.maintenance import conversion, convert_checkpoint, merge_checkpoints
from shardckpt.storage import journal

conversion.OBJECT_BYTES = 3 << 20
(source, target, to), left, sent = sys.argv[1:4], int(sys.argv[4]), 0
note, put = journal.Journal.note, streamed_object.obstore.put

def count(*arguments):
    global left
    note(*arguments)
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

def send(store, path, data, **options):
    global sent
    sent += len(data)
    return put(store, path, data, **options)

journal.Journal.note = count
streamed_object.obstore.put = send
if to.startswith("merge "):
    report = merge_checkpoints([source, source], target, to.split()[1]).conversion
else:
    report = convert_checkpoint(source, target, to, memory_budget=64 << 20, max_shard_size=3 << 20)
print(report.resumed, sent)
"""


def _run(folder: Path, url: str, to: str, objects: int) -> subprocess.CompletedProcess[str]:
    spool = {settings.SPOOL_DIR: str(folder)}
    return programs.run(_RUN, str(folder / "old"), url, to, str(objects), environment=spool)


def _list(url: str) -> dict[str, int]:
    return open_folder(url, get_plugin_manager()).tree()  # type: ignore[union-attr, no-any-return]


@pytest.mark.parametrize("to", ["hf", *in_proof("safetensors", "dcp", "merge safetensors")])
def test_a_killed_conversion_sends_only_the_rest(s3: str, tmp_path: Path, to: str) -> None:
    """Run again after a SIGKILL it sends what was not complete; killed for good, a prune leaves nothing of it."""
    make_source(tmp_path / "old", is_checkpoint=True)
    root = f"s3://{BUCKET}/{to.replace(' ', '-')}"
    url = f"{root}/step-1"
    assert _run(tmp_path, url, to, 2).returncode == -signal.SIGKILL
    left = _list(url)
    assert sum(left.values()) > 4 * MIB
    done = _run(tmp_path, url, to, 0)
    assert done.returncode == 0, done.stderr
    resumed, sent = map(int, done.stdout.split())
    assert resumed > 4 * MIB
    assert resumed + sent < 9 * MIB
    assert not [name for name in _list(url) if name.startswith(".journal") or ".shardckpt" in name]
    with open_any(tmp_path / "old") as old, open_any(url) as new:
        assert sorted(new) == sorted(old)
        assert all(new[key].read().equal(old[key].read()) for key in old)
    assert _run(tmp_path, f"{root}/step-2", to, 2).returncode == -signal.SIGKILL
    assert _list(f"{root}/step-2")
    assert main(["prune", root]) == 0
    assert {name.partition("/")[0] for name in _list(root)} == {"step-1"}
