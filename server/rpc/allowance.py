"""What decoding one request may take: checked, and reserved, before anything is built."""

from typing import NamedTuple

from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.errors import LimitExceededError
from attention_serving.server.engine.limits import Limits


class Allowance(NamedTuple):
    """The limits of a request, and the reservation that its decoded copies are added to.

    Attributes:
        limits: The server's limits.
        reservation: Memory of the request; None if it is not counted.
    """

    limits: Limits
    reservation: Reservation | None = None

    def check_bytes(self, field: str, size: int) -> None:
        """Checks the decoded size of an input.

        Raises:
            LimitExceededError: It is too large.
        """
        if size > self.limits.max_input_bytes:
            raise LimitExceededError(
                field, f"would have {size} bytes decoded; the limit is {self.limits.max_input_bytes}"
            )

    def take(self, field: str, size: int) -> None:
        """Checks the size of a copy that is about to be made, and reserves its memory.

        Raises:
            LimitExceededError: It is too large.
            OverloadedError: The memory is not available.
        """
        self.check_bytes(field, size)
        if self.reservation is not None:
            self.reservation.add(size)


UNCOUNTED = Allowance(Limits())
