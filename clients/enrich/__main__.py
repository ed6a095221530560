"""Command line: `python -m clients.enrich --help`.

Exit codes: 0 the output is complete, 1 there is no result (one line on stderr says why), 2 wrong usage,
130 interrupted.
"""

import sys
from pathlib import Path
from typing import Literal

try:
    from attention_client.enrich.cli import make_app, option
except ImportError as error:
    sys.exit(f"error: {error}; install it: pip install './clients/python[enrich]' '.[cpu,enrich]'")

from attention_serving.enrich import enrich

IN_PROCESS = "Without servers"

app = make_app(
    enrich,
    "Add context vectors or embeddings to a table as a new column: on servers, in this process or on Ray.\n\n"
    "Exactly one of --server and --model-repository is required.",
    own={
        "model_repository": (
            Path | None,
            None,
            option(
                IN_PROCESS,
                "FOLDER",
                "Compute in this process with a model of this repository, without a server.",
            ),
        ),
        "provider": (
            Literal["cpu", "cuda"],
            "cpu",
            option(IN_PROCESS, None, "Execution provider of ONNX Runtime."),
        ),
        "engine": (
            Literal["ray"] | None,
            None,
            option(
                IN_PROCESS,
                None,
                "Compute on a Ray cluster instead of in this process. All its nodes must have the repository "
                "and the tables under the same paths.",
            ),
        ),
        "workers": (
            int | None,
            None,
            option(
                IN_PROCESS,
                "ACTORS",
                "Maximum number of Ray actors. Default: as many as fit the cluster's cores.",
                min=1,
            ),
        ),
        "cores_per_worker": (
            int,
            1,
            option(IN_PROCESS, "CORES", "Number of cores of each Ray actor.", min=1),
        ),
    },
)


if __name__ == "__main__":
    app()
