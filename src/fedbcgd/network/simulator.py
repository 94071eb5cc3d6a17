"""The network of a run: who is there, when a round closes, what goes wrong, and what time it is.

The clock looks at what was really sent (the ledger's entries). Who is late or gone is decided from the plan, before
anybody trains: so it is the same on every backend, and a client whose upload would be discarded computes nothing and
keeps its state.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from fedbcgd.algorithms.uplinks import Matched
from fedbcgd.algorithms.uplinks.assignment import fitted_sizes
from fedbcgd.core.algorithm import Algorithm
from fedbcgd.core.messages import Plan, Task
from fedbcgd.core.objective import objective
from fedbcgd.core.server import Server
from fedbcgd.engine.backend import Backend, Inbox
from fedbcgd.engine.job import Job
from fedbcgd.errors import UserError
from fedbcgd.network.closing import Closing, close
from fedbcgd.network.faults import FaultInjector, crashes, dropped, spoilt
from fedbcgd.network.links import Links
from fedbcgd.network.settings import Network
from fedbcgd.network.traffic import Round
from fedbcgd.rng import stream


def fit_to_links(
    algorithm: Algorithm,
    network: Network | None,
    model: nn.Module,
    clients: Sequence[Any],
    cohort: int | None,
    seed: int,
) -> Algorithm:
    """The algorithm with blocks of the sizes that fit the links, where it asks for that."""
    uplink = algorithm.uplink
    if network is None or not isinstance(uplink, Matched) or not uplink.fits_links:
        return algorithm
    asked = network.sampled(min(10, len(clients)) if cohort is None else cohort, len(clients))
    links = network.links(len(clients), seed)
    even = replace(algorithm, uplink=uplink.fitted([1.0] * uplink.blocks))
    layout = even.uplink.layout(model)
    lengths = [even.lengths(layout, j) for j in range(layout.blocks)]
    first, *rest = (sum(each[channel][0] for channel in algorithm.local.channels) for each in lengths)
    costs = _costs(Job(even, layout, model, objective(), seed, clients), links)[:, 0]
    fixed = costs - first / links.uplink  # of each client, whatever its block
    judged = (links.uplink, asked, uplink.blocks, uplink.haste, stream(seed, "fit"), fixed, first + sum(rest))
    return replace(algorithm, uplink=uplink.fitted(fitted_sizes(*judged)))


class NetworkSimulator:
    """`record` gets what was sent in each round; without a network that is all it does."""

    def __init__(self, job: Job, network: Network | None, record: Callable[[Round], None] | None = None):
        self.network = network
        self.seconds = 0.0  # since the beginning of the run, on the clock of the network
        self.record = record
        self._seed = job.seed
        self._acts = False  # whether a round may close without somebody
        self._minimum: int | None = None
        self._closing: Closing | None = None
        self._tasks: Sequence[Task] = ()
        self.links: Links | None = None
        if network is not None:
            self.links = network.links(len(job.clients), job.seed)
            self.costs = _costs(job, self.links)
            self._acts = network.closes and not job.algorithm.uplink.pooled
            if self._acts and network.times:
                _refuse_unknown_sizes(job)
            if self._acts and network.deadline is not None and self.costs.min() > network.deadline:
                raise UserError(
                    f"network.deadline: nobody can answer within {network.deadline:g} s; the fastest client with the "
                    f"smallest block takes {self.costs.min():.3g} s"
                )

    # -- a round ------------------------------------------------------------------------------------------------------

    def sampled(self, cohort: int, clients: int) -> int:
        """How many clients are asked so that there are `cohort` to wait for."""
        return cohort if self.network is None else self.network.sampled(cohort, clients)

    def attach(self, server: Server, cohort: int) -> None:
        """What the server must know before it plans its first round."""
        if self.network is not None:
            server.costs = self.costs
            self._minimum = self.network.minimum
            if self._minimum is None and self.network.oversample > 1:
                # Rounded up: then no fewer uploads arrive than if the cohort alone had been asked.
                self._minimum = -(-cohort // server.layout.blocks)
            if self._minimum is not None and self._minimum > server.cohort:
                raise UserError(
                    f"network.minimum: {self._minimum} uploads of a block cannot come from the {server.cohort} clients that "
                    "are asked in a round; leave it out to wait for all of them"
                )
            if self.network.corrupt:
                server.suspects = f"network.corrupt = {self.network.corrupt:g}, which damages uploads on purpose"
            self._look(server)

    def plan(self, server: Server) -> Plan:
        """A round begins. Clients that will not answer in time are given up at once."""
        self._look(server)
        plan = server.plan()
        self._tasks, self._closing = plan.tasks, None
        if (found := self._close(plan.tasks)) is not None:
            self._closing, gone, moments = found
            for k, task in enumerate(plan.tasks):
                if gone[k]:
                    server.lost(task, "dropped out")
                elif not self._closing.in_time[k]:
                    server.lost(task, f"late: {moments[k]:.3g} s, the round closed at {self._closing.seconds:.3g} s")
        return plan

    def next_upload_d(self, server: Server) -> float:
        """What the next round will upload, in d: of those who will be in time."""
        tasks = server.next_tasks()
        found = self._close(tasks)
        return server.upload_d(tasks if found is None else [t for k, t in enumerate(tasks) if found[0].in_time[k]])

    def _close(self, tasks: Sequence[Task]) -> tuple[Closing, np.ndarray, np.ndarray] | None:
        """How a round with these tasks ends, who vanishes, and when each answers or vanishes; None: all are waited for."""
        if self.network is None or not self._acts:
            return None
        gone, when = dropped(tasks, self.network.dropout, self._seed)
        bad = spoilt(tasks, self.network.corrupt, self._seed)
        blocks = [task.block for task in tasks]
        moments = self.costs[[task.client for task in tasks], blocks] * np.where(gone, when, 1.0)
        return close(moments, blocks, gone, self._minimum, self.network.deadline, bad), gone, moments

    def inbox(self, server: Server, backend: Backend) -> Inbox:
        """Where backends hand in uploads: the server itself, unless something is to go wrong on the way."""
        network = self.network
        if network is None or not (network.corrupt or network.crash):
            return server
        victim = crashes(network.crash, server.round, self._seed) if hasattr(backend, "pids") else None
        return FaultInjector(server, backend, network.corrupt, self._seed, victim)

    def committed(self, server: Server) -> None:
        """A round is over: the clock goes on, and what was sent is recorded."""
        waited = 0.0
        if self._closing is not None and self._closing.waited:
            waited = self._closing.seconds
        sent = Round.of(server, self._tasks, waited)
        if self.links is not None:
            self.seconds += sent.seconds(self.links)
            self._look(server)
        if self.record is not None:
            self.record(sent)

    def _look(self, server: Server) -> None:
        """Who can be asked in the server's next round. Somebody always can: the server waits for the first to come."""
        if self.network is None or self.links is None or not self.network.absences:
            return
        odds = stream(self._seed, "availability", server.round).random(len(self.links)) / self.links.availability
        server.available = np.flatnonzero(odds < max(1.0, float(odds.min()) * (1 + 1e-9))).tolist()

    # -- what is told and kept ----------------------------------------------------------------------------------------

    def columns(self) -> dict[str, float]:
        """What the clock adds to a row of metrics."""
        return {} if self.network is None else {"hours": self.seconds / 3600}

    def snapshot(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "links": "" if self.links is None else self.links.digest()}

    def restore(self, kept: dict[str, Any], server: Server) -> None:
        """As it was when the server was as it is now."""
        if self.links is not None and kept["links"] != self.links.digest():
            raise UserError("network: the clients' links have changed since the run was begun, so it cannot go on")
        self.seconds = kept["seconds"]
        self._look(server)


def _refuse_unknown_sizes(job: Job) -> None:
    """Who is late follows from the plan, so the plan must know how long each client computes."""
    counts = {job.algorithm.local.evaluations(examples, 1 << 20) for examples in (1, 1 << 20)}
    unknown = [client for client in range(len(job.clients)) if not job.examples(client)]
    if len(counts) > 1 and unknown:
        raise UserError(
            f"network: deadline, minimum and oversample need to know how long a client computes, and client {unknown[0]} is "
            "loaded lazily, so that its size is not known beforehand: give the clients as a list, or local_steps (which is "
            "enough for all rules but SVRG)"
        )


def _costs(job: Job, links: Links) -> np.ndarray:
    """Seconds of each client with each block: the most it can be, where the length of an upload varies."""
    algorithm, layout = job.algorithm, job.layout
    sends = not algorithm.uplink.pooled
    upload = [sends * sum(map(sum, algorithm.lengths(layout, j).values())) for j in range(layout.blocks)]
    download = sends * (layout.size + len(algorithm.local.broadcasts) * layout.dim) * layout.dtype.itemsize
    clients = np.arange(len(links))
    whole = layout.dim * layout.dtype.itemsize
    evaluations = np.array([algorithm.local.evaluations(job.examples(client), whole) for client in range(len(links))])
    return np.stack([links.seconds(clients, download, evaluations, nbytes) for nbytes in upload], axis=1)
