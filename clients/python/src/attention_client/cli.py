"""Entry point of the command `attention-client`. The commands themselves need the extra `cli`."""

import sys

_EXTRA = {"typer", "rich"}


def main() -> None:
    """Runs the command line. Exit codes: 0 success, 1 the call failed, 2 wrong usage."""
    try:
        from attention_client._commands.app import app  # noqa: PLC0415 - needs the extra
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA:
            raise
        sys.stderr.write(f"error: attention-client needs {package}: install it with its extra 'cli'\n")
        sys.exit(1)
    app(prog_name="attention-client")
