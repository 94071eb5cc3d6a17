"""One look for an algorithm everywhere: in figures, on the page, in print.

A look is a colour, a dash and a marker. Dash and marker together belong to one algorithm alone, so a figure survives a
grey printer and any colour vision; the colours are those of Okabe and Ito and of Tol, some of them darkened, each with a
contrast of at least 3 to 1 against its background.
"""

from collections.abc import Collection, Iterable, Sequence
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
    "fedbcgd-matched": Look(*_VERMILION, MIXED, "s"),
    "fedbcgd+": Look(*_PURPLE, SOLID, "D"),
    "qsgd+fedbcgd+": Look(*_PURPLE, DASHED, "D"),
    "fedbcgd+derived": Look(*_PURPLE, DOTTED, "D"),
    "scaffold": Look(*_BLUE, SOLID, "^"),
    "feddc": Look(*_BLUE, DASHED, "^"),
    "fedpaq": Look(*_GREEN, SOLID, "P"),
    "topk": Look(*_SKY, SOLID, "X"),
}
_DASHES = (SOLID, DASHED, DOTTED, MIXED)
_MARKERS = ("<", ">", "p", "h", "*", "d", "H", "8")  # of no algorithm
_OTHERS = [
    Look(*colours, dash, marker)
    for dash in _DASHES
    for colours, marker in zip(
        (_OLIVE, _SKY, _GREEN, _INDIGO, _WINE, _BLUE, _VERMILION, _PURPLE),
        _MARKERS,
        strict=True,
    )
]


# Every dash with every marker: as many lines as a figure can tell apart without colours. Variants of an algorithm take
# markers of no algorithm that the eye tells apart at once, then shapes of no algorithm, then markers that are all nearly
# round, and those of algorithms at last.
_CLEAR = [(dash, marker) for dash in _DASHES for marker in "<>*d"]
_TAKEN = [(look.dash, look.marker) for look in LOOKS.values()]
_OWNED = [(dash, marker) for dash in _DASHES for marker in dict.fromkeys(marker for _, marker in _TAKEN)]
_ROUND = [(dash, marker) for dash in _DASHES for marker in "phH8"]
_REST = [*(shape for shape in _OWNED if shape not in _TAKEN), *_ROUND, *_TAKEN]
MOST = len(_CLEAR) + len(_REST)


def look(name: str, position: int = 0) -> Look:
    """The look of an algorithm; of anything else the one of its position among what has none of its own."""
    return LOOKS.get(name) or _OTHERS[position % len(_OTHERS)]


def families(algorithms: Sequence[str]) -> list[Look]:
    """A look for each of several lines, given the algorithm of each. Where algorithms are compared, variants of one have
    shades of its colour and differ in dash and marker; where all lines are of one algorithm, the first has its look and the
    others differ from it in everything.

    No two of up to MOST = 60 lines have the same dash and marker. Of more, the first 60 have; the others repeat shapes.
    """
    if len(set(algorithms)) == 1 and len(algorithms) > 1:
        name = algorithms[0]
        return list(looks([name, *(f"{name} {k}" for k in range(1, len(algorithms)))]).values())
    first = looks(dict.fromkeys(algorithms))
    used = {(own.dash, own.marker) for own in first.values()}
    out: list[Look] = []
    for k, algorithm in enumerate(algorithms):
        own, turn = first[algorithm], algorithms[:k].count(algorithm)
        if turn:
            start = 5 * turn + 3 * list(first).index(algorithm)  # another dash and another marker
            own = _shaded(_reshaped(own, used, start), turn)
        used.add((own.dash, own.marker))
        out.append(own)
    return out


def looks(names: Iterable[str]) -> dict[str, Look]:
    """A look for each name: algorithms have theirs, the others take theirs in turn. No two of up to 60 names that are there
    have the same dash and marker."""
    names = list(dict.fromkeys(names))
    used = {(LOOKS[name].dash, LOOKS[name].marker) for name in names if name in LOOKS}
    out: dict[str, Look] = {}
    others = 0
    for name in names:
        out[name] = look(name, others)
        if name not in LOOKS:
            if others >= len(_OTHERS):
                out[name] = _reshaped(out[name], used, others)
            used.add((out[name].dash, out[name].marker))
            others += 1
    return out


def _reshaped(own: Look, used: Collection[tuple[tuple[float, ...], str]], start: int) -> Look:
    """This look with the first dash and marker from there on that are free; where none is, with those of its turn."""
    start %= len(_CLEAR)
    turned = [*_CLEAR[start:], *_CLEAR[:start], *_REST]
    dash, marker = next((shape for shape in turned if shape not in used), turned[0])
    return replace(own, dash=dash, marker=marker)


def _shaded(own: Look, turn: int) -> Look:
    """A shade of its colour: further from the background, or for what is nearly black nearer to grey."""
    share = _SHADES[(turn - 1) % len(_SHADES)]
    black = own.colour == _BLACK[0]
    colour = _mixed(own.colour, _GREY[0] if black else "#000000", share)
    dark = _mixed(own.dark, _GREY[1] if black else "#ffffff", share)
    return replace(own, colour=colour, dark=dark)


_SHADES = (0.3, 0.5, 0.65)


def _mixed(colour: str, other: str, share: float) -> str:
    pairs = ((int(colour[at : at + 2], 16), int(other[at : at + 2], 16)) for at in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)
