"""Real stores on loopback, each a process of its own, for tests of clients."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The bucket that every server has.
BUCKET = "bucket"
_MOTO = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
server.start()
print(server.get_host_and_port()[1], file=sys.stderr, flush=True)
sys.stdin.read()  # until the tests' process closes it, or dies
"""


@contextmanager
def moto_server() -> Iterator[str]:
    """Start moto's S3, with an empty bucket; a context manager that gives the endpoint's URL."""
    command = [sys.executable, "-c", _MOTO]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        try:
            lines = iter(process.stderr.readline, "")
            endpoint = f"http://127.0.0.1:{next(line for line in lines if line.strip().isdecimal()).strip()}"
            request(endpoint, "PUT", BUCKET)
            yield endpoint
        finally:
            process.stdin.close()
            process.kill()


def request(endpoint: str, method: str, path: str) -> str:
    """Send an unsigned request, and return the answer's body."""
    with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{path}", method=method), timeout=30) as answer:
        return answer.read().decode()  # type: ignore[no-any-return]
