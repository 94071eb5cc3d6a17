"""Kinds of clients by name, and links drawn from distributions.

The named profiles are round figures of the usual order of magnitude, made to compare algorithms with, not measurements of
any network; seconds per gradient are those of a small convolutional network (LeNet-5, a minibatch of ten).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from fedbcgd.core.parts import Section
from fedbcgd.errors import unknown
from fedbcgd.network.links import COLUMNS, Links
from fedbcgd.rng import stream

_TAIL = 0.01  # of a lognormal the slowest and the fastest hundredth are left out: no client is without a link
_WIDTH = 2 * NormalDist().inv_cdf(0.95)  # from the 5th to the 95th percentile, in standard deviations


class Distribution(Section):
    """A quantity over the clients, never negative. A plain number stands for the same value everywhere."""

    median: float = Field(ge=0, description="half of the clients have less")
    spread: float = Field(
        1.0, ge=1, description="lognormal: the 95th percentile over the 5th; loguniform: the largest over the smallest"
    )
    shape: Literal["lognormal", "loguniform"] = Field("lognormal", description="lognormal or loguniform")

    @model_validator(mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return {"median": value}
        if not isinstance(value, (Mapping, Distribution)):
            raise PydanticCustomError("wanted", "a number is wanted, or { median = 5.0, spread = 100.0 }")
        return value

    def at(self, quantiles: np.ndarray) -> np.ndarray:
        """The values at these quantiles, each from 0 to 1."""
        if self.shape == "loguniform":
            return self.median * self.spread ** (quantiles - 0.5)
        normal = NormalDist()
        deviations = [normal.inv_cdf(q) for q in _TAIL + (1 - 2 * _TAIL) * quantiles]
        return self.median * self.spread ** (np.array(deviations) / _WIDTH)


@dataclass(frozen=True)
class Kind:
    """One kind of client."""

    uplink_mbit: Distribution
    downlink_mbit: Distribution
    latency_ms: Distribution
    gradient_ms: Distribution
    availability: float


_Pair = tuple[float, float]  # median and spread


def _kind(up: _Pair, down: _Pair, latency: _Pair, gradient: _Pair, availability: float) -> Kind:
    a, b, c, d = (Distribution(median=float(m), spread=float(s)) for m, s in (up, down, latency, gradient))
    return Kind(a, b, c, d, availability)


_4G = _kind((8, 25), (30, 20), (45, 4), (20, 5), 0.7)
_BROADBAND = _kind((20, 10), (100, 10), (12, 4), (5, 4), 0.9)
_DATACENTRE = _kind((1000, 2), (1000, 2), (1, 3), (2, 2), 1.0)

# The kinds that clients are of, in turn. Of any so many clients of the mix in a row, 60, 30 and 10 % are of the three kinds,
# to one client.
Profile = Literal["4g", "broadband", "datacentre", "mix"]
PROFILES: Mapping[str, Sequence[Kind]] = {
    "4g": [_4G],
    "broadband": [_BROADBAND],
    "datacentre": [_DATACENTRE],
    "mix": [_DATACENTRE, _4G, _BROADBAND, _4G, _4G, _BROADBAND, _4G, _4G, _BROADBAND, _4G],
}


def draw(profile: str, clients: int, seed: int, instead: Mapping[str, Distribution] | None = None) -> Links:
    """Links of every client. What `instead` names is drawn from that distribution for all of them.

    A client's uplink and downlink are at the same quantile of their distributions: a connection is good or bad. Its
    latency and its speed are drawn apart. Kinds are dealt, not drawn, so that a small federation has its shares of them too;
    the seed says with which the turn begins. So the links of a client depend on the seed and on its number alone.
    """
    if profile not in PROFILES:
        raise unknown("profile", profile, PROFILES)
    kinds = PROFILES[profile]
    quantiles = stream(seed, "network").random((clients, 4))  # row by row: more clients change nobody's links
    first = stream(seed, "network-kinds").integers(len(kinds))
    which = (np.arange(clients) + first) % len(kinds)
    table = np.empty((clients, len(COLUMNS)))
    for k, name in enumerate(COLUMNS):
        at = quantiles[:, max(1, k)]  # 1 for both links
        for index, kind in enumerate(kinds):
            rows = which == index
            table[rows, k] = (instead or {}).get(name, getattr(kind, name)).at(at[rows])
    return Links.of_columns(table, np.array([kinds[index].availability for index in which]))
