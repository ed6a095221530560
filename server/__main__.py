"""Command line: `python -m server --model-repository REPOSITORY`."""

import logging
import sys

from pydantic import ValidationError
from pydantic_settings import CliApp, SettingsError

from server import application, logs
from server.engine.repository import RepositoryError
from server.errors import BindError, WorkerError
from server.settings import Settings
from server.workers import supervisor


def main() -> int:
    """Runs the server; returns the process's exit status."""
    try:
        settings = CliApp.run(Settings)
    except ValidationError as error:
        for problem in error.errors():
            option = ".".join(map(str, problem["loc"])).replace("_", "-")
            sys.stderr.write(f"error: --{option}: {problem['msg']}; found {problem['input']!r}\n")
        return 2
    except SettingsError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    logs.configure(settings.log_level)
    try:
        (application if settings.workers == 1 else supervisor).run(settings)
    except (BindError, RepositoryError, WorkerError) as error:
        logging.getLogger(__name__).error("cannot serve", extra={"reason": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
