"""The asynchronous client, on grpc.aio."""

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Iterable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from attention_client._client import AttentionClient
from attention_client._connection.aio import AsyncConnection
from attention_client._values import ReturnWeights, StreamItem, Version

_ParametersT = ParamSpec("_ParametersT")
_ResultT = TypeVar("_ResultT")


def _awaited(
    method: Callable[Concatenate[AttentionClient, _ParametersT], _ResultT],
) -> Callable[Concatenate["AsyncAttentionClient", _ParametersT], Coroutine[Any, Any, _ResultT]]:
    """A method of the synchronous client, whose steps are awaited: on this client it returns them."""

    @wraps(method)
    async def call(self: Any, *arguments: Any, **options: Any) -> Any:
        return await method(self, *arguments, **options)  # type: ignore[misc]

    call.__doc__ = f"As `AttentionClient.{method.__name__}`."
    return call  # type: ignore[return-value]  # the wrapper has the parameters of the method


class AsyncAttentionClient(AsyncConnection):
    """AttentionClient for asyncio: the same arguments, the same errors, and the same calls, to be awaited.

    Create it inside a running event loop, and use it on that loop only.
    """

    attend = _awaited(AttentionClient.attend)
    attend_text = _awaited(AttentionClient.attend_text)
    attend_tokens = _awaited(AttentionClient.attend_tokens)
    embed = _awaited(AttentionClient.embed)
    infer = _awaited(AttentionClient.infer)
    context = _awaited(AttentionClient.context)
    contexts = _awaited(AttentionClient.contexts)
    models = _awaited(AttentionClient.models)
    model = _awaited(AttentionClient.model)
    is_ready = _awaited(AttentionClient.is_ready)
    wait_until_ready = _awaited(AttentionClient.wait_until_ready)

    def attend_stream(
        self,
        model: str,
        requests: Iterable[StreamItem] | AsyncIterable[StreamItem],
        *,
        return_exceptions: bool = False,
        return_weights: ReturnWeights = False,
        max_in_flight: int = 64,
        timeout: float | None = None,
        version: Version = "",
    ) -> AsyncGenerator[Any, None]:
        """As `AttentionClient.attend_stream`, over an iterable or an asynchronous iterable.

        An iterable is read on the event loop and must not block. Closing the generator (`aclose`, or
        contextlib.aclosing around it) cancels the call; leaving the loop cancels it some time later.
        """
        settings = self._stream_settings(
            self._options(model, version, return_weights),
            return_exceptions=return_exceptions,
            max_in_flight=max_in_flight,
            timeout=timeout,
        )
        return self._stream(requests, settings)
