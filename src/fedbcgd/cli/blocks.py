"""`fedbcgd blocks`: how a model is divided into blocks, and the size of an upload."""

from typing import Annotated

import typer

from fedbcgd.cli import app


@app.command()
def blocks(
    model: Annotated[
        str,
        typer.Argument(
            help="lenet5, vgg11, vgg19, resnet18, vit-base, vit-small, logistic, binary-logistic, binary-sigmoid; "
            "module:attribute or file.py:attribute of your own factory; hf:FOLDER with a transformers configuration.",
            show_default=False,
        ),
    ],
    blocks: Annotated[
        int | None, typer.Option("--blocks", help="N, without the shared block. Default 5, or the paper's.")
    ] = None,
    divider: Annotated[
        str, typer.Option(help="auto, layers, even, paper (its table for its networks), or relative sizes: 1,2,4,8.")
    ] = "auto",
    shared: Annotated[str, typer.Option(help="last, none, or name patterns with commas.")] = "last",
    shape: Annotated[
        str | None, typer.Option(help="Input shape: channels,height,width. Default: the paper's for the model.")
    ] = None,
    classes: Annotated[int | None, typer.Option(min=1, help="Outputs of the last layer. Default 10.")] = None,
    width: Annotated[float | None, typer.Option(help="Factor on the channels of a convolutional network.")] = None,
    norm: Annotated[str | None, typer.Option(help="none, group or batch, for resnet18 and vgg.")] = None,
    codec: Annotated[str, typer.Option(help="plain, float16, qsgd or topk.")] = "plain",
) -> None:
    """Show the division of a model into blocks: layers, parameters, share of d, bytes per upload."""
    from fedbcgd.algorithms.registry import make_algorithm
    from fedbcgd.display.progress import wide_console
    from fedbcgd.models.make import make_model
    from fedbcgd.report.division import table
    from fedbcgd.runs.experiment import parse_shape

    options = {k: v for k, v in (("width", width), ("norm", norm)) if v is not None}
    default = "3,224,224" if model == "vit-base" else "3,32,32"
    outputs = classes or (2 if model.startswith("binary-") else 10)
    module = make_model(model, parse_shape(shape or default), outputs, options=options).module
    sizes = _numbers(divider)
    count = "auto" if blocks is None else blocks
    patterns = shared if shared in ("last", "none") else [p.strip() for p in shared.split(",")]
    algorithm = make_algorithm("fedbcgd", blocks=count, divider=sizes or divider, shared=patterns, codec=codec)
    wide_console().print(table(algorithm, algorithm.uplink.layout(module), model))


def _numbers(text: str) -> list[float]:
    """Return the numbers of a text such as 1,2,4,8; none if it is another text."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        return []
