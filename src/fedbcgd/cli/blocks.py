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
        int | None,
        typer.Option(
            "--blocks",
            help="N, without the shared block. Default: 5; with --divider paper the paper's N; with relative sizes their "
            "number.",
        ),
    ] = None,
    divider: Annotated[
        str,
        typer.Option(
            help="auto, layers, even, paper (the paper's division of its networks), or relative sizes: 1,2,4,8."
        ),
    ] = "auto",
    shared: Annotated[
        str, typer.Option(help="The shared block: last (layer), none, or name patterns, separated by commas.")
    ] = "last",
    shape: Annotated[
        str | None,
        typer.Option(help="Input shape: channels,height,width. Default: 3,224,224 for vit-base, else 3,32,32."),
    ] = None,
    classes: Annotated[
        int | None, typer.Option(min=1, help="Outputs of the last layer. Default: 2 for binary models, else 10.")
    ] = None,
    width: Annotated[float | None, typer.Option(help="Factor on the channels of a convolutional network.")] = None,
    norm: Annotated[str | None, typer.Option(help="Normalisation of resnet18 and vgg: none, group or batch.")] = None,
    codec: Annotated[str, typer.Option(help="How floats become bytes: plain, float16, qsgd or topk.")] = "plain",
) -> None:
    """Show the division of a model into blocks: layers, parameters, share of d, bytes per upload."""
    from fedbcgd.algorithms.registry import make_algorithm
    from fedbcgd.display.progress import wide_console
    from fedbcgd.models.make import make_model
    from fedbcgd.report.division import table

    options = {k: v for k, v in (("width", width), ("norm", norm)) if v is not None}
    default = "3,224,224" if model == "vit-base" else "3,32,32"
    outputs = classes or (2 if model.startswith("binary-") else 10)
    module = make_model(model, _parse_shape(shape or default), outputs, options=options).module
    sizes = _numbers(divider)
    count = "auto" if blocks is None else blocks
    patterns = shared if shared in ("last", "none") else [p.strip() for p in shared.split(",")]
    algorithm = make_algorithm("fedbcgd", blocks=count, divider=sizes or divider, shared=patterns, codec=codec)
    wide_console().print(table(algorithm, algorithm.uplink.layout(module), model))


def _numbers(text: str) -> list[float]:
    """Return the numbers of a list such as 1,2,4,8; an empty list for any other text."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        return []


def _parse_shape(text: str) -> tuple[int, int, int]:
    """Parse `channels,height,width`.

    Raises:
        UserError: it is another text, or a number is out of range.
    """
    from fedbcgd.errors import UserError

    try:
        channels, height, width = (int(n) for n in text.split(","))
    except ValueError:
        raise UserError(f"shape: expected channels,height,width such as 3,32,32, got {text!r}") from None
    if not all(1 <= n <= 4096 for n in (channels, height, width)):
        raise UserError(f"shape: expected numbers from 1 to 4096, got {text!r}")
    return channels, height, width
