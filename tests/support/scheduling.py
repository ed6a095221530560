"""Which tests run in the same worker of pytest-xdist, and in which order they start."""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

# The tests of each of these folders share one server, so that one worker runs all of them.
SERVER_FOLDERS = ("tests/end_to_end/", "tests/parity/")
# These tests wait for processes or export models. They start early, so that no worker is left with a long
# test when the other has finished.
SLOW_FOLDERS = ("tests/clients/enrich/", "tests/export/", "tests/server/workers/")


class SharedServerScheduling(LoadFileScheduling):  # type: ignore[misc]
    """Gives each file to one worker, and all files that use one shared server to the same one."""

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        """Returns the group of a test; xdist runs a group in one worker."""
        scope: str = super()._split_scope(nodeid)
        return next((folder for folder in SERVER_FOLDERS if scope.startswith(folder)), scope)


def start_order(item: pytest.Item) -> int:
    """Sort key of a test; tests of equal keys keep their order."""
    if item.nodeid.startswith(SERVER_FOLDERS):
        return 0
    return 1 if item.nodeid.startswith(SLOW_FOLDERS) else 2
