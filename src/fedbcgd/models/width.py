"""Networks made narrower, and their normalisation."""

from torch import nn

from fedbcgd.errors import UserError

NORMS = ("none", "group", "batch")
GROUPS = 2  # of GroupNorm, as in the paper


def scaled(channels: int, width: float) -> int:
    """So many channels at this width: a multiple of the groups, at least one per group."""
    if not 0 < width <= 16:
        raise UserError(f"width: more than 0 and at most 16, given {width}")
    return max(GROUPS, round(channels * width / GROUPS) * GROUPS)


def normalisation(kind: str, channels: int) -> nn.Module:
    match kind:
        case "group":
            return nn.GroupNorm(GROUPS, channels)
        case "batch":
            return nn.BatchNorm2d(channels)
        case "none":
            return nn.Identity()
    raise UserError(f"norm: one of {', '.join(NORMS)}, given {kind!r}")
