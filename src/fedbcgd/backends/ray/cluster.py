"""Ray itself: found, started here or joined, and given back. All backends of a process share one."""

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

_users = 0
_ours = False  # whether it was this module that called ray.init
_here = False  # whether it started Ray on this machine


def package() -> Any:
    """The package `ray`, imported only when it is asked for."""
    try:
        # Ray prints on standard output that a worker died, where a program's results belong; the backend says it as well.
        with _environment(
            {} if "ray" in sys.modules else {"RAY_DEDUP_LOGS_SKIP_REGEX": "worker died|killed due to|marked dead"}
        ):
            import ray
    except ImportError as error:
        if error.name not in (None, "ray"):
            raise UserError(f"backend 'ray': the package ray is there but cannot be imported: {error}") from error
        raise UserError("backend 'ray' needs the extra `ray`: pip install 'fedbcgd[ray]'") from None
    return ray


def join(address: str | None, cpus: int) -> None:
    """Connect to Ray, or start one with so many CPUs where no address is given. What is connected already is used."""
    global _users, _ours, _here
    ray = package()
    if not ray.is_initialized():
        if address is None:
            _start(ray, cpus)
        else:
            _connect(ray, address)
        _ours, _here = True, address is None
    elif not _users:
        _ours = _here = False
    _users += 1


def started_here() -> bool:
    """Whether Ray was started by this module, so that all its processes are on this machine."""
    return _here


def leave() -> None:
    """The last one to leave shuts Ray down, if it was started or joined here."""
    global _users
    _users = max(0, _users - 1)
    if not _users and _ours:
        package().shutdown()
        if _here:
            _read_settings(package())  # the token was that Ray's


@contextmanager
def keep(where: Placement) -> Iterator[None]:
    """Keep one Ray for several runs, one after the other."""
    join(where.address, where.workers or cores())
    try:
        yield
    finally:
        leave()


def _start(ray: Any, cpus: int) -> None:
    """Start Ray on loopback, with a token of its own: whoever reaches its ports can run code."""
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    if "RAY_AUTH_MODE" not in os.environ:
        settings |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        with _quiet(), _environment(settings), _loopback(ray):
            _read_settings(ray)
            _init(ray, address="local", num_cpus=cpus, include_dashboard=False, _node_ip_address="127.0.0.1")
    except Exception as error:
        raise UserError(f"Ray could not be started on this machine: {first_line(error)}") from error


@contextmanager
def _loopback(ray: Any) -> Iterator[None]:
    """Have Ray take 127.0.0.1 for the address of this machine, and so listen there alone.

    On Linux it would replace that with the address of a network card, unless this constant (which it reads from the
    environment when it is imported) says that there are no clusters.
    """
    constants = ray._private.ray_constants
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def _read_settings(ray: Any) -> None:
    """Have Ray read its variables again: it did so when it was imported."""
    ray._raylet.Config.initialize("")
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


def _connect(ray: Any, address: str) -> None:
    where = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    _reachable(where, address)
    try:
        with _quiet():
            _init(ray, address=address)
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__  # such as two versions, on two lines
        raise UserError(f"run.address: Ray at {address!r} could not be joined: {why}") from error


def _init(ray: Any, **arguments: Any) -> None:
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **arguments)


def _reachable(where: str, address: str) -> None:
    """Ray itself would try for minutes, and then end the process."""
    host, colon, port = where.removeprefix("ray://").rpartition(":")
    if where == "auto":
        return
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f'run.address: "auto", "host:port" or "ray://host:port" is wanted, given {where!r}')
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        named = where if where == address else f"{where} (from RAY_ADDRESS)"
        raise UserError(f"run.address: nothing answers at {named}: {error.strerror or error}") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Ray's advice on standard error, and with the process's own way to handle `kill`, which ray.init replaces."""
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
    """These variables set within, unless the user has set them."""
    added = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
