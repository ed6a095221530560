"""Which caller's turn it is, so that callers share the runs whatever each of them has queued.

Each caller with queued sequences has a virtual time, which advances by the expected duration of what it has
run, divided by its weight. The caller whose virtual time is furthest behind is next. That of a caller that
comes (back) is set to that of the caller which was served last, unless its own is ahead: what was not used is
not saved up, and what was used is not forgotten until the queue is empty. With one caller, it is always that
one's turn. Source: start-time fair queueing, Goyal, Vin and Cheng 1996.
"""

from dataclasses import dataclass

from attention_serving.server.engine.budget import Caller

# Callers without queued sequences are forgotten when there are this many, whatever their virtual times.
MAX_IDLE = 1024


@dataclass(eq=False, slots=True)
class CallerShare:
    """One caller in the queue. The queue itself counts what is queued, since it does so for every sequence.

    Attributes:
        caller: Who it is.
        virtual_time: What it has run, in seconds of weight 1.
        start_tag: That of its sequence that was served last; see `server.engine.schedule.queue`.
        sequences: Number of its queued sequences.
        seconds: Sum of their expected durations.
    """

    caller: Caller
    virtual_time: float = 0.0
    start_tag: float = 0.0
    sequences: int = 0
    seconds: float = 0.0


class FairShares:
    """The callers of one queue.

    Attributes:
        virtual_time: That of the caller which was served last, when its turn came.
    """

    def __init__(self) -> None:
        self.virtual_time = 0.0
        self._shares: dict[Caller, CallerShare] = {}

    def of(self, caller: Caller) -> CallerShare:
        """The share of a caller that queues sequences now."""
        share = self._shares.get(caller)
        if share is None:
            if len(self._shares) >= MAX_IDLE:
                queued = {key: share for key, share in self._shares.items() if share.sequences}
                self._shares = queued
            share = self._shares[caller] = CallerShare(caller)
        if not share.sequences:
            # Rounding errors do not add up.
            share.seconds, share.virtual_time = 0.0, max(share.virtual_time, self.virtual_time)
        return share

    def reset(self) -> None:
        """The queue is empty: all callers begin together."""
        if len(self._shares) > 1:
            self._shares.clear()
        for share in self._shares.values():  # one at most, which keeps the start tag of its requests
            self.virtual_time = share.virtual_time

    def seconds_before(self, caller: Caller, work: float) -> float:
        """What other callers run before a caller has run so much work, all of it queued, in seconds.

        Args:
            caller: The caller, which need not have queued anything.
            work: Expected duration of its runs.
        """
        caller_share = self._shares.get(caller)
        start = self.virtual_time
        if caller_share is not None:
            start = max(start, caller_share.virtual_time)
        until = start + work / caller.weight
        return sum(
            min(share.seconds, max(0.0, until - share.virtual_time) * share.caller.weight)
            for share in self._shares.values()
            if share is not caller_share and share.sequences
        )

    def seconds_of(self, caller: Caller) -> float:
        """Sum of the expected durations of a caller's queued sequences."""
        share = self._shares.get(caller)
        return share.seconds if share is not None and share.sequences else 0.0
