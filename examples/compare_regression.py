"""Three algorithms on a regression of your own, with a metric of your own; stop it at any time, and start it again.

python examples/compare_regression.py
"""

import torch
from my_nets import Net, absolute_error, houses, metrics

import fedbcgd


def main(out: str = "runs/regression", rounds: int = 100) -> None:
    clients, test = houses(seed=0)
    task = {"loss": absolute_error, "metrics": metrics, "metric": "mae", "test": test}
    runs = fedbcgd.compare(
        Net, clients, {"fedavg": {}, "fedbcgd": {"blocks": 3}, "scaffold": {}}, seeds=3, out=out, rounds=rounds,
        cohort=5, lr=0.05, local_epochs=1, batch_size=10, workers=0, **task,
    )  # fmt: skip
    print(runs)  # the plot is compare.png in the folder
    runs.page(f"{out}/report.html")
    best = fedbcgd.load_model(f"{out}/fedbcgd/seed-0", model=Net())
    print("mean absolute error:", float(absolute_error(best, test).detach()), "of", float(test[1].abs().mean()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
