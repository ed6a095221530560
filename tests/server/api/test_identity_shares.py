"""How much of the server's places and memory one identity may hold."""

from dataclasses import replace

import pytest

from attention_serving.server.api.admission import (
    Admission,
    IdentityAccount,
    IdentityPlaces,
    multiple_of,
)
from attention_serving.server.engine.budget import MemoryBudget, Reservation
from attention_serving.server.engine.errors import OverloadedError
from attention_serving.server.security.rights import Identity, IdentityLimitError, Rights, Source
from tests.server.api.scripted import UNLIMITED

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
    modest = filled(places, MODEST)
    assert len(modest) >= 15
    for call in (*greedy, *modest):
        places.give_back(call)
    assert len(filled(places, GREEDY)) == 80


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


def reserved(budget: MemoryBudget, account: IdentityAccount) -> list[Reservation]:
    """Reserves 10 bytes after the other, as often as the identity may."""
    found: list[Reservation] = []
    while True:
        try:
            found.append(budget.reserve(10, account))
        except OverloadedError:
            return found


def accounts(share: float, max_bytes: int = 0) -> tuple[IdentityAccount, IdentityAccount]:
    """Those of two identities."""
    multiple = multiple_of(share)
    return IdentityAccount(max_bytes, multiple), IdentityAccount(max_bytes, multiple)


def test_memory_is_shared_as_places_are_and_has_a_limit_of_its_own() -> None:
    budget, (greedy, modest) = MemoryBudget(1000), accounts(0.8)
    taken = reserved(budget, greedy)
    assert len(taken) == 80
    assert len(reserved(budget, modest)) >= 15
    for reservation in taken:
        reservation.release()
    assert greedy.held_bytes == 0
    limited, _ = accounts(0.8, max_bytes=50)
    first, *_ = reserved(budget, limited)
    with pytest.raises(IdentityLimitError, match="would hold 51 bytes; its limit is 50"):
        first.add(1)
    assert limited.held_bytes == 50


def test_a_request_that_alone_exceeds_the_share_is_granted() -> None:
    budget, (greedy, modest) = MemoryBudget(1000), accounts(0.5)
    reservation = budget.reserve(600, greedy)
    reservation.add(300)
    with pytest.raises(IdentityLimitError):
        budget.reserve(10, greedy)
    budget.reserve(50, modest)


def test_an_account_is_kept_while_something_is_held() -> None:
    budget, shares = MemoryBudget(1000), Admission(UNLIMITED, lambda *_: None)
    held = budget.reserve(10, shares.account_of(GREEDY))
    for number in range(100):
        shares.account_of(replace(GREEDY, name=f"caller-{number}"))
    assert shares.account_of(GREEDY).held_bytes == 10
    assert len(shares._accounts) == 1
    held.release()
