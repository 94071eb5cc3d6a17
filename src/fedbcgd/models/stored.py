"""A trained model in a file: `model.safetensors` says in its metadata how to build the module again.

Reading is safe with files from anywhere. Tensors and metadata are plain values, nothing is unpickled, and a model of this
package is first built without memory and compared with the tensors. Code from elsewhere is imported with `trust` only.
"""

import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ConfigDict, Field, ValidationError
from torch import Tensor, nn

from fedbcgd import files
from fedbcgd.core.objective import Precision
from fedbcgd.core.parts import Section
from fedbcgd.core.reading import shorten
from fedbcgd.data.images import Images
from fedbcgd.data.sources import Tensors, as_source
from fedbcgd.errors import UserError
from fedbcgd.models import MODELS
from fedbcgd.models.make import HF, from_transformers_values, make_model
from fedbcgd.models.pretrained import check_fit
from fedbcgd.models.problems import Point
from fedbcgd.version import __version__

FILE = "model.safetensors"  # in the folder of a run
KEY = "model"  # in the metadata of the file
POINT = "point"  # the model of quadratics
LARGEST = 4096  # the largest number that is accepted in the options of a model of the package

DType = Literal["float32", "float64", "float16", "bfloat16", "uint8", "int8", "int16", "int32", "int64", "bool"]


class ModelInfo(Section):
    """What is needed to build a trained model again, and to prepare its inputs."""

    model_config = ConfigDict(extra="ignore")  # later versions may add to it

    name: str | None = Field(None, description="as `[model] name` in a configuration; None: it has no such name")
    kind: str = Field("", description="the module's class, for messages")
    options: dict[str, Any] = Field(default_factory=dict, description="arguments of the class or factory")
    config: dict[str, Any] | None = Field(None, description="of transformers")
    shape: tuple[int, int, int] | None = Field(None, description="channels, height and width of an image")
    classes: int | None = Field(None, ge=1, le=1 << 24, description="how many")
    class_names: tuple[str, ...] = ()
    inputs: dict[str, tuple[DType, tuple[int, ...]]] = Field(
        default_factory=dict, description="type and shape of an example, by name; the name is empty if there is one"
    )
    mean: tuple[float, ...] | None = Field(None, description="of each channel, of values from 0 to 1")
    std: tuple[float, ...] | None = Field(None, description="of each channel")
    resize: int | None = Field(None, ge=1, le=LARGEST, description="the side that images are scaled to")
    crop: int | None = Field(None, ge=1, le=LARGEST, description="the side that is then cut out of the middle")
    precision: Precision = "fp32"
    version: str = Field(__version__, description="of fedbcgd")

    @classmethod
    def of_module(cls, module: nn.Module, **more: Any) -> "ModelInfo":
        """Describe a module that was made in Python.

        It can be built again if it is a transformers model, or if its class is in a module that can be imported and every
        argument of the constructor is kept in an attribute of the same name.

        Args:
            module: any module.
            **more: values of further fields.
        """
        kind = type(module)
        values: dict[str, Any] = {"kind": kind.__qualname__}
        if kind.__module__.startswith("transformers."):
            values |= {"name": HF + kind.__name__, "config": transformers_values(module)}
        elif (arguments := _arguments(module)) is not None:
            names = {MODELS[name]: name for name in MODELS} | {Point: POINT}
            if kind in names:
                if "shape" in arguments:
                    values |= {"classes": arguments.pop("classes"), "shape": tuple(arguments.pop("shape"))}
                values |= {"name": names[kind], "options": arguments}
            elif kind.__module__ != "__main__" and "<" not in kind.__qualname__:
                values |= {"name": f"{kind.__module__}:{kind.__qualname__}", "options": arguments}
        return cls(**{**values, **more})

    def with_data(self, data: Any) -> "ModelInfo":
        """Return a copy with what a data set says about the inputs: shapes, and the normalisation of images.

        Args:
            data: whatever `fedbcgd.simulate` takes for a client.
        """
        source = as_source(data, "data")
        values: dict[str, Any] = {}
        if isinstance(source, Images):
            values = {"inputs": {"": ("float32", source.shape)}, "resize": source.resize, "crop": source.crop}
            values |= {"mean": tuple(source.mean.tolist()), "std": tuple(source.std.tolist())}
        elif isinstance(source, Tensors):
            columns = source.tensors if isinstance(source.tensors, Mapping) else {"": source.tensors[0]}
            inputs = {name: t for name, t in columns.items() if name != "labels" or "" in columns}
            values["inputs"] = {
                name: (str(t.dtype).removeprefix("torch."), tuple(t.shape[1:])) for name, t in inputs.items()
            }
            if any(dtype not in DType.__args__ for dtype, _ in values["inputs"].values()):  # type: ignore[attr-defined]
                values = {}
        return self.model_copy(update=values)

    def metadata(self) -> dict[str, str]:
        """Return the metadata for the file."""
        return {KEY: json.dumps(self.model_dump(exclude_defaults=True) | {"version": self.version}, sort_keys=True)}

    def prepare(self, images: Tensor) -> Tensor:
        """Prepare images as those that the model was trained on, without augmentation.

        Args:
            images: uint8 (n, channels, height, width).

        Returns:
            The model's input, in the same bits as in the run.

        Raises:
            UserError: the model was not trained on images of a data set, or these images do not fit.
        """
        if self.mean is None or self.std is None:
            raise UserError("the model was not trained on images of a data set: prepare its inputs as its data was")
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != len(self.mean):
            raise UserError(
                f"images: expected uint8 (n, {len(self.mean)}, height, width), got {images.dtype} {tuple(images.shape)}"
            )
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        labels = torch.zeros(len(images), dtype=torch.int64)
        source = Images(images, labels, mean, std, resize=self.resize, crop=self.crop)
        return source.gather(torch.arange(len(images)), None)[0].contiguous()  # type: ignore[arg-type]


def transformers_values(module: nn.Module) -> dict[str, Any]:
    """Return the configuration of a transformers model, without the path that it came from."""
    values = json.loads(module.config.to_json_string(use_diff=False))  # type: ignore[union-attr,operator]
    kept = {key: value for key, value in values.items() if not key.startswith("_") and key != "auto_map"}
    if kept.get("loss_type") is None:
        kept.pop("loss_type", None)  # transformers writes None, and warns when it reads it
    return {**kept, "architectures": [type(module).__name__]}


def _arguments(module: nn.Module) -> dict[str, Any] | None:
    """Return the arguments that a module was made with, from attributes of the same names; None if one is missing."""
    if type(module).__init__ is nn.Module.__init__:
        return {}
    try:
        parameters = inspect.signature(type(module)).parameters.values()
    except (TypeError, ValueError):
        return None
    out = {}
    for parameter in parameters:
        value = vars(module).get(parameter.name, inspect.Parameter.empty)
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or not _is_plain(value):
            return None
        out[parameter.name] = value
    return out


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _file(place: str | Path) -> Path:
    path = Path(place)
    return path / FILE if path.is_dir() else path


def _read(place: str | Path) -> tuple[dict[str, Tensor], ModelInfo, Path]:
    path = _file(place)
    try:
        files.open_regular(path).close()
        tensors, metadata, _ = files.read_tensors(path)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: a run writes it when it is finished") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    if KEY not in metadata:
        return tensors, ModelInfo(kind="module", version="unknown"), path
    try:
        return tensors, ModelInfo.model_validate_json(metadata[KEY]), path
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "metadata"
        raise files.Damaged(f"{path} is damaged: {shorten(field, 100)}: {shorten(first['msg'], 200)}") from None


def model_info(folder: str | Path) -> ModelInfo:
    """Return what is known about the model of a run: its name, options, classes, and how inputs are prepared.

    Args:
        folder: the run folder, or the path of its model.safetensors. It may come from anywhere.

    Raises:
        UserError: the file does not exist, or is damaged.
    """
    return _read(folder)[1]


def load_tensors(folder: str | Path) -> dict[str, Tensor]:
    """Return the state_dict of the model of a run; arguments and errors are those of `model_info`."""
    return {name: tensor.clone() for name, tensor in _read(folder)[0].items()}


def load_model(folder: str | Path, *, model: nn.Module | None = None, trust: bool = False) -> nn.Module:
    """Return the trained model of a run, in evaluation mode, on the CPU.

    Example:
        >>> model = fedbcgd.load_model("runs/first")
        >>> info = fedbcgd.model_info("runs/first")
        >>> info.class_names[model(info.prepare(images))[0].argmax()]

    Args:
        folder: the run folder, or the path of its model.safetensors. It may come from anywhere.
        model: a module to load the values into, if the file does not say how to build one.
        trust: whether to import and run code that the file names: your own `module:attribute` or `file.py:attribute`, or
            transformers. Without it, only models of this package are built.

    Returns:
        The module; `model`, if that was given.

    Raises:
        UserError: the file does not exist or is damaged, or the module cannot be built; the message says what to do.
    """
    tensors, info, path = _read(folder)
    module = model if model is not None else _build(info, tensors, path, trust)
    check_fit(module, tensors, str(path))
    with torch.no_grad():
        for name, value in module.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor) and value.dtype != tensors[name].dtype:  # such as after model.double()
                value.data = value.data.to(tensors[name].dtype)
    module.load_state_dict(tensors)
    return module.eval()


def _build(info: ModelInfo, tensors: Mapping[str, Tensor], path: Path, trust: bool) -> nn.Module:
    name = info.name
    remedy = f"pass a module to load it into: load_model({str(path.parent)!r}, model=…)"
    if name is None:
        kind = shorten(info.kind, 100)
        raise UserError(f"{path} does not say how to build its {kind} again; {remedy}")
    shown = shorten(name, 200)
    if name in MODELS or name == POINT:
        return _from_package(info, name, tensors, path)
    if not trust:
        raise UserError(
            f"{path} was trained with {shown}, which is not part of fedbcgd. trust=True imports and runs it (--trust on "
            f"the command line); or {remedy}"
        )
    try:
        if name.startswith(HF):
            return from_transformers_values(info.config or {})
        return make_model(name, info.shape or (1, 1, 1), info.classes or 1, options=info.options).module
    except UserError as error:
        raise UserError(f"{path}: {error}; load it from a folder where {shown} can be imported, or {remedy}") from None


def _from_package(info: ModelInfo, name: str, tensors: Mapping[str, Tensor], path: Path) -> nn.Module:
    """Build a model of the package: first without memory, since the file may ask for more than there is."""

    def build() -> nn.Module:
        if name == POINT:
            return Point(**info.options)
        return make_model(name, info.shape or (1, 28, 28), info.classes or 10, options=info.options).module

    numbers = [value for value in info.options.values() if isinstance(value, (int, float))]
    if any(abs(number) > (LARGEST if name != POINT else sys.maxsize) for number in numbers):
        raise files.Damaged(f"{path} is damaged: expected options of at most {LARGEST}, got {max(numbers, key=abs)}")
    try:
        with torch.device("meta"):
            check_fit(build(), tensors, str(path))
        return build()
    except UserError:
        raise
    except Exception as error:  # a wrong option can fail anywhere
        reason = shorten(f"{type(error).__name__}: {error}", 200)
        raise files.Damaged(f"{path} is damaged: its options build no {name}: {reason}") from None
