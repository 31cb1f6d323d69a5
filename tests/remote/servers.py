"""Real stores on loopback, each a process of its own, for tests of clients."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import threading
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tests.remote.fault_proxy import FaultProxy

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Seconds in which a server starts; a machine under load is slow to import moto.
_START = 60
#: The bucket that every server has.
BUCKET = "bucket"
#: The key that the servers take; moto takes any.
KEY, SECRET = "someone", "a-secret"
#: Objects in one answer of moto to a listing, of which S3 has 1000: listings of several pages are made in a second.
PAGE = 100
_MOTO = f"""
import logging, os, sys
os.environ["MOTO_S3_DEFAULT_MAX_KEYS"] = "{PAGE}"
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
server.start()
print(server.get_host_and_port()[1], file=sys.stderr, flush=True)
sys.stdin.read()  # until the tests' process closes it, or dies
"""


def variables(endpoint: str) -> dict[str, str]:
    """The environment by which every client finds a server, and is let in."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",  # the name that botocore looks for
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextmanager
def moto_server() -> Iterator[str]:
    """Start moto's S3, with an empty bucket; a context manager that gives the endpoint's URL."""
    with _serve([sys.executable, "-c", _MOTO], r"^(\d+)$") as port:
        endpoint = f"http://127.0.0.1:{port}"
        request(endpoint, "PUT", BUCKET)
        yield endpoint


@contextmanager
def rclone_server(folder: Path) -> Iterator[str]:
    """Start rclone's S3 over an empty local folder; a context manager that gives the endpoint's URL.

    Its buckets are folders. It is odd: it ignores ``If-None-Match``, so that a conditional write replaces, and answers
    ranges with 200 and the checksum of the whole object. It checks the key of requests.
    """
    (folder / BUCKET).mkdir(parents=True)
    program = Path(sysconfig.get_path("scripts"), "rclone")
    command = [str(program), "serve", "s3", str(folder), "--addr", "127.0.0.1:0", "--auth-key", f"{KEY},{SECRET}"]
    with _serve([*command, "--config", ""], r"http://127\.0\.0\.1:(\d+)/") as port:
        yield f"http://127.0.0.1:{port}"


@contextmanager
def fault_proxy(target: str) -> Iterator[FaultProxy]:
    """Start a proxy before a server, which can fail; a context manager that gives its control."""
    with _serve([sys.executable, "-m", "tests.remote.fault_proxy", target], r"^(\d+)$") as port:
        yield FaultProxy(f"http://127.0.0.1:{port}")


@contextmanager
def _serve(command: list[str], pattern: str) -> Iterator[str]:
    """Start a server that logs its port to stderr; a context manager that gives the port, and ends the server."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        deadline = threading.Timer(_START, process.kill)
        deadline.start()
        try:
            port = _find_port(process.stderr, pattern)
            deadline.cancel()
            # a log that nobody reads fills its pipe, and then the server waits
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield port
        finally:
            deadline.cancel()
            process.stdin.close()
            process.kill()
            process.wait(_START)


def _find_port(log: TextIO, pattern: str) -> str:
    seen = ""
    for line in log:
        seen += line
        if found := re.search(pattern, line.strip()):
            return found[1]
    raise RuntimeError(f"the server ended, or did not start in {_START} s; its log: {seen}")


def request(endpoint: str, method: str, path: str) -> str:
    """Send an unsigned request, and return the answer's body."""
    with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{path}", method=method), timeout=30) as answer:
        return answer.read().decode()  # type: ignore[no-any-return]
