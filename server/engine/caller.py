"""Whom the engine shares its runs among: callers that it knows nothing about except their names."""

from typing import NamedTuple


class Caller(NamedTuple):
    """Whose request it is. Requests of one caller do not delay those of others more than its share allows.

    Attributes:
        name: Tells callers apart; empty for requests that belong to nobody in particular.
        weight: Its share of the runs in relation to the other callers that have requests in the queue.
    """

    name: str = ""
    weight: float = 1.0


ANYONE = Caller()
