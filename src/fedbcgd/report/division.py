"""The division of a model into blocks, as a table."""

from rich.table import Table

from fedbcgd.core.algorithm import Algorithm
from fedbcgd.core.vector import Layout

MAX_SHOWN = 100  # blocks; if there are more, the first and the last MAX_SHOWN / 2 are shown


def table(algorithm: Algorithm, layout: Layout, model: str) -> Table:
    """Return a row per block: its layers, its size, and the bytes a client uploads for it in a round.

    Args:
        algorithm: the algorithm, for the size of an upload.
        layout: the model's layout.
        model: the model's name.
    """
    out = Table(
        title=f"{model}: d = {layout.dim:,}, N = {layout.blocks}, divider {layout.divider}; a whole upload is "
        f"{layout.dim * layout.dtype.itemsize:,} bytes, the mean upload {algorithm.upload_d(layout):.4f} d",
        title_justify="left",
    )
    out.add_column("block")
    out.add_column("layers")
    for column in ("parameters", "share of d", "bytes per upload"):
        out.add_column(column, justify="right")
    left_out = range(MAX_SHOWN // 2, layout.blocks - MAX_SHOWN // 2) if layout.blocks > MAX_SHOWN else range(0)
    for j in range(layout.blocks):
        if j in left_out:
            if j == left_out[0]:
                out.add_row("…", f"{len(left_out):,} more blocks", "", "", "")
            continue
        nbytes = sum(map(sum, algorithm.lengths(layout, j).values()))
        s = layout.block(j)
        n = s.stop - s.start
        out.add_row(str(j + 1), _layers(layout, s), f"{n:,}", f"{n / layout.dim:.2%}", f"{nbytes:,}")
    n = layout.dim - layout.bounds[-1]
    out.add_row("shared", _layers(layout, layout.shared), f"{n:,}", f"{n / layout.dim:.2%}", "in each of them")
    if layout.size > layout.dim:
        out.add_row("buffers", f"{len(layout.buffers)} tensors", f"{layout.size - layout.dim:,}", "", "in each of them")
    return out


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
