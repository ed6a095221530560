"""The memory that requests may hold: its limit, and the share of each identity."""

import pytest

from attention_serving.server.engine.budget import Account, MemoryBudget
from attention_serving.server.engine.errors import IdentityLimitError, OverloadedError
from tests.support.coroutines import reserve


def test_the_limit_is_kept_unless_a_reservation_is_alone_and_released_bytes_are_free() -> None:
    budget = MemoryBudget(10)
    first, second = reserve(budget, 4), reserve(budget, 6)
    with pytest.raises(OverloadedError, match="would hold 11 bytes; the limit is 10; try again later"):
        reserve(budget, 1)
    for _ in range(2):
        first.release()
    assert budget.held_bytes == 6
    third = reserve(budget, 3)
    with pytest.raises(OverloadedError):
        third.add(2)
    second.release()
    third.release()
    assert budget.held_bytes == 0
    alone = reserve(budget, 8)
    alone.add(8)  # beyond the limit, which is granted if nothing else is reserved
    assert budget.held_bytes == 16
    with pytest.raises(OverloadedError):
        reserve(budget, 1)


def test_an_identity_gets_its_share_of_the_memory() -> None:
    """A request that alone exceeds it is granted."""
    budget, greedy, modest = MemoryBudget(1000), Account(0), Account(50)
    reserve(budget, 600, greedy).add(300)
    with pytest.raises(IdentityLimitError, match="is more than its share while 100 are free"):
        reserve(budget, 10, greedy)
    held = [reserve(budget, 10, modest) for _ in range(5)]
    with pytest.raises(IdentityLimitError, match="would hold 51 bytes; its limit is 50"):
        reserve(budget, 1, modest)
    assert modest.held_bytes == 50
    held[0].release()
    assert modest.held_bytes == 40
