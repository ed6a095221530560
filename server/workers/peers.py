"""Questions that one worker asks all of them: the supervisor passes them on and collects the replies.

Every worker receives the questions in the same order, so that changes are made in one order everywhere.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from queue import SimpleQueue

from attention_serving.server.steps import StepRequest

ENDED = "the supervisor has ended"
# How long a worker may take for a step, in seconds: models load meanwhile.
PATIENCE_SECONDS = 600.0


@dataclass(frozen=True)
class Question:
    """Worker to supervisor: ask every worker. Supervisor to worker: what was asked.

    Attributes:
        number: Identifies the question among those of the worker that asks.
        asker: Number of that worker.
        request: The step that every worker is to take.
    """

    number: int
    asker: int
    request: StepRequest


@dataclass(frozen=True)
class Answer:
    """Worker to supervisor: its reply to a question."""

    number: int
    asker: int
    reply: str


@dataclass(frozen=True)
class Answers:
    """Supervisor to the worker that asked: the replies of all workers."""

    number: int
    replies: tuple[str, ...]


class WorkerPeers:
    """The workers of a service, as one of them sees them. Its thread takes the steps in their order."""

    def __init__(self, worker: int, send: Callable[[object], None]) -> None:
        """Starts no thread yet.

        Args:
            worker: Number of this worker.
            send: Sends a message to the supervisor. Any thread may call it.
        """
        self._worker = worker
        self._send = send
        self._steps: SimpleQueue[Question | None] = SimpleQueue()
        self._waiting: dict[int, SimpleQueue[tuple[str, ...] | None]] = {}
        self._lock = threading.Lock()
        self._next = 0
        self._ended = False

    def start(self, take: Callable[[StepRequest], str]) -> None:
        """Begins to take the steps that workers ask for."""
        threading.Thread(target=self._take_steps, args=(take,), name="peers", daemon=True).start()

    def ask(self, request: StepRequest) -> list[str]:
        """Asks every worker that serves, this one included, and returns their replies.

        Raises:
            ConnectionError: The supervisor has ended, or a worker does not answer.
        """
        replies: SimpleQueue[tuple[str, ...] | None] = SimpleQueue()
        with self._lock:
            if self._ended:
                raise ConnectionError(ENDED)
            number, self._next = self._next, self._next + 1
            self._waiting[number] = replies
        self._send(Question(number, self._worker, request))
        try:
            found = replies.get(timeout=PATIENCE_SECONDS)
        except Exception as error:  # queue.Empty
            raise ConnectionError("a worker process does not answer") from error
        finally:
            self._waiting.pop(number, None)
        if found is None:
            raise ConnectionError(ENDED)
        return list(found)

    def received(self, message: Question | Answers) -> None:
        """Takes a message of the supervisor."""
        if isinstance(message, Question):
            self._steps.put(message)
        elif (waiting := self._waiting.get(message.number)) is not None:
            waiting.put(message.replies)

    def close(self) -> None:
        """Ends the thread, and every question without answers."""
        with self._lock:
            self._ended = True
        self._steps.put(None)
        for waiting in list(self._waiting.values()):
            waiting.put(None)

    def _take_steps(self, take: Callable[[StepRequest], str]) -> None:
        while (question := self._steps.get()) is not None:
            try:
                reply = take(question.request)
            except Exception as error:
                reply = f"a worker failed: {type(error).__name__}"
            self._send(Answer(question.number, question.asker, reply))


@dataclass
class _Asked:
    """A question and the workers whose replies are missing."""

    missing: set[int]
    replies: list[str] = field(default_factory=list)


class Questions:
    """The supervisor's part: passes questions on, and collects the replies. Has no thread of its own."""

    def __init__(self, send: Callable[[int, object], None]) -> None:
        """Begins without questions; `send` sends a message to a worker, given by its number."""
        self._send = send
        self._asked: dict[tuple[int, int], _Asked] = {}

    def ask(self, question: Question, workers: Iterable[int]) -> None:
        """Passes a question on to workers."""
        asked = _Asked(set(workers))
        self._asked[question.asker, question.number] = asked
        for worker in sorted(asked.missing):
            self._send(worker, question)
        self._finish(question.asker, question.number)

    def answered(self, worker: int, answer: Answer) -> None:
        """Takes the reply of a worker."""
        asked = self._asked.get((answer.asker, answer.number))
        if asked is not None and worker in asked.missing:
            asked.missing.discard(worker)
            asked.replies.append(answer.reply)
            self._finish(answer.asker, answer.number)

    def ended(self, worker: int) -> None:
        """A worker has ended: nobody waits for its replies. The next one loads what is then on disk."""
        for asker, number in list(self._asked):
            if asker == worker:
                del self._asked[asker, number]
                continue
            self._asked[asker, number].missing.discard(worker)
            self._finish(asker, number)

    def _finish(self, asker: int, number: int) -> None:
        asked = self._asked[asker, number]
        if not asked.missing:
            del self._asked[asker, number]
            self._send(asker, Answers(number, tuple(asked.replies)))
