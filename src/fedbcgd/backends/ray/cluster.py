"""Connecting to Ray, or starting it, and shutting it down. All backends of a process share one Ray."""

import logging
import os
import secrets
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fedbcgd.backends.placement import Placement
from fedbcgd.backends.workers.processes import cores
from fedbcgd.errors import UserError

_SILENT: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}  # for ray.init

_users = 0
_initialised = False  # whether this module called ray.init
_started = False  # whether this module started Ray on this machine


def package() -> Any:
    """Import and return the package `ray`.

    Raises:
        UserError: it is not installed, or cannot be imported.
    """
    try:
        # Ray prints to standard output, where results belong, that a worker died; the backend logs that too.
        with _environment(
            {} if "ray" in sys.modules else {"RAY_DEDUP_LOGS_SKIP_REGEX": "worker died|killed due to|marked dead"}
        ):
            import ray
    except ImportError as error:
        if error.name not in (None, "ray"):
            raise UserError(f"backend 'ray': the package ray is installed but cannot be imported: {error}") from error
        raise UserError("backend 'ray': expected the extra `ray`, got none: pip install 'fedbcgd[ray]'") from None
    return ray


def join(address: str | None, cpus: int) -> None:
    """Connect to Ray, unless this process is connected already.

    Args:
        address: of the cluster; None: start Ray on this machine.
        cpus: how many CPUs Ray may use if it is started here.

    Raises:
        UserError: Ray cannot be reached or started.
    """
    global _users, _initialised, _started
    ray = package()
    if not ray.is_initialized():
        if address is None:
            _start(ray, cpus)
        else:
            _connect(ray, address)
        _initialised, _started = True, address is None
    elif not _users:
        _initialised = _started = False
    _users += 1


def started_here() -> bool:
    """Return whether this module started Ray, so that all its processes are on this machine."""
    return _started


def leave() -> None:
    """Undo one `join`: the last one shuts Ray down, or disconnects, if `join` had connected."""
    global _users
    _users = max(0, _users - 1)
    if not _users and _initialised:
        package().shutdown()
        if _started:
            _read_settings(package())  # forget the token of the Ray that was shut down


@contextmanager
def keep(where: Placement) -> Iterator[None]:
    """Keep one Ray for several successive runs."""
    join(where.address, where.workers or cores())
    try:
        yield
    finally:
        leave()


def _start(ray: Any, cpus: int) -> None:
    """Start Ray on loopback, with a new token: whoever reaches its ports without one could run code."""
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    if "RAY_AUTH_MODE" not in os.environ:
        settings |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        with _quiet(), _environment(settings), _loopback(ray):
            _read_settings(ray)
            ray.init(**_SILENT, address="local", num_cpus=cpus, include_dashboard=False, _node_ip_address="127.0.0.1")
    except Exception as error:
        raise UserError(f"backend 'ray': Ray could not be started on this machine: {first_line(error)}") from error


@contextmanager
def _loopback(ray: Any) -> Iterator[None]:
    """Have Ray use 127.0.0.1 as the address of this machine, so that it listens on no other.

    On Linux it would take the address of a network card instead, unless this constant, which it reads from the environment
    when it is imported, disables clusters.
    """
    constants = ray._private.ray_constants
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def _read_settings(ray: Any) -> None:
    """Have Ray read its environment variables again, which it does only when it is imported."""
    ray._raylet.Config.initialize("")
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


def _connect(ray: Any, address: str) -> None:
    where = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    _check_reachable(where, address)
    try:
        with _quiet():
            ray.init(**_SILENT, address=address)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__  # a message about versions has several lines
        raise UserError(f"run.address: cannot connect to Ray at {address!r}: {reason}") from error


def _check_reachable(where: str, address: str) -> None:
    """Refuse an address where nothing answers: Ray would try for minutes, and then end the process."""
    host, colon, port = where.removeprefix("ray://").rpartition(":")
    if where == "auto":
        return
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f'run.address: expected "auto", "host:port" or "ray://host:port", got {where!r}')
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        named = where if where == address else f"{where} (from RAY_ADDRESS)"
        raise UserError(
            f"run.address: expected a Ray cluster, got no answer at {named}: {error.strerror or error}"
        ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide Ray's warnings, and restore this process's handler of SIGTERM, which ray.init replaces."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that the user has not set, and remove them afterwards."""
    added = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
