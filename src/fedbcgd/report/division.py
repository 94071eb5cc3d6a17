"""The division of a model into blocks, as a table."""

from rich.table import Table

from fedbcgd.core.algorithm import Algorithm
from fedbcgd.core.vector import Layout
from fedbcgd.display.tables import text_table

MAX_SHOWN = 100  # blocks; if there are more, the first and the last MAX_SHOWN / 2 are shown


def table(algorithm: Algorithm, layout: Layout, model: str) -> Table:
    """Return a row per block: its layers, its size, and the bytes a client uploads for it in a round.

    Args:
        algorithm: the algorithm, for the size of an upload.
        layout: the model's layout.
        model: the model's name.
    """

    def row(name: str, s: slice, nbytes: str) -> tuple[str, ...]:
        n = s.stop - s.start
        return name, _layers(layout, s), f"{n:,}", f"{n / layout.dim:.2%}", nbytes

    blocks = [j for j in range(layout.blocks) if min(j, layout.blocks - 1 - j) < MAX_SHOWN // 2]
    rows = [
        row(str(j + 1), layout.block(j), f"{sum(map(sum, algorithm.lengths(layout, j).values())):,}") for j in blocks
    ]
    if len(blocks) < layout.blocks:
        rows.insert(MAX_SHOWN // 2, ("…", f"{layout.blocks - len(blocks):,} more blocks", "", "", ""))
    rows.append(row("shared", layout.shared, "in each of them"))
    if layout.size > layout.dim:
        rows.append(
            ("buffers", f"{len(layout.buffers)} tensors", f"{layout.size - layout.dim:,}", "", "in each of them")
        )
    title = (
        f"{model}: d = {layout.dim:,}, N = {layout.blocks}, divider {layout.divider}; a whole upload is "
        f"{layout.dim * layout.dtype.itemsize:,} bytes, the mean upload {algorithm.upload_d(layout):.4f} d"
    )
    return text_table(title, ("block", "layers", "parameters", "share of d", "bytes per upload"), rows, texts=2)


def _layers(layout: Layout, s: slice) -> str:
    """Return the names of the layers in a slice, with "(part)" after those that are not wholly in it."""
    layers: dict[str, bool] = {}
    for e in layout.parameters:
        if e.offset < s.stop and s.start < e.offset + e.numel:
            name = e.name.rpartition(".")[0] or e.name
            whole = s.start <= e.offset and e.offset + e.numel <= s.stop
            layers[name] = layers.get(name, True) and whole
    named = [name if whole else f"{name} (part)" for name, whole in layers.items()]
    if len(named) > 6:
        named = [*named[:3], f"… {len(named) - 5} more …", *named[-2:]]
    return ", ".join(named) or "none"
