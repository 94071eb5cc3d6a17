"""The largest norm that a client's change may have, for a server that does not trust its clients.

`max_norm` is a number, which limits the norm of the whole change y − x, or a multiple such as "20x" of a reference: the
largest value so far of the running median of the norms of the same slice. (Changes become small as clients converge, but
a client that joins late still begins with a large one.) The median is over all uploads that could be decoded, those above
the limit included, so it is robust as long as most clients are honest.

A slice has no median until it has had WARM_UP uploads. Until then its limit is LOOSE·max(‖x‖, √n) for a slice x of n
values, and the uploads of a round are compared with each other before they are added. Later it is at least
FLOOR·max(‖x‖, √n), so that a slice that hardly moved at first may begin to move.

The limits of a round follow from the rounds before it, so they do not depend on who answers first.
"""

import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from fedbcgd.errors import UserError

WINDOW = 64  # norms that a running median looks back on, for each slice
WARM_UP = 8  # uploads of a slice before its median counts
LOOSE = 100.0  # before that: the limit, in units of max(‖x‖, √n)
FLOOR = 0.01  # after that: the smallest limit, in the same units
MIN_COMPARED = 3  # uploads are compared with each other only if there are at least so many
ACROSS = 1000.0  # limit across slices: this multiple of the median norm per coordinate of the whole round
OFF = "off"

MaxNorm = float | str | None
OverNorm = Literal["refuse", "scale"]


def parse(max_norm: MaxNorm) -> tuple[float | None, float | None]:
    """Return the fixed limit and the multiple of the median; at most one of them is a number.

    Raises:
        UserError: the value is neither a positive number, a multiple such as "20x", nor "off".
    """
    if max_norm is None or max_norm == OFF:
        return None, None
    if isinstance(max_norm, (int, float)) and not isinstance(max_norm, bool) and 0 < max_norm < math.inf:
        return float(max_norm), None
    if isinstance(max_norm, str) and (match := re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)x", max_norm)):
        factor = float(match[1])
        if factor >= 1:
            return None, factor
    raise UserError(
        f'max_norm: expected a positive number, a multiple of the median such as "20x" (at least "1x") or "off", '
        f"got {max_norm!r}"
    )


class NormLimit:
    """The norm limits of a run, and the norms from which they are computed.

    A slice is identified by its channel and its owner: a block, the shared block, or the buffers.
    """

    def __init__(self, max_norm: MaxNorm):
        self.fixed, self.factor = parse(max_norm)
        self._seen: dict[str, deque[float]] = {}
        self._reference: dict[str, float] = {}  # the largest that the running median has been

    @property
    def on(self) -> bool:
        """Whether there is a limit."""
        return self.fixed is not None or self.factor is not None

    def of_slice(self, channel: str, owner: int, x: Tensor) -> float:
        """Return the limit of a slice of a channel in the next round; infinity unless `max_norm` is a multiple."""
        if self.factor is None:
            return math.inf
        size = max(math.sqrt(x.numel()), norm(x))
        reference = self._reference.get(f"{channel}.{owner}")
        return LOOSE * size if reference is None else max(self.factor * reference, FLOOR * size)

    def knows(self, channel: str, owner: int) -> bool:
        """Return whether there is a median to compare with, or none is needed."""
        return self.factor is None or f"{channel}.{owner}" in self._reference

    def far_off(self, uploads: Sequence[Mapping[tuple[str, int], float]], lengths: Mapping[int, int]) -> set[int]:
        """Return the positions of the uploads whose norms are far larger than the others' in a round.

        Args:
            uploads: the norms of each upload, by channel and owner of the slice.
            lengths: the coordinates of each owner's slice.
        """
        if self.factor is None or len(uploads) < MIN_COMPARED:
            return set()
        outliers = set()
        for channel in {channel for norms in uploads for channel, owner in norms if owner in lengths}:
            by_owner: dict[int, list[tuple[float, int]]] = {}
            for k, norms in enumerate(uploads):
                for owner in lengths:
                    if (channel, owner) in norms:
                        by_owner.setdefault(owner, []).append((norms[channel, owner], k))
            unit_norm = {owner: math.sqrt(max(1, lengths[owner])) for owner in by_owner}  # of a slice of ones
            typical = median(size / unit_norm[owner] for owner, sizes in by_owner.items() for size, _ in sizes)
            for owner, sizes in by_owner.items():
                limit = ACROSS * typical * unit_norm[owner]
                if len(sizes) >= MIN_COMPARED:
                    limit = min(limit, self.factor * median(size for size, _ in sizes))
                outliers |= {k for size, k in sizes if size > max(limit, FLOOR * unit_norm[owner])}
        return outliers

    def update_medians(self, norms: Sequence[Mapping[tuple[str, int], float]]) -> None:
        """Add the norms of the uploads of a round, in the order of its plan, to the running medians."""
        if self.factor is None:
            return
        for upload in norms:
            for (channel, owner), value in upload.items():
                self._seen.setdefault(f"{channel}.{owner}", deque(maxlen=WINDOW)).append(value)
        for key, norms_seen in self._seen.items():
            if len(norms_seen) >= WARM_UP:
                self._reference[key] = max(median(norms_seen), self._reference.get(key, 0.0))

    def snapshot(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        return {"seen": {key: list(norms) for key, norms in self._seen.items()}, "reference": self._reference}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Load a snapshot."""
        self._seen = {key: deque(norms, maxlen=WINDOW) for key, norms in values.get("seen", {}).items()}
        self._reference = dict(values.get("reference", {}))


def norm(values: Tensor) -> float:
    """Return the Euclidean norm; NaN or infinity if a value is not finite."""
    if values.dtype in (torch.float32, torch.float64):
        square = float(torch.dot(values, values))  # one pass
    else:
        square = float(torch.linalg.vector_norm(values, dtype=torch.float32)) ** 2
    if math.isfinite(square):
        return math.sqrt(square)
    # A square overflows before its value does.
    largest = float(values.abs().max())
    return largest * float(torch.linalg.vector_norm(values / largest, dtype=torch.float64)) if largest else largest
