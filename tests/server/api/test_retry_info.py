"""What the status of an overloaded server tells callers."""

from google.rpc import error_details_pb2, status_pb2

from attention_serving.server.api.errors import status_of
from attention_serving.server.engine.errors import RETRY_SECONDS, InvalidRequestError, OverloadedError


def delay_of(status: status_pb2.Status) -> float | None:
    """The delay of the status's RetryInfo, in seconds; None if it has none."""
    for detail in status.details:
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(retry):
            return float(retry.retry_delay.ToMilliseconds() / 1000)
    return None


def test_an_overloaded_server_says_when_to_retry() -> None:
    assert delay_of(status_of(OverloadedError("full", retry_after=1.25))) == 1.25
    assert delay_of(status_of(OverloadedError("full"))) == RETRY_SECONDS


def test_other_errors_do_not_ask_for_a_retry() -> None:
    assert delay_of(status_of(InvalidRequestError("query", "is wrong"))) is None
