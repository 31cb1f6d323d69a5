"""Program: an HTTP proxy between a client and a store, which counts requests and fails at those that it is told to.

``python -m tests.remote.fault_proxy TARGET`` prints its port, and ends with its standard input.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

#: What may happen to a request; the last four end the connection without a whole answer.
FAULTS = ("500", "503", "delay", "drop-before", "drop-after", "truncate", "reset")
#: The clients are killed before the store has the request, or after it has answered.
KILLS = ("kill-before", "kill-after")
_DELAY = 0.3  # seconds
_CONTROL = "/-/"
_CODES = {500: "InternalError", 503: "SlowDown"}
#: Headers that speak of one connection, not of the request.
_HOPS = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "expect"})


class FaultProxy:
    """The control of a proxy that runs in another process.

    Args:
        endpoint: Its URL, which clients take for the store's.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def fail(self, fault: str, first: int = 1, last: int | None = None, **options: Any) -> None:
        """Forget all requests, and fail from the first-th to the last-th of those that follow.

        Args:
            fault: One of ``FAULTS`` or ``KILLS``, or ``"answer"``.
            first: Counted from 1.
            last: By default ``first``; 0 fails all that follow.
            options: ``pids`` to kill; ``status`` and ``code`` to answer.
        """
        self._call({"fault": fault, "first": first, "last": first if last is None else last, **options})

    def work(self) -> None:
        """Forget all requests, and fail no longer."""
        self._call({"fault": "", "first": 1, "last": 0})

    def requests(self) -> list[list[str]]:
        """Return verb, path and fault of each request since the last call of ``fail`` or ``work``."""
        return self._call(None)  # type: ignore[no-any-return]

    def _call(self, plan: dict[str, Any] | None) -> Any:
        data = None if plan is None else json.dumps(plan).encode()
        call = urllib.request.Request(self.endpoint + _CONTROL, data, method="GET" if data is None else "PUT")
        with urllib.request.urlopen(call, timeout=30) as answer:
            return json.load(answer)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    plan: dict[str, Any] = {"fault": "", "first": 1, "last": 0}  # noqa: RUF012 - replaced, never changed

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = urlsplit(target)
        self.seen: list[list[str]] = []
        self.lock = threading.Lock()

    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that were killed."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def _serve(self) -> None:
        if self.path == _CONTROL:
            self._control()
            return
        with self.server.lock:
            plan, number = self.server.plan, len(self.server.seen) + 1
            hit = plan["first"] <= number <= (plan["last"] or number) and bool(plan["fault"])
            fault = plan["fault"] if hit else ""
            self.server.seen.append([self.command, self.path, fault])
        if fault == "reset":
            self._reset()
            return
        body = self._read_body()
        if fault == "drop-before":
            self.close_connection = True
        elif fault == "kill-before":
            self._kill(plan["pids"])
        elif fault in {"500", "503", "answer"}:
            status = plan["status"] if fault == "answer" else int(fault)
            self._answer_error(status, plan.get("code") or _CODES[status])
        else:
            if fault == "delay":
                time.sleep(_DELAY)
            self._forward(body, fault, plan)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve  # noqa: N815 - http.server looks for these names

    def _control(self) -> None:
        if self.command == "PUT":
            plan = json.loads(self._read_body())
            with self.server.lock:
                self.server.plan, self.server.seen = plan, []
        with self.server.lock:
            data = json.dumps(self.server.seen).encode()
        self._send(200, [], data, len(data))

    def _forward(self, body: bytes, fault: str, plan: dict[str, Any]) -> None:
        target = http.client.HTTPConnection(self.server.target.hostname or "", self.server.target.port, timeout=60)
        target.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in _HOPS:
                target.putheader(name, value)
        if body or self.command in {"PUT", "POST"}:
            target.putheader("Content-Length", str(len(body)))
        target.endheaders(body)
        answer = target.getresponse()
        data = answer.read()
        headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in _HOPS]
        length = int(answer.headers.get("Content-Length") or 0) if self.command == "HEAD" else len(data)
        target.close()
        if fault == "kill-after":
            self._kill(plan["pids"])
        elif fault == "drop-after" or (fault == "truncate" and not data):
            self.close_connection = True
        else:
            self._send(answer.status, headers, data[: len(data) // 2] if fault == "truncate" else data, length)
            self.close_connection = self.close_connection or fault == "truncate"

    def _answer_error(self, status: int, code: str) -> None:
        # what a store may repeat of the request: nothing of it may be shown
        data = (
            f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>the store says {code}</Message>'
            "<AWSAccessKeyId>the-key-id</AWSAccessKeyId><CanonicalRequest>x-amz-security-token:the-token"
            "</CanonicalRequest></Error>"
        ).encode()
        data = b"" if self.command == "HEAD" else data
        self._send(status, [("Content-Type", "application/xml")], data, len(data))

    def _send(self, status: int, headers: list[tuple[str, str]], data: bytes, length: int) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if status != http.HTTPStatus.NO_CONTENT:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(data)

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(parts)

    def _reset(self) -> None:
        """Take half of the request's body, and answer with a reset of the connection."""
        self.rfile.read(int(self.headers.get("Content-Length") or 0) // 2)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def _kill(self, pids: list[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)  # children of the program that waits for them: no other process has their ids
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def _main(target: str) -> None:
    server = _Server(target)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stderr.write(f"{server.server_port}\n")
    sys.stderr.flush()
    sys.stdin.read()


if __name__ == "__main__":
    _main(sys.argv[1])
