"""The width of a network and its normalisation layers."""

from torch import nn

from fedbcgd.errors import UserError

NORMS = ("none", "group", "batch")
GROUPS = 2  # of GroupNorm, as in the paper


def scaled(channels: int, width: float) -> int:
    """Scale a number of channels.

    Args:
        channels: the channels at width 1.
        width: the factor.

    Returns:
        A multiple of the groups of GroupNorm, at least one channel for each group.

    Raises:
        UserError: the width is out of range.
    """
    if not 0 < width <= 16:
        raise UserError(f"width: expected a number > 0 and ≤ 16, got {width}")
    return max(GROUPS, round(channels * width / GROUPS) * GROUPS)


def normalisation(kind: str, channels: int) -> nn.Module:
    """Make a normalisation layer.

    Args:
        kind: a name of `NORMS`.
        channels: the channels of its input.

    Returns:
        The layer; the identity for "none".

    Raises:
        UserError: there is no such kind.
    """
    match kind:
        case "group":
            return nn.GroupNorm(GROUPS, channels)
        case "batch":
            return nn.BatchNorm2d(channels)
        case "none":
            return nn.Identity()
    raise UserError(f"norm: expected one of {', '.join(NORMS)}, got {kind!r}")
