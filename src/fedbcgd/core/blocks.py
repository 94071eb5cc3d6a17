"""The division of a model's parameters into N blocks and a small shared block."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import accumulate, groupby, pairwise
from math import inf
from typing import Any, cast

from torch import nn
from torch.nn.parameter import UninitializedParameter

from fedbcgd.errors import UserError, did_you_mean

log = logging.getLogger("fedbcgd")

DIVIDERS = ("auto", "layers", "even", "paper")
MAX_BLOCK_RATIO = 1.5  # `auto` cuts evenly if the largest block of layers would exceed this many times d/N
LARGE_SHARED = 0.1  # share of d above which a warning says that the default shared block is large

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
        """The number of blocks, N."""
        return len(self.bounds) - 1

    def sizes(self) -> list[int]:
        """Return the number of values in each block."""
        return [b - a for a, b in pairwise(self.bounds)]

    @property
    def shared(self) -> int:
        """The number of values in the shared block."""
        return self.dim - self.bounds[-1]


def divide(
    model: nn.Module,
    blocks: int = 5,
    divider: str | Sequence[str | Patterns] | Sequence[float] = "auto",
    shared: str | Patterns | None = "last",
) -> Division:
    """Divide the trainable parameters of a model into N blocks and a shared block.

    Args:
        model: whose trainable parameters are divided.
        blocks: N.
        divider: how to cut:

            - "layers": between layers, such that the largest block is as small as possible;
            - "even": anywhere; blocks differ by at most one element;
            - "auto": layers, or even if layers are too few or too unequal;
            - "paper": the paper's table for the model, which must have `paper_blocks` (name patterns of each block, or
              the number of even ones) and `paper_shared`;
            - a list with the relative size of each block, such as `[1, 2, 5]`: anywhere;
            - a list with the name patterns of each block, such as `[["conv*"], ["fc1", "fc2"]]`.
        shared: `last` (the last layer, nothing if it is the whole model), "none" or None for an empty one, or name
            patterns. A last layer that is recurrent, an embedding or more than half of d is hardly the output layer: the
            nearest layer before it that is neither recurrent nor an embedding is taken instead, if it is smaller.

    Returns:
        The order of the parameters, and where the blocks end.

    Raises:
        UserError: the model cannot be divided like this; the message says why.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"model: expected an nn.Module, got {model!r}")
    if not isinstance(blocks, int) or isinstance(blocks, bool):
        raise UserError(f"blocks: expected an integer, got {blocks!r}")
    if divider == "paper":
        divider, shared = _paper_division(model, blocks)
        return replace(divide(model, blocks, divider, shared), divider="paper")
    sizes = _trainable(model)
    dim = sum(sizes.values())
    if blocks < 1:
        raise UserError(f"blocks: expected at least 1, got {blocks}")
    if blocks > dim:
        raise UserError(f"blocks: expected at most {dim}, the number of trainable values d, got {blocks}")
    if isinstance(divider, str) and divider not in DIVIDERS:
        raise _wrong_divider(divider, did_you_mean(divider, DIVIDERS))
    if not isinstance(divider, Sequence):
        raise _wrong_divider(divider)
    shares = _relative_sizes(divider, blocks)
    if not isinstance(divider, str) and not shares:
        return _divide_by_patterns(model, sizes, blocks, cast(Sequence[str | Patterns], divider), shared)
    tail = _shared_names(model, sizes, shared)
    body = [name for name in sizes if name not in set(tail)]
    body_size = sum(sizes[name] for name in body)
    if blocks > body_size:
        raise UserError(
            f"blocks: expected at most {body_size}, the number of values outside the shared block ({', '.join(tail)}), got "
            f"{blocks}; make the shared block smaller (shared=None for none) or take fewer blocks"
        )
    if shares:
        cuts, kind = _cut_by_shares(body_size, shares), "sizes"
    else:
        cuts, kind = _cut(sizes, body, blocks, str(divider), dim)
    return Division((*body, *tail), tuple(cuts), dim, kind)


def _wrong_divider(divider: object, hint: str = "") -> UserError:
    expected = f"{', '.join(DIVIDERS)}, or a list of name patterns or sizes for each block"
    return UserError(f"divider: expected {expected}, got {divider!r}.{hint}")


def _relative_sizes(divider: Any, blocks: int) -> list[float]:
    """Return the relative sizes of the blocks if the divider is a list of numbers; otherwise an empty list."""
    if isinstance(divider, str) or not divider:
        return []
    if not all(isinstance(share, (int, float)) and not isinstance(share, bool) for share in divider):
        return []
    if len(divider) != blocks:
        raise UserError(f"divider: expected {blocks} sizes, as many as blocks, got {len(divider)}")
    if not all(0 < share < inf for share in divider):
        raise UserError(f"divider: expected positive numbers as relative sizes of blocks, got {list(divider)}")
    return [float(share) for share in divider]


def _cut_by_shares(size: int, shares: list[float]) -> list[int]:
    """Return where to cut: in these proportions, rounded to whole elements, with no empty block."""
    cuts = [0]
    for j, upto in enumerate(accumulate(shares), 1):
        ideal = round(size * upto / sum(shares))
        cuts.append(min(max(ideal, cuts[-1] + 1), size - (len(shares) - j)))
    return cuts


def paper_blocks(model: nn.Module) -> int:
    """Return N in the paper's division of this model.

    Raises:
        UserError: the paper has none.
    """
    table = getattr(model, "paper_blocks", None)
    if table is None:
        raise UserError(
            f"divider: expected layers, even or auto with {type(model).__name__}, which the paper does not divide, got "
            "'paper'"
        )
    return table if isinstance(table, int) else len(table)


def _paper_division(model: nn.Module, blocks: int) -> tuple[str | Sequence[str | Patterns], Patterns]:
    count = paper_blocks(model)
    if blocks != count:
        raise UserError(f"blocks: expected {count}, as the paper divides {type(model).__name__}, got {blocks}")
    table: Any = model.paper_blocks
    shared: Any = model.paper_shared
    return ("even" if isinstance(table, int) else table), shared


def _trainable(model: nn.Module) -> dict[str, int]:
    """Return the names and sizes of the trainable parameters; a tied one once, under its first name."""
    sizes = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if isinstance(p, UninitializedParameter):
            raise UserError(
                f"model: expected parameters with a shape, got {name!r} without one; run a batch through the lazy model "
                "first"
            )
        if not p.is_floating_point():
            raise UserError(
                f"model: expected trainable parameters of a real floating-point type, got {p.dtype} for {name!r}; freeze it "
                "(requires_grad_(False))"
            )
        sizes[name] = p.numel()
    if not sum(sizes.values()):
        raise UserError(f"model: expected trainable parameters, got a {type(model).__name__} without any")
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
    """Return the names of the parameters of the layer that is probably the output layer."""
    layers = [(name, list(names)) for name, names in groupby(sizes, _layer)]
    if len(layers) < 2:
        return []

    def count(names: list[str]) -> int:
        return sum(sizes[name] for name in names)

    dim = count(list(sizes))
    name, chosen = layers[-1]
    if _is_inner_layer(model, name) or count(chosen) > dim / 2:
        before = [layer for layer in layers[:-1] if not _is_inner_layer(model, layer[0])]
        if before and count(before[-1][1]) < count(chosen):
            name, chosen = before[-1]
    if count(chosen) > LARGE_SHARED * dim:
        _warn(
            f"shared: the shared block, {name or 'the parameters of the model itself'}, is {count(chosen) / dim:.0%} of "
            "the model, and every client uploads it in every round; name a smaller layer (shared=['…']), or none "
            "(shared='none')"
        )
    return chosen


def _is_inner_layer(model: nn.Module, layer: str) -> bool:
    """Return whether this is a recurrent layer or an embedding, whose output other layers use."""
    return isinstance(model.get_submodule(layer), (nn.RNNBase, nn.RNNCellBase, nn.Embedding, nn.EmbeddingBag))


@cache
def _warn(text: str) -> None:
    """Log a warning, but each text only once in a process: a run divides the same model several times."""
    log.warning(text)


def _cut(sizes: dict[str, int], body: list[str], blocks: int, divider: str, dim: int) -> tuple[list[int], str]:
    """Return where to cut the parameters outside the shared block (in the model's order), and "layers" or "even"."""
    layers = [sum(sizes[name] for name in names) for _, names in groupby(body, _layer)]
    layers = [n for n in layers if n]  # a layer without elements is no block
    if divider == "layers" and len(layers) < blocks:
        raise UserError(
            f"blocks: expected at most {len(layers)}, the number of layers outside the shared block, got {blocks}; take "
            "fewer blocks or divider='even'"
        )
    if divider != "even" and len(layers) >= blocks:
        groups = contiguous(layers, blocks)
        if divider == "layers" or max(groups) <= MAX_BLOCK_RATIO * dim / blocks:
            return [0, *accumulate(groups)], "layers"
    return [sum(layers) * j // blocks for j in range(blocks + 1)], "even"


def contiguous(sizes: list[int], groups: int) -> list[int]:
    """Divide `sizes` into contiguous non-empty groups, the largest sum as small as possible, and return the sums."""

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


def _divide_by_patterns(
    model: nn.Module,
    sizes: dict[str, int],
    blocks: int,
    divider: Sequence[str | Patterns],
    shared: str | Patterns | None,
) -> Division:
    if len(divider) != blocks:
        raise UserError(f"divider: expected name patterns for {blocks} blocks, as many as blocks, got {len(divider)}")
    owner: dict[str, str] = {}

    def claim(names: list[str], by: str) -> list[str]:
        for name in names:
            if name in owner:
                raise UserError(
                    f"divider: expected each parameter in one block, got {name!r} in {owner[name]} and {by}"
                )
            owner[name] = by
        return names

    parts = [
        claim(_match(model, sizes, [p] if isinstance(p, str) else p, f"block {j + 1}"), f"block {j + 1}")
        for j, p in enumerate(divider)
    ]
    if shared == "last":  # the default: those parameters of the last layer that no pattern names
        *before, last = (list(names) for _, names in groupby(sizes, _layer))
        tail = [name for name in last if name not in owner] if before else []
    else:
        tail = _shared_names(model, sizes, shared)
    claim(tail, "the shared block")
    left = [name for name in sizes if name not in owner]
    if left:
        raise UserError(
            f"divider: expected each parameter in a block, got {len(left)} in none: {', '.join(left[:8])}; add patterns"
        )
    for j, names in enumerate(parts):
        if not sum(sizes[name] for name in names):
            raise UserError(
                f"divider: expected blocks with elements, got block {j + 1} ({', '.join(names)}) without any"
            )
    cuts = [0, *accumulate(sum(sizes[name] for name in names) for names in parts)]
    ordered = [name for names in parts for name in names]
    return Division((*ordered, *tail), tuple(cuts), sum(sizes.values()), "patterns")


def _match(model: nn.Module, sizes: dict[str, int], patterns: Patterns, where: str) -> list[str]:
    """Return the trainable parameters that match a pattern; the name of a module matches all its parameters."""

    def fits(name: str, pattern: str) -> bool:
        return fnmatchcase(name, pattern) or fnmatchcase(name, pattern + ".*")

    for pattern in patterns:
        if any(fits(name, pattern) for name in sizes):
            continue
        every = {n: p for n, p in model.named_parameters(remove_duplicate=False) if fits(n, pattern)}
        if frozen := [n for n, p in every.items() if not p.requires_grad]:
            reason = f"it matches only parameters that are not trained, such as {frozen[0]!r}"
        elif every:
            alias, p = next(iter(every.items()))
            first = next(n for n, q in model.named_parameters() if q is p)
            reason = f"{alias!r} is tied to {first!r}; name that one"
        else:
            reason = f"the trainable parameters are {', '.join(list(sizes)[:12])}{' …' if len(sizes) > 12 else ''}"
        raise UserError(f"{where}: expected patterns that match parameters, got {pattern!r}: {reason}")
    return [name for name in sizes if any(fits(name, p) for p in patterns)]
