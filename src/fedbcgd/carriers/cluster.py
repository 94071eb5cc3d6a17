"""Ray itself: found, started here or joined, and given back. All carriers of a process share one."""

import logging
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fedbcgd.carriers.where import Where
from fedbcgd.errors import UserError
from fedbcgd.processes import cores

_users = 0
_ours = False  # whether it was this module that called ray.init


def package() -> Any:
    """The package `ray`, imported only when it is asked for."""
    try:
        # Ray prints on standard output that a worker died, where a program's results belong; the carrier says it as well.
        with _environment(
            {} if "ray" in sys.modules else {"RAY_DEDUP_LOGS_SKIP_REGEX": "worker died|killed due to|marked dead"}
        ):
            import ray
    except ImportError as error:
        if error.name not in (None, "ray"):
            raise UserError(f"carrier 'ray': the package ray is there but cannot be imported: {error}") from error
        raise UserError("carrier 'ray' needs the extra `ray`: pip install 'fedbcgd[ray]'") from None
    return ray


def join(address: str | None, cpus: int) -> None:
    """Connect to Ray, or start one with so many CPUs where no address is given. What is connected already is used."""
    global _users, _ours
    ray = package()
    if not ray.is_initialized():
        if address is None:
            _start(ray, cpus)
        else:
            _connect(ray, address)
        _ours = True
    elif not _users:
        _ours = False
    _users += 1


def leave() -> None:
    """The last one to leave shuts Ray down, if it was started or joined here."""
    global _users
    _users = max(0, _users - 1)
    if not _users and _ours:
        package().shutdown()


@contextmanager
def kept(runs: Iterable[Where]) -> Iterator[None]:
    """One Ray for several runs, one after the other, if they want it."""
    first = next((where for where in runs if where.carrier == "ray"), None)
    if first is None:
        yield
        return
    join(first.address, first.workers or cores())
    try:
        yield
    finally:
        leave()


def _start(ray: Any, cpus: int) -> None:
    try:
        with _quiet(), _environment({"RAY_USAGE_STATS_ENABLED": "0"}):
            _init(ray, address="local", num_cpus=cpus, include_dashboard=False)
    except Exception as error:
        raise UserError(f"Ray could not be started on this machine: {first_line(error)}") from error


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
