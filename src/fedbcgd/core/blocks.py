"""The division of a model's parameters into N blocks and a small shared block."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from itertools import accumulate, groupby, pairwise
from math import inf
from typing import Any, cast

from torch import nn
from torch.nn.parameter import UninitializedParameter

from fedbcgd.errors import UserError, unknown

log = logging.getLogger("fedbcgd")

DIVIDERS = ("auto", "layers", "even", "paper")
LARGEST = 1.5  # `auto` leaves layers for `even` cuts when the largest block would exceed this many times d/N

SHARED = 0.1  # share of d above which a shared block that nobody chose is warned about

Patterns = Sequence[str]


@dataclass(frozen=True)
class Division:
    """The order of the parameters in the vector, and where it is cut: x = [x_1 … x_N, x_s]."""

    names: tuple[str, ...]  # every trainable parameter once, in the order of the vector
    bounds: tuple[int, ...]  # block j is [bounds[j], bounds[j+1]); the shared block is [bounds[N], dim)
    dim: int
    divider: str

    @property
    def blocks(self) -> int:
        return len(self.bounds) - 1

    def sizes(self) -> list[int]:
        return [b - a for a, b in pairwise(self.bounds)]

    @property
    def shared(self) -> int:
        return self.dim - self.bounds[-1]


def divide(
    model: nn.Module,
    blocks: int = 5,
    divider: str | Sequence[str | Patterns] | Sequence[float] = "auto",
    shared: str | Patterns | None = "last",
) -> Division:
    """Divide the trainable parameters of `model` into `blocks` blocks and a shared block.

    divider: `layers` (contiguous layers, the largest block as small as possible), `even` (cut anywhere; blocks differ
        by at most one element), `auto` (layers, or even where layers are too few or too unequal), a list with the relative
        size of each block, such as `[1, 2, 5]` (cut anywhere), or with the name patterns of each block, such as
        `[["conv*"], ["fc1", "fc2"]]`; or `paper`, the paper's table for the model,
        which then must have `paper_blocks` (name patterns of each block, or the number of even ones) and `paper_shared`.
    shared: `last` (the last layer, nothing if it is the whole model), "none" or None for an empty one, or name patterns.
        A last layer that is recurrent, an embedding or more than half of d is hardly the one that makes the output: the
        next one before it that is neither recurrent nor an embedding is taken instead, if it is smaller.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"model: an nn.Module is wanted, given {model!r}")
    if not isinstance(blocks, int):
        raise UserError(f"blocks: a whole number is wanted, given {blocks!r}")
    printed = divider == "paper"
    if printed:
        divider, shared = _of_the_paper(model, blocks)
    sizes = _trainable(model)
    dim = sum(sizes.values())
    if blocks < 1:
        raise UserError(f"blocks: at least 1 is needed, given {blocks}")
    if blocks > dim:
        raise UserError(f"blocks: {blocks} blocks cannot be made of {dim} trainable parameters (N is larger than d)")
    shares = _shares(divider, blocks)
    if isinstance(divider, str) or shares:
        if isinstance(divider, str) and divider not in DIVIDERS:
            raise unknown("divider", divider, [*DIVIDERS, "or a list of name patterns or sizes for each block"])
        tail = _shared_names(model, sizes, shared)
        body = [name for name in sizes if name not in set(tail)]
        room = sum(sizes[name] for name in body)
        if blocks > room:
            raise UserError(
                f"blocks: {blocks} blocks cannot be made of the {room} parameters outside the shared block "
                f"({', '.join(tail)}); make the shared block smaller (shared=None for none) or take fewer blocks"
            )
        if shares:
            names, cuts, divider = body, _by_shares(room, shares), "sizes"
        else:
            names, cuts, divider = _cut(sizes, body, blocks, str(divider), dim)
    elif not isinstance(divider, Sequence):
        raise UserError(
            f"divider: {', '.join(DIVIDERS)} or a list of name patterns or sizes for each block, given {divider!r}"
        )
    else:
        patterns = cast(Sequence[str | Patterns], divider)
        names, cuts, tail = _by_patterns(model, sizes, blocks, patterns, shared)
        divider = "patterns"
    return Division((*names, *tail), tuple(cuts), dim, "paper" if printed else str(divider))


def _shares(divider: Any, blocks: int) -> list[float]:
    """Relative sizes, where the divider is a list of numbers; nothing otherwise."""
    if isinstance(divider, str) or not isinstance(divider, Sequence) or not divider:
        return []
    if not all(isinstance(share, (int, float)) and not isinstance(share, bool) for share in divider):
        return []
    if len(divider) != blocks:
        raise UserError(f"divider: sizes of {len(divider)} blocks were given, but blocks = {blocks}")
    if not all(0 < share < inf for share in divider):
        raise UserError(f"divider: the relative sizes of blocks are positive numbers, given {list(divider)}")
    return [float(share) for share in divider]


def _by_shares(room: int, shares: list[float]) -> list[int]:
    """Cuts anywhere, in these proportions to one element; no block is empty."""
    cuts = [0]
    for j, upto in enumerate(accumulate(shares), 1):
        wanted = round(room * upto / sum(shares))
        cuts.append(min(max(wanted, cuts[-1] + 1), room - (len(shares) - j)))
    return cuts


def paper_blocks(model: nn.Module) -> int:
    """N in the paper's division of this model."""
    table = getattr(model, "paper_blocks", None)
    if table is None:
        raise UserError(f"divider: the paper has no division of {type(model).__name__}; take layers, even or auto")
    return table if isinstance(table, int) else len(table)


def _of_the_paper(model: nn.Module, blocks: int) -> tuple[str | Sequence[str | Patterns], Patterns]:
    count = paper_blocks(model)
    if blocks != count:
        raise UserError(f"blocks: the paper divides {type(model).__name__} into {count} blocks, not {blocks}")
    table: Any = model.paper_blocks
    shared: Any = model.paper_shared
    return ("even" if isinstance(table, int) else table), shared


def _trainable(model: nn.Module) -> dict[str, int]:
    """Names and sizes of the trainable parameters; a tied one stands once, under its first name."""
    sizes = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if isinstance(p, UninitializedParameter):
            raise UserError(f"parameter {name!r} has no shape yet: run one batch through the lazy model first")
        if not p.is_floating_point():
            raise UserError(
                f"parameter {name!r} is of type {p.dtype}; only real floating-point parameters can be trained"
            )
        sizes[name] = p.numel()
    if not sum(sizes.values()):
        raise UserError(f"the model ({type(model).__name__}) has no trainable parameters")
    return sizes


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _shared_names(model: nn.Module, sizes: dict[str, int], shared: str | Patterns | None) -> list[str]:
    if shared is None or shared == "none":
        return []
    if shared == "last":
        return _last_layer(model, sizes)
    return _match(model, sizes, [shared] if isinstance(shared, str) else shared, "the shared block")


def _last_layer(model: nn.Module, sizes: dict[str, int]) -> list[str]:
    """The parameters of the layer that makes the output, as far as the order and kind of the layers tell."""
    layers = [(name, list(names)) for name, names in groupby(sizes, _layer)]
    if len(layers) < 2:
        return []

    def count(names: list[str]) -> int:
        return sum(sizes[name] for name in names)

    dim = count(list(sizes))
    name, chosen = layers[-1]
    if _feeds_others(model, name) or count(chosen) > dim / 2:
        before = [layer for layer in layers[:-1] if not _feeds_others(model, layer[0])]
        if before and count(before[-1][1]) < count(chosen):
            name, chosen = before[-1]
    if count(chosen) > SHARED * dim:
        _warn(
            f"shared: the shared block, {name or 'the parameters of the model itself'}, is {count(chosen) / dim:.0%} of the "
            "model, and every client uploads it in every round; name a smaller layer (shared=['…']), or none (shared='none')"
        )
    return chosen


def _feeds_others(model: nn.Module, layer: str) -> bool:
    return isinstance(model.get_submodule(layer), (nn.RNNBase, nn.RNNCellBase, nn.Embedding, nn.EmbeddingBag))


@cache
def _warn(text: str) -> None:
    """Warn once in a process: a model is divided more than once."""
    log.warning(text)


def _cut(
    sizes: dict[str, int], body: list[str], blocks: int, divider: str, dim: int
) -> tuple[list[str], list[int], str]:
    """Cut the body, in the model's own order, at layers or evenly."""
    layers = [sum(sizes[name] for name in names) for _, names in groupby(body, _layer)]
    layers = [n for n in layers if n]  # a layer without elements makes no block
    if divider == "layers" and len(layers) < blocks:
        raise UserError(
            f"blocks: {blocks} blocks cannot be made of {len(layers)} layers outside the shared block; "
            f"take at most {len(layers)} blocks or divider='even'"
        )
    if divider != "even" and len(layers) >= blocks:
        groups = contiguous(layers, blocks)
        if divider == "layers" or max(groups) <= LARGEST * dim / blocks:
            return body, [0, *accumulate(groups)], "layers"
    room = sum(layers)
    return body, [room * j // blocks for j in range(blocks + 1)], "even"


def contiguous(sizes: list[int], groups: int) -> list[int]:
    """Sums of `groups` contiguous non-empty runs of `sizes`, the largest sum as small as can be."""

    def runs(limit: int) -> list[int]:
        out: list[int] = []
        for k, n in enumerate(sizes):
            must_open = len(sizes) - k <= groups - len(out)  # as many sizes left as groups to fill
            if not out or out[-1] + n > limit or must_open:
                out.append(n)
            else:
                out[-1] += n
        return out

    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(runs(middle)) <= groups else (middle + 1, high)
    return runs(low)


def _by_patterns(
    model: nn.Module,
    sizes: dict[str, int],
    blocks: int,
    divider: Sequence[str | Patterns],
    shared: str | Patterns | None,
) -> tuple[list[str], list[int], list[str]]:
    if len(divider) != blocks:
        raise UserError(f"divider: name patterns for {len(divider)} blocks were given, but blocks = {blocks}")
    owner: dict[str, str] = {}

    def claim(names: list[str], by: str) -> list[str]:
        for name in names:
            if name in owner:
                raise UserError(f"parameter {name!r} is claimed twice: by {owner[name]} and by {by}")
            owner[name] = by
        return names

    parts = [
        claim(_match(model, sizes, [p] if isinstance(p, str) else p, f"block {j + 1}"), f"block {j + 1}")
        for j, p in enumerate(divider)
    ]
    if shared == "last":  # a default gives way to what was said explicitly
        *before, last = (list(names) for _, names in groupby(sizes, _layer))
        tail = [name for name in last if name not in owner] if before else []
    else:
        tail = _shared_names(model, sizes, shared)
    claim(tail, "the shared block")
    left = [name for name in sizes if name not in owner]
    if left:
        raise UserError(f"parameter {left[0]!r} is claimed by no block ({len(left)} in all: {', '.join(left[:8])})")
    for j, names in enumerate(parts):
        if not sum(sizes[name] for name in names):
            raise UserError(f"block {j + 1} is empty: {', '.join(names)} hold no elements")
    cuts = [0, *accumulate(sum(sizes[name] for name in names) for names in parts)]
    return [name for names in parts for name in names], cuts, tail


def _match(model: nn.Module, sizes: dict[str, int], patterns: Patterns, where: str) -> list[str]:
    """The trainable parameters that the patterns name; a module's name stands for all it holds."""

    def fits(name: str, pattern: str) -> bool:
        return fnmatchcase(name, pattern) or fnmatchcase(name, pattern + ".*")

    for pattern in patterns:
        if any(fits(name, pattern) for name in sizes):
            continue
        every = {n: p for n, p in model.named_parameters(remove_duplicate=False) if fits(n, pattern)}
        if frozen := [n for n, p in every.items() if not p.requires_grad]:
            why = f"it matches only parameters that are not trained, such as {frozen[0]!r}"
        elif every:
            alias, p = next(iter(every.items()))
            first = next(n for n, q in model.named_parameters() if q is p)
            why = f"{alias!r} is tied to {first!r} and stored under that name"
        else:
            why = f"the trainable parameters are {', '.join(list(sizes)[:12])}{' …' if len(sizes) > 12 else ''}"
        raise UserError(f"pattern {pattern!r} for {where} matches nothing: {why}")
    return [name for name in sizes if any(fits(name, p) for p in patterns)]
