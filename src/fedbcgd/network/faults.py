"""Injected faults, all drawn from the seed: clients drop out, uploads arrive damaged, workers are killed."""

import contextlib
import dataclasses
import os
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedbcgd.core.messages import Receipt, Task, Upload
from fedbcgd.rng import stream

if TYPE_CHECKING:
    from fedbcgd.core.server import Server
    from fedbcgd.engine.backend import Backend


def draw_dropouts(tasks: Sequence[Task], share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw which clients drop out of a round, and when.

    Args:
        tasks: the tasks of the round.
        share: the probability that a client drops out.
        seed: the seed of the run.

    Returns:
        For each task, whether its client drops out, and after which share of the time that its answer would have taken,
        uniform in [0, 1).
    """
    if not share:
        return np.zeros(len(tasks), bool), np.ones(len(tasks))
    draws = np.array([stream(seed, "dropout", t.round, t.client).random(2) for t in tasks]).reshape(-1, 2)
    return draws[:, 0] < share, draws[:, 1]


def draw_damage(tasks: Sequence[Task], share: float, seed: int) -> np.ndarray:
    """Draw for each task whether its upload will arrive damaged, which is whether `damage_upload` will change it."""
    return np.array([_damage_rng(t, share, seed) is not None for t in tasks], bool)


def _damage_rng(message: Task | Upload, share: float, seed: int) -> np.random.Generator | None:
    """Make the generator that chooses the kind of damage; None if the upload is not to be damaged."""
    if not share:
        return None
    rng = stream(seed, "corrupt", message.round, message.client)
    return rng if rng.random() < share else None


def damage_upload(upload: Upload, share: float, seed: int) -> Upload:
    """Damage an upload with probability `share`, so that the server refuses it.

    Its largest piece is cut short, or overwritten with ones, which are NaN in every float format. A single flipped bit
    would look like an ordinary value.

    Args:
        upload: as the client sent it.
        share: the probability of damage.
        seed: the seed of the run.

    Returns:
        A damaged copy, or the upload itself.
    """
    rng = _damage_rng(upload, share, seed)
    if rng is None:
        return upload
    cut_short = rng.random() < 0.5
    channel, k = max(
        ((channel, k) for channel, pieces in upload.payload.items() for k in range(len(pieces))),
        key=lambda index: upload.payload[index[0]][index[1]].numel(),
    )
    pieces = list(upload.payload[channel])
    piece = pieces[k]
    pieces[k] = piece[: piece.numel() // 4].clone() if cut_short else torch.full_like(piece, 255)
    return dataclasses.replace(upload, payload={**upload.payload, channel: pieces})


class FaultInjector:
    """An inbox that damages uploads on their way to the server, and kills a worker.

    Args:
        server: receives the uploads.
        backend: has the worker that is killed.
        corrupt: the share of uploads that are damaged.
        seed: the seed of the run.
        victim: chooses the worker to kill when the first upload arrives, while others still work; None kills none.
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
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                os.kill(int(self._victim.choice(pids)), signal.SIGKILL)
            self._victim = None
        return self._server.receive(damage_upload(upload, self._corrupt, self._seed), sender)


def draw_crash(share: float, round: int, seed: int) -> np.random.Generator | None:
    """Draw whether a worker is killed in a round; return the generator that chooses it, or None."""
    rng = stream(seed, "crash", round)
    return rng if rng.random() < share else None
