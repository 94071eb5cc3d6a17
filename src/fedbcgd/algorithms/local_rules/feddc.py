"""FedDC (Gao et al. 2022): y ← y − η·(∇f_i(y; ζ) + α·(h_i + y − x) − c_i + c);  c_i as in SCAFFOLD;  h_i += y − x.

On blocks, h_i changes only on the uploaded coordinates.

The server moves x ← x + Δ + H, where H is the mean of all h_i, which the server computes from the same uploads.
"""

from collections.abc import Callable, Mapping
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from fedbcgd.algorithms.local_rules.scaffold import Scaffold
from fedbcgd.core.local_rule import Channels, TrainingNeeds
from fedbcgd.core.work import Work


class FedDC(Scaffold):
    """SCAFFOLD with a penalty on each client's drift h_i."""

    controls: ClassVar[tuple[str, ...]] = ("c", "h")
    own_training: ClassVar[TrainingNeeds] = "corrected"

    alpha: float = Field(0.01, ge=0, description="α: weight of the drift penalty")

    def train(self, work: Work) -> None:
        correct = self.corrector(work)
        for batch in work.minibatches():
            g = work.gradient(batch)
            correct(g)
            work.y.add_(g, alpha=-work.eta)

    def corrector(self, work: Work) -> Callable[[Tensor], None]:
        # Constant during the round but for α·y, which `correct` adds.
        penalty = (work.state["h"] - work.x).mul_(self.alpha)
        correction = work.controls["c"] - work.state["c"] + penalty

        def correct(gradient: Tensor) -> None:
            gradient.add_(correction).add_(work.y, alpha=self.alpha)

        return correct

    def complete(self, sent: Channels, controls: Mapping[str, Tensor], rate: float, steps: int) -> Channels:
        return super().complete(sent, controls, rate, steps) | {"dh": sent["dx"]}

    def server_change(self, delta: Tensor, controls: Mapping[str, Tensor]) -> Tensor:
        return delta + controls["h"]
