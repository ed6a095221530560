"""Predicts when a request would be answered, so that one that would be late is refused at once.

Costs of runs are measured on an idle machine, each run alone. Under load, runs share the cores with each
other and with the transport, and batches save time. How much expected work is completed per second is
therefore measured all the time.
"""

import math

from attention_serving.server.engine.errors import OverloadedError

# How long the engine must have been busy for a measurement, in seconds.
WINDOW_SECONDS = 0.2
# Weight of a new measurement beside the earlier ones.
WEIGHT = 0.3
# A request must be expected to end this share of its remaining time before its deadline, because the
# transport needs time as well.
RESERVE = 0.1
# The share for a call whose message has not been received. It is larger, so that what is received is rarely
# refused afterwards: to receive a message costs more than to refuse the call.
EARLY_RESERVE = 0.3
# A request is admitted without a closer look if all work takes no more than this share of its remaining time.
CERTAIN_SHARE = 0.25
# The advised time before a retry is a multiple of this, in seconds.
RETRY_STEP_SECONDS = 0.05


class Admission:
    """Measures the rate of work, and decides by it. Has no thread, lock or clock of its own.

    Work is measured in seconds that runs are expected to take alone.

    Attributes:
        rate: Work that is completed per second.
    """

    def __init__(self) -> None:
        self.rate = 1.0
        self._busy_since: float | None = None
        self._completed = 0.0

    def started(self, now: float) -> None:
        """Records that a batch starts."""
        if self._busy_since is None:
            self._busy_since, self._completed = now, 0.0

    def ended(self, work: float, now: float, *, busy: bool) -> None:
        """Records that a batch ended.

        Args:
            work: Its work.
            now: The current time.
            busy: Whether other work is running or queued.
        """
        self._completed += work
        if self._busy_since is not None and (elapsed := now - self._busy_since) >= WINDOW_SECONDS:
            self.rate += WEIGHT * (self._completed / elapsed - self.rate)
            self._busy_since, self._completed = now, 0.0
        if not busy:
            self._busy_since = None

    def seconds(self, work: float) -> float:
        """How long that much work is expected to take."""
        return work / self.rate

    def is_certain(self, work: float, deadline: float, now: float) -> bool:
        """Whether all the work that is queued and running is small beside the time until a deadline.

        Takes no lock, and saves most requests the exact check.
        """
        return work / self.rate <= CERTAIN_SHARE * (deadline - now)

    def check(
        self, waiting: float, own: float, deadline: float, now: float, *, reserve: float = RESERVE
    ) -> None:
        """Refuses a request that would be late.

        Args:
            waiting: Work that is done first: what is running and queued.
            own: Work of the request.
            deadline: When the caller stops waiting. Requests whose deadline has passed are not checked: they
                expire in the queue.
            now: The current time.
            reserve: Share of the remaining time that must be left.

        Raises:
            OverloadedError: The result would be too late. Not raised if nothing is waiting: then nobody else
                is delayed by the attempt.
        """
        remaining = deadline - now
        if remaining == math.inf or remaining <= 0 or not waiting:
            return
        late = self.seconds(waiting + own) - remaining * (1 - reserve)
        if late > 0:
            raise OverloadedError(
                f"the result is expected in {self.seconds(waiting + own):.2f} s, which is too late for the "
                f"deadline in {remaining:.2f} s; try again later",
                retry_after=math.ceil(late / RETRY_STEP_SECONDS) * RETRY_STEP_SECONDS,
            )
