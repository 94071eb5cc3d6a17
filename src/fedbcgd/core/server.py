"""The server's side of a round, without I/O: plan, receive, commit."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbcgd.core.algorithm import Algorithm
from fedbcgd.core.ledger import Ledger, LedgerEntry
from fedbcgd.core.messages import Broadcast, Payload, Plan, Receipt, RoundReport, Task, Upload
from fedbcgd.core.metric_means import means_over_clients
from fedbcgd.core.norms import norm
from fedbcgd.core.reading import Malformed, UploadValues, shorten
from fedbcgd.core.refusals import MAX_MOSTLY_REFUSED_ROUNDS, Refusals
from fedbcgd.core.uploads import BUFFER_OWNER, DecodedUpload, Norms, UploadDecoder, part_of, read_values
from fedbcgd.core.vector import Layout
from fedbcgd.errors import Diverged, UserError
from fedbcgd.rng import stream

log = logging.getLogger("fedbcgd")


@dataclass(frozen=True)
class Conditions:
    """What a server knows of the clients and links that it works with.

    Attributes:
        available: the clients that can be sampled in a round, given its number; None: all.
        costs: costs[client, block] is the seconds that this client would take with this block; for uplinks that assign
            blocks by time.
        reliable: whether every client that is given a task will answer it; clients reported as lost before the
            training begins do not count.
        likely_cause: the cause to name in the error message if most uploads are refused; empty: the learning rate.
    """

    available: Callable[[int], Sequence[int] | None] | None = None
    costs: np.ndarray | None = None
    reliable: bool = True
    likely_cause: str = ""


class WeightedSums:
    """Running weighted sums of uploads, slice by slice. A slice is identified by its owner, see `part_of`."""

    def __init__(self, x: Tensor, layout: Layout):
        # Accumulate float16 and bfloat16 in float32.
        wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        self._layout = layout
        self._dtype = x.dtype
        self._sum = torch.zeros_like(x, dtype=wide)
        # By owner: each block, the shared block, and last the buffers, whose owner is −1.
        self.weights = [0.0] * (layout.blocks + 2)

    def clear(self) -> None:
        """Begin a new round."""
        self.weights = [0.0] * len(self.weights)

    def add(self, owner: int, values: Tensor, weight: float) -> None:
        """Add values of a slice.

        Args:
            owner: the owner of the slice.
            values: the values of one upload.
            weight: the weight of the upload in the mean.
        """
        total = self._sum[part_of(self._layout, owner)]
        if self.weights[owner]:
            total.add_(values, alpha=weight)
        else:  # the first upload of a round overwrites the sum of an earlier one
            total.copy_(values)
            if weight != 1:
                total.mul_(weight)
        self.weights[owner] += weight

    def mean(self, owner: int) -> Tensor:
        """Return the weighted mean of a slice. May be called once a round, since it divides the sum in place."""
        return self._sum[part_of(self._layout, owner)].div_(self.weights[owner]).to(self._dtype)


class Server:
    """Holds x and every vector of the server; moves x once a round.

    Uploads may arrive in any order. Each is checked and answered at once; they are added to the running sums in the
    order of the plan, so that the sums do not depend on who was faster. An upload that arrives before its turn is kept, and
    may still be read from the backend's memory. So a backend may reuse that memory only for the first `settled` tasks.

    Clients are not trusted: an upload is accepted, or refused with a reason. x and every state are finite after each
    commit, since a step whose result is not finite is rolled back.

    Args:
        algorithm: what to train with.
        layout: where each block lies in x.
        x: the model to begin with; it is copied.
        clients: M, the number of all clients.
        cohort: S, the number of clients sampled in a round.
        seed: the seed of every draw of the server.
        conditions: what is known of clients and links.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        layout: Layout,
        x: Tensor,
        clients: int,
        cohort: int,
        seed: int,
        conditions: Conditions = Conditions(),  # noqa: B008 (frozen)
    ):
        if not 1 <= cohort <= clients:
            raise UserError(f"cohort: expected 1 to {clients}, the number of clients, got {cohort}")
        self.algorithm = algorithm
        self.layout = layout
        self.clients = clients
        self.cohort = cohort
        self.seed = seed
        self.conditions = conditions
        self.round = 0
        self.epoch = 0
        self.x = x.clone()
        params = self.x[: layout.dim]
        self.controls = {name: torch.zeros_like(params) for name in algorithm.local.controls}
        self.state = {n: torch.full_like(params, algorithm.server.init(n)) for n in algorithm.server.vectors}
        self.ledger = Ledger(layout.dim, x.element_size(), layout.blocks)
        self.last: RoundReport | None = None  # the report of the last round that was committed
        self.examples: dict[int, int] = {}  # client → n_i, as reported with its first upload
        self.refusals = Refusals()
        self._sums = WeightedSums(self.x, layout)
        wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        self._control_sums = {name: torch.zeros_like(params, dtype=wide) for name in self.controls}
        self._examples_in_all = 0.0  # Σn over all M clients, if the means of the controls are weighted by examples
        self._assigned: dict[str, int] = {}  # sequence of rounds (`Uplink.turn`) → its tasks in committed rounds
        self._decoder = UploadDecoder(algorithm, layout)
        self._plan: Plan | None = None
        self._position: dict[int, int] = {}  # client → position in the open plan
        # Position → upload; None: refused, lost, or passed on already (added or held).
        self._answers: dict[int, DecodedUpload | None] = {}

    # -- plan ---------------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Sample a cohort, assign blocks, and open the round."""
        self.abandon()
        tasks = self.next_tasks()
        controls = {name: self.controls[name] for name in self.algorithm.local.broadcasts}
        self._ledger_before = self.ledger.totals()
        self._plan = Plan(Broadcast(self.round, self.epoch, self.x, controls), tasks)
        self._position = {task.client: k for k, task in enumerate(tasks)}
        self._answers = {}
        self._next = 0
        self._sums.clear()
        self._losses: list[float] = []
        self._counted: list[DecodedUpload] = []  # in the order of the plan, without their tensors
        self._norms_seen: dict[int, Norms] = {}  # by position, of every upload that could be decoded
        # While max_norm is a multiple ("20x") and a slice has no median yet, uploads are held and compared at the commit.
        has_shared = len(self._decoder.slices(0)) > 1
        owners = {task.block for task in tasks} | ({self.layout.blocks} if has_shared else set())
        self._holds_uploads = not all(self._decoder.limit.knows("dx", owner) for owner in owners)
        self._held: list[DecodedUpload] = []
        self._lost: list[str] = []
        self._reset_reason = ""  # if not empty: why all controls are set to zero at the end of this round
        self._decoder.open_round()
        self.refusals.open_round()
        self.ledger.open_round()
        return self._plan

    def next_tasks(self) -> list[Task]:
        """Return the tasks that the next `plan` will have."""
        rng = stream(self.seed, "cohort", self.round)
        available = self.available()
        candidates = None if available is None else np.array(sorted(available), dtype=np.int64)
        count = self.clients if candidates is None else len(candidates)
        cohort = rng.choice(count, min(self.cohort, count), replace=False)
        cohort = cohort if candidates is None else candidates[cohort]
        costs = None if self.conditions.costs is None else self.conditions.costs[cohort]
        _, assigned = self._turn(len(cohort))
        blocks = self.algorithm.uplink.assign(cohort, self.round, self.layout.blocks, costs, rng, assigned)
        return [Task(self.round, int(client), block) for client, block in zip(cohort, blocks, strict=True)]

    def available(self) -> Sequence[int] | None:
        """Return the clients that can be sampled in the next round; None: all."""
        available = None if self.conditions.available is None else self.conditions.available(self.round)
        excluded = self.refusals.excluded()
        if not excluded:
            return available
        return [c for c in (range(self.clients) if available is None else available) if c not in excluded]

    def _turn(self, tasks: int) -> tuple[str, int]:
        """Return the uplink's sequence of rounds that this round belongs to, and how many tasks were assigned in it so far.

        Without a count (an old snapshot has none) each earlier round is assumed to have had as many tasks as this one.
        """
        turn, rounds = self.algorithm.uplink.turn(self.round)
        return turn, self._assigned.get(turn, rounds * tasks)

    def next_upload_d(self) -> float:
        """Return the mean upload of a client in the next round, in d; an upper bound if uploads may be lost."""
        tasks = self.next_tasks()
        if self.conditions.reliable:
            return self.upload_d(tasks)
        return max((self.upload_d([task]) for task in tasks), default=0.0)

    def upload_d(self, tasks: Sequence[Task]) -> float:
        """Return the mean upload of these tasks, in d; an upper bound if lengths vary."""
        if self.algorithm.uplink.pooled or not tasks:
            return 0.0
        nbytes = [self._decoder.nbytes(task.block) for task in tasks]
        return sum(nbytes) / len(nbytes) / (self.layout.dim * self.layout.dtype.itemsize)

    def abandon(self) -> None:
        """Roll back the open round, if there is one."""
        if self._plan is not None:
            self.ledger = Ledger.from_totals(self._ledger_before)
            self._close()

    def _close(self) -> None:
        for total in self._control_sums.values():
            total.zero_()
        self._plan = None

    @property
    def settled(self) -> int:
        """How many tasks, counted from the first of the plan without a gap, are answered, refused or lost."""
        return self._next

    def expects(self, task: Task) -> bool:
        """Return whether the server still waits for an answer to this task; False if its round is not open."""
        position = self._position.get(task.client)
        is_open = self._plan is not None and task.round == self.round
        return is_open and position is not None and position not in self._answers

    # -- receive ------------------------------------------------------------------------------------------------------

    def receive(self, upload: Upload, sender: int | None = None) -> Receipt:
        """Check an upload and, if it is accepted, count it in.

        A refused one changes neither x nor any state. It is entered in the ledger and the refusals, its norms enter the
        running median of `norms.py`, and its task counts as answered.

        Args:
            upload: what a client sent, with values of whatever types and sizes.
            sender: the client whose answer this is, if the backend knows it: an upload that names another client is
                refused. None: the client named in the upload is taken as the sender.
        """
        plan = self._open_plan()
        values: UploadValues | None = None
        accepted: DecodedUpload | None = None
        reason = ""
        try:
            values = read_values(upload)
            accepted = self._accept(values, upload.payload, sender)
        except Malformed as error:
            reason = shorten(str(error))
        client = values.client if sender is None and values is not None else sender
        # If the sender is known, its task counts as answered whatever the upload says; else only if the round is right.
        identified = sender is not None or (values is not None and values.round == self.round)
        position = self._position.get(client) if client is not None and identified else None
        # None if the client has answered already: its bytes count again, but neither the broadcast nor the gradients.
        unanswered = position if position is not None and position not in self._answers else None
        block = -1 if values is None else values.block
        counted = not self.algorithm.uplink.pooled  # centralised training sends nothing
        self.ledger.record(
            LedgerEntry(
                self.round,
                -1 if client is None else client,
                block,
                self._decoder.floats(block) if counted else 0,
                upload.nbytes if counted and isinstance(upload, Upload) else 0,
                plan.broadcast.nbytes if counted and unanswered is not None else 0,
                accepted=accepted is not None,
                gradient_evaluations=values.gradient_evaluations
                if values is not None and unanswered is not None
                else 0,
            )
        )
        if accepted is None:
            name = "unknown" if client is None else client
            reason = self.refusals.add(f"round {self.round + 1}, client {name}: {reason}", client)
        if unanswered is not None:  # a refused upload settles the client's position, too
            self._answers[unanswered] = accepted
            self._advance()
        return Receipt(accepted is not None, reason)

    def _accept(self, values: UploadValues, payload: Payload, sender: int | None) -> DecodedUpload:
        """Check and decode an upload. Raises Malformed if it is not what the plan asks for."""
        self._check_address(values, sender)
        self._decoder.check_form(values.block, payload)
        upload = self._decoder.decode(values, payload, self.x, self.controls)
        self._norms_seen.setdefault(self._position[values.client], dict(upload.norms))
        self._decoder.hold_to_limits(upload, self.x)
        if self._holds_uploads:  # a held upload outlives the memory that it was read from
            slices = [{channel: t.clone() for channel, t in channels.items()} for channels in upload.slices]
            upload = replace(upload, slices=slices)
        return upload

    def _check_address(self, values: UploadValues, sender: int | None) -> None:
        if sender is not None and values.client != sender:
            raise Malformed(f"client: expected {sender}, which sent it, got {values.client}")
        if values.round != self.round:
            raise Malformed(f"round: expected {self.round + 1}, got {values.round + 1}")
        position = self._position.get(values.client)
        if position is None:
            raise Malformed(f"client: expected one of this round's cohort, got {values.client}")
        if position in self._answers:
            raise Malformed(
                f"client: expected one that has still to answer, got {values.client}, which has answered or was given up"
            )
        block = self._open_plan().tasks[position].block
        if values.block != block:
            raise Malformed(f"block: expected {block + 1}, got {values.block + 1}")

    def lost(self, task: Task, why: str) -> None:
        """Record that the client of this task will not answer; ignored if it has, or if the task is of another round."""
        plan = self._open_plan()
        position = self._position.get(task.client)
        if task.round != self.round or position is None:
            late, now = task.round + 1, self.round + 1
            log.warning(
                "lost client: expected one of round %d, got client %d of round %d; ignored", now, task.client, late
            )
        elif position not in self._answers:
            self._answers[position] = None
            self._lost.append(f"client {task.client}: {shorten(why)}")
            self.ledger.record_lost(plan.broadcast.nbytes)
            self._advance()

    def forget_controls(self, why: str) -> None:
        """Have the commit of this round set all controls to zero.

        For backends, which learn that a client's state is lost or newer than the server's.
        """
        self._open_plan()
        self._reset_reason = self._reset_reason or shorten(why)

    def _advance(self) -> None:
        """Add the uploads that are next in the order of the plan, as far as they have arrived."""
        while self._next in self._answers:
            upload = self._answers[self._next]
            self._answers[self._next] = None
            self._next += 1
            if upload is not None and self._holds_uploads:
                self._held.append(upload)
            elif upload is not None:
                self._add(upload)

    def _add_held(self) -> None:
        """Add the held uploads, except those that are far larger than the others."""
        parts = {k: part_of(self.layout, k) for k in range(self.layout.blocks + 1)}
        lengths = {k: part.stop - part.start for k, part in parts.items()}
        outliers = self._decoder.limit.far_off([upload.norms for upload in self._held], lengths)
        for k, upload in enumerate(self._held):
            if k not in outliers:
                self._add(upload)
                continue
            client = upload.values.client
            reason = f"round {self.round + 1}, client {client}: its norms are far larger than the others' in this round"
            self.refusals.add(reason, client)
            self.ledger.refused += 1
            # The client was told that its upload is accepted and keeps its new c_i, so c = mean(c_i) no longer holds.
            self._reset_reason = self._reset_reason or f"an upload of client {client} was refused late"

    def _add(self, upload: DecodedUpload) -> None:
        values = upload.values
        weight, control_weight = 1.0, 1.0
        if self.algorithm.weighting == "examples":
            # A client cannot raise its weight above what it first reported; in c it keeps the weight that it has there.
            known = self.examples.get(values.client, values.examples)
            weight, control_weight = float(min(values.examples, known)), float(known)
        owners = (values.block, self.layout.blocks)
        for owner, channels in zip(owners, upload.slices, strict=False):
            self._sums.add(owner, channels["dx"], weight)
            for name, total in self._control_sums.items():
                total[part_of(self.layout, owner)].add_(channels[f"d{name}"], alpha=control_weight)
        if upload.buffers is not None:
            self._sums.add(BUFFER_OWNER, upload.buffers, weight)
        if values.train_loss is not None:
            self._losses.append(values.train_loss)
        self._counted.append(upload.without_tensors())

    # -- commit -------------------------------------------------------------------------------------------------------

    def commit(self) -> RoundReport:
        """Move x by the mean of the accepted uploads, and close the round.

        A slice without uploads keeps its values and states.

        Raises:
            Diverged: most uploads of the last rounds were refused. The round is committed nevertheless.
        """
        plan = self._open_plan()
        self._give_up_missing(plan)
        self._add_held()
        self._move_controls()
        moved = [k for k in range(self.layout.blocks + 1) if self._sums.weights[k] and self._step(k)]
        self._move_buffers()
        self._decoder.limit.update_medians([self._norms_seen[position] for position in sorted(self._norms_seen)])
        self.ledger.close_round()
        idle = [j for j in sorted({task.block for task in plan.tasks}) if j not in moved]
        if idle:
            numbers = ", ".join(str(j + 1) for j in idle)
            log.warning(
                "round %d: no upload counts for these blocks, which keep their values: %s", self.round + 1, numbers
            )
        mean_loss = sum(self._losses) / len(self._losses) if self._losses else math.nan
        self.last = report = RoundReport(
            self.round,
            len(self._counted),
            tuple(self.refusals.reasons),
            tuple(self._lost),
            mean_loss,
            means_over_clients([(u.values.examples, u.values.metrics) for u in self._counted]),
        )
        self.refusals.close_round({u.values.client for u in self._counted}, (task.client for task in plan.tasks))
        turn, assigned = self._turn(len(plan.tasks))
        self._assigned[turn] = assigned + len(plan.tasks)
        self.round += 1
        self._close()
        if self.refusals.diverged:
            rate = f"{self.algorithm.local.rate(self.round - 1):.3g} in this round, lr = {self.algorithm.local.lr:g}"
            cause = self.conditions.likely_cause or f"a learning rate that is too high ({rate}), or NaN in the data"
            raise Diverged(
                f"at least two thirds of the uploads were refused in each of the last {MAX_MOSTLY_REFUSED_ROUNDS} rounds, "
                f"so training stopped. Last reason: {report.refused[-1]}. The usual cause is {cause}"
            )
        return report

    def _give_up_missing(self, plan: Plan) -> None:
        for task in plan.tasks:
            if self.expects(task) and task.client in self.refusals.clients:
                # Its upload was refused but could not be tied to its task: count its broadcast, but not a loss.
                self._answers[self._position[task.client]] = None
                self.ledger.download_bytes += plan.broadcast.nbytes
                self._advance()
            elif self.expects(task):
                self.lost(task, "no answer before the round closed")

    def _step(self, k: int) -> bool:
        """Move a slice of x and of the states, unless one of them would not be finite. Return whether it moved."""
        s = part_of(self.layout, k)
        delta = self._sums.mean(k)
        if not math.isfinite(norm(delta)):  # finite uploads may add up to infinity
            self._refuse_step(k, "the sum of the uploads is not finite")
            return False
        delta = self.algorithm.local.server_change(delta, {n: c[s] for n, c in self.controls.items()})
        parts = {"x": self.x[s], **{n: v[s] for n, v in self.state.items()}}
        before = {name: part.clone() for name, part in parts.items()}
        self.algorithm.server.step(parts["x"], delta, {n: parts[n] for n in self.state})
        if all(math.isfinite(norm(part)) for part in parts.values()):
            return True
        for name, part in parts.items():
            part.copy_(before[name])
        self._refuse_step(k, "the step did not end in finite numbers")
        return False

    def _refuse_step(self, k: int, why: str) -> None:
        """Count no upload for this slice, and blame the far larger ones."""
        self._sums.weights[k] = 0
        norms = {u.values.client: u.norms["dx", k] for u in self._counted if ("dx", k) in u.norms}
        part = "the shared block" if k == self.layout.blocks else f"block {k + 1}"
        self.refusals.blame(norms, self.round + 1, f"{why}, so {part} keeps its value")

    def _move_buffers(self) -> None:
        if self._sums.weights[BUFFER_OWNER]:
            mean = self._sums.mean(BUFFER_OWNER)
            if math.isfinite(norm(mean)):
                self.x[self.layout.buffer_slice] = mean

    def _move_controls(self) -> None:
        """c += ΣΔc/M, or c = Σn_i·c_i/Σn. If c = mean(c_i) can no longer hold, all controls are set to zero.

        `kept` is the share of c that remains: the old Σn over the new one.
        """
        weight, kept = float(self.clients), 1.0
        if self.algorithm.weighting == "examples":
            for upload in self._counted:
                self.examples.setdefault(upload.values.client, upload.values.examples)
            if self.examples:  # clients that are not known yet count as the mean of the others
                weight = sum(self.examples.values()) / len(self.examples) * self.clients
            kept = self._examples_in_all / weight
            self._examples_in_all = weight
        moved = {}
        for name, total in self._control_sums.items():
            change, control = total.div_(weight).to(self.x.dtype), self.controls[name]
            moved[name] = change.add_(control, alpha=kept)
        overflow = "" if all(math.isfinite(norm(control)) for control in moved.values()) else "they overflowed"
        why = self._reset_reason or overflow
        if not why:
            for name, control in moved.items():
                self.controls[name].copy_(control)
        elif moved:
            log.warning("round %d: all control variates are set to zero: %s", self.round + 1, why)
            self.reset_controls()

    def reset_controls(self) -> None:
        """Set c = 0 and begin a new control epoch: a client's c_i of an older epoch counts as zero."""
        self.epoch += 1
        for control in self.controls.values():
            control.zero_()

    def _open_plan(self) -> Plan:
        if self._plan is None:
            raise RuntimeError("no round is open: call plan() first")
        return self._plan

    # -- snapshot -----------------------------------------------------------------------------------------------------

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all that `restore` needs, between rounds: tensors, and plain values that JSON can hold."""
        tensors = {"x": self.x, **{f"control.{n}": t for n, t in self.controls.items()}}
        tensors |= {f"server.{n}": t for n, t in self.state.items()}
        values = {
            "round": self.round,
            "epoch": self.epoch,
            "ledger": self.ledger.totals(),
            "entries": [astuple(entry) for entry in self.ledger.entries],
            "last": None if self.last is None else asdict(self.last),
            "examples": [[client, n] for client, n in sorted(self.examples.items())],
            "examples_in_all": self._examples_in_all,
            "norms": self._decoder.limit.snapshot(),
            "dealt": dict(self._assigned),
            **self.refusals.snapshot(),
        }
        return {name: t.clone() for name, t in tensors.items()}, values

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Load a snapshot; those of earlier versions lack some of the values."""
        self.x.copy_(tensors["x"])
        for name, t in self.controls.items():
            t.copy_(tensors[f"control.{name}"])
        for name, t in self.state.items():
            t.copy_(tensors[f"server.{name}"])
        self.round, self.epoch = values["round"], values["epoch"]
        last = {k: v for k, v in (values["last"] or {}).items() if k != "idle_blocks"}  # of earlier versions
        self.last = RoundReport(**last) if last else None
        self.ledger = Ledger.from_totals(values["ledger"])
        self.ledger.entries = [LedgerEntry(*entry) for entry in values.get("entries", [])]
        self.refusals.restore(values)
        self.examples = dict(values.get("examples", []))
        self._examples_in_all = values.get("examples_in_all", 0.0)
        self._decoder.limit.restore(values.get("norms", {}))
        self._assigned = dict(values.get("dealt", {}))
        self._close()
