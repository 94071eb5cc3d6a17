"""One style for each algorithm, the same in figures and on the HTML page.

A style is a colour, a dash and a marker. Each algorithm has its own colour, with a contrast of at least 3 to 1 against its
background and a distance of at least 0.07 from all others in OKLab, and its own pair of dash and marker, so that lines can
be told apart without colours too. Relatives have the same marker.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

SOLID: tuple[float, ...] = ()
DASHED = (4.0, 1.6)
DOTTED = (1.0, 1.4)
MIXED = (5.0, 1.4, 1.0, 1.4)


@dataclass(frozen=True)
class LineStyle:
    """How a line is drawn."""

    colour: str  # on white
    dark: str  # on a dark background
    dash: tuple[float, ...]  # lengths on and off, in widths of the line; empty for a solid line
    marker: str  # as matplotlib names it


_BLACK = ("#222222", "#e8e8e8")
_GREY = ("#808080", "#a6a6a6")

ALGORITHM_STYLES = {
    "fedavg": LineStyle(*_BLACK, SOLID, "o"),
    "fedavgm": LineStyle("#73005c", "#bf1d9f", DASHED, "o"),
    "fedprox": LineStyle("#5a5a7c", "#8088b8", DOTTED, "o"),
    "central": LineStyle("#5c0a14", "#c25a5a", MIXED, "o"),
    "fedadam": LineStyle(*_GREY, SOLID, "v"),
    "fedyogi": LineStyle("#4a5200", "#8f9c36", DASHED, "v"),
    "fedbcgd": LineStyle("#d55e00", "#ff8a3d", SOLID, "s"),
    "qsgd+fedbcgd": LineStyle("#b38600", "#ffd84d", DASHED, "s"),
    "fedbcgd-frozen": LineStyle("#c00014", "#ff4d4d", DOTTED, "s"),
    "fedbcgd-matched": LineStyle("#ff2d7e", "#ff2d86", MIXED, "s"),
    "fedbcgd+": LineStyle("#aa3377", "#e884bd", SOLID, "D"),
    "qsgd+fedbcgd+": LineStyle("#b266ff", "#d27dff", DASHED, "D"),
    "fedbcgd+derived": LineStyle("#6f1aa8", "#9a3df0", DOTTED, "D"),
    "scaffold": LineStyle("#0072b2", "#56b4e9", SOLID, "^"),
    "feddc": LineStyle("#2a3cf0", "#6f86ff", DASHED, "^"),
    "fedpaq": LineStyle("#00886a", "#3cc49c", SOLID, "P"),
    "topk": LineStyle("#3a92c4", "#9ad4f5", SOLID, "X"),
}
_DASHES = (SOLID, DASHED, DOTTED, MIXED)
_MARKERS = ("<", ">", "p", "h", "*", "d", "H", "8")  # markers that no algorithm has
_OTHER_COLOURS = (
    ("#7f7a00", "#f4ff8c"),
    ("#332288", "#6a5cd6"),
    ("#3f9e00", "#6fe03a"),
    ("#0f4c5c", "#2a96a6"),
    ("#e600e6", "#ff66ff"),
    ("#c08497", "#f3b9d3"),
    ("#0a3d1e", "#2f8a3c"),
    ("#9c3848", "#ffb199"),
)
_OTHERS = [
    LineStyle(*colours, dash, marker)
    for dash in _DASHES
    for colours, marker in zip(_OTHER_COLOURS, _MARKERS, strict=True)
]


# A shape is a pair of dash and marker. Variants of an algorithm take, in this order: clearly different markers that no
# algorithm has, unused pairs with an algorithm's marker, nearly round markers, and pairs of other algorithms.
_CLEAR_SHAPES = [(dash, marker) for dash in _DASHES for marker in "<>*d"]
_ALGORITHM_SHAPES = [(style.dash, style.marker) for style in ALGORITHM_STYLES.values()]
_ALGORITHM_MARKERS = [
    (dash, marker) for dash in _DASHES for marker in dict.fromkeys(marker for _, marker in _ALGORITHM_SHAPES)
]
_ROUND_SHAPES = [(dash, marker) for dash in _DASHES for marker in "phH8"]
_OTHER_SHAPES = [
    *(shape for shape in _ALGORITHM_MARKERS if shape not in _ALGORITHM_SHAPES),
    *_ROUND_SHAPES,
    *_ALGORITHM_SHAPES,
]
MAX_SHAPES = len(_CLEAR_SHAPES) + len(_OTHER_SHAPES)


def line_style(name: str, position: int = 0) -> LineStyle:
    """Return the style of an algorithm; for another name, the one at `position` in the list of other styles."""
    return ALGORITHM_STYLES.get(name) or _OTHERS[position % len(_OTHERS)]


def variant_styles(algorithms: Sequence[str]) -> list[LineStyle]:
    """Return a style for each of several lines.

    If several algorithms are compared, variants of one have shades of its colour and differ in dash and marker. If all
    lines are of one algorithm, the first has its style, and the others differ from it in everything. No two of the first
    `MAX_SHAPES` lines have the same dash and marker.

    Args:
        algorithms: the algorithm of each line.
    """
    if len(set(algorithms)) == 1 and len(algorithms) > 1:
        name = algorithms[0]
        return list(line_styles([name, *(f"{name} {k}" for k in range(1, len(algorithms)))]).values())
    first = line_styles(dict.fromkeys(algorithms))
    used = {(own.dash, own.marker) for own in first.values()}
    out: list[LineStyle] = []
    for k, algorithm in enumerate(algorithms):
        own, turn = first[algorithm], algorithms[:k].count(algorithm)
        if turn:
            start = 5 * turn + 3 * list(first).index(algorithm)  # another dash and another marker
            own = _shaded(_reshaped(own, used, start), turn)
        used.add((own.dash, own.marker))
        out.append(own)
    return out


def line_styles(names: Iterable[str]) -> dict[str, LineStyle]:
    """Return a style for each name: an algorithm's own, or the next of the other styles.

    No two of the first `MAX_SHAPES` names have the same dash and marker, and no two of the first `len(ALGORITHM_STYLES) +
    len(_OTHER_COLOURS)` the same colour.
    """
    names = list(dict.fromkeys(names))
    spare = [own for name, own in ALGORITHM_STYLES.items() if name not in names]
    used = {(ALGORITHM_STYLES[name].dash, ALGORITHM_STYLES[name].marker) for name in names if name in ALGORITHM_STYLES}
    out: dict[str, LineStyle] = {}
    others = 0
    for name in names:
        out[name] = line_style(name, others)
        if name not in ALGORITHM_STYLES:
            if others >= len(_OTHERS):
                out[name] = _reshaped(out[name], used, others)
            if others >= len(_OTHER_COLOURS) and spare:
                unused = spare.pop(0)
                out[name] = replace(out[name], colour=unused.colour, dark=unused.dark)
            used.add((out[name].dash, out[name].marker))
            others += 1
    return out


def _reshaped(base: LineStyle, used: Collection[tuple[tuple[float, ...], str]], start: int) -> LineStyle:
    """Return this style with the first unused dash and marker from position `start` on, or those at `start`."""
    start %= len(_CLEAR_SHAPES)
    turned = [*_CLEAR_SHAPES[start:], *_CLEAR_SHAPES[:start], *_OTHER_SHAPES]
    dash, marker = next((shape for shape in turned if shape not in used), turned[0])
    return replace(base, dash=dash, marker=marker)


def _shaded(base: LineStyle, turn: int) -> LineStyle:
    """Return this style in a shade of its colour: farther from the background, or for black nearer to grey."""
    share = _SHADES[(turn - 1) % len(_SHADES)]
    black = base.colour == _BLACK[0]
    colour = _mix(base.colour, _GREY[0] if black else "#000000", share)
    dark = _mix(base.dark, _GREY[1] if black else "#ffffff", share)
    return replace(base, colour=colour, dark=dark)


_SHADES = (0.3, 0.5, 0.65)


def _mix(colour: str, other: str, share: float) -> str:
    pairs = ((int(colour[at : at + 2], 16), int(other[at : at + 2], 16)) for at in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)
