"""`python -m flashkernel` is the `flashkernel` command."""

from flashkernel.cli import app

if __name__ == "__main__":
    app(prog_name="flashkernel")
