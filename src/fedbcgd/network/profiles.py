"""Network profiles by name, and links drawn from distributions.

The profiles have round figures of the usual order of magnitude, for comparing algorithms; these are not measurements.
Seconds per gradient are those of a small convolutional network (LeNet-5, a minibatch of ten).
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

_TAIL = 0.01  # a lognormal is cut off at its 1st and 99th percentile, so that every client has a usable link
_WIDTH = 2 * NormalDist().inv_cdf(0.95)  # from the 5th to the 95th percentile, in standard deviations


class Distribution(Section):
    """The distribution of a quantity over the clients. A plain number gives all of them that value."""

    median: float = Field(ge=0, description="the median over the clients")
    spread: float = Field(
        1.0, ge=1, description="lognormal: the 95th percentile over the 5th; loguniform: the largest over the smallest"
    )
    shape: Literal["lognormal", "loguniform"] = Field("lognormal", description="lognormal or loguniform")

    @model_validator(mode="before")
    @classmethod
    def _from_number(cls, value: Any) -> Any:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return {"median": value}
        if not isinstance(value, (Mapping, Distribution)):
            raise PydanticCustomError("distribution", "expected a number or { median = 5.0, spread = 100.0 }")
        return value

    def at(self, quantiles: np.ndarray) -> np.ndarray:
        """Compute the values at these quantiles, each from 0 to 1."""
        if self.shape == "loguniform":
            return self.median * self.spread ** (quantiles - 0.5)
        normal = NormalDist()
        deviations = [normal.inv_cdf(q) for q in _TAIL + (1 - 2 * _TAIL) * quantiles]
        return self.median * self.spread ** (np.array(deviations) / _WIDTH)


@dataclass(frozen=True)
class Kind:
    """The distributions of one kind of client, in the units of `links.COLUMNS`."""

    uplink_mbit: Distribution
    downlink_mbit: Distribution
    latency_ms: Distribution
    gradient_ms: Distribution
    availability: float


_Pair = tuple[float, float]  # median and spread


def _kind(up: _Pair, down: _Pair, latency: _Pair, gradient: _Pair, availability: float) -> Kind:
    uplink, downlink, delay, compute = (Distribution(median=m, spread=s) for m, s in (up, down, latency, gradient))
    return Kind(uplink, downlink, delay, compute, availability)


_4G = _kind((8, 25), (30, 20), (45, 4), (20, 5), 0.7)
_BROADBAND = _kind((20, 10), (100, 10), (12, 4), (5, 4), 0.9)
_DATACENTRE = _kind((1000, 2), (1000, 2), (1, 3), (2, 2), 1.0)

# The kinds that are assigned to clients in turn. The order of the mix spreads its 60, 30 and 10 % evenly: among the
# first n clients each kind has its share to within one client.
Profile = Literal["4g", "broadband", "datacentre", "mix"]
PROFILES: Mapping[str, Sequence[Kind]] = {
    "4g": [_4G],
    "broadband": [_BROADBAND],
    "datacentre": [_DATACENTRE],
    "mix": [_DATACENTRE, _4G, _BROADBAND, _4G, _4G, _BROADBAND, _4G, _4G, _BROADBAND, _4G],
}


def draw(profile: str, clients: int, seed: int, overrides: Mapping[str, Distribution] | None = None) -> Links:
    """Draw the links of all clients.

    A client's uplink and downlink are at the same quantile of their distributions, since a connection is good or bad as
    a whole; latency and speed are drawn independently. Kinds are assigned in turn from a random beginning, so that
    small federations have their shares of them too. The links of a client depend on the seed and its number alone.

    Args:
        profile: a name from `PROFILES`.
        clients: how many clients.
        seed: the seed of the run.
        overrides: distributions that replace those of the profile, by names from `COLUMNS`.

    Returns:
        The links.

    Raises:
        UserError: there is no such profile.
    """
    if profile not in PROFILES:
        raise unknown("profile", profile, PROFILES)
    kinds = PROFILES[profile]
    quantiles = stream(seed, "network").random((clients, 4))  # a row for each, so more clients do not change the first
    first = stream(seed, "network-kinds").integers(len(kinds))
    kind_of = (np.arange(clients) + first) % len(kinds)
    table = np.empty((clients, len(COLUMNS)))
    for k, name in enumerate(COLUMNS):
        column = quantiles[:, max(1, k)]  # column 1 serves both uplink and downlink
        for index, kind in enumerate(kinds):
            rows = kind_of == index
            table[rows, k] = (overrides or {}).get(name, getattr(kind, name)).at(column[rows])
    return Links.of_columns(table, np.array([kinds[index].availability for index in kind_of]))
