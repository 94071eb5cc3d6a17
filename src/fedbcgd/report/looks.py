"""One look for an algorithm everywhere: in figures, on the page, in print.

A look is a colour, a dash and a marker. Dash and marker together belong to one algorithm alone, so a figure survives a
grey printer and any colour vision; the colours are those of Okabe and Ito and of Tol, some of them darkened, each with a
contrast of at least 3 to 1 against its background.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

SOLID: tuple[float, ...] = ()
DASHED = (4.0, 1.6)
DOTTED = (1.0, 1.4)
MIXED = (5.0, 1.4, 1.0, 1.4)


@dataclass(frozen=True)
class Look:
    colour: str  # on white
    dark: str  # on a dark background
    dash: tuple[float, ...]  # on and off, in widths of the line; nothing for a solid one
    marker: str  # in matplotlib's letters


_BLACK = ("#222222", "#e8e8e8")
_GREY = ("#808080", "#a6a6a6")
_VERMILION = ("#d55e00", "#ff8a3d")
_PURPLE = ("#aa3377", "#e884bd")
_BLUE = ("#0072b2", "#56b4e9")
_SKY = ("#3a92c4", "#9ad4f5")
_GREEN = ("#00886a", "#3cc49c")
_OLIVE = ("#887700", "#d6c64a")
_WINE = ("#882255", "#f09aa8")
_INDIGO = ("#332288", "#a89cf0")

LOOKS = {
    "fedavg": Look(*_BLACK, SOLID, "o"),
    "fedavgm": Look(*_BLACK, DASHED, "o"),
    "fedprox": Look(*_BLACK, DOTTED, "o"),
    "central": Look(*_BLACK, MIXED, "o"),
    "fedadam": Look(*_GREY, SOLID, "v"),
    "fedyogi": Look(*_GREY, DASHED, "v"),
    "fedbcgd": Look(*_VERMILION, SOLID, "s"),
    "qsgd+fedbcgd": Look(*_VERMILION, DASHED, "s"),
    "fedbcgd-frozen": Look(*_VERMILION, DOTTED, "s"),
    "fedbcgd+": Look(*_PURPLE, SOLID, "D"),
    "qsgd+fedbcgd+": Look(*_PURPLE, DASHED, "D"),
    "fedbcgd+derived": Look(*_PURPLE, DOTTED, "D"),
    "scaffold": Look(*_BLUE, SOLID, "^"),
    "feddc": Look(*_BLUE, DASHED, "^"),
    "fedpaq": Look(*_GREEN, SOLID, "P"),
    "topk": Look(*_SKY, SOLID, "X"),
}
_DASHES = (SOLID, DASHED, DOTTED, MIXED)
_MARKERS = ("<", ">", "p", "h", "*", "d", "H", "8")
_OTHERS = [
    Look(*colours, dash, marker)
    for dash in _DASHES
    for colours, marker in zip(
        (_OLIVE, _SKY, _GREEN, _INDIGO, _WINE, _BLUE, _VERMILION, _PURPLE),
        _MARKERS,
        strict=True,
    )
]


def look(name: str, position: int = 0) -> Look:
    """The look of an algorithm; of anything else the one of its position among what has none of its own."""
    return LOOKS.get(name) or _OTHERS[position % len(_OTHERS)]


def families(algorithms: Sequence[str]) -> list[Look]:
    """A look for each of several lines, given the algorithm of each. Where algorithms are compared, variants of one keep its
    colour and differ in dash and marker; where all lines are of one algorithm, they differ in everything."""
    if len(set(algorithms)) == 1 and len(algorithms) > 1:
        return [_OTHERS[k % len(_OTHERS)] for k in range(len(algorithms))]
    first = looks(dict.fromkeys(algorithms))
    out = []
    for k, algorithm in enumerate(algorithms):
        own, turn = first[algorithm], algorithms[:k].count(algorithm)
        if turn:
            marker = _MARKERS[(turn + 3 * list(first).index(algorithm)) % len(_MARKERS)]
            own = replace(own, dash=_DASHES[turn % len(_DASHES)], marker=marker)
        out.append(own)
    return out


def looks(names: Iterable[str]) -> dict[str, Look]:
    """A look for each name: algorithms have theirs, the others take theirs in turn."""
    out: dict[str, Look] = {}
    others = 0
    for name in names:
        out[name] = look(name, others)
        others += name not in LOOKS
    return out
