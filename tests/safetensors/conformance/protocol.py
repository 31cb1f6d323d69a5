"""What a reader prints for the conformance runner: one JSON line a directory."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class Content(NamedTuple):
    """What a reader found in a valid checkpoint.

    Attributes:
        tensors: By name, aliases too: the dtype's name, the shape, and the bytes in row-major order.
        objects: By name: codec and payload. None for a reader that does not show payloads.
    """

    tensors: dict[str, tuple[str, list[int], bytes]]
    objects: dict[str, tuple[str, bytes]] | None = None


def describe(read: Callable[[str], Content], directory: str, refusal: type[Exception] = Exception) -> dict[str, Any]:
    """Return the verdict of a reader on a directory, as it is printed.

    Args:
        read: Returns what is in a valid checkpoint; raises an exception for an invalid one.
        directory: The checkpoint.
        refusal: What it raises for an invalid one; any other exception is a fault of the reader.
    """
    try:
        content = read(directory)
    except refusal as error:
        return {"verdict": "invalid", "why": f"{type(error).__name__}: {error!s:.300}"}
    tensors = {name: [dtype, shape, _sha256(data)] for name, (dtype, shape, data) in content.tensors.items()}
    line: dict[str, Any] = {"verdict": "valid", "tensors": tensors}
    if content.objects is not None:
        line["objects"] = {name: [codec, _sha256(payload)] for name, (codec, payload) in content.objects.items()}
    return line


def run_reader(read: Callable[[str], Content], refusal: type[Exception] = Exception) -> None:
    """Print a line for each directory of the command line, and exit: 0 if all are valid, else 1."""
    lines = [describe(read, directory, refusal) for directory in sys.argv[1:]]
    for line in lines:
        sys.stdout.write(json.dumps(line) + "\n")
    sys.exit(any(line["verdict"] != "valid" for line in lines))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
