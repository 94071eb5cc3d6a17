"""One style for an algorithm everywhere; figures as PNG and SVG."""

import itertools
import math
import xml.etree.ElementTree as ET

import matplotlib.lines
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from fedbcgd.algorithms.registry import algorithm_names
from fedbcgd.display import plots, styles

LIGHT, DARK = "#ffffff", "#14171c"  # the grounds that lines are drawn on


def luminance(colour):
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a, b):
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_by_hand():
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)  # the known border of 4.5


def test_every_algorithm_has_a_look_that_needs_no_colour():
    assert set(styles.ALGORITHM_STYLES) == set(algorithm_names())
    shapes = [(style.dash, style.marker) for style in [*styles.ALGORITHM_STYLES.values(), *styles._OTHERS]]
    assert len(set(shapes)) == len(shapes) == len(styles.ALGORITHM_STYLES) + 32


def oklab(colour):
    """Björn Ottosson's space, in which distances are about as they are seen."""
    rgb = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in rgb)
    long = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    medium = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    short = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * short,
    )


def test_oklab_by_hand():
    assert oklab("#ffffff") == pytest.approx((1, 0, 0), abs=1e-3)
    assert oklab("#ff0000") == pytest.approx((0.628, 0.225, 0.126), abs=1e-3)


@pytest.mark.parametrize("ground", ["colour", "dark"])
@pytest.mark.parametrize(
    "names", [[*styles.ALGORITHM_STYLES, *(f"own-{k}" for k in range(8))], [f"own-{k}" for k in range(25)]]
)
def test_algorithms_that_occur_together_have_distinct_colours(ground, names):
    given_styles = styles.variant_styles(names)
    pairs = itertools.combinations([oklab(getattr(style, ground)) for style in given_styles], 2)
    assert min(math.dist(a, b) for a, b in pairs) > 0.07


def shades(own):
    return [own, *(styles._shaded(own, turn) for turn in (1, 2, 3))]


def test_shades_by_hand():
    """0.3 of the way from vermilion (213, 94, 0) to black is (149, 66, 0)."""
    assert styles._shaded(styles.ALGORITHM_STYLES["fedbcgd"], 1).colour == "#954200"
    assert len({shade.colour for shade in shades(styles.ALGORITHM_STYLES["fedavg"])}) == 4


def test_every_colour_can_be_seen_on_its_ground():
    for style in [shade for own in [*styles.ALGORITHM_STYLES.values(), *styles._OTHERS] for shade in shades(own)]:
        assert contrast(style.colour, LIGHT) >= 3
        assert contrast(style.dark, DARK) >= 3
        assert style.marker in matplotlib.lines.Line2D.markers


def test_looks_of_what_is_no_algorithm_are_taken_in_turn():
    given = styles.line_styles(["lr 0.1", "fedavg", "lr 0.3"])
    assert given["fedavg"] == styles.ALGORITHM_STYLES["fedavg"]
    assert [given["lr 0.1"], given["lr 0.3"]] == styles._OTHERS[:2]


LINES = st.lists(
    st.sampled_from([*styles.ALGORITHM_STYLES, *(f"own-{k}" for k in range(40))]),
    min_size=1,
    max_size=styles.MAX_SHAPES,
)


@given(LINES)
def test_no_two_lines_of_a_figure_have_the_same_shape(algorithms):
    given_styles = styles.variant_styles(algorithms)
    assert len({(style.dash, style.marker) for style in given_styles}) == len(algorithms)
    by_name = styles.line_styles(algorithms)
    assert len({(style.dash, style.marker) for style in by_name.values()}) == len(set(algorithms))
    if len(set(algorithms)) > 1:
        for k, (name, style) in enumerate(zip(algorithms, given_styles, strict=True)):
            assert style.colour in {shade.colour for shade in shades(by_name[name])}
            assert style == by_name[name] or name in algorithms[:k]  # the first of an algorithm has its own style


def test_a_figure_can_tell_as_many_lines_apart_as_there_are_shapes():
    markers = {style.marker for style in [*styles.ALGORITHM_STYLES.values(), *styles._OTHERS]}
    assert styles.MAX_SHAPES == 60 == 4 * len(markers)
    shapes = [(style.dash, style.marker) for style in styles.variant_styles(["fedavg", "feddc"] * 40)]
    assert len(shapes) == 80
    assert len(set(shapes)) == 60
    assert len(set(shapes[:60])) == 60


def test_pairs_of_the_drift_corrected_algorithms_differ():
    pairs = styles.variant_styles(["feddc", "feddc", "scaffold", "scaffold", *["feddc", "scaffold"] * 4])
    assert len({(style.dash, style.marker) for style in pairs}) == 12


def figure():
    out = Figure(figsize=(2, 2))
    out.subplots().plot([0, 1], [0, 1], label="eine Größe", **plots.line(styles.line_style("fedbcgd+")))
    out.axes[0].legend()
    return out


def test_a_figure_is_written_as_png_and_as_svg_with_text_in_it(tmp_path):
    plots.save(figure(), tmp_path / "a.png")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "a.svg"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    root = ET.parse(tmp_path / "a.svg").getroot()
    assert "eine Größe" in ["".join(e.itertext()).strip() for e in root.iter("{http://www.w3.org/2000/svg}text")]
    first = (tmp_path / "a.svg").read_bytes()
    plots.save(figure(), tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_bytes() == first  # no date, no random names
    plots.save(figure(), tmp_path / "b.pdf")
    assert (tmp_path / "b.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "b.svg").exists()
