"""The server's side of a round, without I/O: plan, receive, commit."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median_low
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbcgd.core.algorithm import Algorithm
from fedbcgd.core.ledger import Entry, Ledger
from fedbcgd.core.messages import BUFFERS, Broadcast, Plan, Receipt, RoundReport, Task, Upload
from fedbcgd.core.norms import NormLimit, norm
from fedbcgd.core.reading import Malformed, UploadValues, read, shorten, shown
from fedbcgd.core.vector import Layout
from fedbcgd.errors import Diverged, UserError
from fedbcgd.rng import stream

log = logging.getLogger("fedbcgd")

GIVE_UP = 3  # rounds in a row in which two of three answers, or more, were refused
STRIKES = 3  # steps that had to be undone because of a client, after which it is not asked again
OUTLIER = 10  # times the median norm: an upload that is to blame if a step has to be undone
_MOST_CHANNELS = 16


@dataclass(frozen=True)
class _Accepted:
    """An upload that was read, checked and decoded. `norms` has one for each channel and owner of a slice."""

    values: UploadValues
    slices: list[dict[str, Tensor]]
    buffers: Tensor | None
    norms: dict[tuple[str, int], float]


class Server:
    """Holds x and every vector of the server; moves x once a round.

    Uploads may arrive in any order. Each is checked and answered at once; they are added to the running sums in the
    order of the plan, so that the sums do not depend on who was faster. An upload that is early waits, decoded, until
    `settled` has passed it: a backend that lends memory to uploads may reuse that of the first `settled` tasks.

    Clients are not trusted: whatever one sends is accepted or refused with a reason, and x and every state are finite
    after each commit, since a step that does not end in finite numbers is undone.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        layout: Layout,
        x: Tensor,
        clients: int,
        cohort: int,
        seed: int,
        reliable: bool = True,
    ):
        if not 1 <= cohort <= clients:
            raise UserError(f"cohort: between 1 and the number of clients ({clients}) is possible, given {cohort}")
        self.algorithm = algorithm
        self.layout = layout
        self.clients = clients
        self.cohort = cohort
        self.seed = seed
        self.round = 0
        self.epoch = 0
        self.available: Sequence[int] | None = None  # the clients that can be asked; None: all
        self.costs: np.ndarray | None = None  # seconds of each client with each block, for uplinks that ask
        self.reliable = reliable  # whether what is asked for arrives, unless it is given up before it begins
        self.suspects = ""  # what else may be the cause if all uploads are refused
        self.x = x.clone()
        params = self.x[: layout.dim]
        self.controls = {name: torch.zeros_like(params) for name in algorithm.local.controls}
        self.state = {n: torch.full_like(params, algorithm.server.init(n)) for n in algorithm.server.vectors}
        self.ledger = Ledger(layout.dim, x.element_size(), layout.blocks)
        # Accumulate float16 and bfloat16 in float32.
        wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        self._sum = torch.zeros_like(self.x, dtype=wide)  # of a slice: once something of this round was counted in
        self._control_sums = {name: torch.zeros_like(params, dtype=wide) for name in self.controls}
        self.last: RoundReport | None = None  # of the last round that was committed
        self.examples: dict[int, int] = {}  # of each client, as it said with its first upload
        self._examples_in_all = 0.0  # that the controls are a mean over, where clients are weighted by their examples
        self.strikes: dict[int, int] = {}  # client → steps that were undone because of it
        self._limit = NormLimit(algorithm.max_norm)
        self._dealt: dict[str, int] = {}  # tasks of the committed rounds, for each turn that the uplink takes
        self._barren = 0
        self._barren_refused: set[int] = set()  # clients, over the rounds that `_barren` counts
        self._barren_asked: set[int] = set()
        self._plan: Plan | None = None
        # What every upload is checked against, for each block.
        self._cut = [layout.slices(j) for j in range(layout.blocks)]
        self._lengths = [algorithm.lengths(layout, j) for j in range(layout.blocks)]

    # -- plan ---------------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Sample a cohort, assign blocks, and open the round."""
        self.abandon()
        tasks = self.next_tasks()
        seen = {name: self.controls[name] for name in self.algorithm.local.broadcasts}
        self._before = self.ledger.totals()
        self._plan = Plan(Broadcast(self.round, self.epoch, self.x, seen), tasks)
        self._place = {task.client: k for k, task in enumerate(tasks)}
        self._arrived: dict[int, _Accepted | None] = {}
        self._next = 0
        self._weight = [0.0] * (self.layout.blocks + 2)  # per block, then shared, then buffers
        self._losses: list[float] = []
        self._counted: list[_Accepted] = []  # in the order of the plan, without their tensors
        self._norms_seen: dict[int, dict[tuple[str, int], float]] = {}  # by place, of all that could be decoded
        # While limits are loose, uploads wait until they can be compared with each other.
        owners = {task.block for task in tasks} | ({self.layout.blocks} if len(self._cut[0]) > 1 else set())
        self._compares = not all(self._limit.knows("dx", owner) for owner in owners)
        self._held: list[_Accepted] = []
        self._limits: dict[tuple[str, int], float] = {}  # of this round, as far as they were needed
        self._refused: list[str] = []
        self._refused_clients: set[int] = set()
        self._lost: list[str] = []
        self._forget = ""
        self.ledger.open_round()
        return self._plan

    def next_tasks(self) -> list[Task]:
        """Those of the next plan."""
        rng = stream(self.seed, "cohort", self.round)
        available = self.available
        struck = {client for client, strikes in self.strikes.items() if strikes >= STRIKES}
        if struck:
            available = [c for c in (range(self.clients) if available is None else available) if c not in struck]
        there = None if available is None else np.array(sorted(available), dtype=np.int64)
        count = self.clients if there is None else len(there)
        cohort = rng.choice(count, min(self.cohort, count), replace=False)
        cohort = cohort if there is None else there[cohort]
        costs = None if self.costs is None else self.costs[cohort]
        _, dealt = self._turn(len(cohort))
        blocks = self.algorithm.uplink.assign(cohort, self.round, self.layout.blocks, costs, rng, dealt)
        return [Task(self.round, int(client), block) for client, block in zip(cohort, blocks, strict=True)]

    def _turn(self, tasks: int) -> tuple[str, int]:
        """The turn of this round, and the tasks dealt in it so far: where nobody counted, as if rounds were all alike."""
        turn, rounds = self.algorithm.uplink.turn(self.round)
        return turn, self._dealt.get(turn, rounds * tasks)

    def next_upload_d(self) -> float:
        """What the next round will upload, in d; at most, where it cannot be known what will be lost."""
        tasks = self.next_tasks()
        return self.upload_d(tasks) if self.reliable else max(self.upload_d([task]) for task in tasks)

    def upload_d(self, tasks: Sequence[Task]) -> float:
        """What a round uploads in which these tasks are answered, in d; the most it can be, where that varies."""
        if self.algorithm.uplink.pooled or not tasks:
            return 0.0
        each = [sum(map(sum, self._lengths[task.block].values())) for task in tasks]
        return sum(each) / len(each) / (self.layout.dim * self.layout.dtype.itemsize)

    def abandon(self) -> None:
        """The open round never was: only the ledger and the sums have changed so far."""
        if self._plan is not None:
            self.ledger = Ledger.from_totals(self._before)
            self._clear()

    def _clear(self) -> None:
        for total in self._control_sums.values():
            total.zero_()
        self._plan = None

    @property
    def settled(self) -> int:
        """How many tasks, from the first of the plan on, are done with."""
        return self._next

    def expects(self, task: Task) -> bool:
        """Whether the client of this task has still to answer: it was not given up before it began."""
        place = self._place.get(task.client)
        return place is not None and place not in self._arrived

    # -- receive ------------------------------------------------------------------------------------------------------

    def receive(self, upload: Upload, sender: int | None = None) -> Receipt:
        """Check an upload and count it in; a refused one changes nothing but the ledger.

        Args:
            upload: what a client sent, with values of whatever types and sizes.
            sender: the client whose answer this is, where the backend knows it. An upload that names another one is
                refused. Without it the upload's own word counts.
        """
        plan = self._open_plan()
        values: UploadValues | None = None
        accepted: _Accepted | None = None
        try:
            values = _read(upload)
            accepted = self._accept(values, upload.payload, sender)
            reason = ""
        except Malformed as error:
            reason = shorten(str(error))
        who = values.client if sender is None and values is not None else sender
        # A known sender has answered, whatever it says; without one, an upload of another round may be anybody's.
        named = sender is not None or (values is not None and values.round == self.round)
        place = self._place.get(who) if who is not None and named else None
        # What is sent twice was sent twice; but it was broadcast and computed once.
        first = place if place is not None and place not in self._arrived else None
        block = -1 if values is None else values.block
        sent = sum(self.algorithm.codec.floats(s.stop - s.start) for s in self._slices(block))
        floats = sent * len(self.algorithm.local.channels)
        sends = not self.algorithm.uplink.pooled
        self.ledger.record(
            Entry(
                self.round,
                -1 if who is None else who,
                block,
                (floats + self.layout.size - self.layout.dim) * sends,
                (upload.nbytes if isinstance(upload, Upload) else 0) * sends,
                plan.broadcast.nbytes * sends if first is not None else 0,
                accepted=accepted is not None,
                gradient_evaluations=values.gradient_evaluations if values is not None and first is not None else 0,
            )
        )
        if accepted is None:
            reason = f"round {self.round}, client {'unknown' if who is None else who}: {reason}"
            self._refuse(reason, who)
        if first is not None:  # it settles the client's place in the order, even if it was refused
            self._arrived[first] = accepted
            self._advance()
        return Receipt(accepted is not None, reason)

    def _refuse(self, reason: str, client: int | None) -> None:
        log.warning("upload refused: %s", reason)
        self._refused.append(reason)
        if client is not None:
            self._refused_clients.add(client)

    def lost(self, task: Task, why: str) -> None:
        """The client of this task will not answer."""
        plan = self._open_plan()
        place = self._place.get(task.client)
        if task.round != self.round or place is None:
            log.warning("client %d of round %d is given up, but this is round %d", task.client, task.round, self.round)
        elif place not in self._arrived:
            self._arrived[place] = None
            self._lost.append(f"client {task.client}: {shorten(why)}")
            self.ledger.record_lost(plan.broadcast.nbytes)
            self._advance()

    def forget_controls(self, why: str) -> None:
        """A client's state is gone, or newer than this server: with this round all controls begin again from zero."""
        self._open_plan()
        self._forget = self._forget or shorten(why)

    def _slices(self, block: int) -> tuple[slice, ...]:
        return self._cut[block] if 0 <= block < self.layout.blocks else ()

    def _accept(self, values: UploadValues, payload: Mapping[str, Sequence[Tensor]], sender: int | None) -> _Accepted:
        """Decode an upload; Malformed where it is not what was asked for."""
        self._check_direction(values, sender)
        self._check_shape(values.block, payload)
        try:
            slices, buffers = self._decode(values, payload)
        except ValueError as error:
            raise Malformed(f"it cannot be decoded: {error}") from None
        norms = self._norms(values.block, slices, buffers)
        self._norms_seen.setdefault(self._place[values.client], dict(norms))
        if self._limit.on:
            self._check_norms(values.block, slices, norms)
        if self._compares:  # the memory of an upload may be used again before the round is over
            slices = [{channel: values.clone() for channel, values in channels.items()} for channels in slices]
        return _Accepted(values, slices, buffers, norms)

    def _check_direction(self, values: UploadValues, sender: int | None) -> None:
        if sender is not None and values.client != sender:
            raise Malformed(f"it says that it is from client {values.client}, and came from client {sender}")
        if values.round != self.round:
            raise Malformed(f"it is for round {values.round}, this is round {self.round}")
        place = self._place.get(values.client)
        if place is None:
            raise Malformed("this client was not asked in this round")
        if place in self._arrived:
            raise Malformed("this client's part of the round is closed already (sent twice, or given up)")
        asked = self._open_plan().tasks[place].block
        if values.block != asked:
            raise Malformed(f"it holds block {values.block + 1}, asked was block {asked + 1}")

    def _check_shape(self, block: int, payload: Mapping[str, Sequence[Tensor]]) -> None:
        expected = self._lengths[block]
        if not isinstance(payload, Mapping) or len(payload) > _MOST_CHANNELS or set(payload) != set(expected):
            given = sorted(map(shown, payload))[:_MOST_CHANNELS] if isinstance(payload, Mapping) else shown(payload)
            raise Malformed(f"it has channels {given}, expected were {sorted(expected)}")
        for channel, lengths in expected.items():
            pieces = payload[channel]
            if not isinstance(pieces, (list, tuple)) or not all(map(_bytes, pieces[: len(lengths) + 1])):
                raise Malformed(f"channel {channel!r} is not a list of contiguous uint8 tensors")
            got = [piece.numel() for piece in pieces[: len(lengths) + 1]]
            if not self._fit(channel, block, got):
                raise Malformed(f"channel {channel!r} has slices of {got} bytes, expected were {lengths}")

    def _fit(self, channel: str, block: int, got: list[int]) -> bool:
        codec, dtype = self.algorithm.codec, self.layout.dtype
        if channel == BUFFERS:
            return got == self._lengths[block][BUFFERS]
        sizes = [s.stop - s.start for s in self._cut[block]]
        return len(got) == len(sizes) and all(codec.fits(k, n, dtype) for k, n in zip(got, sizes, strict=True))

    def _decode(
        self, values: UploadValues, payload: Mapping[str, Sequence[Tensor]]
    ) -> tuple[list[dict[str, Tensor]], Tensor | None]:
        rule, codec, dtype = self.algorithm.local, self.algorithm.codec, self.layout.dtype
        rate = rule.rate(self.round)
        out = []
        for k, s in enumerate(self._slices(values.block)):
            sent = {channel: codec.decode(payload[channel][k], s.stop - s.start, dtype) for channel in rule.channels}
            out.append(rule.complete(sent, {n: c[s] for n, c in self.controls.items()}, rate, values.steps))
        buffers = payload[BUFFERS][0].clone().view(dtype) if BUFFERS in payload else None
        return out, buffers

    def _norms(
        self, block: int, slices: list[dict[str, Tensor]], buffers: Tensor | None
    ) -> dict[tuple[str, int], float]:
        """Norms by channel and owner of the slice, of buffers as they change; Malformed where a value is not finite."""
        norms = {
            (channel, owner): norm(values)
            for owner, channels in zip((block, self.layout.blocks), slices, strict=False)
            for channel, values in channels.items()
        }
        if buffers is not None:
            norms[BUFFERS, -1] = norm(buffers - self.x[self.layout.buffer_slice])
        for (channel, _), size in norms.items():
            if not math.isfinite(size):
                what = "the buffers hold" if channel == BUFFERS else f"channel {channel!r} holds"
                raise Malformed(f"{what} NaN or infinity")
        return norms

    def _check_norms(self, block: int, slices: list[dict[str, Tensor]], norms: dict[tuple[str, int], float]) -> None:
        """Refuse what is larger than `max_norm` allows, or scale it down."""
        limits = {key: self._limit_of(*key) for key in norms}
        if self._limit.fixed is not None:
            for channel in {channel for channel, _ in norms}:
                # A control is of the size of a gradient: a change of one step, divided by its rate.
                most = self._limit.fixed / (1 if channel in ("dx", BUFFERS) else self.algorithm.local.rate(self.round))
                whole = math.hypot(*(size for (c, _), size in norms.items() if c == channel))
                if whole > most:
                    limits |= {key: size * (most / whole) for key, size in norms.items() if key[0] == channel}
        for key, size in norms.items():
            if size <= limits[key]:
                continue
            channel, owner = key
            if self.algorithm.over_norm == "refuse" or channel == BUFFERS:
                part = {-1: "buffers", self.layout.blocks: "shared block"}.get(owner, f"block {owner + 1}")
                raise Malformed(
                    f"channel {channel!r}, {part}: the norm is {size:.3g}, at most {limits[key]:.3g} is allowed"
                )
            slices[owner != block][channel].mul_(limits[key] / size)
            norms[key] = limits[key]

    def _limit_of(self, channel: str, owner: int) -> float:
        """The limit of a slice in this round."""
        key = channel, owner
        if key not in self._limits:
            self._limits[key] = self._limit.of_slice(channel, owner, self.x[self._part(owner)])
        return self._limits[key]

    def _part(self, owner: int) -> slice:
        """The coordinates of a block, of the shared block (N), or of the buffers (−1)."""
        if owner == -1:
            return self.layout.buffer_slice
        return self.layout.block(owner) if owner < self.layout.blocks else self.layout.shared

    def _advance(self) -> None:
        """Add what is next in the order of the plan, as far as it has arrived."""
        while self._next in self._arrived:
            arrived = self._arrived[self._next]
            self._arrived[self._next] = None
            self._next += 1
            if arrived is not None and self._compares:
                self._held.append(arrived)
            elif arrived is not None:
                self._add(arrived)

    def _count_held(self) -> None:
        """Count in what waited to be compared, but for uploads that are far larger than the others."""
        lengths = {k: self._part(k).stop - self._part(k).start for k in range(self.layout.blocks + 1)}
        far = self._limit.far_off([one.norms for one in self._held], lengths)
        for k, one in enumerate(self._held):
            if k not in far:
                self._add(one)
                continue
            client = one.values.client
            self._refuse(
                f"round {self.round}, client {client}: its norms are far larger than the others' in this round", client
            )
            self.ledger.refused += 1
            # The client was told that its upload is accepted, and keeps its new state.
            self._forget = self._forget or f"an upload of client {client} was refused late"

    def _add(self, accepted: _Accepted) -> None:
        values = accepted.values
        weight, share = 1.0, 1.0
        if self.algorithm.weighting == "examples":
            known = self.examples.get(values.client, values.examples)
            weight, share = float(min(values.examples, known)), float(known)
        for s, channels, owner in zip(
            self._slices(values.block), accepted.slices, (values.block, self.layout.blocks), strict=False
        ):
            self._count_in(s, channels["dx"], owner, weight)
            for name, total in self._control_sums.items():
                total[s].add_(channels[f"d{name}"], alpha=share)
        if accepted.buffers is not None:
            self._count_in(self.layout.buffer_slice, accepted.buffers, -1, weight)
        self._losses.append(values.train_loss)
        self._counted.append(_Accepted(values, [], None, accepted.norms))

    def _count_in(self, s: slice, values: Tensor, owner: int, weight: float) -> None:
        if self._weight[owner]:
            self._sum[s].add_(values, alpha=weight)
        else:  # the first one replaces what an earlier round left
            total = self._sum[s].copy_(values)
            if weight != 1:
                total.mul_(weight)
        self._weight[owner] += weight

    # -- commit -------------------------------------------------------------------------------------------------------

    def commit(self) -> RoundReport:
        """Move x by what arrived. A slice for which nothing arrived keeps x and every state."""
        plan = self._open_plan()
        for task in plan.tasks:
            if self.expects(task) and task.client in self._refused_clients:
                # Its answer was refused and counted already.
                self._arrived[self._place[task.client]] = None
                self.ledger.download_bytes += plan.broadcast.nbytes
                self._advance()
            self.lost(task, "no answer before the round closed")
        self._count_held()
        self._move_controls()
        moved = [k for k in range(self.layout.blocks + 1) if self._weight[k] and self._step(k)]
        buffers = self.layout.buffer_slice
        if self._weight[-1] and (mean := self._mean(-1, buffers)) is not None:
            self.x[buffers] = mean
        self._limit.follow([self._norms_seen[place] for place in sorted(self._norms_seen)])
        self.ledger.close_round()
        idle = [j for j in sorted({task.block for task in plan.tasks}) if j not in moved]
        if idle:
            log.warning(
                "round %d: nothing that counts arrived for block %s", self.round, ", ".join(str(j + 1) for j in idle)
            )
        self.last = report = RoundReport(
            self.round,
            len(self._losses),
            tuple(self._refused),
            tuple(self._lost),
            tuple(idle),
            sum(self._losses) / len(self._losses) if self._losses else math.nan,
        )
        self._count_barren([task.client for task in plan.tasks])
        turn, dealt = self._turn(len(plan.tasks))
        self._dealt[turn] = dealt + len(plan.tasks)
        self.round += 1
        self._clear()
        if self._barren >= GIVE_UP and len(self._barren_refused) >= min(2, len(self._barren_asked)):
            rate = f"lr = {self.algorithm.local.lr:g} now"
            cause = f"a learning rate that is too high ({rate}); another one is NaN in the data"
            raise Diverged(
                f"two of three uploads or more were refused in each of the last {GIVE_UP} rounds, so training stopped. "
                f"Last reason: {self._refused[-1]}. The usual cause is {self.suspects or cause}"
            )
        return report

    def _count_barren(self, asked: list[int]) -> None:
        """Count rounds in a row in which two of three answers, or more, were refused; what was accepted may be hostile."""
        useful = {one.values.client for one in self._counted} - self._refused_clients
        if not self._refused_clients or len(self._refused_clients) < 2 * len(useful):
            self._barren, self._barren_refused, self._barren_asked = 0, set(), set()
            return
        self._barren += 1
        self._barren_refused |= self._refused_clients
        self._barren_asked |= set(asked)

    def _step(self, k: int) -> bool:
        """Move a slice and its states; all of them stay as they are where one would not be finite."""
        s = self._part(k)
        delta = self._mean(k, s)
        if delta is None:
            return False
        delta = self.algorithm.local.server_change(delta, {n: c[s] for n, c in self.controls.items()})
        parts = {"x": self.x[s], **{n: v[s] for n, v in self.state.items()}}
        before = {name: part.clone() for name, part in parts.items()}
        self.algorithm.server.step(parts["x"], delta, {n: parts[n] for n in self.state})
        if all(math.isfinite(norm(part)) for part in parts.values()):
            return True
        for name, part in parts.items():
            part.copy_(before[name])
        self._undone(k, "the step did not end in finite numbers")
        return False

    def _undone(self, k: int, why: str) -> None:
        """Count a step that was undone against the clients whose uploads are far larger than the others'.

        Where all are of one size nobody is at fault: then it counts against all, and training is diverging.
        """
        self._weight[k] = 0
        sizes = {one.values.client: one.norms["dx", k] for one in self._counted if ("dx", k) in one.norms}
        middle = median_low(sizes.values())
        far = {client: size for client, size in sizes.items() if size > OUTLIER * middle or len(sizes) == 1}
        part = "the shared block" if k == self.layout.blocks else f"block {k + 1}"
        for client, size in (far or sizes).items():
            self._refuse(
                f"round {self.round}, client {client}: {why}, so {part} keeps its value; the norm of this upload is "
                f"{size:.3g}, the median {middle:.3g}",
                client,
            )
        for client in far:
            self.strikes[client] = self.strikes.get(client, 0) + 1
            if self.strikes[client] == STRIKES:
                log.warning("client %d is not asked again: %d steps had to be undone because of it", client, STRIKES)

    def _mean(self, k: int, s: slice) -> Tensor | None:
        """The mean of a slice; None, and the slice stays as it is, where finite uploads added up to infinity."""
        mean = self._sum[s].div_(self._weight[k]).to(self.x.dtype)
        if math.isfinite(norm(mean)):
            return mean
        if k >= 0:
            self._undone(k, "the sum of the uploads is not finite")
        return None

    def _move_controls(self) -> None:
        """c += ΣΔc/M, or c = Σn_i·c_i/Σn. Where c = mean(c_i) can no longer hold, all controls begin again from zero."""
        in_all, kept = float(self.clients), 1.0
        if self.algorithm.weighting == "examples":
            for one in self._counted:
                self.examples.setdefault(one.values.client, one.values.examples)
            if self.examples:  # of clients that are not known yet: as many as the others have
                in_all = sum(self.examples.values()) / len(self.examples) * self.clients
            kept = self._examples_in_all / in_all
            self._examples_in_all = in_all
        moved = {}
        for name, total in self._control_sums.items():
            change, control = total.div_(in_all).to(self.x.dtype), self.controls[name]
            moved[name] = change.add_(control, alpha=kept)
        overflow = "" if all(math.isfinite(norm(control)) for control in moved.values()) else "they overflowed"
        why = self._forget or overflow
        if not why:
            for name, control in moved.items():
                self.controls[name].copy_(control)
        elif moved:
            log.warning("round %d: all control variates begin again from zero: %s", self.round, why)
            self.reset_controls()

    def reset_controls(self) -> None:
        """c = 0, in a new control epoch: a client's c_i of an older one counts as zero."""
        self.epoch += 1
        for control in self.controls.values():
            control.zero_()

    def _open_plan(self) -> Plan:
        if self._plan is None:
            raise RuntimeError("no round is open: call plan() first")
        return self._plan

    # -- explicit state -----------------------------------------------------------------------------------------------

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that a later `restore` needs, between rounds: tensors, and plain values that JSON can hold."""
        tensors = {"x": self.x, **{f"control.{n}": t for n, t in self.controls.items()}}
        tensors |= {f"server.{n}": t for n, t in self.state.items()}
        values = {"round": self.round, "epoch": self.epoch, "barren": self._barren, "ledger": self.ledger.totals()}
        values["last"] = None if self.last is None else asdict(self.last)
        values["barren_clients"] = [sorted(self._barren_refused), sorted(self._barren_asked)]
        values["examples"] = [[client, n] for client, n in sorted(self.examples.items())]
        values |= {"examples_in_all": self._examples_in_all, "norms": self._limit.snapshot()}
        values["strikes"] = [[client, n] for client, n in sorted(self.strikes.items())]
        values["dealt"] = dict(self._dealt)
        return {name: t.clone() for name, t in tensors.items()}, values

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        self.x.copy_(tensors["x"])
        for name, t in self.controls.items():
            t.copy_(tensors[f"control.{name}"])
        for name, t in self.state.items():
            t.copy_(tensors[f"server.{name}"])
        self.round, self.epoch, self._barren = values["round"], values["epoch"], values["barren"]
        self.last = None if values["last"] is None else RoundReport(**values["last"])
        self.ledger = Ledger.from_totals(values["ledger"])
        # Checkpoints of earlier versions have none of these.
        self._barren_refused, self._barren_asked = map(set, values.get("barren_clients", [(), ()]))
        self.examples, self.strikes = dict(values.get("examples", [])), dict(values.get("strikes", []))
        self._examples_in_all = values.get("examples_in_all", 0.0)
        self._limit.restore(values.get("norms", {}))
        self._dealt = dict(values.get("dealt", {}))  # older checkpoints have none
        self._clear()


def _read(upload: Upload) -> UploadValues:
    """Read the plain values of an upload, whatever was handed in."""
    if not isinstance(upload, Upload):
        raise Malformed(f"it is no upload but {shown(upload)}")
    return read(UploadValues, {name: getattr(upload, name) for name in UploadValues.model_fields})


def _bytes(piece: object) -> bool:
    return (
        isinstance(piece, Tensor)
        and piece.layout == torch.strided
        and piece.device.type != "meta"
        and piece.dtype == torch.uint8
        and piece.dim() == 1
        and piece.is_contiguous()
    )
