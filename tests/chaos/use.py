"""Good callers of a soak: each call returns a step that is repeated until the soak ends."""

import random
import threading
from collections.abc import Callable, Sequence

import grpc
from attention_client import AttentionClient, AttentionClientError

from tests.chaos.callers import Tally
from tests.chaos.traffic import Exchange

Step = Callable[[], None]
STREAM_ITEMS = 40
CALL_SECONDS = 60.0


def good_calls(
    target: str, exchanges: Sequence[Exchange], tally: Tally, rng: random.Random, pause: float = 0
) -> Step:
    """Unary calls, without retries, one after another; a connection serves a hundred of them."""
    clients: list[AttentionClient] = []

    def step() -> None:
        if not clients or rng.random() < 0.01:
            for client in clients:
                client.close()
            clients[:] = [AttentionClient(target, max_retries=0, timeout=CALL_SECONDS)]
        exchange = rng.choice(exchanges)
        try:
            arrays = exchange.send(clients[0], target)
        except (grpc.RpcError, AttentionClientError) as error:
            tally.failed(error)
        else:
            tally.answered(right=exchange.is_answered_by(arrays))
        threading.Event().wait(pause)

    return step


def streams(target: str, exchanges: Sequence[Exchange], tally: Tally, rng: random.Random) -> Step:
    """Streams of some requests to one model, of which one in four is left before its end."""
    items = [exchange for exchange in exchanges if exchange.inputs]
    models = sorted({exchange.model for exchange in items})

    def step() -> None:
        model = rng.choice(models)
        sent = rng.choices([item for item in items if item.model == model], k=STREAM_ITEMS)
        last = rng.randrange(STREAM_ITEMS) if rng.random() < 0.25 else STREAM_ITEMS
        try:
            with AttentionClient(target, max_retries=0, timeout=CALL_SECONDS) as client:
                results = client.attend_stream(
                    model, (item.inputs for item in sent if item.inputs), max_in_flight=16
                )
                for number, (item, result) in enumerate(zip(sent, results, strict=False)):
                    tally.answered(right=item.is_answered_by(list(result.context_vectors)))
                    if number == last:
                        results.close()
                        break
        except AttentionClientError as error:
            tally.failed(error)

    return step
