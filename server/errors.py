"""Why the process cannot serve.

ServerError
├── BindError      an address cannot be listened on
├── LoadError      no model can be served, or the keys to check models with are missing
└── WorkerError    a worker process ended before all workers were serving
"""


class ServerError(Exception):
    """The process cannot serve; the message gives the reason."""


class BindError(ServerError):
    """An address cannot be listened on."""


class LoadError(ServerError):
    """No model can be served, or the keys to check models with are missing."""


class WorkerError(ServerError):
    """A worker process ended before all workers were serving."""
