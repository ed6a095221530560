"""The refusal of an invalid request, as every layer checks it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from attention_serving.server.engine.errors import EngineError, InvalidRequestError


@contextmanager
def expect_refusal(
    message: str, kind: type[EngineError] = InvalidRequestError
) -> Iterator[pytest.ExceptionInfo[EngineError]]:
    """The block raises this error, of no subclass. Its message begins so; its field is before the colon."""
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.message[: len(message)] == message
    assert (type(caught.value), caught.value.field) == (kind, message.partition(": ")[0])
