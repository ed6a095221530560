"""How much of the server's places and memory one identity may hold."""

import math
from dataclasses import replace

import pytest

from attention_serving.server.api import admission
from attention_serving.server.api.admission import IdentityAccounts, IdentityPlaces
from attention_serving.server.engine.budget import MemoryBudget, Reservation
from attention_serving.server.engine.errors import OverloadedError
from attention_serving.server.security.errors import IdentityLimitError
from attention_serving.server.security.identities import Identity, IdentityLimits, Source
from attention_serving.server.security.rights import Rights

GREEDY = Identity(source=Source.TOKEN, name="greedy", rights=Rights())
MODEST = replace(GREEDY, name="modest")


def filled(places: IdentityPlaces, identity: Identity, limit: int = 0) -> list[object]:
    """Takes as many places as the identity gets; returns the calls that have them."""
    calls: list[object] = []
    while True:
        call = object()
        try:
            places.take(call, identity, limit)
        except IdentityLimitError:
            return calls
        calls.append(call)


def test_one_identity_gets_its_share_and_leaves_room() -> None:
    places = IdentityPlaces("calls", 100, share=0.8)
    greedy = filled(places, GREEDY)
    assert len(greedy) == 80
    assert len(filled(places, MODEST)) >= 15


def test_what_is_released_can_be_taken_again() -> None:
    places = IdentityPlaces("calls", 10, share=0.5)
    taken = filled(places, GREEDY)
    for call in taken:
        places.give_back(call)
    assert len(filled(places, GREEDY)) == len(taken) == 5


def test_an_identity_has_a_limit_of_its_own() -> None:
    places = IdentityPlaces("calls", 100, share=0.8)
    assert len(filled(places, GREEDY, limit=3)) == 3
    with pytest.raises(IdentityLimitError, match="3 calls of this identity are open, which is its limit"):
        places.take(object(), GREEDY, 3)
    places.take(object(), MODEST, 3)


def test_a_share_of_one_sets_no_limit() -> None:
    places = IdentityPlaces("calls", 4, share=1)
    for _ in range(20):  # the server's own limit is elsewhere
        places.take(object(), GREEDY)


@pytest.mark.parametrize("total", [1, 2, 3])
def test_with_few_places_each_identity_gets_one(total: int) -> None:
    places = IdentityPlaces("streams", total, share=0.5)
    for number in range(total):
        places.take(object(), replace(GREEDY, name=f"caller-{number}"))


def reserved(budget: MemoryBudget, shares: IdentityAccounts, identity: Identity) -> list[Reservation]:
    """Reserves 10 bytes after the other, as often as the identity may."""
    found: list[Reservation] = []
    while True:
        try:
            found.append(budget.reserve(10, shares.of(identity)))
        except OverloadedError:
            return found


def test_memory_is_shared_as_places_are() -> None:
    budget, shares = MemoryBudget(1000), IdentityAccounts(0.8)
    greedy = reserved(budget, shares, GREEDY)
    assert len(greedy) == 80
    assert len(reserved(budget, shares, MODEST)) >= 15
    for reservation in greedy:
        reservation.release()
    assert shares.of(GREEDY).held_bytes == 0


def test_memory_has_a_limit_of_its_own_too() -> None:
    budget, shares = MemoryBudget(1000), IdentityAccounts(0.8)
    limited = replace(GREEDY, limits=IdentityLimits(max_bytes=50))
    (first, *_), account = reserved(budget, shares, limited), shares.of(limited)
    assert account.held_bytes == 50
    with pytest.raises(IdentityLimitError, match="would hold 51 bytes; its limit is 50"):
        first.add(1)
    assert (account.held_bytes, budget.held_bytes) == (50, 50)


def test_a_request_that_alone_exceeds_the_share_is_granted() -> None:
    budget, shares = MemoryBudget(1000), IdentityAccounts(0.5)
    reservation = budget.reserve(600, shares.of(GREEDY))
    reservation.add(300)
    with pytest.raises(IdentityLimitError):
        budget.reserve(10, shares.of(GREEDY))
    budget.reserve(50, shares.of(MODEST))


def test_what_the_server_refuses_is_not_counted_for_the_identity() -> None:
    budget, shares = MemoryBudget(100), IdentityAccounts(1)
    budget.reserve(90)
    with pytest.raises(OverloadedError):
        budget.reserve(20, shares.of(GREEDY))
    assert shares.of(GREEDY).held_bytes == 0


def test_accounts_without_memory_are_removed_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_ACCOUNTS", 10)
    budget, shares = MemoryBudget(1000), IdentityAccounts(0.8)
    kept = shares.of(GREEDY)
    budget.reserve(10, kept)
    for number in range(100):
        shares.of(replace(GREEDY, name=f"caller-{number}"))
    assert len(shares._accounts) <= 10
    assert shares.of(GREEDY) is kept


def test_shares_become_multiples_of_what_is_free() -> None:
    assert [admission.multiple_of(share) for share in (0.5, 0.8, 1)] == [1, pytest.approx(4), math.inf]
