"""Who holds what: the split of a training set over clients. Each part is an array of row numbers."""

from dataclasses import dataclass

import numpy as np

from fedbcgd.errors import UserError
from fedbcgd.rng import stream

Parts = list[np.ndarray]


def iid(examples: int, clients: int, seed: int = 0) -> Parts:
    """A random split into parts of equal size (to one example)."""
    _enough(examples, clients)
    return np.array_split(stream(seed, "partition").permutation(examples), clients)


def dirichlet(labels: np.ndarray, clients: int, rho: float, seed: int = 0) -> Parts:
    """Clients of equal size (to one example) whose label shares are drawn from Dirichlet(ρ): small ρ, few labels each.

    Every example is handed out once. Each client asks for labels by its shares; where a label is asked for more often
    than it occurs, chance decides, and those who went without ask again among the labels that are left.
    """
    labels = np.asarray(labels)
    _enough(len(labels), clients)
    _positive("dirichlet: ρ", rho)
    rng = stream(seed, "partition")
    pools = _pools(labels, rng)
    left = np.array([len(pool) for pool in pools])
    share = rng.dirichlet(np.full(len(pools), rho), size=clients)
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


def dirichlet_unequal(labels: np.ndarray, clients: int, rho: float, seed: int = 0) -> Parts:
    """Each label's examples are dealt to the clients by shares drawn from Dirichlet(ρ): labels and sizes both vary.

    A client that got nothing takes one example from the largest.
    """
    labels = np.asarray(labels)
    _enough(len(labels), clients)
    _positive("dirichlet: ρ", rho)
    rng = stream(seed, "partition")
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for pool in _pools(labels, rng):
        for part, rows in zip(parts, _cut(pool, rng.dirichlet(np.full(clients, rho))), strict=True):
            part.append(rows)
    return _nobody_empty([np.concatenate(part) for part in parts])


def shards(labels: np.ndarray, clients: int, each: int, seed: int = 0) -> Parts:
    """Examples sorted by label and cut into clients × `each` shards of equal size (to one); every client gets `each`."""
    labels = np.asarray(labels)
    if each < 1:
        raise UserError(f"shards: a client needs at least 1, given {each}")
    if len(labels) < clients * each:
        raise UserError(f"shards: {len(labels)} examples cannot be cut into {clients} × {each} shards")
    _enough(len(labels), clients)
    rng = stream(seed, "partition")
    by_label = np.concatenate(_pools(labels, rng))
    pieces = np.array_split(by_label, clients * each)
    hands = rng.permutation(len(pieces)).reshape(clients, each)
    return [np.sort(np.concatenate([pieces[k] for k in hand])) for hand in hands]


def quantity(examples: int, clients: int, spread: float, seed: int = 0) -> Parts:
    """Labels as they come, sizes by shares drawn from Dirichlet(`spread`): small for very unequal clients."""
    _enough(examples, clients)
    _positive("quantity: the spread", spread)
    rng = stream(seed, "partition")
    return _nobody_empty(_cut(rng.permutation(examples), rng.dirichlet(np.full(clients, spread))))


def by_group(groups: np.ndarray, clients: int, seed: int = 0) -> Parts:
    """Examples of one group (a writer, a device) stay together; where groups outnumber clients, each gets several."""
    groups = np.asarray(groups)
    kinds, kind = np.unique(groups, return_inverse=True)
    if len(kinds) < clients:
        raise UserError(
            f"clients: {len(kinds)} groups cannot be split over {clients} clients; take at most {len(kinds)}"
        )
    _enough(len(groups), clients)
    rng = stream(seed, "partition")
    rows = np.split(np.argsort(kind, kind="stable"), np.cumsum(np.bincount(kind))[:-1])
    deals = np.array_split(rng.permutation(len(kinds)), clients)
    return [np.sort(np.concatenate([rows[k] for k in deal])) for deal in deals]


def label_counts(labels: np.ndarray, parts: Parts) -> np.ndarray:
    """A row per client, a column per label: how many examples."""
    kinds, kind = np.unique(np.asarray(labels), return_inverse=True)
    return np.stack([np.bincount(kind[part], minlength=len(kinds)) for part in parts])


@dataclass(frozen=True)
class Heterogeneity:
    """How unequal clients are."""

    clients: int
    smallest: int
    median: int
    largest: int
    distance: (
        float  # mean over clients of the total variation between their labels and everybody's: 0 alike, near 1 apart
    )
    by_chance: float  # what an IID split into clients of these sizes would have, on average
    labels: float  # mean over clients of the effective number of labels, exp(entropy)
    kinds: int

    @classmethod
    def of(cls, counts: np.ndarray) -> "Heterogeneity":
        """From label counts, a row per client."""
        sizes = counts.sum(1)
        share = counts / sizes[:, None]
        overall = counts.sum(0) / counts.sum()
        distance = 0.5 * np.abs(share - overall).sum(1)
        rng = stream(0, "by chance")
        iid = [0.5 * np.abs(rng.multinomial(n, overall) / n - overall).sum() for n in sizes]
        entropy = -(share * np.log(np.where(share > 0, share, 1))).sum(1)
        return cls(
            len(sizes),
            int(sizes.min()),
            int(np.median(sizes)),
            int(sizes.max()),
            float(distance.mean()),
            float(np.mean(iid)),
            float(np.exp(entropy).mean()),
            counts.shape[1],
        )

    def __str__(self) -> str:
        equal = self.largest - self.smallest <= 1
        sizes = f"{self.largest:,}" if equal else f"{self.smallest:,} to {self.largest:,} (median {self.median:,})"
        return (
            f"{self.clients:,} clients of {sizes} examples; heterogeneity {self.distance:.3f} (mean total variation between "
            f"a client's labels and all; by chance it would be {self.by_chance:.3f}); "
            f"{self.labels:.1f} of {self.kinds} labels effective per client"
        )


def _pools(labels: np.ndarray, rng: np.random.Generator) -> Parts:
    """The rows of each label, shuffled."""
    kinds, kind = np.unique(labels, return_inverse=True)
    return [rng.permutation(np.flatnonzero(kind == c)) for c in range(len(kinds))]


def _cut(rows: np.ndarray, share: np.ndarray) -> Parts:
    return np.split(rows, np.round(np.cumsum(share)[:-1] * len(rows)).astype(np.int64))


def _nobody_empty(parts: Parts) -> Parts:
    for k, part in enumerate(parts):
        if not len(part):
            largest = max(range(len(parts)), key=lambda i: len(parts[i]))
            parts[k], parts[largest] = parts[largest][:1], parts[largest][1:]
    return [np.sort(part) for part in parts]


def _positive(what: str, value: float) -> None:
    if not 0 < value < np.inf:
        raise UserError(f"{what} must be positive and finite, given {value}")


def _enough(examples: int, clients: int) -> None:
    if clients < 1:
        raise UserError(f"clients: at least 1 is needed, given {clients}")
    if examples < clients:
        raise UserError(f"clients: {examples} examples cannot be split over {clients} clients")
