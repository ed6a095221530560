"""A worker as the supervisor sees it, over all processes that run as this worker one after another."""

from attention_serving.server.child_process import ChildProcess, State
from attention_serving.server.workers.assignment import Assignment


class WorkerHandle(ChildProcess):
    """The child process that is one worker.

    Attributes:
        number: Number of the worker, from 0.
    """

    def __init__(self, assignment: Assignment) -> None:
        self.number = assignment.worker
        super().__init__(
            f"worker {self.number}",
            "attention_serving.server.workers.worker",
            assignment,
            assignment.settings.worker_timeout_seconds,
        )

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
