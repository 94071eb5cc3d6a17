"""`fedbcgd doctor`: what this machine has, and what would be used."""

from fedbcgd.cli import app


@app.command()
def doctor() -> None:
    """Show cores, memory, versions and devices, what a run would use, and what costs speed."""
    from fedbcgd.display.progress import wide_console
    from fedbcgd.report.doctor import look

    console = wide_console()
    facts, warnings = look()
    width = max(map(len, facts))
    for name, fact in facts.items():
        console.print(f"{name:<{width}}  {fact}", highlight=False, markup=False, soft_wrap=True)
    for warning in warnings:
        console.print(f"! {warning}", highlight=False, markup=False, soft_wrap=True)
