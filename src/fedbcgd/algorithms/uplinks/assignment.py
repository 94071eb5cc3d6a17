"""Blocks to clients so that the slowest is as fast as can be; and block sizes that fit the links."""

from collections.abc import Sequence

import numpy as np

_COHORTS = 200  # cohorts drawn to judge block sizes by
_POWERS = np.linspace(0, 5, 101)


SLACK = 0.01  # what nobody would notice: blocks that differ by an element need no sorting


def fastest(costs: np.ndarray, slots: Sequence[int], rng: np.random.Generator, slack: float = SLACK) -> list[int]:
    """A block for each client, `slots` being the blocks to give out, such that the largest cost is as small as can be, up
    to the share `slack`; of all such assignments one at random, each equally likely.

    costs[k, j]: seconds that client k takes when it uploads block j. A larger block takes every client at least as long.

    Why this is the optimum. Take a limit τ. Client k can then have the blocks that cost it at most τ; blocks in the order
    of their size, that is the first cap(k) of them, so what two clients can have is nested. If some assignment stays
    within τ, then so does the one that gives the blocks in the order of their size to the clients in the order of cap:
    where client a with the smaller cap has a larger block than client b, let them exchange. Then a has a smaller block
    than the one it could have, and b one that a could have, hence b too. Each exchange removes an inversion and none
    breaks the limit. So τ is possible exactly if, both sorted, no block is beyond its client; the smallest such τ among
    the costs is found by bisection. (Where the upload alone counts, this is: the larger block to the faster uplink.)

    Why each is equally likely. Blocks are given out from the largest on, each to one of those not served yet who can have
    it. As caps are nested, all who could have the larger ones can have this one: how many there are to choose from does
    not depend on who was chosen before. Clients that need not hurry thus serve any block, at no cost in time.
    """
    order = np.argsort(costs.sum(0), kind="stable")
    rank = np.empty(len(order), int)
    rank[order] = np.arange(len(order))
    wanted = np.sort(rank[list(slots)])
    by_size = np.maximum.accumulate(costs[:, order], axis=1)  # against the last bit of a sum

    def caps(limit: float) -> np.ndarray:
        return (by_size <= limit).sum(1)

    limits = np.unique(by_size)
    low, high = 0, len(limits) - 1  # the largest is always possible
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if (np.sort(caps(limits[middle])) > wanted).all() else (middle + 1, high)
    able = caps(limits[low] * (1 + slack))
    waiting = list(np.argsort(-able, kind="stable"))  # the most able first
    free: list[int] = []
    chosen = [0] * len(wanted)
    for place in wanted[::-1]:
        while waiting and able[waiting[0]] > place:
            free.append(int(waiting.pop(0)))
        k = int(rng.integers(len(free)))
        free[k], free[-1] = free[-1], free[k]
        chosen[free.pop()] = int(order[place])
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
    """Relative block sizes, the smallest first, for which a round takes least on average.

    A client takes `fixed` seconds whatever its block (download, computing, the shared block), and for its part of the
    `volume` bytes of all blocks as long as its uplink says. Sort a cohort by its uplinks, slowest first, and cut it into as
    many groups as there are blocks; q_j is the mean of the slowest uplink of group j. Blocks proportional to q take every
    group about equally long. But what is fixed counts too, and a share 1 − haste of the rounds is dealt at random, where
    large blocks meet slow clients: so the sizes are q^p, with the p of a grid for which the mean over drawn cohorts, of both
    kinds of rounds, is least. p = 0, even blocks, is on the grid; of powers that nobody could tell apart by the time, the
    smallest is taken, since it is the fairest.
    """
    size = max(cohort, blocks)
    enough = len(uplinks) >= size
    drawn = np.array([rng.choice(len(uplinks), size, replace=not enough) for _ in range(_COHORTS)])
    ordered = np.take_along_axis(drawn, np.argsort(uplinks[drawn], axis=1), axis=1)
    group = np.arange(size) * blocks // size
    slowest = np.array([uplinks[ordered][:, group == j].min(1).mean() for j in range(blocks)])
    always = np.broadcast_to(fixed, uplinks.shape)

    def seconds(power: float) -> float:
        sizes = (slowest / slowest.sum()) ** power
        sizes /= sizes.sum()
        matched, dealt = (
            (always[who] + volume * sizes[group] / uplinks[who]).max(1).mean() for who in (ordered, drawn)
        )  # drawn is in random order
        return float(haste * matched + (1 - haste) * dealt)

    taken = np.array([seconds(power) for power in _POWERS])
    power = _POWERS[np.argmax(taken <= taken.min() * (1 + SLACK))]
    best = (slowest / slowest.max()) ** power
    return tuple(float(share) for share in best / best.sum())
