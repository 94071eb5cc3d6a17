"""The backends by name: what each can do and how it is made. A new backend is one entry of `BACKENDS`.

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


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class BackendEntry:
    """One backend, as it can be known before it is made."""

    name: str
    summary: str  # for the description of `[run] backend`
    make: "Make"  # of job, store, cohort, placement and transport
    check_installed: Callable[[], None] = _nothing  # raises UserError where a package is missing
    start_early: Callable[[], None] = _nothing  # called as soon as it is known that the backend will be used
    keep: "Callable[[Placement], AbstractContextManager[None]] | None" = None  # holds what several runs share
    has_workers: bool = True  # False: everything is done in this process
    options: tuple[str, ...] = ()  # fields of Placement that no other backend has
    device_is_remote: bool = False  # `device` is the workers'; the server computes on the CPU
    takes_transport: bool = False  # a stand-in for the network, see `simulate`
    batches_clients: bool = False  # computes several clients in one multiplication
    overlaps_evaluation: bool = False  # evaluates beside the next round: an OverlappingBackend
    crashes_workers: bool = False  # has `pids`, processes of this machine that [network] crash may kill


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
            keep=_keep_ray,
            options=("address", "gpus"),
            device_is_remote=True,
        ),
    )
}


def find(where: "Placement") -> BackendEntry:
    """The backend of a placement: worker processes need `workers` above 0 and the CPU, or this process does the work.

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
    """The backends that have a capability, such as `batches_clients`."""
    return " or ".join(repr(entry.name) for entry in BACKENDS.values() if getattr(entry, capability))


def make_backend(
    job: "Job", store: "StateStore", cohort: int, where: "Placement", transport: "Transport | None" = None
) -> "Backend":
    """Make the backend that a placement chooses.

    Args:
        job: what the clients' work needs.
        store: the clients' state.
        cohort: clients of a round; more workers than that are not started.
        where: which backend, how many workers, on which device.
        transport: stands for the network; only for the backend in this process.

    Raises:
        UserError: the backend cannot be had, or cannot do what the job asks for.
    """
    entry = find(where)
    if job.batch_clients is not None and not entry.batches_clients:
        raise UserError(
            f"batch_clients: expected backend = {names('batches_clients')} with it, got {where.backend!r}; leave it out"
        )
    return entry.make(job, store, cohort, where, transport)


def keep_for(placements: "Iterable[Placement]") -> ExitStack:
    """Hold what several runs, one after the other, share: such as one Ray for all of them. A context manager."""
    first: dict[str, Placement] = {}
    for where in placements:
        first.setdefault(find(where).name, where)
    with ExitStack() as stack:
        for name, where in first.items():
            if (keep := BACKENDS[name].keep) is not None:
                stack.enter_context(keep(where))
        return stack.pop_all()
