"""The ServerApp: Flower's usual one, with our strategy."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import fedbcgd.flower
from fedbcgd.algorithms.registry import algorithm_names, option_names
from flower_cifar10.task import data, make_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    name = str(config["algorithm"])
    options = {"blocks": config["blocks"]} if name in algorithm_names() and "blocks" in option_names(name, {}) else {}
    strategy = fedbcgd.flower.strategy(
        name,
        make_model(context),
        clients=config["clients"],
        min_clients=config["min-clients"],
        seed=config["seed"],
        lr=config["lr"],
        batch_size=config["batch-size"],
        test=data(str(config["data"])).test,
        evaluate_clients=1.0,
        folder=config["folder"] or None,
        **options,
    )
    strategy.start(grid=grid, num_rounds=config["rounds"], timeout=float(config["timeout"]))
