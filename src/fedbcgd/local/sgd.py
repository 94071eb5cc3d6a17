"""Local SGD: y ← y − η·∇f_i(y; ζ)."""

from fedbcgd.local.rule import LocalRule
from fedbcgd.local.work import Work


class SGD(LocalRule):
    def train(self, work: Work) -> None:
        for batch in work.minibatches():
            work.y.add_(work.gradient(batch), alpha=-work.eta)
