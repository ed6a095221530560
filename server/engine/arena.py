"""Decides when memory that large runs left in the runtime's arena is returned to the system."""

from attention_serving.server.engine.model import LoadedModel

# Smaller runs leave too little memory in the arena to matter.
LARGE_RUN_BYTES = 64 << 20
# After this time without a large run, the next one is not expected soon.
IDLE_SECONDS = 5.0


class ArenaTrimmer:
    """Watches for the end of a burst of large runs. Has no thread, lock or clock of its own."""

    def __init__(self) -> None:
        self._model: LoadedModel | None = None
        self._due = 0.0

    @property
    def wait_seconds(self) -> float | None:
        """How long to wait before asking `due` again; None if there is nothing to trim."""
        return IDLE_SECONDS if self._model else None

    def note_run(self, model: LoadedModel, run_bytes: int, now: float) -> None:
        """Records that a run ended which needed this much memory."""
        if run_bytes >= LARGE_RUN_BYTES:
            self._model = model
            self._due = now + IDLE_SECONDS

    def due(self, now: float) -> LoadedModel | None:
        """A model to trim the arena with, once, after a burst has ended."""
        if now < self._due:
            return None
        model, self._model = self._model, None
        return model
