"""The section `[network]` of a configuration: links, when a round closes, and injected faults."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from fedbcgd.core.parts import Section, explain_error
from fedbcgd.engine.closing import share_of
from fedbcgd.errors import UserError
from fedbcgd.network.links import COLUMNS, Links, read_csv
from fedbcgd.network.profiles import Distribution, Profile, draw
from fedbcgd.rng import stream

_DEFAULT: Profile = "mix"


class Network(Section):
    """The simulated network of a run.

    Without any of `deadline`, `oversample`, `minimum`, `close_at`, `absences`, `dropout` and `corrupt` it only measures
    time, and training is the same as without a network.
    """

    profile: Profile = Field(_DEFAULT, description="4g, broadband, datacentre, or mix of the three")
    csv: str | None = Field(
        None, description="a CSV file of measured links: uplink_mbit, downlink_mbit, latency_ms, gradient_ms"
    )
    uplink_mbit: Distribution | None = Field(
        None,
        description="replaces the profile's uplinks: a number, or { median = 5.0, spread = 100.0, shape = 'loguniform' }",
    )
    downlink_mbit: Distribution | None = Field(None, description="the same for downlinks")
    latency_ms: Distribution | None = Field(None, description="the same for latencies, one way")
    gradient_ms: Distribution | None = Field(None, description="the same for the gradient of one minibatch")
    compute: float = Field(1.0, gt=0, le=1e6, description="factor on the seconds per gradient, for larger models")
    availability: Distribution | None = Field(
        None,
        description="share of the rounds in which a client is available: a number, or a distribution (cut off at 1)",
    )
    absences: bool = Field(False, description="whether clients are available only in this share of the rounds")
    deadline: float | None = Field(None, gt=0, description="seconds after which a round closes")
    oversample: float = Field(1.0, ge=1, le=100, description="sample this many times the cohort")
    minimum: int | None = Field(
        None,
        ge=1,
        description="a round closes when each block has this many uploads; unset with oversample: cohort / blocks, rounded "
        "up",
    )
    close_at: float = Field(
        1.0, gt=0, le=1, description="a round closes when each block has this share of its clients' uploads, rounded up"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="share of the sampled clients that drop out of a round")
    corrupt: float = Field(0.0, ge=0, lt=1, description="share of the uploads that arrive damaged")
    crash: float = Field(0.0, ge=0, le=1, description="share of the rounds in which a worker process is killed")

    @field_validator("uplink_mbit", "downlink_mbit", "availability")
    @classmethod
    def _positive(cls, value: Distribution | None, info: ValidationInfo) -> Distribution | None:
        share = info.field_name == "availability"
        if value is not None and not 0 < value.median <= (1 if share else math.inf):
            expected = "a share > 0 and ≤ 1" if share else "a number > 0"
            raise PydanticCustomError("median", f"expected {expected}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> "Network":
        if self.csv is not None and (own := [name for name in COLUMNS if getattr(self, name) is not None]):
            raise ValueError(f"{own[0]}: expected none with csv, whose file has all links; leave one of the two out")
        if self.minimum is not None and self.close_at < 1:
            raise ValueError(
                "close_at: expected none with minimum, which says how many uploads complete a block; leave one of them out"
            )
        if self.csv is not None and "profile" in self.model_fields_set and self.profile != _DEFAULT:
            raise ValueError("profile: expected none with csv, whose file has all links; leave one of the two out")
        return self

    @property
    def may_lose_clients(self) -> bool:
        """Whether a round may close without some of the sampled clients."""
        return self.may_be_late or self.dropout > 0

    @property
    def may_be_late(self) -> bool:
        """Whether a round may close before all uploads have arrived."""
        return self.deadline is not None or self.minimum is not None or self.oversample > 1 or self.close_at < 1

    def sampled(self, cohort: int, clients: int) -> int:
        """Compute how many of all clients are sampled in a round: `oversample` times the cohort, rounded up."""
        return min(clients, share_of(cohort, self.oversample))

    def links(self, clients: int, seed: int) -> Links:
        """Make the links of all clients.

        Args:
            clients: how many clients.
            seed: the seed of the run.

        Returns:
            Links from the CSV file if there is one, else drawn from the profile and the distributions.

        Raises:
            UserError: the CSV file cannot be read, or is wrong.
        """
        if self.csv is not None:
            links = read_csv(Path(self.csv), clients, seed)
        else:
            own = {name: chosen for name in COLUMNS if (chosen := getattr(self, name)) is not None}
            links = draw(self.profile, clients, seed, own)
        availability = links.availability
        if self.availability is not None:
            quantiles = stream(seed, "network-availability").random(clients)
            availability = np.minimum(1.0, self.availability.at(quantiles))
        return replace(links, gradient=links.gradient * self.compute, availability=availability)


def as_network(value: "str | Mapping[str, Any] | Network | None") -> Network | None:
    """Convert what `simulate` accepts as its network.

    Args:
        value: the name of a profile, a dictionary of settings, settings, or None.

    Returns:
        Settings, or None.

    Raises:
        UserError: the value has another type, or a setting is wrong.
    """
    if value is None or isinstance(value, Network):
        return value
    if not isinstance(value, (str, Mapping)):
        raise UserError(f"network: expected the name of a profile or a dictionary of settings, got {value!r}")
    try:
        return Network.model_validate({"profile": value} if isinstance(value, str) else dict(value))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(explain_error({**first, "loc": ("network", *first["loc"])}, Network)) from None
