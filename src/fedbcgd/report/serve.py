"""The page on loopback, refreshed while runs go on."""

import hashlib
import io
import socket
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedbcgd.core.reading import shorten
from fedbcgd.errors import UserError
from fedbcgd.report.collect import Collector
from fedbcgd.report.page import as_script, content, document

LOOPBACK = "127.0.0.1"
MOST_CONNECTIONS = 32  # at a time; one more is told so and closed
MOST_HEAD = 1 << 14  # bytes of a request
REQUEST_SECONDS = 10.0  # for the whole of a request to arrive
ANSWER_SECONDS = 300.0  # for the whole of an answer to be taken


class PageServer(ThreadingHTTPServer):
    """Serves `/`, the page, and `/data.json`, what it shows now; to this machine alone."""

    daemon_threads = True

    def __init__(self, places: Sequence[Path], port: int = 0):
        self._collector = Collector(places)
        self._lock = threading.Lock()
        self._free = threading.Semaphore(MOST_CONNECTIONS)
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise UserError(f"--port {port}: {error.strerror}; without it a free one is chosen") from None

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_address[1]}/"

    def content(self) -> dict[str, Any]:
        with self._lock:
            runs, problems = self._collector.collect()
            return content(runs, problems)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        try:
            request.setblocking(False)
            request.send(b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 2\r\n\r\ntoo many connections\n")
            request.recv(MOST_HEAD)  # closed with something unread, the answer would be lost
        except OSError:
            pass
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # a reader that goes away is no error


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version = "fedbcgd"
    sys_version = ""
    default_request_version = "HTTP/1.0"  # a line that is no request is answered with a status too
    request_version, requestline, command = default_request_version, "", ""  # of a request that is not read to its end

    def handle(self) -> None:
        """Read the whole request within its time and size, then answer it; there is one per connection."""
        try:
            head = _head(self.connection)
        except TimeoutError:
            self._answer(408, "text/plain", b"the request took too long\n")
            return
        if len(head) > MOST_HEAD:
            self._answer(431, "text/plain", b"the request is too long\n")
            return
        self.connection.settimeout(ANSWER_SECONDS)
        self.rfile = io.BytesIO(head)
        self.handle_one_request()

    def do_GET(self) -> None:
        # A page from elsewhere may point a name of its own at this machine; only these two names are ours.
        port = self.server.server_address[1]
        if self.headers.get("Host") not in (f"{LOOPBACK}:{port}", f"localhost:{port}"):
            self._answer(403, "text/plain", b"this server answers on loopback alone\n")
            return
        path = self.path.partition("?")[0]
        try:
            if path == "/":
                page = document(self.server.content(), watch=True)
                answer: Any = (200, "text/html; charset=utf-8", page.encode())
            elif path == "/data.json":
                body = as_script(self.server.content()).encode()
                tag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
                same = self.headers.get("If-None-Match") == tag
                answer = (304, "", b"", tag) if same else (200, "application/json", body, tag)
            else:
                answer = (404, "text/plain", b"there is / and /data.json\n")
        except UserError as error:  # such as a folder that has been taken away
            answer = (503, "text/plain; charset=utf-8", f"{shorten(str(error))}\n".encode())
        except Exception as error:  # the page says it, where a connection that breaks off would say nothing
            said = shorten(f"the page cannot be made: {type(error).__name__}: {error}")
            answer = (500, "text/plain; charset=utf-8", f"{said}\n".encode())
        self._answer(*answer)

    def _answer(self, code: int, kind: str, body: bytes, tag: str = "") -> None:
        self.send_response(code)
        if kind:
            self.send_header("Content-Type", kind)
        if tag:
            self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _head(connection: socket.socket) -> bytes:
    """A request up to its empty line, or as much of it as there is; more than MOST_HEAD bytes if it is too long.

    Raises:
        TimeoutError: it is not there in time, however steadily it arrives.
    """
    ends = time.monotonic() + REQUEST_SECONDS
    head = b""
    while b"\r\n\r\n" not in head and len(head) <= MOST_HEAD:
        left = ends - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        some = connection.recv(4096)
        if not some:
            break
        head += some
    return head
