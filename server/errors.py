"""Why the process cannot serve."""


class BindError(Exception):
    """An address cannot be listened on."""
