"""The commands about the paper: `fedbcgd reproduce`, its tables and figures, and `fedbcgd theory`, its Table 1."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbcgd.display.terminal import Json, Quiet, display, print_json, terminable

if TYPE_CHECKING:
    from fedbcgd.paper.theory import Setting


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(reproduce)
    app.command()(theory)


def reproduce(
    item: Annotated[str, typer.Argument(help="table1 … figure8, or all; --list shows them.", show_default=False)] = "",
    scale: Annotated[str, typer.Option(help="Size of the runs: paper, desk, cpu or smoke.")] = "cpu",
    out: Annotated[
        Path | None, typer.Option(help="Folder for everything; runs/reproduce-SCALE if not given.", show_default=False)
    ] = None,
    only: Annotated[str, typer.Option(help="Only panels whose name contains this: cifar10-lenet5.")] = "",
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds, instead of the scale's.")] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="Replace a data set by another: emnist-byclass=mine. May be repeated.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes; one per core if not given.")] = None,
    device: Annotated[str, typer.Option(help="Where clients compute: cpu, cuda, mps.")] = "cpu",
    precision: Annotated[
        str | None,
        typer.Option(
            help="Type of forward and backward passes: fp32 or bf16. If not given, fp32, and at scale desk bf16 where the "
            "processor has it. Table 1 always has float64.",
            show_default=False,
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Run nothing: write the tables from finished runs.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the items and what each costs at this scale.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run a table or figure of the paper and say which of its claims hold.

    Scales: paper is the paper's setting to the letter, for people with GPUs; desk is the part of it that a few cores
    compute in days; cpu is a miniature for two cores; smoke tries the machinery in under a minute.

    Finished runs are kept and not run again; items share the runs they have in common. Several processes may work in one
    folder. At scale desk the runs that decide most claims come first, whichever item they are of.
    """
    from fedbcgd.display.progress import wide_console
    from fedbcgd.paper import command

    console = wide_console(stderr=as_json)
    command.check_scale(scale)
    if list_ or not item:
        command.show_list(
            console, scale, command.make_request(scale, out, "", None, [], workers, device, precision).machine
        )
        return
    request = command.make_request(scale, out, only, seeds, data or [], workers, device, precision)
    names = command.item_names(item, scale, only)
    command.check(names, request, run=not show)
    with terminable():
        for batch in [names] if scale == "desk" else [[name] for name in names]:
            if not show:
                command.run(batch, request, lambda labels: display(labels, quiet, as_json), console)
            for name in batch:
                verdicts = command.show(name, request, console, run=not show)
                if as_json:
                    print_json(item=name, claims=verdicts)


def theory(
    beta: Annotated[float, typer.Option(help="β: smoothness.")] = 100.0,
    mu: Annotated[float, typer.Option(help="μ: strong convexity.")] = 1.0,
    sigma: Annotated[float, typer.Option(help="σ: deviation of a minibatch's gradient.")] = 1.0,
    heterogeneity: Annotated[float, typer.Option("--G", help="G: deviation of clients' gradients.")] = 1.0,
    clients: Annotated[int | None, typer.Option(help="M; 100, or 16 with --measure.", show_default=False)] = None,
    cohort: Annotated[int | None, typer.Option(help="S; 10, or 8 with --measure.", show_default=False)] = None,
    blocks: Annotated[int, typer.Option(help="N.")] = 5,
    steps: Annotated[int | None, typer.Option(help="T; 10, or 4 with --measure.", show_default=False)] = None,
    epsilon: Annotated[float, typer.Option(help="ε: the error to be reached.")] = 1e-3,
    momentum: Annotated[float, typer.Option(help="λ: the table's α is 1/(1 − λ).")] = 0.0,
    gap: Annotated[float, typer.Option("--F", help="F = f(x⁰) − f*, in the non-convex case.")] = 1.0,
    tau: Annotated[float, typer.Option(help="τ: second-order heterogeneity, of CE-LSGD and BVR-L-SGD.")] = 1.0,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the floats to ε on quadratics too, over N (minutes).")
    ] = False,
    up_to: Annotated[int, typer.Option("--up-to", min=2, help="With --measure: the largest N, by doubling.")] = 8,
    seeds: Annotated[int, typer.Option(min=1, help="With --measure: number of seeds.")] = 3,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for CSV and figures (PNG, SVG).", show_default=False)
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """The orders of rounds and floats in the paper's Table 1, with numbers, and the theorem each comes from.

    Every constant that the O hides is taken as 1. --out draws the floats over N and over G. --measure runs FedBCGD+,
    FedBCGD, FedAvg and SCAFFOLD on quadratics with these very β, μ, σ and G until f(x) − f* stays at ε, each at the best
    learning rate of a ladder, and says whether measured and theorem agree on the effect of N. With --out every
    measurement is kept, and the same command continues after an interruption.
    """
    from fedbcgd.paper.theory import Setting

    default_clients, default_cohort, default_steps = (16, 8, 4) if measure else (100, 10, 10)
    setting = Setting(
        beta,
        mu,
        sigma,
        heterogeneity,
        default_clients if clients is None else clients,
        default_cohort if cohort is None else cohort,
        blocks,
        default_steps if steps is None else steps,
        epsilon,
        momentum,
        gap,
        tau,
    )
    _print_orders(setting, as_json)
    if out is not None:
        _write_orders(setting, out)
    if measure:
        _measure(setting, up_to, seeds, out, quiet, as_json)
    if out is not None and not as_json:
        _print(f"everything is in {out}")


def _print(line: str) -> None:
    from fedbcgd.display.progress import wide_console

    wide_console().print(line, highlight=False, markup=False)


def _print_orders(setting: "Setting", as_json: bool) -> None:
    from fedbcgd.paper import theory

    if as_json:
        for order in (order for case in theory.CASES for order in theory.orders(setting, case)):
            print_json(
                algorithm=order.name,
                case=order.case,
                rounds=order.rounds,
                terms=order.terms,
                floats_d=order.floats,
                source=order.source,
            )
        return
    from fedbcgd.display.progress import wide_console
    from fedbcgd.display.tables import text_table
    from fedbcgd.paper import theory_figures

    for case in theory.CASES:
        title = f"rounds and floats until ε = {setting.epsilon:g}, orders"
        wide_console().print(text_table(title, *theory_figures.order_table(setting, case)))
    for note in (*theory.notes(setting), *theory.NOTES):
        _print(f"- {note}")


def _write_orders(setting: "Setting", out: Path) -> None:
    from fedbcgd.files import as_csv, make_folder, write_text
    from fedbcgd.paper import theory_figures

    rows = theory_figures.sweep(setting)
    write_text(make_folder(out) / "theory.csv", as_csv(rows))
    theory_figures.figure(rows, out / "theory.png")


def _measure(setting: "Setting", up_to: int, seeds: int, out: Path | None, quiet: bool, as_json: bool) -> None:
    from dataclasses import replace

    from fedbcgd.display.progress import wide_console
    from fedbcgd.display.tables import text_table
    from fedbcgd.paper import quadratics, table1, theory_figures
    from fedbcgd.version import __version__

    numbers_of_blocks = tuple(2**k for k in range(up_to.bit_length()))
    size = quadratics.Size(replace(setting, blocks=1, momentum=0.0), numbers_of_blocks, seeds=seeds)

    def log(line: str) -> None:
        if not quiet and not as_json:
            print(line, file=sys.stderr, flush=True)

    about = {"command": " ".join(["fedbcgd", *sys.argv[1:]]), "version": __version__}
    rows = table1.measure(out, size, log, about).rows
    verdicts = quadratics.verdicts(rows)
    if out is not None:
        theory_figures.measured_figure(rows, out / "measured.png")
    if as_json:
        for row in rows:
            print_json(**row)
        print_json(verdicts=verdicts)
        return
    title = "floats until ε on quadratics: measured, and by the theorem with constants 1"
    wide_console().print(text_table(title, *theory_figures.measured_table(rows)))
    for name, verdict in verdicts.items():
        _print(f"{name}: {verdict}")
