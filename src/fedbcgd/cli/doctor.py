"""`fedbcgd doctor`: what this machine has, and what a run would use of it."""

from fedbcgd.cli import app


@app.command()
def doctor() -> None:
    """Show cores, memory, versions and devices, what a run would use, and what slows it down."""
    from fedbcgd.display.progress import wide_console
    from fedbcgd.report.doctor import inspect_machine

    console = wide_console()
    facts, warnings = inspect_machine()
    width = max(map(len, facts))
    for name, fact in facts.items():
        console.print(f"{name:<{width}}  {fact}", highlight=False, markup=False, soft_wrap=True)
    for warning in warnings:
        console.print(f"! {warning}", highlight=False, markup=False, soft_wrap=True)
