"""The ServerApp."""

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import fedbcgd.flower
from lora_app.task import make_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    model = make_model(str(config["body"]))
    strategy = fedbcgd.flower.strategy("fedbcgd", model, blocks=2, lr=0.05, batch_size=20)
    result = strategy.start(grid=grid, num_rounds=config["num-server-rounds"])
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    torch.save({n: t for n, t in result.arrays.to_torch_state_dict().items() if n in trained}, config["output"])
