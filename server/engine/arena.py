"""What large runs leave behind in the runtime's arena, and when it is given back."""

from server.engine.model import LoadedModel

# Runs that need less leave too little behind to matter.
LARGE_BYTES = 64 << 20
# So long after the last large run the next one is not expected.
REST_SECONDS = 5.0


class Burst:
    """Large runs that follow each other. Has no threads, no locks and no clock."""

    def __init__(self) -> None:
        self._model: LoadedModel | None = None
        self._until = 0.0

    @property
    def wait_seconds(self) -> float | None:
        """How long to wait for its end; None where there is none."""
        return REST_SECONDS if self._model else None

    def note(self, model: LoadedModel, scratch_bytes: int, now: float) -> None:
        """A run ends that needed so much memory."""
        if scratch_bytes >= LARGE_BYTES:
            self._model = model
            self._until = now + REST_SECONDS

    def over(self, now: float) -> LoadedModel | None:
        """A model to give the memory back with, once, when the burst is over."""
        if now < self._until:
            return None
        model, self._model = self._model, None
        return model
