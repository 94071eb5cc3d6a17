"""The backends by name."""

from fedbcgd.backends.inprocess import InProcess, Transport
from fedbcgd.backends.placement import Placement
from fedbcgd.backends.workers.backend import Workers
from fedbcgd.backends.workers.processes import cores
from fedbcgd.engine.backend import Backend
from fedbcgd.engine.client_state import StateStore
from fedbcgd.engine.job import Job
from fedbcgd.errors import UserError


def make_backend(
    job: Job, store: StateStore, cohort: int, where: Placement, transport: Transport | None = None
) -> Backend:
    """Worker processes, one per core unless told otherwise; this process where 0 is asked for or a GPU computes."""
    if where.backend == "ray":
        if job.together is not None:
            raise UserError("together: only worker processes and this process compute clients together, not Ray")
        from fedbcgd.backends.ray.backend import Ray

        return Ray(job, store, cohort, where.workers, where.address, where.gpus, where.device)
    on_cpu = next(job.module.parameters()).device.type == "cpu"
    if where.workers == 0 or not on_cpu:
        return InProcess(job, store, transport)
    return Workers(job, store, min(where.workers or cores(), cohort), cohort)
