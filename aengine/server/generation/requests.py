"""`GetRequest`: how far a request has come, whether it is under way or only kept."""

from __future__ import annotations

from collections.abc import Mapping

from aengine.errors import InvalidRequestError
from aengine.outputs import RequestState
from aengine.server.calls.errors import request_not_found
from aengine.server.calls.records import current_caller
from aengine.server.generation.backend import Backend
from aengine.server.generation.responses import write_usage
from aengine.server.generation.resume import ResumableStreams
from aengine.v1 import generation_service_pb2 as messages

STATES: Mapping[RequestState, messages.RequestState.ValueType] = {
    RequestState.PREPARING: messages.REQUEST_STATE_PREPARING,
    RequestState.WAITING: messages.REQUEST_STATE_WAITING,
    RequestState.RUNNING: messages.REQUEST_STATE_RUNNING,
    RequestState.PARKED: messages.REQUEST_STATE_PARKED,
    RequestState.FINISHED: messages.REQUEST_STATE_FINISHED,
}


def describe_request(backend: Backend, resumables: ResumableStreams, request: messages.GetRequestRequest) -> messages.GetRequestResponse:
    """Raises `InvalidRequestError`, `StatusError` (REQUEST_NOT_FOUND), or what `AsyncEngine.request_info` raises."""
    request_id = request.request_id
    if not request_id:
        raise InvalidRequestError.of("request_id", "must not be empty")
    caller = current_caller()
    resumable = resumables.find(request_id, caller)
    streams = backend.streams.find(request_id, caller)
    if resumable is not None and streams and not resumable.is_from(streams[0]):
        resumable = None  # kept of an earlier request of the same name
    info = resumable.info if resumable is not None else backend.find(request_id, caller)
    if info is None:
        raise request_not_found(request_id)
    response = messages.GetRequestResponse(request_id=request_id, state=STATES[info.state])
    write_usage(info.usage, response.usage)
    response.arrival.FromNanoseconds(round(info.arrival * 1e9))
    if resumable is not None:
        response.resumable = True
        response.next_event_number = resumable.replay.next_event_number
    return response
