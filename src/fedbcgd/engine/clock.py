"""How many seconds a run spends on what."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Clock(dict[str, float]):
    """Real seconds by purpose: `local` and `codec` are summed over the workers, all others are of the main process."""

    def add(self, more: Mapping[str, float]) -> None:
        """Add seconds by purpose."""
        for name, seconds in more.items():
            self[name] = self.get(name, 0.0) + seconds

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Add the seconds of the block under a name."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add({name: time.perf_counter() - start})
