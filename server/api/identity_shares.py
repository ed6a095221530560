"""What one identity may hold, so that it cannot take everything from the others: calls, streams and memory.

Beside a limit of its own, an identity may hold at most a multiple of what nobody holds. With a share of 0.8,
for which the multiple is 4, one identity alone takes 4/5 of everything; two greedy ones take 4/9 each, and
n of them leave 1/(1 + 4n) for those that come later.
Source: dynamic queue length thresholds, Choudhury and Hahne 1998.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial

from attention_serving.server.engine.budget import Account
from attention_serving.server.engine.schedule.fair_shares import Caller
from attention_serving.server.security.errors import IdentityLimitError
from attention_serving.server.security.identities import Identity

# Accounts are removed, if nothing is held, when there are this many.
MAX_ACCOUNTS = 1024


def multiple_of(share: float) -> float:
    """How many times what is free one identity may hold, for the share that it may take alone."""
    # Rounded: for 0.8 it is 4, so that one identity holds 80 of 100 and not 81.
    return math.inf if share >= 1 else round(share / (1 - share), 9)


class PlaceShares:
    """How many of the server's places each identity holds. Belongs to the transport's thread."""

    def __init__(self, noun: str, places: int, share: float) -> None:
        """Begins with nothing held.

        Args:
            noun: What the places are for, in the plural.
            places: Number of all places.
            share: Part of them that one identity may hold while nobody else holds any, above 0 to 1.
        """
        self._noun = noun
        self._places = places
        self._multiple = multiple_of(share)
        self._held: defaultdict[Caller, int] = defaultdict(int)
        self._all = 0

    def take(self, identity: Identity, limit: int = 0) -> Callable[[], None]:
        """Takes a place; returns what gives it back.

        Raises:
            IdentityLimitError: The identity holds its limit, or its share.
        """
        caller = identity.caller
        held, free = self._held.get(caller, 0), max(0, self._places - self._all)
        if limit and held >= limit:
            raise IdentityLimitError(
                f"{held} {self._noun} of this identity are open, which is its limit; try again later"
            )
        if held and math.isfinite(self._multiple) and held >= self._multiple * free:
            raise IdentityLimitError(
                f"{held} {self._noun} of this identity are open, which is its share while"
                f" {self._all} of {self._places} are; try again later"
            )
        self._held[caller] = held + 1
        self._all += 1
        return partial(self._release, caller)

    def _release(self, caller: Caller) -> None:
        self._all -= 1
        self._held[caller] -= 1
        if not self._held[caller]:
            del self._held[caller]


class IdentityAccount(Account):
    """The memory that the requests of one identity hold."""

    def __init__(self, limit: int, multiple: float) -> None:
        """Begins with nothing.

        Args:
            limit: Bytes that the identity may hold; 0 sets no limit.
            multiple: How many times the free memory it may hold.
        """
        super().__init__()
        self._limit, self._multiple = limit, multiple

    def check(self, size: int, own: int, free: int) -> None:
        """See `Account`. A request that alone exceeds the share is granted if the identity has no other."""
        if self.held_bytes <= own:
            return
        held = self.held_bytes + size
        if self._limit and held > self._limit:
            raise IdentityLimitError(
                f"requests of this identity would hold {held} bytes; its limit is {self._limit};"
                " try again later"
            )
        if math.isfinite(self._multiple) and held > self._multiple * (free - size):
            raise IdentityLimitError(
                f"requests of this identity would hold {held} bytes, which is more than its share while"
                f" {free} are free; try again later"
            )


class AccountShares:
    """The memory accounts of all identities. Belongs to the transport's thread."""

    def __init__(self, share: float) -> None:
        """Begins without accounts.

        Args:
            share: Part of the memory that one identity may hold while nobody else holds any, above 0 to 1.
        """
        self._multiple = multiple_of(share)
        self._accounts: dict[tuple[Caller, int], IdentityAccount] = {}

    def of(self, identity: Identity) -> IdentityAccount:
        """The account of an identity."""
        key = identity.caller, identity.limits.max_bytes
        account = self._accounts.get(key)
        if account is None:
            if len(self._accounts) >= MAX_ACCOUNTS:
                used = self._accounts.items()
                self._accounts = {one: other for one, other in used if other.held_bytes}
            account = self._accounts[key] = IdentityAccount(identity.limits.max_bytes, self._multiple)
        return account
