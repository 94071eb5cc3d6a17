"""The page's server in a thread, for as long as a test needs it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedbcgd.report.serve import PageServer


@contextmanager
def serving(*folders: Path) -> Iterator[PageServer]:
    server = PageServer(folders)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
