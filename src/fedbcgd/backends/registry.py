"""The backends by name."""

from fedbcgd.backends.inprocess import InProcess, Transport
from fedbcgd.backends.placement import Where
from fedbcgd.backends.workers.backend import Workers
from fedbcgd.backends.workers.processes import cores
from fedbcgd.engine.backend import Carrier
from fedbcgd.engine.client_state import StateStore
from fedbcgd.engine.job import Job
from fedbcgd.errors import UserError


def make_backend(job: Job, store: StateStore, cohort: int, where: Where, transport: Transport | None = None) -> Carrier:
    """Worker processes, one per core unless told otherwise; this process where 0 is asked for or a GPU computes."""
    if where.carrier == "ray":
        if job.together is not None:
            raise UserError("together: only worker processes and this process compute clients together, not Ray")
        from fedbcgd.backends.ray.backend import Ray

        return Ray(job, store, cohort, where.workers, where.address, where.gpus, where.device)
    on_cpu = next(job.module.parameters()).device.type == "cpu"
    if where.workers == 0 or not on_cpu:
        return InProcess(job, store, transport)
    return Workers(job, store, min(where.workers or cores(), cohort), cohort)
