"""The commands about the paper: `fedbcgd reproduce`, its tables and figures, and `fedbcgd theory`, its Table 1."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbcgd.display.terminal import Json, Quiet, display, say_json, terminable

if TYPE_CHECKING:
    from fedbcgd.paper.theory import Setting


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(reproduce)
    app.command()(theory)


def reproduce(
    item: Annotated[str, typer.Argument(help="table1 … figure8, or all; --list shows them.", show_default=False)] = "",
    scale: Annotated[str, typer.Option(help="paper, cpu or smoke.")] = "cpu",
    out: Annotated[
        Path | None, typer.Option(help="Folder for everything; runs/reproduce-SCALE if not given.", show_default=False)
    ] = None,
    only: Annotated[str, typer.Option(help="Only panels whose name has this in it: cifar10-lenet5.")] = "",
    seeds: Annotated[int | None, typer.Option(min=1, help="So many seeds instead of the scale's.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Another data set in the place of one: emnist-byclass=mine. May be repeated."),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes; one per core if not given.")] = None,
    device: Annotated[str, typer.Option(help="Where clients compute: cpu, cuda, mps.")] = "cpu",
    show: Annotated[bool, typer.Option("--show", help="Run nothing: write the tables from what is finished.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="The items, and what each costs at this scale.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run a table or figure of the paper and say which of its claims hold.

    paper: the paper's setting to the letter, for people with GPUs. cpu: a faithful miniature for two cores. smoke: a trial
    of the machinery in under a minute. Finished runs are kept and not run again; items share the runs they have in common.
    """
    from fedbcgd.display.progress import wide_console
    from fedbcgd.paper import command

    console = wide_console(stderr=as_json)
    command.check_scale(scale)
    if list_ or not item:
        command.show_list(console, scale)
        return
    asked = command.asked(scale, out, only, seeds, data or [], workers, device)
    wanted = command.names(item, scale, only)
    command.check(wanted, asked, run=not show)
    with terminable():
        for name in wanted:
            verdicts = command.reproduce(
                name, asked, lambda labels: display(labels, quiet, as_json), console, run=not show
            )
            if as_json:
                say_json(item=name, claims=verdicts)


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
    seeds: Annotated[int, typer.Option(min=1, help="With --measure: seeds.")] = 3,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for CSV and figures (PNG, SVG).", show_default=False)
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """The orders of rounds and floats in the paper's Table 1, with numbers, and the theorem each comes from.

    Every constant that the O hides is taken as 1. --out draws the floats over N and over G. --measure runs FedBCGD+,
    FedBCGD, FedAvg and SCAFFOLD on quadratics with these very β, μ, σ and G until f(x) − f* stays at ε, each at the best
    learning rate of a ladder, and says whether what N does agrees with the theorem. With --out every point that was
    measured is kept, and the same command goes on after an interruption.
    """
    from fedbcgd.display.progress import wide_console
    from fedbcgd.paper import theory as tables

    small = measure
    setting = tables.Setting(
        beta,
        mu,
        sigma,
        heterogeneity,
        clients if clients is not None else 16 if small else 100,
        cohort if cohort is not None else 8 if small else 10,
        blocks,
        steps if steps is not None else 4 if small else 10,
        epsilon,
        momentum,
        gap,
        tau,
    )
    console = wide_console()
    for case in tables.CASES:
        if as_json:
            for o in tables.orders(setting, case):
                say_json(
                    algorithm=o.name, case=case, rounds=o.rounds, terms=o.terms, floats_d=o.floats, source=o.source
                )
        else:
            from fedbcgd.paper import theory_figures as report

            console.print(report.table(setting, case))
    if not as_json:
        for note in (*tables.notes(setting), *tables.NOTES):
            console.print(f"- {note}", highlight=False)
    if out is not None:
        from fedbcgd.files import as_csv, make_folder, write_text
        from fedbcgd.paper import theory_figures as report

        rows = report.sweep(setting)
        write_text(make_folder(out) / "theory.csv", as_csv(rows))
        report.figure(rows, out / "theory.png")
    if measure:
        _measure(setting, up_to, seeds, out, quiet, as_json)
    if out is not None and not as_json:
        console.print(f"everything is in {out}", highlight=False, markup=False)


def _measure(setting: "Setting", up_to: int, seeds: int, out: Path | None, quiet: bool, as_json: bool) -> None:
    from dataclasses import asdict, replace

    from fedbcgd import files
    from fedbcgd.display.progress import wide_console
    from fedbcgd.files import as_csv
    from fedbcgd.paper import quadratics
    from fedbcgd.paper import theory_figures as report
    from fedbcgd.paper.origin import commit
    from fedbcgd.paper.points import Points
    from fedbcgd.version import __version__

    ladder = tuple(2**k for k in range(up_to.bit_length()))
    size = quadratics.Size(replace(setting, blocks=1, momentum=0.0), ladder, seeds=seeds)

    def say(line: str) -> None:
        if not quiet and not as_json:
            print(line, file=sys.stderr, flush=True)

    kept = Points(None if out is None else out / "points", commit())
    measured = quadratics.measure(size, say, kept)
    rows = quadratics.compare(size, measured)
    verdicts = quadratics.verdicts(rows)
    if out is not None:
        files.write_text(out / "search.csv", as_csv(measured.search))
        files.write_text(out / "runs.csv", as_csv(measured.runs))
        files.write_text(out / "measured.csv", as_csv(rows))
        told = {"command": " ".join(["fedbcgd", *sys.argv[1:]]), "version": __version__, "size": asdict(size)}
        about = told | {"commits": sorted(kept.commits), "hours": kept.hours, "verdicts": verdicts}
        files.write_text(out / "measured.json", files.as_json(about, indent=1) + "\n")
        report.measured_figure(rows, out / "measured.png")
    if as_json:
        for row in rows:
            say_json(**row)
        say_json(verdicts=verdicts)
        return
    console = wide_console()
    console.print(report.measured_table(rows))
    for name, verdict in verdicts.items():
        console.print(f"{name}: {verdict}", highlight=False)
