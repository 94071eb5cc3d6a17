"""Where the state of clients is kept between rounds. A client that never took part takes no space."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedbcgd.messages import StateUpdate


class Memory:
    """Client state in this process's memory."""

    def __init__(self, dim: int, dtype: torch.dtype):
        self._dim, self._dtype = dim, dtype
        self._kept: dict[int, tuple[int, dict[str, Tensor]]] = {}

    def load(self, client: int, epoch: int) -> Mapping[str, Tensor]:
        """This client's vectors; nothing if it never took part or if they are of an older control epoch."""
        kept_epoch, vectors = self._kept.get(client, (epoch, {}))
        return vectors if kept_epoch == epoch else {}

    def store(self, update: StateUpdate) -> None:
        """Make an accepted update this client's state."""
        if not update.values:
            return
        kept = dict(self.load(update.client, update.epoch))
        for name, pieces in update.values.items():
            vector = kept.setdefault(name, torch.zeros(self._dim, dtype=self._dtype, device=pieces[0][1].device))
            for s, values in pieces:
                vector[s] = values
        self._kept[update.client] = (update.epoch, kept)

    def clients(self) -> list[int]:
        return sorted(self._kept)
