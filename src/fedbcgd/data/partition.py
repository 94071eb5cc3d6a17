"""Who holds what: the split of a training set over clients. Each part is an array of row numbers."""

import numpy as np

from fedbcgd.errors import UserError
from fedbcgd.streams import stream


def iid(examples: int, clients: int, seed: int = 0) -> list[np.ndarray]:
    """A random split into parts of equal size (to one example)."""
    _enough(examples, clients)
    return np.array_split(stream(seed, "partition").permutation(examples), clients)


def dirichlet(labels: np.ndarray, clients: int, rho: float, seed: int = 0) -> list[np.ndarray]:
    """Clients of equal size (to one example) whose label shares are drawn from Dirichlet(ρ): small ρ, few labels each.

    Every example is handed out once. Each client asks for labels by its shares; where a label is asked for more often
    than it occurs, chance decides, and those who went without ask again among the labels that are left.
    """
    labels = np.asarray(labels)
    _enough(len(labels), clients)
    if not 0 < rho < np.inf:
        raise UserError(f"dirichlet: ρ must be positive and finite, given {rho}")
    rng = stream(seed, "partition")
    kinds, kind = np.unique(labels, return_inverse=True)
    pools = [rng.permutation(np.flatnonzero(kind == c)) for c in range(len(kinds))]
    left = np.array([len(pool) for pool in pools])
    share = rng.dirichlet(np.full(len(kinds), rho), size=clients)
    wants = np.full(clients, len(labels) // clients)
    wants[: len(labels) % clients] += 1
    rng.shuffle(wants)
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    while wants.any():
        open_share = np.where(left > 0, share, 0)
        spent = open_share.sum(1) <= 1e-12  # all that this client likes is gone: it takes what there is
        open_share[spent] = left
        asked = rng.multinomial(wants, open_share / open_share.sum(1, keepdims=True))
        for c in np.flatnonzero(asked.sum(0)):
            askers = rng.permutation(np.repeat(np.arange(clients), asked[:, c]))[: left[c]]
            at = len(pools[c]) - left[c]
            rows = pools[c][at : at + len(askers)]
            left[c] -= len(askers)
            for client in np.unique(askers):
                got = rows[askers == client]
                parts[client].append(got)
                wants[client] -= len(got)
    return [np.sort(np.concatenate(part)) for part in parts]


def label_counts(labels: np.ndarray, parts: list[np.ndarray]) -> np.ndarray:
    """A row per client, a column per label: how many examples."""
    kinds, kind = np.unique(np.asarray(labels), return_inverse=True)
    return np.stack([np.bincount(kind[part], minlength=len(kinds)) for part in parts])


def _enough(examples: int, clients: int) -> None:
    if clients < 1:
        raise UserError(f"clients: at least 1 is needed, given {clients}")
    if examples < clients:
        raise UserError(f"clients: {examples} examples cannot be split over {clients} clients")
