"""Loading published weights of a vision transformer, with the names of timm or Hugging Face, into a ViT."""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbcgd import files
from fedbcgd.errors import UserError
from fedbcgd.models.vit import STD, ViT

FILES = ("model.safetensors", "pytorch_model.bin")  # in a folder or a model on the hub, in order of preference
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SHOWN = 8  # items of a list in a message

# Prefixes that training scripts and wrappers add to the names.
PREFIXES = re.compile(r"^(?:(?:state_dict|model|module|_orig_mod|vit)\.)+")
OUTSIDE_LAYERS = {
    "embeddings.cls_token": "cls_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.patch_embeddings.projection.weight": "patch_embed.proj.weight",
    "embeddings.patch_embeddings.projection.bias": "patch_embed.proj.bias",
    "layernorm.weight": "norm.weight",
    "layernorm.bias": "norm.bias",
}
# Published files use the first names; modules of transformers 5, and so their state_dict, use the second.
LAYER = re.compile(r"(?:encoder\.layer|layers)\.(\d+)\.(.+)\.(weight|bias)")
INSIDE_LAYER = {
    "layernorm_before": "norm1",
    "attention.output.dense": "attn.proj",
    "attention.o_proj": "attn.proj",
    "layernorm_after": "norm2",
    "intermediate.dense": "mlp.fc1",
    "mlp.fc1": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "mlp.fc2": "mlp.fc2",
}
QKV = ("query", "key", "value")
PROJECTIONS = {f"attention.attention.{part}": part for part in QKV} | {
    f"attention.{part[0]}_proj": part for part in QKV
}


@dataclass(frozen=True)
class LoadedWeights:
    """What `load_pretrained` did.

    Attributes:
        source: where the weights come from.
        interpolated: whether the positions were interpolated from those of another grid.
        reinitialised: the tensors of the model that were drawn anew: those of the head.
        unused: the tensors of the file that were not used.
    """

    source: str
    interpolated: bool
    reinitialised: tuple[str, ...]
    unused: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return lines that describe the result to the user."""
        return [
            f"pretrained weights from {self.source}",
            "positions " + ("interpolated to this model's grid" if self.interpolated else "as in the file"),
            f"drawn anew: {', '.join(self.reinitialised)}",
            f"in the file but not used: {', '.join(self.unused) or 'nothing'}",
        ]

    def __str__(self) -> str:
        return "\n".join(self.lines())


def load_pretrained(model: ViT, weights: str | Path, seed: int = 0) -> LoadedWeights:
    """Copy the body of a pretrained ViT into a model, and draw the model's head anew.

    Args:
        model: the model, which is changed only if all tensors of its body fit.
        weights: a .safetensors file, a PyTorch file (.bin, .pt, .pth), a folder that holds model.safetensors or
            pytorch_model.bin, or the name owner/model of one on the Hugging Face hub (extra `hf`).
        seed: fixes the weights of the head.

    Returns:
        Which tensors were used, and how.

    Raises:
        UserError: the weights cannot be read, or do not fit.
    """
    if not isinstance(model, ViT):
        raise UserError(f"expected a model of fedbcgd.models.vit for pretrained weights, got a {type(model).__name__}")
    stored, source = read_tensors(weights)
    head = {name: p for name, p in model.named_parameters() if name.startswith("head.")}
    body = {name: p.detach() for name, p in model.named_parameters() if name not in head}
    thirds = {
        f"{name}.{part}": third
        for name, p in body.items()
        if ".attn.qkv." in name
        for part, third in zip(QKV, p.chunk(3), strict=True)
    }
    targets = body | thirds  # a file has query, key and value as one tensor or as three
    name_of = _match_names(stored, targets, source)
    divided = {name.rpartition(".")[0] for name in thirds.keys() & name_of.keys()}
    needed = [name for name in targets if name.rpartition(".")[0] in divided or (name in body and name not in divided)]
    values = _fitting_values({name: targets[name].shape for name in needed}, stored, name_of, model, source)
    generator = torch.Generator().manual_seed(seed)  # on the CPU: the same head for every device
    with torch.no_grad():
        for name, value in values.items():
            targets[name].copy_(value)
        for p in head.values():
            initial = torch.zeros(p.shape)
            p.copy_(nn.init.trunc_normal_(initial, std=STD, generator=generator) if p.dim() > 1 else initial)
    interpolated = stored[name_of["pos_embed"]].shape != model.pos_embed.shape
    unused = tuple(name for name in stored if name not in name_of.values())
    return LoadedWeights(source, interpolated, tuple(head), unused)


def load_exactly(module: nn.Module, weights: str | Path) -> str:
    """Load weights of exactly the same model.

    Args:
        module: any model.
        weights: as for `load_pretrained`.

    Returns:
        Where the weights come from.

    Raises:
        UserError: the weights cannot be read, or names or shapes differ.
    """
    stored, source = read_tensors(weights)
    check_fit(module, stored, source)
    module.load_state_dict(stored)
    return source


def check_fit(module: nn.Module, stored: Mapping[str, Tensor], source: str) -> None:
    """Check that a model has exactly these tensors, by name and shape.

    Args:
        module: any model, also one on the meta device.
        stored: the tensors of a file.
        source: the file, for messages.

    Raises:
        UserError: names or shapes differ.
    """
    own = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    problems = [f"{name} is missing" for name in own if name not in stored]
    problems += [f"{name} is not of this model" for name in stored if name not in own]
    problems += [
        f"{name} is {_size(stored[name].shape)} in the file, {_size(value.shape)} in the model"
        for name, value in own.items()
        if name in stored and stored[name].shape != value.shape
    ]
    if problems:
        raise UserError(
            f"{source}: expected weights of {type(module).__name__}, got others: {_shortened(problems, '; ')}"
        )


def read_tensors(weights: str | Path) -> tuple[dict[str, Tensor], str]:
    """Read all tensors of a file, a folder or a model on the hub.

    Args:
        weights: as for `load_pretrained`.

    Returns:
        The tensors by their names, and where they come from.

    Raises:
        UserError: they cannot be read.
    """
    if path := _on_disk(weights):
        return _read(path), str(path)
    path = _download(str(weights))
    return _read(path), f"{weights} ({path})"


def _on_disk(weights: str | Path) -> Path | None:
    """Return the path of the file; None if it is a name on the hub."""
    path = Path(weights).expanduser()
    try:
        if path.is_dir():
            for name in FILES:
                if (path / name).is_file():
                    return path / name
            raise UserError(f"{path}: expected a folder with {FILES[0]} or {FILES[1]}, got one with neither")
        if path.exists():
            return path
    except OSError as error:
        raise UserError(f"{path} could not be read: {error.strerror or error}") from error
    # A name with the suffix of a file is a mistyped path, not a model on the hub.
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(weights)) and path.suffix not in SUFFIXES:
        return None
    raise UserError(
        f"weights: expected a .safetensors or PyTorch file, a folder with {FILES[0]} or {FILES[1]}, or the name "
        f"owner/model of a model on the Hugging Face hub, got {weights}"
    )


def _download(name: str) -> Path:
    """Download a model's file into the hub's own cache, and return its path."""
    local = "a path to a downloaded file or folder works too"
    try:  # imported by name, since the type checker may not have the extra
        hub, errors = import_module("huggingface_hub"), import_module("huggingface_hub.errors")
    except ImportError:
        raise UserError(
            f"{name}: no such file or folder; to download it from the Hugging Face hub, install the extra: "
            f"pip install 'fedbcgd[hf]'; {local}"
        ) from None
    unreachable: Exception | None = None
    for file in FILES:
        try:
            # If the hub is unreachable, look for the second file in the cache only: another attempt would wait again.
            return Path(hub.hf_hub_download(name, file, local_files_only=unreachable is not None))
        except errors.LocalEntryNotFoundError as error:
            unreachable = unreachable or error
        except errors.EntryNotFoundError:
            continue
        except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
            raise UserError(
                f"{name}: no such file or folder here, and no such model on the Hugging Face hub (or a private or "
                f"gated one that this machine is not logged in for); {local}"
            ) from error
        except Exception as error:  # of any network library that the hub's client may use
            raise UserError(f"{name} could not be downloaded: {_first_line(error)}; {local}") from error
    if unreachable:
        raise UserError(
            f"{name}: no such file or folder here, the Hugging Face hub could not be reached, and its cache does not "
            f"have the model; {local}"
        ) from unreachable
    raise UserError(f"{name}: expected {FILES[0]} or {FILES[1]} in the model on the Hugging Face hub, got neither")


def _read(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a file by their names; those in nested dictionaries get dotted names."""
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: expected a file that ends in one of {', '.join(SUFFIXES)}, got {path.name!r}")
    try:
        stored = files.read_tensors(path)[0] if path.suffix == ".safetensors" else _read_pytorch(path)
    except (files.Damaged, OSError) as error:
        raise UserError(f"{path} cannot be read, it may be damaged or cut short: {_first_line(error)}") from error
    for name, tensor in stored.items():
        if _is_plain(tensor) and not tensor.isfinite().all():
            raise UserError(f"{path}: expected finite values, got others in tensor {name!r}; use another file")
    return stored


def _read_pytorch(path: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can raise anything
        if isinstance(error, UnpicklingError) or "weights_only" in str(error):
            raise UserError(
                f"{path} holds more than tensors, or is no PyTorch file; it was not loaded, because loading such a "
                "file can run code. Save the model's state_dict() alone, best as .safetensors"
            ) from error
        raise OSError(_first_line(error)) from error
    return dict(_tensors(content, "", set()))


def _tensors(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value.detach()
    elif isinstance(value, dict) and id(value) not in seen:  # a dictionary may contain itself
        seen.add(id(value))
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}" if name else str(key), seen)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype in FLOATS and tensor.layout == torch.strided and tensor.device.type == "cpu"


def _own_name(name: str) -> str:
    """Return the name in ViT for a name in a file; for query, key and value with their names at the end."""
    name = PREFIXES.sub("", name)
    if not (layer := LAYER.fullmatch(name)):
        return OUTSIDE_LAYERS.get(name, name)
    index, inside, kind = layer.groups()
    if inside in PROJECTIONS:
        return f"blocks.{index}.attn.qkv.{kind}.{PROJECTIONS[inside]}"
    return f"blocks.{index}.{INSIDE_LAYER[inside]}.{kind}" if inside in INSIDE_LAYER else name


def _match_names(stored: Mapping[str, Tensor], targets: Collection[str], source: str) -> dict[str, str]:
    """Find the tensor of the file for each tensor of the body, or third of one, that the file has."""
    name_of: dict[str, str] = {}
    for name in stored:
        own = _own_name(name)
        if own not in targets:
            continue
        for target, other in name_of.items():
            if target.startswith(own) or own.startswith(target):  # the same, or a third of it
                raise UserError(
                    f"{source}: expected the weights of one model, got both {other!r} and {name!r} for {own}"
                )
        name_of[own] = name
    if not name_of:
        raise UserError(
            f"{source}: expected tensors with the names of timm's or Hugging Face's ViT, got "
            f"{_shortened(list(stored), ', ') or 'no tensors'}"
        )
    return name_of


def _fitting_values(
    shapes: Mapping[str, torch.Size], stored: Mapping[str, Tensor], name_of: Mapping[str, str], model: ViT, source: str
) -> dict[str, Tensor]:
    """Return a value of each of these shapes, or raise one error that lists all problems."""
    values, problems = {}, []
    for name, shape in shapes.items():
        try:
            values[name] = _value(name, shape, stored, name_of, model.grid)
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError(
            f"{source}: expected the {len(shapes)} tensors of {type(model).__name__}'s body, got {len(problems)} that "
            f"do not fit: {_shortened(problems, '; ')}"
        )
    return values


def _value(
    name: str, shape: torch.Size, stored: Mapping[str, Tensor], name_of: Mapping[str, str], grid: tuple[int, int]
) -> Tensor:
    if name not in name_of:
        raise UserError(f"{name} is missing")
    given, tensor = name_of[name], stored[name_of[name]]
    if not _is_plain(tensor):
        kind = f"{tensor.layout} of {tensor.dtype} on {tensor.device}"
        raise UserError(f"{given}: expected dense floating point of 16, 32 or 64 bits, got {kind}")
    is_grid = name == "pos_embed" and tensor.dim() == 3 and tensor.shape[::2] == shape[::2]
    if tensor.shape != shape and not is_grid:
        raise UserError(f"{given} is {_size(tensor.shape)} in the file, {_size(shape)} in the model")
    return _positions(given, tensor, shape[1], grid) if is_grid else tensor


def _positions(name: str, tensor: Tensor, needed: int, grid: tuple[int, int]) -> Tensor:
    """Return the positions for this grid; those of another, square grid are interpolated as in transformers."""
    count = tensor.shape[1]
    rows, columns = grid
    side = math.isqrt(max(count - 1, 0))
    square = count > 1 and side * side == count - 1
    if count == needed and (rows == columns or not square):
        return tensor
    if not square:
        hint = " (a square grid without the class token)" if math.isqrt(count) ** 2 == count else ""
        raise UserError(f"{name}: expected positions of the class token and a square grid, got {count}{hint}")
    if count == needed:
        raise UserError(
            f"{name} fits {side}×{side} patches and the model's {rows}×{columns}, and the file does not say which it "
            "is for: use images of another shape, or model.load_state_dict if the file is for this shape"
        )
    patches = tensor[:, 1:].double().unflatten(1, (side, side)).permute(0, 3, 1, 2)
    patches = F.interpolate(patches, grid, mode="bicubic", align_corners=False)
    return torch.cat([tensor[:, :1].double(), patches.flatten(2).transpose(1, 2)], 1)


def _size(shape: torch.Size) -> str:
    return "×".join(map(str, shape)) or "a single number"


def _shortened(items: Sequence[str], separator: str) -> str:
    more = f"{separator}and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return separator.join(items[:SHOWN]) + more


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
