"""Why the process cannot serve.

ServerError
├── BindError      an address cannot be listened on
├── DeviceError    the execution provider that was asked for cannot be used
├── ExposureError  the address is public, and calls to it would not be encrypted
├── IdentityError  the tokens file or the keys of JSON Web Tokens cannot be used
├── LoadError      the model repository cannot be read, or does not contain a model to serve
├── TlsError       a certificate, its key or the clients' authorities cannot be used
└── WorkerError    a worker process ended before all workers were serving
"""


class ServerError(Exception):
    """The process cannot serve; the message gives the reason."""


class BindError(ServerError):
    """An address cannot be listened on."""


class DeviceError(ServerError):
    """The execution provider that was asked for cannot be used."""


class ExposureError(ServerError):
    """The address is public, and calls to it would not be encrypted."""


class IdentityError(ServerError):
    """The tokens file or the keys of JSON Web Tokens cannot be used."""


class LoadError(ServerError):
    """The model repository cannot be read, or does not contain a model to serve."""


class TlsError(ServerError):
    """A certificate, its key or the clients' authorities cannot be used."""


class WorkerError(ServerError):
    """A worker process ended before all workers were serving."""
