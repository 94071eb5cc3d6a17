"""The backends by name: what each can do and how it is made. A new backend is one more entry of `BACKENDS`.

Importing this module imports no backend, so that a configuration can be read without torch or Ray.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedbcgd.errors import UserError

if TYPE_CHECKING:
    from fedbcgd.backends.inprocess import Transport
    from fedbcgd.backends.placement import Placement
    from fedbcgd.engine.backend import Backend
    from fedbcgd.engine.client_state import StateStore
    from fedbcgd.engine.job import Job

    Make = Callable[[Job, StateStore, int, Placement, Transport | None], Backend]


def _do_nothing() -> None:
    pass


@dataclass(frozen=True)
class BackendEntry:
    """What is known of a backend before it is made.

    An option that only this backend has is also a field of `Placement`, a key of `[run]` (runs/config.py) and an argument
    of `simulate`.
    """

    name: str
    summary: str  # for the description of `[run] backend`
    make: "Make"  # a function of job, store, cohort, placement and transport
    check_installed: Callable[[], None] = _do_nothing  # raises UserError if a package is missing
    start_early: Callable[[], None] = _do_nothing  # called as soon as the backend is chosen, to prepare it
    # Returns a context within which successive runs share what is expensive to start, such as Ray.
    shared_by_runs: "Callable[[Placement], AbstractContextManager[None]] | None" = None
    has_workers: bool = True  # False: all work is done in this process
    options: tuple[str, ...] = ()  # fields of Placement that no other backend has
    device_is_remote: bool = False  # `device` is that of the workers; the server computes on the CPU
    takes_transport: bool = False  # accepts `transport`, see `simulate`
    batches_clients: bool = False  # can train several clients in one batch
    overlaps_evaluation: bool = False  # can evaluate during the next round: an OverlappingBackend
    crashes_workers: bool = False  # has a method `pids`: the local worker processes that `[network] crash` may kill


def _in_process(
    job: "Job", store: "StateStore", cohort: int, where: "Placement", transport: "Transport | None"
) -> "Backend":
    from fedbcgd.backends.inprocess import InProcess

    return InProcess(job, store, transport)


def _workers(
    job: "Job", store: "StateStore", cohort: int, where: "Placement", transport: "Transport | None"
) -> "Backend":
    from fedbcgd.backends.workers.backend import Workers
    from fedbcgd.backends.workers.processes import cores

    return Workers(job, store, min(where.workers or cores(), cohort), cohort)


def _start_forkserver() -> None:
    from fedbcgd.backends.workers.processes import start_early

    start_early()


def _ray(job: "Job", store: "StateStore", cohort: int, where: "Placement", transport: "Transport | None") -> "Backend":
    from fedbcgd.backends.ray.backend import Ray

    return Ray(job, store, cohort, where.workers, where.address, where.gpus, where.device)


def _check_ray() -> None:
    from fedbcgd.backends.ray.cluster import package

    package()


def _keep_ray(where: "Placement") -> AbstractContextManager[None]:
    from fedbcgd.backends.ray.cluster import keep

    return keep(where)


BACKENDS: dict[str, BackendEntry] = {
    entry.name: entry
    for entry in (
        BackendEntry(
            name="inprocess",
            summary="this process, as with workers = 0 or a GPU",
            make=_in_process,
            has_workers=False,
            takes_transport=True,
            batches_clients=True,
        ),
        BackendEntry(
            name="workers",
            summary="processes of this machine",
            make=_workers,
            start_early=_start_forkserver,
            batches_clients=True,
            overlaps_evaluation=True,
            crashes_workers=True,
        ),
        BackendEntry(
            name="ray",
            summary="actors of a Ray cluster (extra `ray`)",
            make=_ray,
            check_installed=_check_ray,
            shared_by_runs=_keep_ray,
            options=("address", "gpus"),
            device_is_remote=True,
        ),
    )
}


def find(where: "Placement") -> BackendEntry:
    """Return the entry of the backend that a placement leads to.

    Worker processes need `workers` above 0 and the CPU; otherwise this process does the work.

    Raises:
        UserError: there is no backend of this name.
    """
    entry = BACKENDS.get(where.backend)
    if entry is None:
        raise UserError(f"backend: expected one of {', '.join(BACKENDS)}, got {where.backend!r}")
    on_cpu = where.device.partition(":")[0] == "cpu"
    if entry.has_workers and not entry.device_is_remote and (where.workers == 0 or not on_cpu):
        return BACKENDS["inprocess"]
    return entry


def names(capability: str) -> str:
    """Return the names of the backends with a capability, such as `batches_clients`, as text."""
    return " or ".join(repr(entry.name) for entry in BACKENDS.values() if getattr(entry, capability))


def make_backend(
    job: "Job", store: "StateStore", cohort: int, where: "Placement", transport: "Transport | None" = None
) -> "Backend":
    """Make the backend that a placement chooses.

    Args:
        job: model, data and algorithm.
        store: the clients' state.
        cohort: clients of a round; more workers than that are not started.
        where: which backend, how many workers, on which device.
        transport: see `simulate`; only for the backend in this process.

    Raises:
        UserError: the backend does not exist, cannot be started, or cannot do what the job needs.
    """
    entry = find(where)
    if job.batch_clients is not None and not entry.batches_clients:
        raise UserError(
            f"batch_clients: expected none with backend = {where.backend!r}, got {job.batch_clients}; leave it out, or take "
            f"backend = {names('batches_clients')}"
        )
    return entry.make(job, store, cohort, where, transport)


def keep_for(placements: "Iterable[Placement]") -> ExitStack:
    """Start what successive runs share, such as Ray, and keep it until the returned stack is closed."""
    first: dict[str, Placement] = {}
    for where in placements:
        first.setdefault(find(where).name, where)
    with ExitStack() as stack:
        for name, where in first.items():
            if (shared := BACKENDS[name].shared_by_runs) is not None:
                stack.enter_context(shared(where))
        return stack.pop_all()
