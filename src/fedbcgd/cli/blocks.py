"""`fedbcgd blocks`: how a model would be divided, and what an upload would cost."""

from typing import Annotated

import typer

from fedbcgd.cli import app


@app.command()
def blocks(
    model: Annotated[str, typer.Argument(help="A model's name: lenet5", show_default=False)],
    blocks: Annotated[int, typer.Option("--blocks", help="N, the shared block not counted.")] = 5,
    divider: Annotated[str, typer.Option(help="auto, layers or even.")] = "auto",
    shared: Annotated[str, typer.Option(help="last, none, or name patterns with commas.")] = "last",
    shape: Annotated[str, typer.Option(help="Input shape: channels,height,width.")] = "1,28,28",
    classes: Annotated[int, typer.Option(min=1, help="Outputs of the last layer.")] = 10,
    codec: Annotated[str, typer.Option(help="plain or qsgd.")] = "plain",
) -> None:
    """Show the division of a model into blocks: layers, parameters, share of d, bytes per upload."""
    from fedbcgd.algorithm import make_algorithm
    from fedbcgd.report.division import table
    from fedbcgd.report.progress import wide_console
    from fedbcgd.task import make_model, parse_shape

    patterns = shared if shared in ("last", "none") else [p.strip() for p in shared.split(",")]
    algorithm = make_algorithm("fedbcgd", blocks=blocks, divider=divider, shared=patterns, codec=codec)
    module = make_model(model, parse_shape(shape), classes)
    wide_console().print(table(algorithm, algorithm.uplink.layout(module), model))
