"""Partitions of a training set over clients. Each part is an array of row numbers."""

from dataclasses import dataclass

import numpy as np

from fedbcgd.errors import UserError
from fedbcgd.rng import stream

RowsByClient = list[np.ndarray]


def held_out(examples: int, share: float, seed: int, purpose: str, client: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw the examples of a client that are held out from training; a single example is not.

    Args:
        examples: how many the client has.
        share: how much of them is held out: at least one example, and not all.
        seed: fixes the draw.
        purpose: what they are held out for; different purposes draw independently.
        client: the client.

    Returns:
        The rows of the examples that it keeps, and of those that are held out.
    """
    order = stream(seed, purpose, 0, client).permutation(examples)
    count = min(max(1, round(examples * share)), examples - 1)
    return np.sort(order[count:]), np.sort(order[:count])


def iid(examples: int, clients: int, seed: int = 0) -> RowsByClient:
    """Split examples at random into parts of equal size, to within one example.

    Args:
        examples: how many there are.
        clients: how many parts.
        seed: fixes the partition.

    Returns:
        The row numbers of each client.

    Raises:
        UserError: there are fewer examples than clients.
    """
    _check_clients(examples, clients)
    return np.array_split(stream(seed, "partition").permutation(examples), clients)


def dirichlet(labels: np.ndarray, clients: int, rho: float, seed: int = 0) -> RowsByClient:
    """Split examples into parts of equal size, to within one, with label shares drawn from Dirichlet(ρ).

    Every example is assigned once. Each client requests as many examples as it lacks, with labels drawn from its shares. If
    a label is requested more often than it has examples left, these go to requests chosen at random. What a client then
    lacks it requests again, from the labels that are left, until every client has its examples.

    Args:
        labels: the label of each example.
        clients: how many parts.
        rho: ρ; the smaller, the fewer labels a client has.
        seed: fixes the partition.

    Returns:
        The row numbers of each client.

    Raises:
        UserError: there are fewer examples than clients, or ρ is not positive.
    """
    labels = np.asarray(labels)
    _check_clients(len(labels), clients)
    _check_positive("dirichlet: ρ", rho)
    rng = stream(seed, "partition")
    rows_of = _rows_by_label(labels, rng)
    left = np.array([len(rows) for rows in rows_of])
    share = rng.dirichlet(np.full(len(rows_of), rho), size=clients)
    missing = np.full(clients, len(labels) // clients)
    missing[: len(labels) % clients] += 1
    rng.shuffle(missing)
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    while missing.any():
        open_share = np.where(left > 0, share, 0)
        exhausted = open_share.sum(1) <= 1e-12  # no example with one of this client's labels is left: it takes any
        open_share[exhausted] = left
        requests = rng.multinomial(missing, open_share / open_share.sum(1, keepdims=True))
        for c in np.flatnonzero(requests.sum(0)):
            receivers = rng.permutation(np.repeat(np.arange(clients), requests[:, c]))[: left[c]]
            start = len(rows_of[c]) - left[c]
            rows = rows_of[c][start : start + len(receivers)]
            left[c] -= len(receivers)
            for client in np.unique(receivers):
                received = rows[receivers == client]
                parts[client].append(received)
                missing[client] -= len(received)
    return [np.sort(np.concatenate(part)) for part in parts]


def dirichlet_unequal(labels: np.ndarray, clients: int, rho: float, seed: int = 0) -> RowsByClient:
    """Split the examples of each label by shares drawn from Dirichlet(ρ), so that labels and sizes both vary.

    A client that would have no example gets one of the largest client. Arguments, result and errors are those of
    `dirichlet`; the smaller ρ, the more unequal the clients.
    """
    labels = np.asarray(labels)
    _check_clients(len(labels), clients)
    _check_positive("dirichlet: ρ", rho)
    rng = stream(seed, "partition")
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label_rows in _rows_by_label(labels, rng):
        for part, rows in zip(parts, _cut(label_rows, rng.dirichlet(np.full(clients, rho))), strict=True):
            part.append(rows)
    return _fill_empty([np.concatenate(part) for part in parts])


def shards(labels: np.ndarray, clients: int, each: int, seed: int = 0) -> RowsByClient:
    """Sort examples by label, cut them into shards of equal size (to within one), and give each client random shards.

    Args:
        labels: the label of each example.
        clients: how many parts.
        each: shards of a client.
        seed: fixes the partition.

    Returns:
        The row numbers of each client.

    Raises:
        UserError: there are fewer examples than shards, or `each` is not positive.
    """
    labels = np.asarray(labels)
    if each < 1:
        raise UserError(f"shards: expected an integer ≥ 1, got {each}")
    if len(labels) < clients * each:
        raise UserError(f"shards: expected at most {len(labels)}, one for each example, got {clients} × {each}")
    _check_clients(len(labels), clients)
    rng = stream(seed, "partition")
    by_label = np.concatenate(_rows_by_label(labels, rng))
    pieces = np.array_split(by_label, clients * each)
    shards_of = rng.permutation(len(pieces)).reshape(clients, each)
    return [np.sort(np.concatenate([pieces[k] for k in own])) for own in shards_of]


def quantity(examples: int, clients: int, spread: float, seed: int = 0) -> RowsByClient:
    """Split examples at random into parts of unequal size, by shares drawn from a Dirichlet distribution.

    Args:
        examples: how many there are.
        clients: how many parts.
        spread: parameter of the distribution; the smaller, the more unequal the sizes.
        seed: fixes the partition.

    Returns:
        The row numbers of each client.

    Raises:
        UserError: there are fewer examples than clients, or `spread` is not positive.
    """
    _check_clients(examples, clients)
    _check_positive("quantity: spread", spread)
    rng = stream(seed, "partition")
    return _fill_empty(_cut(rng.permutation(examples), rng.dirichlet(np.full(clients, spread))))


def by_group(groups: np.ndarray, clients: int, seed: int = 0) -> RowsByClient:
    """Keep the examples of each group (a writer, a device) together. If groups outnumber clients, each gets several.

    Args:
        groups: the group of each example.
        clients: how many parts.
        seed: fixes the partition.

    Returns:
        The row numbers of each client.

    Raises:
        UserError: there are fewer groups than clients.
    """
    groups = np.asarray(groups)
    distinct, group = np.unique(groups, return_inverse=True)
    if len(distinct) < clients:
        raise UserError(f"clients: expected at most {len(distinct)}, one for each group, got {clients}")
    _check_clients(len(groups), clients)
    rng = stream(seed, "partition")
    rows = np.split(np.argsort(group, kind="stable"), np.cumsum(np.bincount(group))[:-1])
    groups_of = np.array_split(rng.permutation(len(distinct)), clients)
    return [np.sort(np.concatenate([rows[k] for k in own])) for own in groups_of]


def label_counts(labels: np.ndarray, parts: RowsByClient) -> np.ndarray:
    """Count the examples of each label at each client.

    Args:
        labels: the label of each example.
        parts: the row numbers of each client.

    Returns:
        A row for each client, a column for each label.
    """
    distinct, label = np.unique(np.asarray(labels), return_inverse=True)
    return np.stack([np.bincount(label[part], minlength=len(distinct)) for part in parts])


@dataclass(frozen=True)
class Heterogeneity:
    """How unequal the clients are.

    Attributes:
        clients: how many clients.
        smallest: examples of the smallest client.
        median: examples of the median client.
        largest: examples of the largest client.
        distance: mean over clients of the total variation between their labels and all labels: 0 is equal, 1 disjoint.
        by_chance: the distance that an IID split into clients of these sizes would have on average.
        labels: mean over clients of the effective number of labels, exp(entropy).
        kinds: how many labels there are.
    """

    clients: int
    smallest: int
    median: int
    largest: int
    distance: float
    by_chance: float
    labels: float
    kinds: int

    @classmethod
    def of(cls, counts: np.ndarray) -> "Heterogeneity":
        """Measure how unequal the clients are, from their label counts (see `label_counts`)."""
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
            f"{self.clients:,} clients of {sizes} examples; heterogeneity {self.distance:.3f} (mean total variation "
            f"between a client's labels and all; by chance it would be {self.by_chance:.3f}); "
            f"{self.labels:.1f} of {self.kinds} labels effective per client"
        )


def _rows_by_label(labels: np.ndarray, rng: np.random.Generator) -> RowsByClient:
    """Return the rows of each label, shuffled."""
    distinct, label = np.unique(labels, return_inverse=True)
    return [rng.permutation(np.flatnonzero(label == c)) for c in range(len(distinct))]


def _cut(rows: np.ndarray, share: np.ndarray) -> RowsByClient:
    """Cut rows into consecutive pieces of these shares."""
    return np.split(rows, np.round(np.cumsum(share)[:-1] * len(rows)).astype(np.int64))


def _fill_empty(parts: RowsByClient) -> RowsByClient:
    """Give each empty part one row of the largest part; return all parts sorted."""
    for k, part in enumerate(parts):
        if not len(part):
            largest = max(range(len(parts)), key=lambda i: len(parts[i]))
            parts[k], parts[largest] = parts[largest][:1], parts[largest][1:]
    return [np.sort(part) for part in parts]


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < np.inf:
        raise UserError(f"{name}: expected a finite number > 0, got {value}")


def _check_clients(examples: int, clients: int) -> None:
    if clients < 1:
        raise UserError(f"clients: expected an integer ≥ 1, got {clients}")
    if examples < clients:
        raise UserError(f"clients: expected at most {examples}, one for each example, got {clients}")
