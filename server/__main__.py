"""Command line: `python -m server --model-repository FOLDER`."""

import logging
import os
import resource

from attention_serving.server.addresses import check_exposure
from attention_serving.server.errors import ServerError
from attention_serving.server.lifecycle import Inbox, end, handle_signals
from attention_serving.server.observe import logs
from attention_serving.server.process.command_line import make_application, unknown_variables
from attention_serving.server.settings import Settings

log = logging.getLogger(__name__)


def main() -> None:
    """Runs the server and ends the process with its status."""
    make_application(lambda settings: end(serve(settings)))()


def serve(settings: Settings) -> int:
    """Serves until the process is asked to stop; returns its exit status."""
    logs.configure(settings.log_level, settings.log_format)
    # Connections take descriptors. The lower limit is meant for programs that use `select`.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for name in unknown_variables(os.environ):
        log.warning("unknown environment variable", extra={"variable": name})
    try:
        check_exposure(settings.host, encrypted=settings.tls_files is not None, insecure=settings.insecure)
        inbox = Inbox()
        handle_signals(inbox.put)
        # ONNX Runtime and gRPC are imported here: --help and a supervisor need neither.
        from attention_serving.server.process.service import run  # noqa: PLC0415

        if settings.workers > 1:
            from attention_serving.server.process.workers import Workers  # noqa: PLC0415

            run(Workers(settings, inbox))
        else:
            from attention_serving.server.process.application import Application  # noqa: PLC0415

            run(Application(settings, inbox))
    except ServerError as error:
        log.error("cannot serve", extra={"reason": str(error)})
        return 1
    except Exception:
        log.exception("failed")
        return 1
    return 0


if __name__ == "__main__":
    main()
