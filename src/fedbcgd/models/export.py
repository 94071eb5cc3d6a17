"""Writing a trained model for other programs: as a state_dict, TorchScript or ONNX."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedbcgd.errors import UserError
from fedbcgd.files import write_whole
from fedbcgd.models.stored import ModelInfo, load_model, load_tensors, model_info

Format = Literal["state_dict", "torchscript", "onnx"]
MOST = 1 << 26  # a model is tried only with examples of at most this many values


def export(
    folder: str | Path, out: Path, form: Format, *, model: nn.Module | None = None, trust: bool = False
) -> tuple[str, ...]:
    """Write the model of a run for other programs.

    TorchScript and ONNX compute in float32 what the module computes in evaluation mode, for any number of examples. The
    output of a transformers model is its logits. Before anything is written, its output is compared with the module's.

    Args:
        folder: the run folder, or the path of its model.safetensors.
        out: the file to write.
        form: "state_dict", a file for `torch.load(…, weights_only=True)`; "torchscript", for `torch.jit.load`; or "onnx".
        model: see `load_model`.
        trust: see `load_model`.

    Returns:
        The names of the inputs; empty for a state_dict.

    Raises:
        UserError: the model cannot be loaded, or cannot be written in this form.
    """
    if form == "state_dict":  # needs no module
        values = load_tensors(folder)
        write_whole(out, lambda temporary: torch.save(values, temporary))
        return ()
    info = model_info(folder)
    module = _Outputs(load_model(folder, model=model, trust=trust), tuple(info.inputs)).eval()
    two, three = (_examples(info, count, f"{folder}") for count in (2, 3))
    write = _trace if form == "torchscript" else _to_onnx
    with torch.no_grad(), _quiet():
        try:
            written, again = write(module, two)
            expected, got = module(*three), again(*three)
        except UserError:
            raise
        except Exception as error:  # of any kind of module
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(
                f"the model cannot be written as {form}: {reason}; --format state_dict has its values"
            ) from error
        if not isinstance(expected, Tensor):
            raise UserError(
                f"the model cannot be written as {form}: expected a tensor as its output, got {type(expected)}"
            )
        if not isinstance(got, Tensor) or not torch.allclose(got, expected, rtol=1e-4, atol=1e-5, equal_nan=True):
            raise UserError(
                f"the model cannot be written as {form}: what it computes depends on its input in a way that cannot be "
                "recorded; --format state_dict has its values"
            )
        write_whole(out, lambda temporary: written(str(temporary)))
    return module.names


class _Outputs(nn.Module):
    """A module whose inputs have an order and whose output is a tensor."""

    def __init__(self, module: nn.Module, names: tuple[str, ...]):
        super().__init__()
        self.module = module
        self._keys = names if names != ("",) else ()
        self.names = self._keys or ("input",)

    def forward(self, *values: Tensor) -> Any:
        output = self.module(**dict(zip(self._keys, values, strict=True))) if self._keys else self.module(*values)
        return output.logits if hasattr(output, "logits") else output


def _examples(info: ModelInfo, count: int, where: str) -> tuple[Tensor, ...]:
    """Return inputs for this many examples: drawn from a normal distribution, or ones if they are integers."""
    if not info.inputs:
        raise UserError(
            f"{where} does not say what the model's inputs are: export it from Python, with torch.jit or torch.onnx"
        )
    generator = torch.Generator().manual_seed(0)
    out = []
    for dtype, shape in info.inputs.values():
        size = torch.Size([count, *shape])
        if not 0 <= size.numel() <= MOST * count:
            raise UserError(f"{where}: expected examples of at most {MOST:,} values, got {list(shape)}")
        kind = getattr(torch, dtype)
        out.append(
            torch.randn(size, generator=generator).to(kind) if kind.is_floating_point else torch.ones(size, dtype=kind)
        )
    return tuple(out)


def _trace(module: nn.Module, examples: tuple[Tensor, ...]) -> tuple[Any, Any]:
    traced: Any = torch.jit.trace(module, examples, check_trace=False)

    def save(path: str) -> None:
        with Path(path).open("wb") as file:  # torch refuses to write to hidden files by name
            torch.jit.save(traced, file)

    return save, traced


def _to_onnx(module: Any, examples: tuple[Tensor, ...]) -> tuple[Any, Any]:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise UserError("onnx: needs the extra `onnx`: pip install 'fedbcgd[onnx]'") from None
    batch = torch.export.Dim("batch")
    shapes = {"values": tuple({0: batch} for _ in examples)}
    exported = torch.export.export(module, examples, dynamic_shapes=shapes)
    program: Any = torch.onnx.export(
        exported, dynamo=True, input_names=list(module.names), output_names=["output"], verbose=False
    )
    return program.save, exported.module()


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide torch's warnings about deprecations and about packages that are not needed."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
