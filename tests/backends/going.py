"""Short runs on worker processes, and what they come to."""

import torch

from fedbcgd import simulate


def state(result):
    return {k: v.clone() for k, v in result.module.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def go(net, toys, name="scaffold", workers=2, **kwargs):
    settings = {"rounds": 3, "cohort": 5, "batch_size": 3, "test": toys((700,))[0]} | kwargs
    return simulate(net(), toys(), name, workers=workers, **settings)
