"""Entry point of the command `attention-client`. The commands themselves need the extra `cli`."""

import sys


def main() -> None:
    """Runs the command line. Exit codes: 0 success, 1 the call failed, 2 wrong usage."""
    try:
        from attention_client._commands.app import app  # noqa: PLC0415 - needs the extra
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        sys.exit("error: attention-client needs typer: install it with its extra 'cli'")
    app(prog_name="attention-client")
