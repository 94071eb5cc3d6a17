"""Faults on purpose, all from the seed: clients that vanish, uploads that arrive damaged, workers that are killed."""

import contextlib
import dataclasses
import os
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedbcgd.core.messages import Receipt, Task, Upload
from fedbcgd.rng import stream

if TYPE_CHECKING:
    from fedbcgd.core.server import Server
    from fedbcgd.engine.backend import Backend


def dropped(tasks: Sequence[Task], share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Which of these clients vanish in this round; and when, as a share of the time until they would have answered: any
    moment is as likely as another."""
    if not share:
        return np.zeros(len(tasks), bool), np.ones(len(tasks))
    drawn = np.array([stream(seed, "dropout", t.round, t.client).random(2) for t in tasks]).reshape(-1, 2)
    return drawn[:, 0] < share, drawn[:, 1]


def spoilt(tasks: Sequence[Task], share: float, seed: int) -> np.ndarray:
    """Whose uploads arrive damaged in this round."""
    return np.array([_damage(t, share, seed) is not None for t in tasks], bool)


def _damage(of: Task | Upload, share: float, seed: int) -> np.random.Generator | None:
    """What chooses the damage, if there is to be any."""
    if not share:
        return None
    rng = stream(seed, "corrupt", of.round, of.client)
    return rng if rng.random() < share else None


def damaged(upload: Upload, share: float, seed: int) -> Upload:
    """The upload as it arrives: with probability `share` its largest piece is cut short, or overwritten with ones (which
    are NaN in every float format). The server refuses both. A single flipped bit could not be told from a value."""
    rng = _damage(upload, share, seed)
    if rng is None:
        return upload
    short = rng.random() < 0.5
    channel, k = max(
        ((channel, k) for channel, pieces in upload.payload.items() for k in range(len(pieces))),
        key=lambda at: upload.payload[at[0]][at[1]].numel(),
    )

    def damage(piece: Tensor) -> Tensor:
        return piece[: piece.numel() // 4].clone() if short else torch.full_like(piece, 255)

    pieces = list(upload.payload[channel])
    pieces[k] = damage(pieces[k])
    return dataclasses.replace(upload, payload={**upload.payload, channel: pieces})


class FaultInjector:
    """Stands before the server in a round with faults: damages uploads, and kills a worker.

    `victim` chooses the worker to kill, as soon as the first upload is in: the others are at work then.
    """

    def __init__(
        self, server: "Server", backend: "Backend", corrupt: float, seed: int, victim: np.random.Generator | None
    ):
        self._server, self._backend = server, backend
        self._corrupt, self._seed, self._victim = corrupt, seed, victim

    @property
    def settled(self) -> int:
        return self._server.settled

    def expects(self, task: Task) -> bool:
        return self._server.expects(task)

    def lost(self, task: Task, why: str) -> None:
        self._server.lost(task, why)

    def receive(self, upload: Upload, sender: int | None = None) -> Receipt:
        if self._victim is not None:
            pids: list[int] = self._backend.pids()  # type: ignore[attr-defined]
            with contextlib.suppress(ProcessLookupError):  # gone already
                os.kill(int(self._victim.choice(pids)), signal.SIGKILL)
            self._victim = None
        return self._server.receive(damaged(upload, self._corrupt, self._seed), sender)


def crashes(share: float, round: int, seed: int) -> np.random.Generator | None:
    """If a worker is killed in this round: what chooses it."""
    rng = stream(seed, "crash", round)
    return rng if rng.random() < share else None
