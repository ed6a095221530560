"""How long a worker has been silent, judged from the heartbeats that answer its pings."""

# How often the supervisor pings each worker, in seconds; four times per timeout if the timeout is short.
HEARTBEAT_SECONDS = 1.0


class Watchdog:
    """Adds up how long one process has not proven that it works. Reads no clock.

    Time counts only while the supervisor itself runs, so that a container that was frozen as a whole does not
    lose its workers.

    Attributes:
        timeout: After how many silent seconds the process counts as failed; 0 means never.
        interval: Seconds between two pings.
        silent_seconds: How long the process has been silent.
        is_stuck: Whether its last heartbeat said that the thread that takes calls makes no progress.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.interval = min(HEARTBEAT_SECONDS, timeout / 4) if timeout else HEARTBEAT_SECONDS
        self.reset()

    @property
    def failed(self) -> bool:
        """Whether the process has been silent for longer than the timeout."""
        return 0 < self.timeout < self.silent_seconds

    def reset(self) -> None:
        """Begins anew, with a new process."""
        self.silent_seconds = 0.0
        self.is_stuck = False
        self._unanswered = False

    def elapsed(self, seconds: float) -> None:
        """Counts time that passed on the supervisor's clock."""
        self.silent_seconds += min(seconds, 2 * self.interval)

    def excused(self) -> None:
        """Forgets the time so far: the process need not answer now."""
        self.silent_seconds = 0.0

    def ping(self) -> bool:
        """Returns whether to send a ping: not while one is unanswered."""
        is_due, self._unanswered = not self._unanswered, True
        return is_due

    def heard(self, *, responsive: bool) -> None:
        """Notes a heartbeat."""
        self._unanswered, self.is_stuck = False, not responsive
        if responsive:
            self.silent_seconds = 0.0
