"""Command line: `python -m clients.enrich --help`.

Exit codes: 0 the output is complete, 1 there is no result (one line on stderr says why), 2 wrong usage,
130 interrupted.
"""

import sys
from pathlib import Path
from typing import Literal

try:
    import typer
    from attention_client.enrich.cli import make_command
except ImportError as error:
    sys.exit(f"error: {error}; install it: pip install './clients/python[enrich]' '.[cpu,enrich]'")

from attention_serving.enrich import enrich
from attention_serving.server import VERSION

IN_PROCESS = "Without servers"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(context_settings={"help_option_names": ["-h", "--help"]})(
    make_command(
        enrich,
        "Add context vectors or embeddings to a table as a new column: on servers, in this process or on "
        "Ray.\n\nExactly one of --server and --model-repository is required.",
        further={
            "model_repository": (IN_PROCESS, "FOLDER", Path | None, None),
            "provider": (IN_PROCESS, None, Literal["cpu", "cuda"], "cpu"),
            "engine": (IN_PROCESS, None, Literal["ray"] | None, None),
            "workers": (IN_PROCESS, "ACTORS", int | None, None),
            "cores_per_worker": (IN_PROCESS, "CORES", int, 1),
        },
        program=f"attention-enrich {VERSION}",
    )
)


if __name__ == "__main__":
    app()
