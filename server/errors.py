"""Why the process cannot serve."""


class ServerError(Exception):
    """The process cannot serve, or not with the files as they are now; the message gives the reason."""
