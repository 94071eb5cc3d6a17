"""What a server rule does: it moves x by the mean change of the clients, one slice at a time."""

from typing import ClassVar

from torch import Tensor

from fedbcgd.core.parts import Part


class ServerRule(Part):
    """Base of server rules. The fields of a subclass are its options."""

    vectors: ClassVar[tuple[str, ...]] = ()  # names of the state vectors, each of length d

    def init(self, name: str) -> float:
        """Return the value that every element of a state vector starts from."""
        return 0.0

    def step(self, x: Tensor, delta: Tensor, state: dict[str, Tensor]) -> None:
        """Move x in place.

        A slice for which no upload arrived is not passed: it keeps its value and its state.

        Args:
            x: a slice of the model.
            delta: the mean change on that slice.
            state: the state vectors on that slice, to be changed in place.
        """
        raise NotImplementedError
