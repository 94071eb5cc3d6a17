"""Assigns blocks to clients so that the slowest one takes least time, and chooses block sizes that fit the links."""

from collections.abc import Sequence

import numpy as np

_COHORTS = 200  # cohorts drawn to compare block sizes
_POWERS = np.linspace(0, 5, 101)  # exponents p that are tried for the sizes q^p
SLACK = 0.01  # times that differ by this share count as equal, such as those of blocks that differ by one element


def fastest(costs: np.ndarray, blocks: Sequence[int], rng: np.random.Generator, slack: float = SLACK) -> list[int]:
    """Assign blocks to clients such that the largest cost is as small as possible, up to the share `slack`.

    Of all such assignments one is drawn, each equally likely.

    Why the largest cost is the smallest possible. Take a limit τ. Client k can then have the blocks that cost it at most
    τ. With the blocks sorted by size these are the first cap(k) of them, so the blocks that one client can have contain
    those of another, or the other way round. If some assignment stays within τ, then so does the one that gives the blocks
    in the order of their size to the clients in the order of cap: if client a with the smaller cap has a larger block than
    client b, let them exchange. Then a has a smaller block than before, and b one that a could have, hence b too. Each
    exchange removes an inversion and none exceeds the limit. So τ can be reached exactly if, both sorted, no block exceeds
    its client's cap; the smallest such τ among the costs is found by bisection. (If only the upload counts, this gives
    larger blocks to faster uplinks.)

    Why each is equally likely. Blocks are assigned from the largest on, each to one of the clients without a block that
    can have it. All clients that can have a larger block can have this one: how many there are to choose from does not
    depend on who was chosen before. So a client that is not the slowest may serve any block that costs no more time.

    Args:
        costs: costs[k, j] is the seconds that client k takes if it uploads block j. A larger block takes every client at
            least as long.
        blocks: the blocks to assign, one for each client.
        rng: for the choice among equally fast assignments.
        slack: the share by which the largest cost may exceed the smallest possible one.

    Returns:
        The block of each client.
    """
    order = np.argsort(costs.sum(0), kind="stable")  # blocks from the smallest to the largest
    rank = np.empty(len(order), int)
    rank[order] = np.arange(len(order))
    ranks = np.sort(rank[list(blocks)])  # of the blocks to assign
    by_size = np.maximum.accumulate(costs[:, order], axis=1)  # a rounding error may have broken the order

    def caps(limit: float) -> np.ndarray:
        return (by_size <= limit).sum(1)

    limits = np.unique(by_size)
    low, high = 0, len(limits) - 1  # the largest limit can always be reached
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if (np.sort(caps(limits[middle])) > ranks).all() else (middle + 1, high)
    cap = caps(limits[low] * (1 + slack))
    waiting = list(np.argsort(-cap, kind="stable"))  # clients by cap, the largest first
    free: list[int] = []  # clients that can have the current block
    chosen = [0] * len(ranks)
    for block_rank in ranks[::-1]:
        while waiting and cap[waiting[0]] > block_rank:
            free.append(int(waiting.pop(0)))
        k = int(rng.integers(len(free)))
        free[k], free[-1] = free[-1], free[k]
        chosen[free.pop()] = int(order[block_rank])
    return chosen


def fitted_sizes(
    uplinks: np.ndarray,
    cohort: int,
    blocks: int,
    haste: float,
    rng: np.random.Generator,
    fixed: np.ndarray | float = 0.0,
    volume: float = 1.0,
) -> tuple[float, ...]:
    """Return relative block sizes, the smallest first, for which a round takes the least time on average.

    Sort a cohort by its uplinks, slowest first, and cut it into as many groups as there are blocks; q_j is the mean of the
    slowest uplink of group j. Blocks proportional to q take every group about equally long. But the fixed time counts too,
    and in a share 1 − haste of the rounds blocks are assigned at random, where slow clients get large blocks. So the sizes
    are q^p, with the p of a grid for which the mean time over drawn cohorts, of both kinds of rounds, is least. p = 0, even
    blocks, is on the grid. Of powers with about the same time the smallest is taken, since it is the fairest.

    Args:
        uplinks: bytes per second of each client.
        cohort: clients of a round.
        blocks: N.
        haste: the share of rounds in which blocks are matched to links.
        rng: for drawing cohorts.
        fixed: seconds of each client that do not depend on its block (download, computing, the shared block).
        volume: bytes of all blocks.
    """
    size = max(cohort, blocks)
    drawn = np.array([rng.choice(len(uplinks), size, replace=len(uplinks) < size) for _ in range(_COHORTS)])
    ordered = np.take_along_axis(drawn, np.argsort(uplinks[drawn], axis=1), axis=1)
    group = np.arange(size) * blocks // size
    slowest = np.array([uplinks[ordered][:, group == j].min(1).mean() for j in range(blocks)])
    fixed_seconds = np.broadcast_to(fixed, uplinks.shape)

    def seconds(power: float) -> float:
        sizes = (slowest / slowest.sum()) ** power
        sizes /= sizes.sum()
        # `drawn` lists each cohort in random order: its blocks are assigned at random.
        matched, random = (
            (fixed_seconds[clients] + volume * sizes[group] / uplinks[clients]).max(1).mean()
            for clients in (ordered, drawn)
        )
        return float(haste * matched + (1 - haste) * random)

    times = np.array([seconds(power) for power in _POWERS])
    power = _POWERS[np.argmax(times <= times.min() * (1 + SLACK))]
    best = (slowest / slowest.max()) ** power
    return tuple(float(share) for share in best / best.sum())
