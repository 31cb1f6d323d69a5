"""Read every byte of a checkpoint, and compare it with the digests in shardckpt.json and integrity.json.

Of files that have no digest (Megatron's and plain DCP's) the structure is checked: that they exist, that they contain
the ranges that the index names and nothing after them, and that those are complete archives of the right dtypes and
sizes.

exit codes:
  0  intact: all bytes match their digests
  1  damaged: a file is missing, or not what was written
  2  not a checkpoint, or it cannot be checked: no installed strategy reads it, or a file cannot be read
  3  intact as far as can be checked without digests: values were not checked
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.maintenance import FileResult

_STRUCTURE = (
    "they exist, contain the ranges that the index names, and are what it says as far as their structure shows that. "
    "Not checked: their values"
)


def add(verbs: Any) -> None:
    """Add the verb."""
    import argparse

    parser = verbs.add_parser(
        "verify",
        help="check every file of a checkpoint, against digests if it has them",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", help="the checkpoint's directory or URL")
    parser.set_defaults(run=run)


def run(options: Any) -> int:
    """Print a row per file, and a summary. Return the exit code, one of those in the help."""
    from shardckpt.cli.failure import print_error
    from shardckpt.cli.table import table
    from shardckpt.engine import is_damage
    from shardckpt.errors import CheckpointingException
    from shardckpt.maintenance import DAMAGED, NO_ANSWER, get_exit_code, verify_checkpoint

    try:
        results = verify_checkpoint(options.directory)
    except CheckpointingException as exc:
        print_error(exc, options)
        return DAMAGED if is_damage(exc) else NO_ANSWER
    code = get_exit_code(results)
    print(table(("file", "bytes", "result"), [(r.name, r.nbytes, _said(r)) for r in results]))
    print(f"{options.directory}: {_summary(results, code)}")
    return code


def _said(result: FileResult) -> str:
    if result.foreign:
        return "not a file of this checkpoint"
    return result.fault or ("as written" if result.checked == "digests" else "its structure is valid; it has no digest")


def _summary(results: Sequence[FileResult], code: int) -> str:
    from shardckpt.maintenance import DAMAGED, INTACT, NO_ANSWER

    own = [result for result in results if not result.foreign]
    bad = [result for result in own if result.fault]
    if code == INTACT:
        return f"intact: every byte of {len(own)} files was read, and matches its digest"
    if code == NO_ANSWER:
        return f"cannot be checked: {len(bad)} of {len(own)} files could not be read"
    compared = sum(result.checked == "digests" for result in own)
    some = f"{compared} of {len(own)} files were compared with digests; checked of the others"
    how = "" if compared == len(own) else f". {some if compared else 'Checked'}: {_STRUCTURE}"
    if code == DAMAGED:
        return f"damaged: {len(bad)} of {len(own)} files{how}"
    return f"intact as far as can be checked without digests{how}"
