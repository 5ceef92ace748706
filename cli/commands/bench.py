"""`phasewise bench`."""

import typer

app = typer.Typer(no_args_is_help=True, help="Being built.")


@app.callback()
def root() -> None:
    pass
