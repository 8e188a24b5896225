"""Errors as OpenAI's clients expect them: nested, with a type and a string code."""

from typing import Any

from minisgl.errors import DeadlineExceeded, EngineDead, EngineUnreachable, InvalidRequest, ModelLoadError, Overloaded

RETRY_AFTER_S = 1


class ApiError(Exception):
    """What a client is told instead of an answer.

    Args:
        param: the request's field that is wrong.
        code: for programs; None where the message says it all.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The reply's JSON, or an event's."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Of the reply, beside the usual ones."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        if self.status == 408:
            return {"Connection": "close"}  # the rest of the body will not be read
        return {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}


_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "unavailable_error"}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def to_api_error(error: Exception) -> ApiError:
    """What to tell a client of an error from below. Texts of unknown errors stay inside."""
    match error:
        case ApiError():
            return error
        case InvalidRequest() | ModelLoadError():  # the model lacks what the request needs: a tokenizer
            return bad_request(str(error))
        case Overloaded():
            return ApiError(429, str(error), code="queue_full")
        case EngineDead() | EngineUnreachable():
            return ApiError(503, f"the engine is gone: {error}", code="engine_dead")
        case DeadlineExceeded():
            return ApiError(503, str(error), code="engine_silent")
    return ApiError(500, f"internal error: {type(error).__name__}", code="internal_error")
