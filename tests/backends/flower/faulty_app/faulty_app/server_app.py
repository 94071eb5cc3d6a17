"""The ServerApp: Flower's usual one, with our strategy."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import fedbcgd.flower
from faulty_app.task import make_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    strategy = fedbcgd.flower.strategy(
        str(config["algorithm"]),
        make_model(context),
        clients=config["clients"],
        min_clients=config["min-clients"],
        close_at=config["close-at"],
        folder=config["folder"],
        roster=config["roster"] or None,
        max_empty_rounds=2,
        lr=0.1,
    )
    strategy.start(grid=grid, num_rounds=config["rounds"], timeout=float(config["timeout"]))
