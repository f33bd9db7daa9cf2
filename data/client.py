"""One turn answered by whichever server can: tried again with back-off until it is answered, refused, or out of attempts.

What is the server's trouble never rejects a row by itself: a refused connection, a 429, 502 or 503 says nothing about the row and
is retried for as long as there is hope of a server. Errors that may be the row's own doing (5xx, a cut or silent connection,
an unusable answer) count as attempts, and so does nothing else.
"""

from __future__ import annotations

import email.utils
import time
from collections import Counter
from typing import Any

import httpx

from configs.schema import ServerSection
from data.servers import Server, Servers
from data.turns import Response
from data.wire import (
    Answer,
    AnswerRules,
    TurnRequest,
    Unusable,
    completion_request,
    parse_body,
    read_stream,
    response_of,
)
from target.generate import Sampling

REFUSED = "refused by the server"
UNANSWERED = "no usable answer from a server"
_CONNECT_S = 10.0
_IDLE_S = (
    2.0  # below the 5 s after which uvicorn, and so vLLM and SGLang, closes an idle connection
)
_BUSY = (429, 502, 503)
_MISTAKES = (401, 403, 404, 405)


class RowFailed(Exception):
    """This prompt gets no answer; the message is the reason, the same for all of its kind."""

    def __init__(self, reason: str, detail: str):
        super().__init__(reason)
        self.reason, self.detail = reason, detail


class _Trouble(Exception):
    """A try that did not work."""

    def __init__(self, what: str, is_attempt: bool, retry_after_s: float | None = None):
        super().__init__(what)
        self.is_attempt, self.retry_after_s = is_attempt, retry_after_s


class Client:
    """Asynchronous; one for all servers and all turns of a run."""

    def __init__(
        self,
        section: ServerSection,
        servers: Servers,
        http: httpx.AsyncClient,
        sampling: Sampling,
        rules: AnswerRules,
    ):
        self._section, self.servers, self._http = section, servers, http
        self._sampling, self._rules = sampling, rules
        self.retries: Counter[str] = Counter()
        """Tries that did not work, by reason."""

    async def answer(
        self, request: TurnRequest, preferred: Server | None = None
    ) -> tuple[Response, Server]:
        """The response and the server that gave it.

        Raises RowFailed when the row is refused or out of attempts, NoServer when no server is left, ValueError for a
        mistake in the recipe (a wrong key, a wrong URL).
        """
        attempts = 0
        while True:
            server = await self.servers.take(preferred)
            sent_at = time.monotonic()
            try:
                response = await self._try(server, request)
                server.answered()
                return response, server
            except Unusable as error:
                # the server is well, its answer is not
                server.answered()
                what, attempts = str(error), attempts + 1
            except _Trouble as trouble:
                server.troubled(str(trouble), sent_at, trouble.retry_after_s)
                what, attempts = str(trouble), attempts + trouble.is_attempt
            finally:
                self.servers.give(server)
            self.retries[what] += 1
            preferred = None  # perhaps another one can
            if attempts >= self._section.max_attempts:
                raise RowFailed(UNANSWERED, what)

    async def _try(self, server: Server, request: TurnRequest) -> Response:
        body = completion_request(server.model, request, self._sampling, self._section.stream)
        try:
            answer = await self._post(server, body)
        except httpx.ConnectError as error:
            raise _Trouble(f"cannot connect: {error}", is_attempt=False) from error
        except httpx.ConnectTimeout as error:
            raise _Trouble("cannot connect in time", is_attempt=False) from error
        except httpx.TimeoutException as error:
            raise _Trouble(
                f"silent for {self._section.timeout_s:.0f} s", is_attempt=True
            ) from error
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise _Trouble(f"connection cut ({type(error).__name__})", is_attempt=True) from error
        return response_of(answer, request, self._rules)

    async def _post(self, server: Server, body: dict[str, Any]) -> Answer:
        url = f"{server.url}/completions"
        if not self._section.stream:
            reply = await self._http.post(url, json=body)
            _require_success(url, reply.status_code, reply.headers, reply.content)
            answer = Answer()
            answer.add(parse_body(reply.content))
            return answer
        async with self._http.stream("POST", url, json=body) as reply:
            if reply.status_code != 200:
                _require_success(url, reply.status_code, reply.headers, await reply.aread())
            return await read_stream(reply.aiter_bytes())


def http_client(section: ServerSection, key: str | None) -> httpx.AsyncClient:
    """As many connections as requests in flight; the balance over servers is ours, so are retries."""
    return httpx.AsyncClient(
        headers={"Authorization": f"Bearer {key}"} if key else None,
        timeout=httpx.Timeout(section.timeout_s, connect=_CONNECT_S, pool=None),
        limits=httpx.Limits(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE_S
        ),
    )


async def ask(http: httpx.AsyncClient, url: str, body: dict[str, Any] | None) -> Any:
    """One question outside the run: GET, or POST with a body; its JSON, None if there is no such endpoint.

    Raises ValueError in one line for anything else than an answer.
    """
    try:
        reply = await (http.get(url) if body is None else http.post(url, json=body))
    except httpx.RequestError as error:
        raise ValueError(
            f"{url} cannot be reached ({type(error).__name__} {error}); start the server, or correct "
            "data.responses.server.urls"
        ) from error
    if reply.status_code == 404:
        return None
    try:
        _require_success(url, reply.status_code, reply.headers, reply.content)
        return parse_body(reply.content)
    except RowFailed as error:
        raise ValueError(f"{url} refuses a test request: {error.detail}") from error
    except (_Trouble, Unusable) as error:
        raise ValueError(f"{url}: {error}; is it an OpenAI-compatible server?") from error


def _require_success(url: str, status: int, headers: httpx.Headers, content: bytes) -> None:
    """Raises _Trouble, RowFailed or ValueError for what is not 200."""
    if status == 200:
        return
    told = " ".join(content[:300].decode(errors="replace").split())
    if status in _MISTAKES:
        raise ValueError(
            f"{url} answers {status} ({told}); correct data.responses.server.urls (they end in /v1), .model or "
            ".api_key_variable"
        )
    if status in _BUSY:
        raise _Trouble(f"busy ({status})", False, retry_after_s(headers.get("retry-after")))
    if 400 <= status < 500 and status != 408:
        raise RowFailed(REFUSED, f"{status}: {told}")
    raise _Trouble(f"server error {status}", True, retry_after_s(headers.get("retry-after")))


def retry_after_s(value: str | None) -> float | None:
    """Seconds of a Retry-After header, a number or an HTTP date; None if there is none that can be read."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
