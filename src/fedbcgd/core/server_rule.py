"""What a server rule is: named state vectors, all zero at the start, and a step on one slice."""

from typing import ClassVar

from torch import Tensor

from fedbcgd.core.parts import Part


class ServerRule(Part):
    vectors: ClassVar[tuple[str, ...]] = ()  # the state it keeps: one vector of length d for each name

    def init(self, name: str) -> float:
        """The value a state vector starts from."""
        return 0.0

    def step(self, x: Tensor, delta: Tensor, state: dict[str, Tensor]) -> None:
        """Move x in place. All arguments are the same slice; a slice for which nothing arrived is never passed."""
        raise NotImplementedError
