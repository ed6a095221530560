"""What handlers add to the record of a request, if there is one."""

from server.engine.budget import Reservation
from server.engine.model import LoadedModel
from server.rpc.records import RequestRecord


def note_model(reservation: Reservation, model: LoadedModel) -> None:
    """The model of a request was found."""
    if (timeline := reservation.timeline) is not None:
        timeline.model, timeline.version = model.name, model.version


def note_failure(reservation: Reservation, error: Exception) -> None:
    """An error takes the place of the reply to a request of a stream."""
    if isinstance(reservation.timeline, RequestRecord):
        reservation.timeline.failed(error)
