"""A worker as the supervisor sees it, over all processes that run as this worker one after another."""

from attention_serving.server.child_process import ChildProcess, State
from attention_serving.server.workers.assignment import Assignment
from attention_serving.server.workers.peers import Answer, Question


class WorkerHandle(ChildProcess):
    """The child process that is one worker.

    Attributes:
        number: Number of the worker, from 0.
        messages: What the worker asked and answered, for the supervisor to take.
    """

    def __init__(self, assignment: Assignment) -> None:
        self.number = assignment.worker
        self.messages: list[Question | Answer] = []
        super().__init__(
            f"worker {self.number}",
            "attention_serving.server.workers.worker",
            assignment,
            assignment.settings.worker_timeout_seconds,
        )

    def take(self, message: Question | Answer) -> None:
        """Keeps it for the supervisor."""
        self.messages.append(message)

    def listen(self) -> None:
        """Orders the process to listen."""
        self.state = State.LISTENING
        self.send(State.LISTENING)

    def drain(self) -> None:
        """Closes the pipe, so that the process drains. One that has not listened yet is killed."""
        if self.connection:
            self.send(State.DRAINING)
            self.connection.close()
        if self.state in (State.LOADING, State.READY):
            self.kill()
