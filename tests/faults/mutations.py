"""Program: break the source in one way at a time, and say whether a test finds it.

``python -m tests.faults.mutations [--only WORD] [-o FILE]`` copies the tree, and for each line of :data:`MUTATIONS`
changes the copy, and runs the test that must fail there. It prints JSON: ``caught``, or what happened instead. All
tests must pass in the unchanged copy first. What catches strategies that are wrong is ``tests/testing/``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.tree import ROOT

_COPIED = ("shardckpt", "strategies", "tests", "pyproject.toml", "README.md", "benchmarks")
_TIMEOUT = 300.0


class Mutation(NamedTuple):
    """A change of the source, and the test that must fail then.

    Attributes:
        what: What is wrong with it.
        file: Relative to the root.
        old: Stands there once.
        new: Takes its place.
        test: Node id below ``tests/``.
    """

    what: str
    file: str
    old: str
    new: str
    test: str


_COMMIT = "shardckpt/commit/commit.py"
_OWNER = "shardckpt/commit/owner.py"
_UPLOAD = "shardckpt/commit/upload.py"
_NEW_FILE = "shardckpt/storage/new_file.py"
_FILES = "shardckpt/storage/filesystem.py"
_READER = "shardckpt/storage/reader.py"
_DIGEST = "shardckpt/storage/digest.py"
_COMMITTERS = "shardckpt/engine/committers.py"
_TRANSACTION = "shardckpt/engine/transaction.py"
_RENAME = '    with wrap_os_errors(f"rename {staging} to", target):\n        os.rename(staging, target)\n'
_UNSAFE = '        if found is None:\n            raise make_refusal(f"{self.source}: the pickle asks'
_ORDER = "ci/faults/test_kill.py::test_order_of_calls[torch_dist]"
_KILLS = "ci/faults/test_kill.py::test_killed_overwrite_leaves_old_or_new[torch_dist]"
_CUTS = "ci/faults/test_power_cuts.py::test_a_power_cut_leaves_old_or_new[torch_dist]"

MUTATIONS = (
    Mutation(
        "a file is not fsynced",
        _NEW_FILE,
        "            os.fsync(self._fd)\n",
        "            pass\n",
        _ORDER,
    ),
    Mutation(
        "an fsync that fails is a success",
        _NEW_FILE,
        '        with wrap_os_errors("fsync", self.path):\n',
        '        with __import__("contextlib").suppress(OSError):\n',
        "storage/test_writer.py::test_error_of_the_system",
    ),
    Mutation(
        "a close that fails is a success",
        _NEW_FILE,
        '        with wrap_os_errors("close", self.path):\n',
        '        with __import__("contextlib").suppress(OSError):\n',
        "ci/storage/test_new_file.py::test_a_close_that_fails",
    ),
    Mutation(
        "a file keeps the space that was allocated ahead",
        _NEW_FILE,
        "                os.ftruncate(self._fd, size)\n        return found\n",
        "                pass\n        return found\n",
        "ci/storage/test_stream.py::test_no_more_space_than_bytes",
    ),
    Mutation(
        "a file that is shorter than what was written to it is taken",
        _NEW_FILE,
        "        if self._cut(size) < size:\n",
        "        if self._cut(size) < 0:\n",
        "storage/test_new_file.py::test_bytes_that_are_gone",
    ),
    Mutation(
        "the rest of a short write is not written",
        _FILES,
        "    while view.nbytes:\n        done = write_some(",
        "    if view.nbytes:\n        done = write_some(",
        "storage/test_filesystem.py::test_short_writes_are_gone_on_with",
    ),
    Mutation(
        "a write that does nothing is taken for done",
        _FILES,
        '    if not done:\n        raise StorageError(f"cannot write',
        '    if not done:\n        return view.nbytes\n        raise StorageError(f"cannot write',
        "storage/test_filesystem.py::test_no_progress",
    ),
    Mutation(
        "folders in the staging directory are not fsynced",
        _COMMIT,
        '    sync_tree(staging)\n    with wrap_os_errors(f"rename',
        '    with wrap_os_errors(f"rename',
        _ORDER,
    ),
    Mutation(
        "the rename comes before the fsync of the staging directory",
        _COMMIT,
        f"    sync_tree(staging)\n{_RENAME}",
        f"{_RENAME}    sync_tree(target)\n",
        _ORDER,
    ),
    Mutation(
        "the parent is not fsynced after the rename",
        _COMMIT,
        "        sync_directory(target.parent)\n    except StorageError as exc:\n",
        "        pass\n    except StorageError as exc:\n",
        _ORDER,
    ),
    Mutation(
        "the parent of a new folder above the target is not fsynced",
        _COMMIT,
        'is not a directory") from exc\n    sync_directory(path.parent)\n',
        'is not a directory") from exc\n',
        _ORDER,
    ),
    Mutation(
        "the parent is not fsynced after the exchange of an overwrite",
        _COMMIT,
        "        sync_directory(target.parent)\n    except BaseException as exc:  # an interrupt",
        "    except BaseException as exc:  # an interrupt",
        _CUTS,
    ),
    Mutation(
        "the staging directory of an overwrite is not fsynced before the exchange",
        _COMMIT,
        "        _keep_foreign(target, staging, owned)\n    sync_tree(staging)\n",
        "        _keep_foreign(target, staging, owned)\n",
        _CUTS,
    ),
    Mutation(
        "an overwrite removes the old checkpoint first",
        _COMMIT,
        "    os.rename(staging, aside)  # so",
        "    shutil.rmtree(target)\n    target.mkdir()\n    os.rename(staging, aside)  # so",
        _KILLS,
    ),
    Mutation(
        "an overwrite renames twice where it could exchange",
        _COMMIT,
        "    if renameat2 is None:\n",
        "    if True:\n",
        _KILLS,
    ),
    Mutation(
        "an overwrite loses files that are not the checkpoint's",
        _COMMIT,
        "        _keep_foreign(target, staging, owned)\n",
        "        pass\n",
        _KILLS,
    ),
    Mutation(
        "a save without overwrite replaces what is there",
        _COMMIT,
        "    if not overwrite and not is_free(target):\n",
        "    if False:\n",
        "commit/test_commit.py::test_a_commit_replaces_only_what_it_may",
    ),
    Mutation(
        "an exchange that fails half-way is not undone",
        _COMMIT,
        "            _undo_swap(staging, target, aside)\n            raise\n",
        "            raise\n",
        "faults/test_overwrite.py::test_an_overwrite_that_ends_at_any_call",
    ),
    Mutation(
        "what a living process is saving is removed",
        "shardckpt/commit/leftovers.py",
        '    return f"process {owner.pid} of this host is alive"\n',
        '    return ""\n',
        "commit/test_leftovers.py::test_what_a_living_process_has_stays",
    ),
    Mutation(
        "what a dead process has left is kept",
        "shardckpt/commit/leftovers.py",
        '    if not is_alive:\n        return ""\n',
        "",
        "engine/test_pruning.py::test_the_next_save_leaves_nothing_but_the_checkpoint",
    ),
    Mutation(
        "a process id that is used again is taken for the owner",
        _OWNER,
        "            if self.start and start & _START_MASK != self.start:\n",
        "            if False:\n",
        "commit/test_owner.py::test_an_id_that_is_used_again_is_another_process",
    ),
    Mutation(
        "a killed process whose parent has not looked counts as alive",
        _OWNER,
        '            return state not in "ZX" or',
        "            return True or",
        "ci/commit/test_owner.py::test_a_process_lives_until_it_is_dead",
    ),
    Mutation(
        "what a load reads is not compared with its digest",
        _READER,
        "                if self._digest(memory[start - span.start : stop - span.start]) != digest:\n",
        "                if False:\n",
        "storage/test_reader.py::test_only_touched_segments_matter",
    ),
    Mutation(
        "a range outside a file is read",
        _READER,
        "    if offset < 0 or nbytes < 0 or offset + nbytes > file.size:\n",
        "    if False:\n",
        "storage/test_reader.py::test_ranges_outside",
    ),
    Mutation(
        "the table of digests is not compared with its own digest",
        _DIGEST,
        "        if len(raw) % wide or hashlib.sha256(raw).hexdigest() != root:\n",
        "        if len(raw) % wide:\n",
        "storage/test_digest.py::test_every_flipped_bit_of_the_text_is_noticed",
    ),
    Mutation(
        "a table of digests for another size is taken",
        _DIGEST,
        "        if found.size != size or",
        "        if",
        "storage/test_digest.py::test_tables_for_another_file",
    ),
    Mutation(
        "a file's name may lead out of the checkpoint",
        _FILES,
        "    if not is_file_name(name):\n",
        "    if False:\n",
        "storage/test_filesystem.py::test_names_that_are_refused",
    ),
    Mutation(
        "a link is followed out of the checkpoint",
        "shardckpt/storage/input_file.py",
        "os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK",
        "os.O_CLOEXEC | os.O_NONBLOCK",
        "storage/test_filesystem.py::test_only_regular_files_are_read",
    ),
    Mutation(
        "a load opens files by path, also of a save that has come since",
        "shardckpt/storage/directory.py",
        "        return RelativePath(_OpenDirectory(path, open_within_limit(lambda: os.open(path, _FLAGS))))\n",
        "        return path\n",
        "faults/test_replaced.py::test_replaced_at_every_moment",
    ),
    Mutation(
        "files without digests, or recorded twice, are committed",
        _TRANSACTION,
        "                check_records(written.files, self._author)\n",
        "",
        "faults/test_careless.py::test_objects_of_two_ranks_with_one_name_are_refused",
    ),
    Mutation(
        "files that no writer recorded are committed",
        _COMMITTERS,
        "        refuse_unrecorded(staging, {*list_files(files), *(file.name for file in writer.files)})\n",
        "",
        "faults/test_careless.py::test_files_without_digests_fail_the_save",
    ),
    Mutation(
        "a save that fails leaves its staging directory",
        _COMMITTERS,
        "            discard_staging(self.staging)\n",
        "            pass\n",
        "faults/test_error_sync.py",
    ),
    Mutation(
        "an error stays on the rank that has it",
        "shardckpt/distributed/comm.py",
        "        if self.world_size == 1:\n            if error is not None:\n",
        "        if self.world_size == 1 or error is not None:\n            if error is not None:\n",
        "distributed/test_error_report.py::test_a_class_does_not_depend_on_the_number_of_ranks",
    ),
    Mutation(
        "a rank that stopped is named by its last answer, however old",
        "shardckpt/distributed/group_failure.py",
        "            return not alive.check([key]) or float(alive.get(key)) < since\n",
        "            return not alive.check([key])\n",
        "distributed/test_group_failure.py::test_an_answer_to_an_earlier_failure_is_none",
    ),
    Mutation(
        "an upload of another size than the file is committed",
        _UPLOAD,
        "            if found.get(name) != size:\n",
        "            if False:\n",
        "remote/test_faults.py::test_a_listing_that_lacks_an_object_ends_the_save",
    ),
    Mutation(
        "a failed save to a store deletes its marker last",
        _UPLOAD,
        "        if self._marking:\n            self._delete([MARKER_NAME])  # first",
        "        if False:\n            self._delete([MARKER_NAME])  # first",
        "remote/test_faults.py::test_a_save_whose_kth_upload_fails_is_absent",
    ),
    Mutation(
        "a save to a store goes on where another one has begun",
        _UPLOAD,
        "            raise claim.make_error(found)\n\n    def _clear(",
        "            pass\n\n    def _clear(",
        "remote/test_obstore.py::test_a_save_that_has_seen_an_empty_url_does_not_write_over_one_that_has_ended_since",
    ),
    Mutation(
        "retention removes a step for which a lease has come since it was chosen",
        "shardckpt/manager/garbage_collection.py",
        "            if against:\n",
        "            if False:\n",
        "manager/test_holds.py::test_of_a_lease_and_a_removal_one_gives_way",
    ),
    Mutation(
        "a damaged newest step ends the training",
        "shardckpt/manager/step_resolution.py",
        "            if step != NEWEST:\n                raise\n",
        "            raise\n",
        "manager/test_manager.py::test_the_newest_damaged_one_is_skipped",
    ),
    Mutation(
        "a pickle may name any class or function",
        "shardckpt/archive/unpickle.py",
        _UNSAFE,
        '        if found is None:\n            found = getattr(__import__(module, fromlist=["x"]), name, None)\n'
        f"{_UNSAFE}",
        "archive/test_unpickle.py::test_other_classes_need_leave",
    ),
)


def copy_tree(folder: Path) -> Path:
    """Copy what tests need into a new directory below a folder."""
    copy = folder / "tree"
    copy.mkdir()
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, copy / name)
    return copy


def mutate(mutation: Mutation, root: Path) -> None:
    """Change the source below a root."""
    path = root / mutation.file
    text = path.read_text()
    path.write_text(text.replace(mutation.old, mutation.new, 1))


def run_tests(copy: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """Run tests in a copy, of which all processes import it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(copy), str(copy / "strategies")])
    environment["TMPDIR"] = str(copy.parent)  # tests look at what is left there: what others leave is theirs
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # a change within one second would not be noticed
    options = ["-n", "0", "-x", "-q", "--tier", "default,ci", "-p", "no:cacheprovider", "--no-header", "-rfE"]
    try:
        return subprocess.run(
            [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in tests)],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT * (1 + len(tests) // 8),
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        return subprocess.CompletedProcess(exc.cmd, 124, str(exc.stdout), "it did not end")


@cache
def check_baseline() -> None:
    """Run the tests of all mutations where nothing is changed: they must pass, or their failures prove nothing."""
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        done = run_tests(copy_tree(Path(folder)), *sorted({each.test for each in MUTATIONS}))
    if done.returncode:
        raise SystemExit(f"tests fail where nothing is changed: {(done.stdout + done.stderr)[-4000:]}")


def try_mutation(mutation: Mutation, folder: Path) -> str:
    """Run the test of a mutation in a copy with it: ``caught``, or what happened."""
    copy = copy_tree(folder)
    try:
        mutate(mutation, copy)
        done = run_tests(copy, mutation.test)
    finally:
        shutil.rmtree(copy)
    if done.returncode == 1 and "FAILED tests/" in done.stdout and "error during collection" not in done.stdout:
        return "caught"
    return "survived" if done.returncode == 0 else f"status {done.returncode}: {(done.stdout + done.stderr)[-600:]}"


def main() -> int:
    """Print what came of each; exit with 1 if one was not caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.mutations", description="Break the source.")
    parser.add_argument("--only", default="", help="those whose file or description has this")
    parser.add_argument(
        "-o", "--output", type=Path, help="takes the JSON, after each of them; by default it is printed"
    )
    options = parser.parse_args()
    wanted = [each for each in MUTATIONS if options.only in f"{each.file} {each.what}"]
    found: dict[str, str] = {}
    check_baseline()
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        for each in wanted:
            found[each.what] = try_mutation(each, Path(folder))
            if options.output:
                options.output.write_text(json.dumps(found, indent=1) + "\n")
    if not options.output:
        json.dump(found, sys.stdout)
    return 1 if {*found.values()} - {"caught"} else 0


if __name__ == "__main__":
    sys.exit(main())
