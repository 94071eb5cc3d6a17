"""The ServerApp: an ordinary one."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

import fedbcgd.flower
from images_app.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    fraction_train = config["fraction-train"]
    torch.manual_seed(0)
    net = Net()
    arrays = ArrayRecord(net.state_dict())

    strategy = fedbcgd.flower.strategy("fedbcgd", net, blocks=3, fraction_train=fraction_train, fraction_evaluate=1.0)

    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": config["lr"]}),
        num_rounds=config["num-server-rounds"],
    )
    torch.save(result.arrays.to_torch_state_dict(), config["output"])
