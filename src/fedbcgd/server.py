"""The server's side of a round, without I/O: plan, receive, commit."""

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbcgd.algorithm import Algorithm
from fedbcgd.errors import Diverged, UserError
from fedbcgd.flat import Layout
from fedbcgd.ledger import Entry, Ledger
from fedbcgd.messages import BUFFERS, Broadcast, Plan, Receipt, RoundReport, Task, Upload
from fedbcgd.streams import stream

log = logging.getLogger("fedbcgd")

_LONG, _WIDE = 1 << 18, 1 << 12
GIVE_UP = 3  # rounds in a row without one accepted upload, all of them refused


class Server:
    """Holds x and every vector of the server; moves x once a round.

    Uploads may arrive in any order. Each is checked and answered at once; they are added to the running sums in the
    order of the plan, so that the sums do not depend on who was faster. An upload that is early waits, decoded, until
    `settled` has passed it: a carrier that lends memory to uploads may reuse that of the first `settled` tasks.
    """

    def __init__(self, algorithm: Algorithm, layout: Layout, x: Tensor, clients: int, cohort: int, seed: int):
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
        self.reliable = True  # whether what is asked for arrives, unless it is given up before it begins
        self.suspects = ""  # what else may be the cause if all uploads are refused
        self.x = x.clone()
        params = self.x[: layout.dim]
        self.controls = {name: torch.zeros_like(params) for name in algorithm.local.controls}
        self.state = {n: torch.full_like(params, algorithm.server.init(n)) for n in algorithm.server.vectors}
        self.ledger = Ledger(layout.dim, x.element_size(), layout.blocks)
        wide = (
            torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        )  # half a precision is no place to sum
        self._sum = torch.zeros_like(self.x, dtype=wide)  # of a slice: once something of this round was counted in
        self._control_sums = {name: torch.zeros_like(params, dtype=wide) for name in self.controls}
        self.last: RoundReport | None = None  # of the last round that was committed
        self._dealt: dict[str, int] = {}  # tasks of the committed rounds, for each turn that the uplink takes
        self._barren = 0
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
        self._arrived: dict[int, tuple[Upload, list[dict[str, Tensor]], Tensor | None] | None] = {}
        self._next = 0
        self._weight = [0.0] * (self.layout.blocks + 2)  # per block, then shared, then buffers
        self._losses: list[float] = []
        self._refused: list[str] = []
        self._lost: list[str] = []
        self._forget = ""
        self.ledger.open_round()
        return self._plan

    def next_tasks(self) -> list[Task]:
        """Those of the next plan."""
        rng = stream(self.seed, "cohort", self.round)
        there = None if self.available is None else np.array(sorted(self.available), dtype=np.int64)
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

    def receive(self, upload: Upload) -> Receipt:
        """Check an upload and count it in; a refused one changes nothing but the ledger."""
        plan = self._open_plan()
        slices: list[dict[str, Tensor]] = []
        buffers: Tensor | None = None
        reason = self._misdirected(upload) or self._misshapen(upload)
        if not reason:
            try:
                slices, buffers = self._decode(upload)
                reason = self._not_finite(slices, buffers)
            except ValueError as error:
                reason = f"it cannot be decoded: {error}"
        sent = sum(self.algorithm.codec.floats(s.stop - s.start) for s in self._slices(upload.block))
        floats = sent * len(self.algorithm.local.channels)
        # What is sent twice was sent twice; but it was broadcast and computed once.
        place = self._place.get(upload.client) if upload.round == self.round else None
        first = place if place is not None and place not in self._arrived else None
        evaluations = max(0, int(upload.gradient_evaluations)) if first is not None else 0
        sends = not self.algorithm.uplink.pooled
        self.ledger.record(
            Entry(
                self.round,
                upload.client,
                upload.block,
                (floats + self.layout.size - self.layout.dim) * sends,
                upload.nbytes * sends,
                plan.broadcast.nbytes * sends if first is not None else 0,
                accepted=not reason,
                gradient_evaluations=evaluations,
            )
        )
        if reason:
            reason = f"round {self.round}, client {upload.client}: {reason}"
            log.warning("upload refused: %s", reason)
            self._refused.append(reason)
        if first is not None:  # it settles the client's place in the order, even if it was refused
            self._arrived[first] = None if reason else (upload, slices, buffers)
            self._advance()
        return Receipt(not reason, reason)

    def lost(self, task: Task, why: str) -> None:
        """The client of this task will not answer."""
        plan = self._open_plan()
        place = self._place.get(task.client)
        if task.round != self.round or place is None:
            log.warning("client %d of round %d is given up, but this is round %d", task.client, task.round, self.round)
        elif place not in self._arrived:
            self._arrived[place] = None
            self._lost.append(f"client {task.client}: {why}")
            self.ledger.record_lost(plan.broadcast.nbytes)
            self._advance()

    def forget_controls(self, why: str) -> None:
        """A client's state is gone, or newer than this server: with this round all controls begin again from zero."""
        self._open_plan()
        self._forget = self._forget or why

    def _slices(self, block: int) -> tuple[slice, ...]:
        return self._cut[block] if 0 <= block < self.layout.blocks else ()

    def _misdirected(self, upload: Upload) -> str:
        if upload.round != self.round:
            return f"it is for round {upload.round}, this is round {self.round}"
        if upload.client not in self._place:
            return "this client was not asked in this round"
        place = self._place[upload.client]
        if place in self._arrived:
            return "this client's part of the round is closed already (sent twice, or given up)"
        asked = self._open_plan().tasks[place].block
        if upload.block != asked:
            return f"it holds block {upload.block + 1}, asked was block {asked + 1}"
        return ""

    def _misshapen(self, upload: Upload) -> str:
        expected = self._lengths[upload.block]
        if set(upload.payload) != set(expected):
            return f"it has channels {sorted(upload.payload)}, expected were {sorted(expected)}"
        for channel, lengths in expected.items():
            pieces = upload.payload[channel]
            if not isinstance(pieces, (list, tuple)) or not all(map(_bytes, pieces)):
                return f"channel {channel!r} is not a list of contiguous uint8 tensors"
            got = [piece.numel() for piece in pieces]
            if not self._fit(channel, upload.block, got):
                return f"channel {channel!r} has slices of {got} bytes, expected were {lengths}"
        if upload.steps < 1 or upload.examples < 1:
            return f"it reports {upload.steps} steps on {upload.examples} examples; both must be positive"
        return ""

    def _fit(self, channel: str, block: int, got: list[int]) -> bool:
        codec, dtype = self.algorithm.codec, self.layout.dtype
        if channel == BUFFERS:
            return got == self._lengths[block][BUFFERS]
        sizes = [s.stop - s.start for s in self._cut[block]]
        return len(got) == len(sizes) and all(codec.fits(k, n, dtype) for k, n in zip(got, sizes, strict=True))

    def _decode(self, upload: Upload) -> tuple[list[dict[str, Tensor]], Tensor | None]:
        rule, codec, dtype = self.algorithm.local, self.algorithm.codec, self.layout.dtype
        rate = rule.rate(self.round)
        out = []
        for k, s in enumerate(self._slices(upload.block)):
            sent = {
                channel: codec.decode(upload.payload[channel][k], s.stop - s.start, dtype) for channel in rule.channels
            }
            out.append(rule.complete(sent, {n: c[s] for n, c in self.controls.items()}, rate, upload.steps))
        buffers = upload.payload[BUFFERS][0].clone().view(dtype) if BUFFERS in upload.payload else None
        return out, buffers

    @staticmethod
    def _not_finite(slices: list[dict[str, Tensor]], buffers: Tensor | None) -> str:
        for channels in slices:
            for channel, values in channels.items():
                if not _finite(values):
                    return f"channel {channel!r} holds NaN or infinity"
        if buffers is not None and not _finite(buffers):
            return "the buffers hold NaN or infinity"
        return ""

    def _advance(self) -> None:
        """Add what is next in the order of the plan, as far as it has arrived."""
        while self._next in self._arrived:
            arrived = self._arrived[self._next]
            self._arrived[self._next] = None
            self._next += 1
            if arrived is not None:
                self._add(*arrived)

    def _add(self, upload: Upload, slices: list[dict[str, Tensor]], buffers: Tensor | None) -> None:
        weight = float(upload.examples) if self.algorithm.weighting == "examples" else 1.0
        for s, channels, owner in zip(
            self._slices(upload.block), slices, (upload.block, self.layout.blocks), strict=False
        ):
            self._count_in(s, channels["dx"], owner, weight)
            for name, total in self._control_sums.items():
                total[s].add_(channels[f"d{name}"])
        if buffers is not None:
            self._count_in(self.layout.buffer_slice, buffers, -1, weight)
        self._losses.append(upload.train_loss)

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
            self.lost(task, "no answer before the round closed")
        self._move_controls()
        parts = [self.layout.block(j) for j in range(self.layout.blocks)] + [self.layout.shared]
        for k, s in enumerate(parts):
            if self._weight[k] and (delta := self._mean(k, s)) is not None:
                delta = self.algorithm.local.server_change(delta, {n: c[s] for n, c in self.controls.items()})
                self.algorithm.server.step(self.x[s], delta, {n: v[s] for n, v in self.state.items()})
        buffers = self.layout.buffer_slice
        if self._weight[-1] and (mean := self._mean(-1, buffers)) is not None:
            self.x[buffers] = mean
        self.ledger.close_round()
        idle = [j for j in sorted({task.block for task in plan.tasks}) if not self._weight[j]]
        if idle:
            log.warning("round %d: nothing arrived for block %s", self.round, ", ".join(str(j + 1) for j in idle))
        self.last = report = RoundReport(
            self.round,
            len(self._losses),
            tuple(self._refused),
            tuple(self._lost),
            tuple(idle),
            sum(self._losses) / len(self._losses) if self._losses else math.nan,
        )
        self._barren = self._barren + 1 if self._refused and not self._losses else 0
        turn, dealt = self._turn(len(plan.tasks))
        self._dealt[turn] = dealt + len(plan.tasks)
        self.round += 1
        self._clear()
        if self._barren >= GIVE_UP:
            rate = f"lr = {self.algorithm.local.lr:g} now"
            cause = f"a learning rate that is too high ({rate}); another one is NaN in the data"
            raise Diverged(
                f"every upload of the last {GIVE_UP} rounds was refused, so training stopped. Last reason: "
                f"{self._refused[-1]}. The usual cause is {self.suspects or cause}"
            )
        return report

    def _mean(self, k: int, s: slice) -> Tensor | None:
        """The mean of a slice; None, and the slice stays as it is, where finite uploads added up to infinity."""
        mean = self._sum[s].div_(self._weight[k]).to(self.x.dtype)
        if _finite(mean):
            return mean
        log.warning("round %d: a mean overflowed; that part of the model keeps its value", self.round)
        self._weight[k] = 0
        return None

    def _move_controls(self) -> None:
        """c += ΣΔc/M. Where c = mean(c_i) can no longer hold, all controls begin again from zero."""
        sums = {name: total.div_(self.clients).to(self.x.dtype) for name, total in self._control_sums.items()}
        overflow = "" if all(map(_finite, sums.values())) else "they overflowed"
        why = self._forget or overflow
        if not why:
            for name, change in sums.items():
                self.controls[name].add_(change)
        elif sums:
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
        self._dealt = dict(values.get("dealt", {}))  # older checkpoints have none
        self._clear()


def _finite(values: Tensor) -> bool:
    """Whether all are finite: in one pass where their sum is, since no sum loses a NaN or an infinity."""
    rest = values
    if values.numel() >= _LONG and values.dtype in (torch.float32, torch.float64):
        # As a product with ones: that reads several rows at a time, half as long as one after the other.
        whole = values.numel() // _WIDE * _WIDE
        rows, rest = values[:whole].view(-1, _WIDE), values[whole:]
        if not math.isfinite((rows @ rows.new_ones(_WIDE)).sum()):
            return bool(values.isfinite().all())
    return math.isfinite(rest.sum()) or bool(values.isfinite().all())


def _bytes(piece: object) -> bool:
    return isinstance(piece, Tensor) and piece.dtype == torch.uint8 and piece.dim() == 1 and piece.is_contiguous()
