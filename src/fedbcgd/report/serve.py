"""Serves the page on loopback, and refreshes it while runs continue."""

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
MAX_CONNECTIONS = 32  # at a time; further ones get status 503
MAX_REQUEST_BYTES = 1 << 14  # bytes of a request
REQUEST_SECONDS = 10.0  # for a whole request to arrive
RESPONSE_SECONDS = 300.0  # for a whole response to be read


class PageServer(ThreadingHTTPServer):
    """Serves the page as `/` and its current data as `/data.json`, to this machine alone.

    Args:
        folders: folders of runs, or folders that contain some.
        port: the port; 0 for a free one.

    Raises:
        UserError: the port cannot be used.
    """

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int = 0):
        self._collector = Collector(folders)
        self._lock = threading.Lock()
        self._free = threading.Semaphore(MAX_CONNECTIONS)
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise UserError(
                f"--port: expected a port that this process may use, got {port}: {error.strerror}; choose another, or leave "
                "it out for a free one"
            ) from None

    @property
    def address(self) -> str:
        """The URL of the page."""
        return f"http://{LOOPBACK}:{self.server_address[1]}/"

    def content(self) -> dict[str, Any]:
        """Return the data that the page shows now."""
        with self._lock:
            runs, problems = self._collector.collect()
            return content(runs, problems)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in a thread, or refuse it if there are too many."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        try:
            request.setblocking(False)
            request.send(b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 2\r\n\r\ntoo many connections\n")
            request.recv(MAX_REQUEST_BYTES)  # closing with unread bytes would lose the response
        except OSError:
            pass
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle a connection, then free its place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an unexpected error; a browser that closes its connection is not unexpected."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version = "fedbcgd"
    sys_version = ""
    # Defaults for requests that are malformed or were not read to the end, so that they get a status line, too.
    default_request_version = "HTTP/1.0"
    request_version, requestline, command = default_request_version, "", ""

    def handle(self) -> None:
        """Read one request within its limits of time and size, and respond to it."""
        try:
            head = _head(self.connection)
        except TimeoutError:
            self._respond(408, "text/plain", b"the request took too long\n")
            return
        if len(head) > MAX_REQUEST_BYTES:
            self._respond(431, "text/plain", b"the request is too long\n")
            return
        self.connection.settimeout(RESPONSE_SECONDS)
        self.rfile = io.BytesIO(head)
        self.handle_one_request()

    def do_GET(self) -> None:
        # DNS rebinding: another site's name may resolve to this machine, so only these two hosts are accepted.
        port = self.server.server_address[1]
        if self.headers.get("Host") not in (f"{LOOPBACK}:{port}", f"localhost:{port}"):
            self._respond(403, "text/plain", b"this server answers on loopback alone\n")
            return
        path = self.path.partition("?")[0]
        try:
            if path == "/":
                page = document(self.server.content(), watch=True)
                response: Any = (200, "text/html; charset=utf-8", page.encode())
            elif path == "/data.json":
                body = as_script(self.server.content()).encode()
                tag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
                same = self.headers.get("If-None-Match") == tag
                response = (304, "", b"", tag) if same else (200, "application/json", body, tag)
            else:
                response = (404, "text/plain", b"not found; this server has / and /data.json\n")
        except UserError as error:  # such as a folder that was removed
            response = (503, "text/plain; charset=utf-8", f"{shorten(str(error))}\n".encode())
        except Exception as error:  # the browser shows it; a closed connection would show nothing
            text = shorten(f"the page cannot be made: {type(error).__name__}: {error}")
            response = (500, "text/plain; charset=utf-8", f"{text}\n".encode())
        self._respond(*response)

    def _respond(self, code: int, kind: str, body: bytes, tag: str = "") -> None:
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
    """Read a request up to its empty line, or to the end of the connection; stop after MAX_REQUEST_BYTES bytes.

    Raises:
        TimeoutError: it did not arrive within REQUEST_SECONDS.
    """
    deadline = time.monotonic() + REQUEST_SECONDS
    head = b""
    while b"\r\n\r\n" not in head and len(head) <= MAX_REQUEST_BYTES:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        chunk = connection.recv(4096)
        if not chunk:
            break
        head += chunk
    return head
