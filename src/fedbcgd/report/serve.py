"""The page on loopback, refreshed while runs go on."""

import hashlib
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedbcgd.errors import UserError
from fedbcgd.report.collect import Collector
from fedbcgd.report.page import as_script, content, document

LOOPBACK = "127.0.0.1"


class PageServer(ThreadingHTTPServer):
    """Serves `/`, the page, and `/data.json`, what it shows now; to this machine alone."""

    daemon_threads = True

    def __init__(self, places: Sequence[Path], port: int = 0):
        self._collector = Collector(places)
        self._lock = threading.Lock()
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


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version = "fedbcgd"
    sys_version = ""

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
                self._answer(200, "text/html; charset=utf-8", page.encode())
            elif path == "/data.json":
                body = as_script(self.server.content()).encode()
                tag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
                if self.headers.get("If-None-Match") == tag:
                    self._answer(304, "", b"", tag)
                else:
                    self._answer(200, "application/json", body, tag)
            else:
                self._answer(404, "text/plain", b"there is / and /data.json\n")
        except UserError as error:  # such as a folder that has been taken away
            self._answer(503, "text/plain; charset=utf-8", f"{error}\n".encode())
        except Exception as error:  # the page says it, where a connection that breaks off would say nothing
            said = f"the page cannot be made: {type(error).__name__}: {error}\n"
            self._answer(500, "text/plain; charset=utf-8", said.encode(errors="replace"))

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
        try:
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the reader has gone: that is its right

    def log_message(self, format: str, *args: Any) -> None:
        pass
