"""Where the clients' work is done, as a user says it: which backend, how many workers, which cluster, which device."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral, Real

from fedbcgd.errors import UserError

BACKENDS = ("workers", "ray")


@dataclass(frozen=True)
class Placement:
    backend: str = "workers"
    workers: int | None = None
    address: str | None = None
    gpus: float | None = None
    device: str = "cpu"

    def check(self) -> None:
        """Say what is wrong with it, before anything is begun."""
        for problem in self.problems():
            raise UserError(problem)
        if self.backend == "ray":
            from fedbcgd.backends.ray.cluster import package

            package()

    def problems(self) -> Iterator[str]:
        """What needs no package to be found."""
        if self.backend not in BACKENDS:
            yield f"backend: one of {', '.join(BACKENDS)} is wanted, given {self.backend!r}"
        if self.workers is not None and not (isinstance(self.workers, Integral) and 0 <= self.workers < 2**31):
            yield f"workers: a whole number of at least 0 is wanted, given {self.workers!r}"
        if self.gpus is not None and not (isinstance(self.gpus, Real) and 0 <= self.gpus < math.inf):
            yield f"gpus: a number of at least 0 is wanted, given {self.gpus!r}"
        if self.backend != "ray":
            for name in ("address", "gpus"):
                if getattr(self, name) is not None:
                    yield f"{name}: given {getattr(self, name)!r}, but only backend = 'ray' has one"
            return
        if self.workers == 0:
            yield "workers: backend 'ray' needs at least one, given 0 (which computes in this process)"
        if self.gpus and self.gpus > 1 and self.gpus != int(self.gpus):
            yield f"gpus: a share up to 1 or a whole number is wanted for each actor, given {self.gpus!r}"
        if self.gpus and self.device == "cpu":
            yield f"gpus: {self.gpus:g} of a GPU for each actor, but device = 'cpu' would not use it"
        if self.gpus == 0 and self.device.startswith("cuda"):
            yield f"gpus: 0 leaves device = {self.device!r} without a GPU"

    @property
    def home(self) -> str:
        """The device of this process: with Ray `device` is the actors', and the server computes on the CPU."""
        return "cpu" if self.backend == "ray" else self.device
