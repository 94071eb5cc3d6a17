"""Published weights of a vision transformer, under timm's or Hugging Face's names, put into a ViT."""

import math
import re
from collections.abc import Iterator, Sequence
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

FILES = ("model.safetensors", "pytorch_model.bin")  # of a folder or a model on the hub, the first that is there
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SHOWN = 8  # of a list of tensors in a message

# What training scripts and wrappers put before the names.
PREFIXES = re.compile(r"^(?:(?:state_dict|model|module|_orig_mod|vit)\.)+")
OUTSIDE = {
    "embeddings.cls_token": "cls_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.patch_embeddings.projection.weight": "patch_embed.proj.weight",
    "embeddings.patch_embeddings.projection.bias": "patch_embed.proj.bias",
    "layernorm.weight": "norm.weight",
    "layernorm.bias": "norm.bias",
}
# Files have the first names; the modules of transformers 5 have the second, and so has a state_dict of theirs.
LAYER = re.compile(r"(?:encoder\.layer|layers)\.(\d+)\.(.+)\.(weight|bias)")
INSIDE = {
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

Parts = dict[str, str]  # the names in the file that make up one tensor: under query, key, value, or whole under ""


@dataclass(frozen=True)
class Loaded:
    """What became of a file of pretrained weights."""

    source: str
    interpolated: bool  # the positions were of another grid
    reinitialised: tuple[str, ...]  # the head: tensors of the model
    unused: tuple[str, ...]  # tensors of the file

    def lines(self) -> list[str]:
        return [
            f"pretrained weights from {self.source}",
            "positions " + ("interpolated to this model's grid" if self.interpolated else "as in the file"),
            f"drawn anew: {', '.join(self.reinitialised)}",
            f"in the file but not used: {', '.join(self.unused) or 'nothing'}",
        ]

    def __str__(self) -> str:
        return "\n".join(self.lines())


def load_pretrained(model: ViT, weights: str | Path, seed: int = 0) -> Loaded:
    """Put the body of a pretrained ViT into `model` and draw its head anew, from `seed`.

    weights: a .safetensors file, a PyTorch file (.bin, .pt, .pth), a folder that holds model.safetensors or
        pytorch_model.bin, or the name owner/model of one on the Hugging Face hub (extra `hf`).

    Nothing is copied unless everything fits: after an error the model is as it was.
    """
    if not isinstance(model, ViT):
        raise UserError(f"pretrained weights are for the models of fedbcgd.models.vit, given a {type(model).__name__}")
    stored, source = read_tensors(weights)
    head = {name: p for name, p in model.named_parameters() if name.startswith("head.")}
    body = {name: p for name, p in model.named_parameters() if name not in head}
    found = _sort(stored, set(body), source)
    values = _fit(model, body, found, stored, source)
    generator = torch.Generator().manual_seed(seed)  # on the CPU: the same head for every device
    with torch.no_grad():
        for name, value in values.items():
            body[name].copy_(value)
        for p in head.values():
            drawn = torch.zeros(p.shape)
            p.copy_(nn.init.trunc_normal_(drawn, std=STD, generator=generator) if p.dim() > 1 else drawn)
    interpolated = stored[found["pos_embed"][""]].shape != model.pos_embed.shape
    used = {name for parts in found.values() for name in parts.values()}
    return Loaded(source, interpolated, tuple(head), tuple(name for name in stored if name not in used))


def load_exactly(module: nn.Module, weights: str | Path) -> str:
    """Weights of the same model, tensor for tensor; where they were found."""
    stored, source = read_tensors(weights)
    own = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    wrong = [f"{name} is missing" for name in own if name not in stored]
    wrong += [f"{name} is not of this model" for name in stored if name not in own]
    wrong += [
        f"{name} is {_size(stored[name].shape)} in the file, {_size(value.shape)} in the model"
        for name, value in own.items()
        if name in stored and stored[name].shape != value.shape
    ]
    if wrong:
        raise UserError(f"{source} does not fit {type(module).__name__}: {_some(wrong, '; ')}")
    module.load_state_dict(stored)
    return source


def read_tensors(weights: str | Path) -> tuple[dict[str, Tensor], str]:
    """Every tensor of what `weights` names, and where it was found."""
    if path := _on_disk(weights):
        return _read(path), str(path)
    path = _download(str(weights))
    return _read(path), f"{weights} ({path})"


def _on_disk(weights: str | Path) -> Path | None:
    """The file that is meant; None for a name on the hub."""
    path = Path(weights).expanduser()
    try:
        if path.is_dir():
            for name in FILES:
                if (path / name).is_file():
                    return path / name
            raise UserError(f"{path}: the folder holds neither {FILES[0]} nor {FILES[1]}")
        if path.exists():
            return path
    except OSError as error:
        raise UserError(f"{path} could not be read: {error.strerror or error}") from error
    # What ends like a file is a mistyped path, not a model on the hub.
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(weights)) and path.suffix not in SUFFIXES:
        return None
    raise UserError(
        f"{weights}: no such file or folder; give a .safetensors or PyTorch file, a folder with {FILES[0]} or "
        f"{FILES[1]}, or the name owner/model of a model on the Hugging Face hub"
    )


def _download(name: str) -> Path:
    """The path of a hub model's file in the hub's own cache."""
    local = "a path to a downloaded file or folder works too"
    try:  # imported by name: the extra is not there for every type checker either
        hub, errors = import_module("huggingface_hub"), import_module("huggingface_hub.errors")
    except ImportError:
        raise UserError(
            f"{name}: no such file or folder, and to get it from the Hugging Face hub the extra is needed: "
            f"pip install 'fedbcgd[hf]'; {local}"
        ) from None
    unreachable: Exception | None = None
    for file in FILES:
        try:
            # With the hub out of reach the cache may still hold the second file; asking again would only wait again.
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
        except Exception as error:  # of whichever network library the hub's client is built on
            raise UserError(f"{name} could not be downloaded: {_first_line(error)}; {local}") from error
    if unreachable:
        raise UserError(
            f"{name}: no such file or folder here, the Hugging Face hub could not be reached, and its cache does not "
            f"hold the model; {local}"
        ) from unreachable
    raise UserError(f"{name}: the model on the Hugging Face hub has neither {FILES[0]} nor {FILES[1]}")


def _read(path: Path) -> dict[str, Tensor]:
    """Every tensor of the file by its name there; those in nested dictionaries have dotted names."""
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: a file that ends in one of {', '.join(SUFFIXES)} is wanted")
    try:
        stored = files.read_tensors(path)[0] if path.suffix == ".safetensors" else _read_pytorch(path)
    except (files.Damaged, OSError) as error:
        raise UserError(f"{path} could not be read, it may be damaged or cut short: {_first_line(error)}") from error
    for name, tensor in stored.items():
        if _is_plain(tensor) and not tensor.isfinite().all():
            raise UserError(f"{path}: tensor {name!r} holds values that are not finite; another file is needed")
    return stored


def _read_pytorch(path: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can end in any of them
        if isinstance(error, UnpicklingError) or "weights_only" in str(error):
            raise UserError(
                f"{path} holds more than tensors, or is no PyTorch file: it was not loaded, because loading such a "
                "file can run code; save the model's state_dict() alone, best as .safetensors"
            ) from error
        raise OSError(_first_line(error)) from error
    return dict(_tensors(content, "", set()))


def _tensors(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value.detach()
    elif isinstance(value, dict) and id(value) not in seen:  # a dictionary may hold itself
        seen.add(id(value))
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}" if name else str(key), seen)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype in FLOATS and tensor.layout == torch.strided and tensor.device.type == "cpu"


def _place(name: str) -> tuple[str, str]:
    """The name in ViT for a name in a file, and which part of that tensor it is."""
    name = PREFIXES.sub("", name)
    if not (layer := LAYER.fullmatch(name)):
        return OUTSIDE.get(name, name), ""
    index, inside, kind = layer.groups()
    if inside in PROJECTIONS:
        return f"blocks.{index}.attn.qkv.{kind}", PROJECTIONS[inside]
    return (f"blocks.{index}.{INSIDE[inside]}.{kind}" if inside in INSIDE else name), ""


def _sort(stored: dict[str, Tensor], body: set[str], source: str) -> dict[str, Parts]:
    found: dict[str, Parts] = {}
    for name in stored:
        ours, part = _place(name)
        if ours not in body:
            continue
        parts = found.setdefault(ours, {})
        if clash := [other for p, other in parts.items() if p == part or not (p and part)]:
            raise UserError(f"{source}: both {clash[0]!r} and {name!r} are {ours}; a file of one model is wanted")
        parts[part] = name
    if not found:
        raise UserError(
            f"{source}: no tensor has a name of timm's or Hugging Face's ViT; the file holds "
            f"{_some(list(stored), ', ') or 'no tensors'}"
        )
    return found


def _fit(
    model: ViT, body: dict[str, nn.Parameter], found: dict[str, Parts], stored: dict[str, Tensor], source: str
) -> dict[str, Tensor]:
    """A value for every tensor of the body, or one error for all that is wrong."""
    values, wrong = {}, []
    for name, parameter in body.items():
        try:
            values[name] = _value(name, parameter.shape, found.get(name, {}), stored, model.grid)
        except UserError as error:
            wrong.append(str(error))
    if wrong:
        raise UserError(
            f"{source} does not fit {type(model).__name__}, whose body has {len(body)} tensors, in {len(wrong)} of "
            f"them: {_some(wrong, '; ')}"
        )
    return values


def _value(name: str, shape: torch.Size, parts: Parts, stored: dict[str, Tensor], grid: tuple[int, int]) -> Tensor:
    if not parts:
        raise UserError(f"{name} is missing")
    if name == "pos_embed":
        return _positions(parts[""], stored[parts[""]], shape, grid)
    if "" in parts:
        return _checked(parts[""], stored[parts[""]], shape)
    if missing := [part for part in QKV if part not in parts]:
        raise UserError(f"{name} is missing its {' and '.join(missing)}")
    third = torch.Size([shape[0] // 3, *shape[1:]])
    return torch.cat([_checked(parts[part], stored[parts[part]], third) for part in QKV])


def _checked(name: str, tensor: Tensor, shape: torch.Size) -> Tensor:
    if not _is_plain(tensor):
        kind = f"{tensor.layout} of {tensor.dtype} on {tensor.device}"
        raise UserError(f"{name} is {kind}, where dense floating point of 16, 32 or 64 bits is wanted")
    if tensor.shape != shape:
        raise UserError(f"{name} is {_size(tensor.shape)} in the file, {_size(shape)} in the model")
    return tensor


def _positions(name: str, tensor: Tensor, shape: torch.Size, grid: tuple[int, int]) -> Tensor:
    """The positions for this grid. Those of another, which must be square, are interpolated as transformers does."""
    count = tensor.shape[1] if tensor.dim() == 3 else shape[1]
    tensor = _checked(name, tensor, torch.Size([1, count, shape[2]]))
    rows, columns = grid
    side = math.isqrt(max(count - 1, 0))
    square = count > 1 and side * side == count - 1
    if count == shape[1] and (rows == columns or not square):
        return tensor
    if not square:
        alone = " (a square grid alone, without the class token's)" if math.isqrt(count) ** 2 == count else ""
        raise UserError(
            f"{name} holds {count} positions{alone}, where the class token's and a square grid's are wanted"
        )
    if count == shape[1]:
        raise UserError(
            f"{name} may be of {side}×{side} patches or of the model's {rows}×{columns}, and the file does not say: "
            "take images of another shape, or model.load_state_dict if the file is of the same"
        )
    patches = tensor[:, 1:].double().unflatten(1, (side, side)).permute(0, 3, 1, 2)
    patches = F.interpolate(patches, grid, mode="bicubic", align_corners=False)
    return torch.cat([tensor[:, :1].double(), patches.flatten(2).transpose(1, 2)], 1)


def _size(shape: torch.Size) -> str:
    return "×".join(map(str, shape)) or "a single number"


def _some(items: Sequence[str], between: str) -> str:
    more = f"{between}and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return between.join(items[:SHOWN]) + more


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
