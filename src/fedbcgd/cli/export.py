"""`fedbcgd export`: the model of a run, for other programs."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedbcgd.cli import app


class Format(StrEnum):
    """The form in which the model is written."""

    state_dict = "state_dict"
    torchscript = "torchscript"
    onnx = "onnx"


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="The folder of a finished run.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="The file to write.", show_default=False)],
    form: Annotated[
        Format, typer.Option("--format", help="For torch.load, for torch.jit.load, or ONNX (extra `onnx`).")
    ] = Format.state_dict,
    trust: Annotated[
        bool, typer.Option("--trust", help="Import the code that the model was built with: yours, or transformers.")
    ] = False,
) -> None:
    """Write the model of a run as a state_dict, TorchScript or ONNX.

    TorchScript and ONNX take any number of examples, prepared as in the run: the mean and standard deviation of images are
    printed.
    """
    from fedbcgd.models.export import export as write
    from fedbcgd.models.stored import model_info

    names = write(folder, out, form.value, trust=trust)
    print(f"{out} written" + (f"; inputs: {', '.join(names)}" if names else ""))
    info = model_info(folder)
    if info.mean is not None and info.std is not None:
        numbers = [", ".join(f"{v:.6g}" for v in values) for values in (info.mean, info.std)]
        print(f"pixels from 0 to 1, less the mean {numbers[0]}, divided by {numbers[1]}")
