"""Why the process cannot serve.

ServerError
├── BindError      an address cannot be listened on
├── ExposureError  the address is public, and calls to it would not be encrypted
├── LoadError      the repository does not contain a model that can be served
├── TlsError       a certificate, its key or the clients' authorities cannot be used
└── WorkerError    a worker process ended before all workers were serving
"""


class ServerError(Exception):
    """The process cannot serve; the message gives the reason."""


class BindError(ServerError):
    """An address cannot be listened on."""


class LoadError(ServerError):
    """The repository does not contain a model that can be served."""


class ExposureError(ServerError):
    """The address is public, and calls to it would not be encrypted."""


class TlsError(ServerError):
    """A certificate, its key or the clients' authorities cannot be used."""


class WorkerError(ServerError):
    """A worker process ended before all workers were serving."""
