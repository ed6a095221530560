"""Why the process cannot serve."""


class BindError(Exception):
    """An address cannot be listened on."""


class WorkerError(Exception):
    """A worker process ended before all of them served."""
