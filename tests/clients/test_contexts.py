"""Stored contexts of a live server: the client, its commands, and contexts that the server has lost."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention_client import AsyncAttentionClient, AttendInputs, AttentionClient, NotFoundError
from attention_client._commands.app import app
from typer.testing import CliRunner

from attention_serving.server.engine.limits import Limits
from scripts.local_server import ServerProcess
from tests.server.samples import CROSS, WIDTHS, eager_module
from tests.support import eager

RNG = np.random.default_rng(0)
QUERIES = RNG.standard_normal((3, 4, WIDTHS["query"]), np.float32)
LOST = "does not exist here"


def rows(seed: int, count: int = 7) -> list[Any]:
    """The key and the value rows of a context, which no other test has."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((count, WIDTHS[name]), np.float32) for name in ("key", "value")]


def expected(key: Any, value: Any, query: Any = QUERIES[0], mask: Any = None) -> tuple[Any, Any]:
    """Context vectors and weights by eager PyTorch."""
    return eager.attend(eager_module(CROSS), query, key, value, mask=mask)


def lose(client: AttentionClient, model: str = CROSS) -> None:
    """Removes all contexts from the server without the knowledge of who put them."""
    for each in client.contexts(model):
        each.drop()


@pytest.fixture
def client(client: AttentionClient) -> AttentionClient:
    lose(client)
    return client


def test_calls_attend_to_a_context_in_every_form_of_the_query(client: AttentionClient) -> None:
    key, value = rows(1)
    seen, pairs = np.arange(7) != 2, RNG.random((3, 4, 6)) < 0.7
    memory = client.context(CROSS, key, value, mask=seen, ttl=60)
    assert (memory.rows, memory.model_name, memory.model_version, memory.shared) == (6, CROSS, "1", False)
    assert timedelta(0) < memory.expires_at - datetime.now(UTC) <= timedelta(seconds=60)
    batch: Any = client.attend(CROSS, QUERIES, context=memory, mask=pairs, return_weights=True)
    several = client.attend(CROSS, list(QUERIES), context=memory.id, mask=list(pairs))
    answers = [expected(key[seen], value[seen], *own) for own in zip(QUERIES, pairs, strict=True)]
    eager.assert_parity(list(batch.context_vectors), [vectors for vectors, _ in answers])
    eager.assert_parity(list(batch.attention_weights), [weights for _, weights in answers])
    eager.assert_parity(several.context_vectors, [vectors for vectors, _ in answers])
    one = client.attend(CROSS, QUERIES[0], context=memory)
    eager.assert_parity(one.context_vectors, expected(key[seen], value[seen])[0])


def test_appended_rows_count_as_if_they_had_been_put_at_once(client: AttentionClient) -> None:
    key, value = rows(2)
    mask = np.arange(7) != 5
    with client.context(CROSS, key[:3], value[:3], mask=mask[:3]) as memory:
        first = memory.id
        memory.append(key[3:], value[3:], mask=mask[3:])
        assert memory.id != first
        assert memory.rows == 6
        assert {each.id for each in client.contexts(CROSS)} == {first, memory.id}
        lose(client)
        found = client.attend(CROSS, QUERIES[0], context=memory).context_vectors
        eager.assert_parity(found, expected(key[mask], value[mask])[0])
    assert client.contexts(CROSS) == []


def test_rows_are_put_again_when_the_server_has_lost_them(client: AttentionClient) -> None:
    key, value = rows(3)
    given = key.copy()
    memory = client.context(CROSS, given, value)
    given[:] = 0  # the rows that were put are those that are put again
    answer = expected(key, value)[0]
    items = [AttendInputs(query, context=memory) for query in QUERIES]
    for call in (
        lambda: client.attend(CROSS, QUERIES[0], context=memory),
        lambda: next(client.attend_stream(CROSS, items)),
    ):
        lose(client)
        eager.assert_parity(call().context_vectors, answer)
        assert [context.id for context in client.contexts(CROSS)] == [memory.id]
    lose(client)
    memory.append(key, value)
    assert memory.rows == 14


def test_rows_that_are_too_many_for_one_put_are_put_again_as_they_were_appended(
    client: AttentionClient,
) -> None:
    key, value = rows(7, Limits.max_sequence_length)
    memory = client.context(CROSS, key, value)
    memory.append(key[:8], value[:8])
    before = memory.id
    lose(client)
    client.attend(CROSS, QUERIES[0], context=memory)
    assert (memory.id, memory.rows) == (before, len(key) + 8)


def test_neither_an_id_nor_a_listed_or_dropped_context_is_put_again(client: AttentionClient) -> None:
    memory = client.context(CROSS, *rows(4))
    (listed,) = client.contexts(CROSS)
    memory.drop()
    memory.drop()
    for context in (memory.id, listed, memory):
        with pytest.raises(NotFoundError, match=LOST) as error:
            client.attend(CROSS, QUERIES[0], context=context)
        assert (error.value.reason, error.value.field) == ("CONTEXT_NOT_FOUND", "context_id")
    items = [AttendInputs(QUERIES[0], context=memory), AttendInputs(QUERIES[0], *rows(4))]
    lost, answered = client.attend_stream(CROSS, items, return_exceptions=True)
    assert lost.reason == "CONTEXT_NOT_FOUND"
    assert answered.context_vectors.shape == (4, answered.context_vectors.shape[1])
    with pytest.raises(NotFoundError, match=LOST):
        listed.append(*rows(4))


async def test_the_asynchronous_client_awaits_the_same(
    client: AttentionClient, server: ServerProcess
) -> None:
    key, value = rows(5)
    async with AsyncAttentionClient(server.target) as asynchronous:
        async with await asynchronous.context(CROSS, key[:4], value[:4]) as memory:
            await memory.append(key[4:], value[4:])
            lose(client)
            found = await asynchronous.attend(CROSS, QUERIES[0], context=memory)
            eager.assert_parity(found.context_vectors, expected(key, value)[0])
            assert [each.id for each in await asynchronous.contexts(CROSS)] == [memory.id]
        assert await asynchronous.contexts(CROSS) == []


@pytest.mark.usefixtures("client")
def test_commands_put_use_list_and_drop(server: ServerProcess, tmp_path: Path) -> None:
    key, value = rows(6)
    for name, array in (("key", key), ("value", value), ("query", QUERIES[0])):
        np.save(tmp_path / f"{name}.npy", array)

    def run(*arguments: object, code: int = 0) -> str:
        done = CliRunner().invoke(app, ["--server", server.target, *map(str, arguments)])
        assert done.exit_code == code, done.output
        return done.stdout if code == 0 else done.stderr

    put = ("context", "put", CROSS, tmp_path / "key.npy", "--value", tmp_path / "value.npy")
    found = json.loads(run(*put, "--ttl", 60, "--shared", "--json"))
    assert (found["rows"], found["shared"], run(*put).strip()) == (7, True, found["id"])
    question = ("attend", "--model", CROSS, "--query", tmp_path / "query.npy", "--context", found["id"])
    run(*question, "--out", tmp_path / "out.npy")
    eager.assert_parity(np.load(tmp_path / "out.npy"), expected(key, value)[0])
    (listed,) = json.loads(run("context", "list", CROSS, "--json"))
    assert listed["id"] == found["id"]
    assert run("context", "list", CROSS).splitlines()[1].split()[:3] == [found["id"], "1", "7"]
    run("context", "drop", CROSS, found["id"])
    assert f"has no context {found['id']}" in run("context", "drop", CROSS, found["id"], code=1)
    assert LOST in run(*question, code=1)
