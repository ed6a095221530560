"""The replies of streams: one for each request in their order, or whatever a handler sends."""

from collections import deque
from collections.abc import Generator
from types import coroutine
from typing import Any

from attention_serving.server.coroutines import Post, Task, Wait, suspend


class OrderedReplies:
    """The requests of a stream whose replies have not been sent, in their order.

    Each is answered by a task of its own, which awaits its turn to send. The stream's task awaits room for
    the next request.
    """

    def __init__(self, window: int) -> None:
        """Begins without requests.

        Args:
            window: Number of requests that may be without a sent reply.
        """
        self._window = window
        self._answering: deque[Task] = deque()
        # Those that await their turn.
        self._ready: set[Task] = set()
        self._waiting: Task | None = None
        self._most = window

    def __len__(self) -> int:
        """Number of requests without a sent reply."""
        return len(self._answering)

    def begin(self, task: Task) -> None:
        """A request arrived, which a task answers."""
        self._answering.append(task)
        task.resume()

    @coroutine
    def turn(self) -> Generator[Wait, Any, bool]:
        """Waits until the replies to all earlier requests have been sent.

        Returns:
            Whether the next reply is ready too.
        """
        yield self._await_turn
        return len(self._answering) > 1 and self._answering[1] in self._ready

    def _await_turn(self, task: Task) -> None:
        self._ready.add(task)
        if self._answering[0] is task:
            self._next()

    def sent(self) -> None:
        """The reply whose turn it was has been sent."""
        self._answering.popleft()
        if self._waiting is not None and len(self._answering) < self._most:
            task, self._waiting = self._waiting, None
            task.resume()
        self._next()

    def _next(self) -> None:
        if self._answering and self._answering[0] in self._ready:
            task = self._answering[0]
            self._ready.discard(task)
            task.resume()

    @coroutine
    def room(self, most: int | None = None) -> Generator[Wait, Any, None]:
        """Waits until fewer requests than the window are without a sent reply.

        Args:
            most: A smaller number in place of the window; 1 waits until all replies have been sent.
        """
        self._most = self._window if most is None else most
        if len(self._answering) >= self._most:
            yield self._await_room

    def _await_room(self, task: Task) -> None:
        self._waiting = task

    def close(self) -> None:
        """Ends all tasks: no reply can be sent any more."""
        self._waiting = None
        for task in self._answering:
            task.close()


class Outbox:
    """What a handler sends, one message after the other. `put` is for any thread."""

    def __init__(self, post: Post) -> None:
        """Begins empty.

        Args:
            post: Runs callbacks on the thread of the task that sends.
        """
        self._post = post
        self._messages: deque[bytes | None] = deque()
        self._waiting: Task | None = None

    def put(self, message: bytes | None) -> None:
        """Adds a message; None after the last one."""
        self._messages.append(message)
        self._post(self._resume)

    def _resume(self) -> None:
        task, self._waiting = self._waiting, None
        if task is not None:
            task.resume()

    async def next(self) -> bytes | None:
        """Waits for the next message; None if there are no more."""
        if not self._messages:
            await suspend(self._wait)
        return self._messages.popleft()

    def _wait(self, task: Task) -> None:
        if self._messages:  # it came in the meantime, on another thread, whose callback found nobody waiting
            task.resume()
        else:
            self._waiting = task
