"""`fedbcgd report`: the page of one or many runs."""

from pathlib import Path
from typing import Annotated

import typer

from fedbcgd.cli import app


@app.command()
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Folders of runs, or folders that hold several (compare, sweep).", show_default=False),
    ],
    out: Annotated[Path, typer.Option("--out", help="The HTML file to write.")] = Path("report.html"),
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the page on this machine and refresh it while runs continue.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of --watch; 0: any free one.")] = 0,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write a report about runs: one HTML file that contains everything and opens offline.

    It shows every metric against upload, rounds, gradient evaluations and time; time to a target under an uplink of your
    choice; traffic per block; clients and their labels; configurations and how they differ; charts to save as PNG, SVG and
    CSV, tables to sort and to copy as CSV and LaTeX. A folder that is damaged or still being written is shown as far as it
    can be read, and the page says what is missing.
    """
    import sys
    import webbrowser

    from fedbcgd.core.reading import shorten
    from fedbcgd.engine.run_folder import find_runs
    from fedbcgd.errors import UserError
    from fedbcgd.report import page

    runs = find_runs(folders)  # a missing folder is an error, also with --watch
    if watch:
        from fedbcgd.report.serve import PageServer

        with PageServer(folders, port) as server:
            print(f"{server.address}  (Ctrl-C ends it)", flush=True)
            if open_:
                webbrowser.open(server.address)
            try:
                server.serve_forever(poll_interval=0.2)
            except KeyboardInterrupt:
                print("ended", file=sys.stderr)
        return
    if not runs:
        where = ", ".join(map(str, folders))
        raise UserError(f"{where}: expected runs, got none; `fedbcgd run` makes one, and --watch waits for one")
    count, problems = page.write(folders, out)
    for problem in problems:
        print(f"fedbcgd: {problem.where}: {problem.what}", file=sys.stderr)
    print(f"{shorten(str(out))} written: {count} run{'' if count == 1 else 's'}")
    if open_:
        webbrowser.open(out.resolve().as_uri())
