"""Why the process cannot serve.

ServerError
├── BindError      an address cannot be listened on
├── DeviceError    the execution provider that was asked for cannot be used
├── LoadError      the repository does not contain a model that can be served
└── WorkerError    a worker process ended before all workers were serving
"""


class ServerError(Exception):
    """The process cannot serve; the message gives the reason."""


class BindError(ServerError):
    """An address cannot be listened on."""


class DeviceError(ServerError):
    """The execution provider that was asked for cannot be used."""


class LoadError(ServerError):
    """The repository does not contain a model that can be served."""


class WorkerError(ServerError):
    """A worker process ended before all workers were serving."""
