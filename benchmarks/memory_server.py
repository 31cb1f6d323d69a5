"""An S3 server that keeps objects in memory and counts requests: it costs little beside the client that it serves.

``python -m benchmarks.memory_server`` prints its port, and ends with its standard input. It knows what saves and loads
ask for (objects, ranges, copies, multipart uploads, conditional creates, listings in one page), checks no signature and
has one bucket.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections import Counter
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

#: The path that answers with the requests by kind since it was asked last, as JSON.
COUNTS = "/-/"
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.Lock()
        self.objects: dict[str, tuple[bytes | bytearray, float]] = {}
        self.uploads: dict[str, dict[int, bytes | bytearray]] = {}
        self.counts: Counter[str] = Counter()
        self.begun = 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def _begin(self) -> tuple[str, dict[str, str], bytearray]:
        """Count the request; return the object's key, the query and the body."""
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        body = bytearray(int(self.headers.get("Content-Length") or 0))
        view = memoryview(body)
        while view:
            view = view[self.rfile.readinto(view) :]  # type: ignore[attr-defined]
        key = unquote(parts.path).lstrip("/").partition("/")[2]
        kind = "LIST" if self.command == "GET" and not key else self.command
        if self.path != COUNTS:
            with self.server.lock:
                self.server.counts[kind] += 1
        return key, query, body

    def do_GET(self) -> None:
        """Send an object, a range of it, a listing, or the counts."""
        key, query, _ = self._begin()
        if self.path == COUNTS:
            with self.server.lock:
                counts, self.server.counts = self.server.counts, Counter()
            self._answer(200, json.dumps(counts).encode())
        elif key:
            self._send_object(key)
        else:
            self._list(query.get("prefix", ""), query.get("delimiter", ""))

    def do_HEAD(self) -> None:
        """Send the headers of an object; a bucket is there."""
        key, _, _ = self._begin()
        if key:
            self._send_object(key)
        else:
            self._answer(200, b"")

    def do_PUT(self) -> None:
        """Take an object or a part."""
        key, query, body = self._begin()
        with self.server.lock:
            if "uploadId" in query:
                self.server.uploads[query["uploadId"]][int(query["partNumber"])] = body
            elif key in self.server.objects and self.headers.get("If-None-Match") == "*":
                key = ""
            else:
                if source := unquote(self.headers.get("x-amz-copy-source", "")):
                    body = self.server.objects[source.lstrip("/").partition("/")[2]][0]  # type: ignore[assignment]
                self.server.objects[key] = (body, time.time())
        if key:
            copied = _xml("CopyObjectResult", '<ETag>"0"</ETag>') if "x-amz-copy-source" in self.headers else b""
            self._answer(200, copied, [("ETag", '"0"')])
        else:
            self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")

    def do_POST(self) -> None:
        """Begin or end a multipart upload, or delete many objects."""
        key, query, body = self._begin()
        if "uploads" in query:
            with self.server.lock:
                self.server.begun += 1
                name = f"upload{self.server.begun}"
                self.server.uploads[name] = {}
            said = f"<Bucket>bucket</Bucket><Key>{escape(key)}</Key><UploadId>{name}</UploadId>"
            self._answer(200, _xml("InitiateMultipartUploadResult", said))
        elif "uploadId" in query:
            with self.server.lock:
                parts = self.server.uploads.pop(query["uploadId"])
            data = b"".join(parts[number] for number in sorted(parts))
            with self.server.lock:
                self.server.objects[key] = (data, time.time())
            said = f'<Bucket>bucket</Bucket><Key>{escape(key)}</Key><ETag>"0"</ETag>'
            self._answer(200, _xml("CompleteMultipartUploadResult", said))
        else:
            keys = re.findall(r"<Key>([^<]*)</Key>", body.decode())
            with self.server.lock:
                for each in keys:
                    self.server.objects.pop(each, None)
            self._answer(200, _xml("DeleteResult", "".join(f"<Deleted><Key>{each}</Key></Deleted>" for each in keys)))

    def do_DELETE(self) -> None:
        """Delete an object, or abort an upload."""
        key, query, _ = self._begin()
        with self.server.lock:
            self.server.uploads.pop(query.get("uploadId", ""), None)
            if "uploadId" not in query:
                self.server.objects.pop(key, None)
        self._answer(204, b"")

    def _send_object(self, key: str) -> None:
        with self.server.lock:
            data, written = self.server.objects.get(key, (None, 0.0))
        if data is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        headers = [("Last-Modified", formatdate(written, usegmt=True)), ("ETag", '"0"'), ("Accept-Ranges", "bytes")]
        wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
        if wanted is None:
            self._answer(200, memoryview(data), headers)
            return
        first, last = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
        headers.append(("Content-Range", f"bytes {first}-{last}/{len(data)}"))
        self._answer(206, memoryview(data)[first : last + 1], headers)

    def _list(self, prefix: str, delimiter: str) -> None:
        with self.server.lock:
            found = sorted((key, len(data), at) for key, (data, at) in self.server.objects.items())
        folders: dict[str, None] = {}
        rows = []
        for key, size, written in found:
            if not key.startswith(prefix):
                continue
            folder, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            if cut:
                folders[prefix + folder + cut] = None
                continue
            when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(written))
            rows.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>{when}</LastModified><ETag>0</ETag>"
                f"<Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            )
        rows += [f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in folders]
        head = f"<Name>bucket</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(rows)}</KeyCount>"
        self._answer(200, _xml("ListBucketResult", f"{head}<IsTruncated>false</IsTruncated>{''.join(rows)}"))

    def _answer(self, status: int, data: bytes | memoryview, headers: list[tuple[str, str]] | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers or []:
            self.send_header(name, value)
        if status != 204:  # noqa: PLR2004 - no content
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.connection.sendall(data)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def _xml(name: str, content: str) -> bytes:
    head = '<?xml version="1.0" encoding="UTF-8"?>'
    return f'{head}<{name} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{content}</{name}>'.encode()


if __name__ == "__main__":
    _server = _Server()
    threading.Thread(target=_server.serve_forever, daemon=True).start()
    sys.stdout.write(f"{_server.server_port}\n")
    sys.stdout.flush()
    sys.stdin.read()
