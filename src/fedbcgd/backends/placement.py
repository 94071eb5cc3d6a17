"""Where the clients' work is done, as the user chooses it: which backend, how many workers, which cluster and device."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral, Real

from fedbcgd.backends.registry import BACKENDS, BackendEntry, find, names
from fedbcgd.errors import UserError


@dataclass(frozen=True)
class Placement:
    """The user's choice of backend, with the arguments of `simulate` and the keys of `[run]` of the same names."""

    backend: str = "workers"
    workers: int | None = None
    address: str | None = None
    gpus: float | None = None
    device: str = "cpu"

    @property
    def entry(self) -> BackendEntry:
        """The backend that does the work, with its capabilities."""
        return find(self)

    def check(self) -> None:
        """Check the choice before any work starts.

        Raises:
            UserError: a value is wrong, or a package is missing.
        """
        for problem in self.problems():
            raise UserError(problem)
        self.entry.check_installed()

    def problems(self) -> Iterator[str]:
        """Yield a message for each wrong value, without importing any package."""
        chosen = BACKENDS.get(self.backend)
        if chosen is None:
            yield f"backend: expected one of {', '.join(BACKENDS)}, got {self.backend!r}"
            return
        if self.workers is not None and not (isinstance(self.workers, Integral) and 0 <= self.workers < 2**31):
            yield f"workers: expected an integer ≥ 0, got {self.workers!r}"
        elif self.workers and not chosen.has_workers:
            yield f"workers: expected none with backend = {self.backend!r}, got {self.workers!r}; leave it out"
        elif self.workers == 0 and chosen.device_is_remote:
            yield f"workers: expected at least one with backend = {self.backend!r}, got 0 (which would be this process)"
        for entry in BACKENDS.values():
            for name in entry.options if entry is not chosen else ():
                if getattr(self, name) is not None:
                    yield (
                        f"{name}: expected none with backend = {self.backend!r}, got {getattr(self, name)!r}; leave it out, "
                        f"or take backend = {entry.name!r}"
                    )
        if "gpus" in chosen.options:
            yield from self._gpu_problems()

    def _gpu_problems(self) -> Iterator[str]:
        if self.gpus is None:
            return
        if not (isinstance(self.gpus, Real) and 0 <= self.gpus < math.inf):
            yield f"gpus: expected a number ≥ 0, got {self.gpus!r}"
            return
        if self.gpus > 1 and self.gpus != int(self.gpus):
            yield f"gpus: expected at most 1 or a whole number of GPUs for each actor, got {self.gpus!r}"
        if self.gpus and self.device == "cpu":
            yield f"gpus: expected 0 with device = 'cpu', which uses no GPU, got {self.gpus:g}"
        if self.gpus == 0 and self.device.startswith("cuda"):
            yield f"gpus: expected more than 0 with device = {self.device!r}, got 0"

    def crash_problem(self) -> str:
        """Return why `[network] crash` is not possible here; empty if it is."""
        if self.entry.crashes_workers:
            return ""
        return (
            f"crash: expected backend = {names('crashes_workers')}, whose processes can be killed, got "
            f"{self.entry.name!r}; leave crash out, or choose that backend with workers above 0"
        )

    @property
    def local_device(self) -> str:
        """The device of this process: the CPU if `device` is that of remote workers."""
        return "cpu" if self.entry.device_is_remote else self.device
