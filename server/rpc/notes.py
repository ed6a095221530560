"""What handlers add to the record of a request, if there is one."""

from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.rpc.records import RequestRecord


def note_refusal(engine: Engine, reservation: Reservation, model: LoadedModel, error: Exception) -> None:
    """A request was refused after its model was found, and before it was queued."""
    if (timeline := reservation.timeline) is not None:
        timeline.model, timeline.version = model.name, model.version
    engine.refused(model, error)


def note_failure(reservation: Reservation, error: Exception) -> None:
    """An error takes the place of the reply to a request of a stream."""
    if isinstance(reservation.timeline, RequestRecord):
        reservation.timeline.failed(error)
