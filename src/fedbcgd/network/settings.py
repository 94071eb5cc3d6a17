"""The section `[network]` of a configuration: whose links, when a round closes, and what goes wrong on purpose."""

from collections.abc import Mapping
from math import inf
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
    """Without any of `deadline`, `oversample`, `minimum`, `close_at`, `absences`, `dropout`, `corrupt` it only watches."""

    profile: Profile = Field(_DEFAULT, description="4g, broadband, datacentre, or mix of the three")
    csv: str | None = Field(None, description="your measurements instead: uplink_mbit, downlink_mbit, latency_ms, …")
    uplink_mbit: Distribution | None = Field(
        None,
        description="instead of the profile's: a number, or { median = 5.0, spread = 100.0, shape = 'loguniform' }",
    )
    downlink_mbit: Distribution | None = Field(None, description="likewise")
    latency_ms: Distribution | None = Field(None, description="likewise; one way")
    gradient_ms: Distribution | None = Field(None, description="likewise; of one minibatch")
    compute: float = Field(1.0, gt=0, le=1e6, description="times the seconds per gradient: for larger models")
    availability: Distribution | None = Field(
        None, description="instead of the profile's: a share of the rounds, or a distribution (never more than 1)"
    )
    absences: bool = Field(False, description="clients are there only as often as their availability says")
    deadline: float | None = Field(None, gt=0, description="seconds after which a round closes")
    oversample: float = Field(1.0, ge=1, le=100, description="sample so many times the cohort")
    minimum: int | None = Field(
        None,
        ge=1,
        description="a round closes when each block has so many uploads; with oversample: cohort / blocks, rounded up",
    )
    close_at: float = Field(
        1.0, gt=0, le=1, description="a round closes when each block has this share of its clients' uploads, rounded up"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="share of the asked clients that vanish in a round")
    corrupt: float = Field(0.0, ge=0, lt=1, description="share of the uploads that arrive damaged")
    crash: float = Field(0.0, ge=0, le=1, description="share of the rounds in which a worker process is killed")

    @field_validator("uplink_mbit", "downlink_mbit", "availability")
    @classmethod
    def _positive(cls, value: Distribution | None, info: ValidationInfo) -> Distribution | None:
        share = info.field_name == "availability"
        if value is not None and not 0 < value.median <= (1 if share else inf):
            wanted = "a share above 0 and at most 1 is wanted" if share else "more than 0 is wanted"
            raise PydanticCustomError("wanted", wanted)
        return value

    @model_validator(mode="after")
    def _consistent(self) -> "Network":
        if self.csv is not None and (own := [name for name in COLUMNS if getattr(self, name) is not None]):
            raise ValueError(f"{own[0]}: with csv the links are those of the file; leave one of the two out")
        if self.minimum is not None and self.close_at < 1:
            raise ValueError("close_at: minimum says how many uploads are enough; leave one of the two out")
        if self.csv is not None and "profile" in self.model_fields_set and self.profile != _DEFAULT:
            raise ValueError("profile: with csv the links are those of the file; leave one of the two out")
        return self

    @property
    def closes(self) -> bool:
        """Whether a round may end without some of those who were asked."""
        return self.times or self.dropout > 0

    @property
    def times(self) -> bool:
        """Whether somebody may be late."""
        return self.deadline is not None or self.minimum is not None or self.oversample > 1 or self.close_at < 1

    def sampled(self, cohort: int, clients: int) -> int:
        """How many clients are asked, so that `cohort` of them can be waited for."""
        return min(clients, share_of(cohort, self.oversample))

    def links(self, clients: int, seed: int) -> Links:
        if self.csv is not None:
            made = read_csv(Path(self.csv), clients, seed)
        else:
            own = {name: chosen for name in COLUMNS if (chosen := getattr(self, name)) is not None}
            made = draw(self.profile, clients, seed, own)
        there = made.availability
        if self.availability is not None:
            there = np.minimum(1.0, self.availability.at(stream(seed, "network-availability").random(clients)))
        return Links(made.uplink, made.downlink, made.latency, made.gradient * self.compute, there)


def as_network(given: "str | Mapping[str, Any] | Network | None") -> Network | None:
    """What `simulate` takes: the name of a profile, a dictionary of settings, or settings made elsewhere."""
    if given is None or isinstance(given, Network):
        return given
    if not isinstance(given, (str, Mapping)):
        raise UserError(f"network: the name of a profile or a dictionary of settings is wanted, given {given!r}")
    try:
        return Network.model_validate({"profile": given} if isinstance(given, str) else dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(explain_error({**first, "loc": ("network", *first["loc"])}, Network)) from None
