"""Simulates the network of a run: which clients are available, when a round closes, faults, and the time that it takes.

The clock follows what was really sent (the ledger's entries). Which clients are late or drop out is decided from the
plan, before any client trains: so it is the same on every backend, and a client whose upload would be discarded computes
nothing and keeps its state.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from fedbcgd.algorithms.uplinks import Matched
from fedbcgd.algorithms.uplinks.assignment import fitted_sizes
from fedbcgd.core.algorithm import Algorithm
from fedbcgd.core.messages import Plan, Task
from fedbcgd.core.objective import objective
from fedbcgd.core.server import Conditions, Server
from fedbcgd.core.vector import Layout
from fedbcgd.engine.assemble import DEFAULT_COHORT
from fedbcgd.engine.backend import Backend, Inbox
from fedbcgd.engine.hooks import RoundHooks
from fedbcgd.engine.job import Job
from fedbcgd.engine.traffic import Round
from fedbcgd.errors import UserError
from fedbcgd.network.closing import Closing, close
from fedbcgd.network.faults import FaultInjector, draw_crash, draw_damage, draw_dropouts
from fedbcgd.network.links import Links
from fedbcgd.network.settings import Network
from fedbcgd.rng import stream


def fit_to_links(
    algorithm: Algorithm,
    network: Network | None,
    model: nn.Module,
    clients: Sequence[Any],
    cohort: int | None,
    seed: int,
) -> Algorithm:
    """Return the algorithm with block sizes that fit the links, if its uplink asks for that; else the same algorithm.

    Args:
        algorithm: the algorithm.
        network: the settings of the network; None: no network.
        model: the model that is divided into blocks.
        clients: the clients' data.
        cohort: clients of a round; None: the default.
        seed: the seed of the run.
    """
    wanted = min(DEFAULT_COHORT, len(clients)) if cohort is None else cohort
    uplink = algorithm.uplink.for_cohort(wanted)
    if network is None or not isinstance(uplink, Matched) or not uplink.fits_links:
        return algorithm
    assert isinstance(uplink.blocks, int)
    sampled = network.sampled(wanted, len(clients))
    links = network.links(len(clients), seed)
    even = replace(algorithm, uplink=uplink.fitted([1.0] * uplink.blocks))
    layout = even.uplink.layout(model)
    lengths = [even.lengths(layout, j) for j in range(layout.blocks)]
    first, *rest = (sum(each[channel][0] for channel in algorithm.local.channels) for each in lengths)
    costs = _costs(Job(even, layout, model, objective(), seed, clients), links)[:, 0]
    fixed = costs - first / links.uplink  # seconds of each client that do not depend on its block
    sizes = fitted_sizes(
        links.uplink, sampled, uplink.blocks, uplink.haste, stream(seed, "fit"), fixed, first + sum(rest)
    )
    return replace(algorithm, uplink=uplink.fitted(sizes))


class NetworkSimulator(RoundHooks):
    """Simulates the clients' links, a clock, and faults. Without a network it only records what was sent.

    Args:
        job: the clients and their work.
        network: the settings; None: no network.

    Raises:
        UserError: the settings do not fit the clients.
    """

    def __init__(self, job: Job, network: Network | None):
        self.network = network
        self.seconds = 0.0  # simulated seconds since the beginning of the run
        self.sent: Round | None = None  # what was sent in the last round
        self.links: Links | None = None
        self._seed = job.seed
        self._may_close_early = False
        self._minimum: int | None = None
        self._closing: Closing | None = None
        self._tasks: Sequence[Task] = ()
        if network is not None:
            self.links = network.links(len(job.clients), job.seed)
            self.costs = _costs(job, self.links)
            self._may_close_early = network.may_lose_clients and not job.algorithm.uplink.pooled
            if self._may_close_early and network.may_be_late:
                _refuse_unknown_sizes(job)
            if self._may_close_early and network.deadline is not None and self.costs.min() > network.deadline:
                raise UserError(
                    f"network.deadline: expected at least {self.costs.min():.3g} s, the time that the fastest client takes "
                    f"with the smallest block, got {network.deadline:g} s"
                )

    # -- a round ------------------------------------------------------------------------------------------------------

    def sampled(self, cohort: int, clients: int) -> int:
        """Return how many clients to sample for a cohort of this size: more with `oversample`."""
        return cohort if self.network is None else self.network.sampled(cohort, clients)

    def conditions(self, cohort: int, sampled: int, layout: Layout) -> Conditions:
        """Return what the server must know of this network."""
        if self.network is None:
            return Conditions()
        self._minimum = self.network.minimum
        if self._minimum is None and self.network.oversample > 1 and self.network.close_at == 1:
            # Rounded up: then no fewer uploads arrive than if the cohort alone had been sampled.
            self._minimum = -(-cohort // layout.blocks)
        if self._minimum is not None and self._minimum > sampled:
            raise UserError(
                f"network.minimum: expected at most {sampled}, the clients that are sampled in a round, got "
                f"{self._minimum}; leave it out to wait for all of them"
            )
        corrupt = self.network.corrupt
        cause = f"network.corrupt = {corrupt:g}, which damages uploads on purpose" if corrupt else ""
        return Conditions(self._available, self.costs, likely_cause=cause)

    def _available(self, round: int) -> list[int] | None:
        """Return the clients that can be sampled in a round: at least one, since the server waits for the first."""
        if self.network is None or self.links is None or not self.network.absences:
            return None
        odds = stream(self._seed, "availability", round).random(len(self.links)) / self.links.availability
        available: list[int] = np.flatnonzero(odds < max(1.0, float(odds.min()) * (1 + 1e-9))).tolist()
        return available

    def plan(self, server: Server) -> Plan:
        """Open a round, and give up the clients that will not answer in time."""
        plan = server.plan()
        self._tasks, self._closing = plan.tasks, None
        if (ending := self._close(plan.tasks)) is not None:
            self._closing, gone, moments = ending
            for k, task in enumerate(plan.tasks):
                if gone[k]:
                    server.lost(task, "dropped out")
                elif not self._closing.in_time[k]:
                    server.lost(task, f"late: {moments[k]:.3g} s; the round closed at {self._closing.seconds:.3g} s")
        return plan

    def next_upload_d(self, server: Server) -> float:
        """Return the mean upload, in d, of the clients that will be in time in the next round."""
        tasks = server.next_tasks()
        ending = self._close(tasks)
        return server.upload_d(tasks if ending is None else [t for k, t in enumerate(tasks) if ending[0].in_time[k]])

    def _close(self, tasks: Sequence[Task]) -> tuple[Closing, np.ndarray, np.ndarray] | None:
        """Return how a round closes, which clients drop out, and when each answers or drops out.

        None means that the server waits for all clients.
        """
        if self.network is None or not self._may_close_early:
            return None
        gone, when = draw_dropouts(tasks, self.network.dropout, self._seed)
        bad = draw_damage(tasks, self.network.corrupt, self._seed)
        blocks = [task.block for task in tasks]
        moments = self.costs[[task.client for task in tasks], blocks] * np.where(gone, when, 1.0)
        network = self.network
        return close(moments, blocks, gone, self._minimum, network.deadline, bad, network.close_at), gone, moments

    def inbox(self, server: Server, backend: Backend) -> Inbox:
        """Return what receives the uploads: the server, or a `FaultInjector` around it."""
        network = self.network
        if network is None or not (network.corrupt or network.crash):
            return server
        victim = draw_crash(network.crash, server.round, self._seed) if hasattr(backend, "pids") else None
        return FaultInjector(server, backend, network.corrupt, self._seed, victim)

    def committed(self, server: Server) -> None:
        """Record what was sent, and advance the clock."""
        waited = 0.0
        if self._closing is not None and self._closing.waited:
            waited = self._closing.seconds
        self.sent = Round.of(server, self._tasks, waited)
        if self.links is not None:
            self.seconds += self.sent.seconds(self.links)

    def columns(self) -> dict[str, float]:
        """Return the clock as a column of metrics."""
        return {} if self.network is None else {"hours": self.seconds / 3600}

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        return {"seconds": self.seconds, "links": "" if self.links is None else self.links.digest()}

    def restore(self, values: dict[str, Any]) -> None:
        """Continue from a snapshot.

        Raises:
            UserError: the links have changed since.
        """
        if self.links is not None and values["links"] != self.links.digest():
            raise UserError(
                "network: expected the clients' links as when the run was begun, got others; another --out begins a "
                "new run"
            )
        self.seconds = values["seconds"]


def _refuse_unknown_sizes(job: Job) -> None:
    """Raise a UserError if a client's number of examples is unknown, since it determines who will be late."""
    counts = {job.algorithm.local.evaluations(examples, 1 << 20) for examples in (1, 1 << 20)}
    unknown = [client for client in range(len(job.clients)) if not job.examples(client)]
    if len(counts) > 1 and unknown:
        raise UserError(
            "network: expected clients of known size with deadline, minimum, close_at or oversample, got client "
            f"{unknown[0]}, whose data is loaded when it is needed; give the clients as a list, or set local_steps (enough "
            "for all rules but SVRG)"
        )


def _costs(job: Job, links: Links) -> np.ndarray:
    """Return the seconds that each client takes with each block, for the longest upload if lengths vary."""
    algorithm, layout = job.algorithm, job.layout
    sends = not algorithm.uplink.pooled
    upload = [sends * sum(map(sum, algorithm.lengths(layout, j).values())) for j in range(layout.blocks)]
    download = sends * (layout.size + len(algorithm.local.broadcasts) * layout.dim) * layout.dtype.itemsize
    clients = np.arange(len(links))
    whole = layout.dim * layout.dtype.itemsize
    evaluations = np.array([algorithm.local.evaluations(job.examples(client), whole) for client in range(len(links))])
    return np.stack([links.seconds(clients, download, evaluations, nbytes) for nbytes in upload], axis=1)
