"""The client of a load test: it sends one request and returns one outcome, whatever the server does.

It often runs on the cores of the server under test, so it does little: bodies are bytes, events are read as
they come, and only what the figures need is kept.
"""

from __future__ import annotations

import asyncio
import errno
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

import aiohttp

from phasewise._json import read_json
from phasewise.loadtest.metrics import FailureKind, RequestOutcome

MAX_LINE_BYTES = 4 << 20
MAX_ERROR_CHARS = 200

Known = TypeVar("Known", int, int | None)


class StreamReader:
    """Reader of a streamed answer that fills in `outcome`; times are on the clock of `outcome.start_s`."""

    def __init__(self, outcome: RequestOutcome) -> None:
        self._outcome = outcome
        self._rest = b""
        self._last_token_s = 0.0
        self._n_events = 0
        self._has_finish = False
        self._is_done = False
        self._n_told: int | None = None

    def feed(self, chunk: bytes, at_s: float) -> None:
        """Read every whole line; anything after an end or a failure is ignored."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if self._is_done or self._outcome.failure is not None:
                return
            if line.startswith(b"data:"):
                self._data(line[5:].strip(), at_s)
        if len(self._rest) > MAX_LINE_BYTES:
            self._fail(FailureKind.garbage, f"a line of more than {MAX_LINE_BYTES >> 20} MiB")

    @property
    def is_finished(self) -> bool:
        return self._is_done or self._has_finish

    def close(self) -> None:
        """Settle the outcome at the end of the connection: an unfinished answer has failed."""
        outcome = self._outcome
        outcome.output_tokens = self._n_events if self._n_told is None else self._n_told
        if outcome.failure is None and not self.is_finished:
            if self._n_events or not self._rest.strip():
                self._fail(FailureKind.broken_stream, "the connection closed before the answer was finished")
            else:
                self._fail(FailureKind.garbage, f"no events came, but {self._rest[:40]!r}")

    def _fail(self, kind: FailureKind, reason: str) -> None:
        self._outcome.failure = kind
        self._outcome.error = reason[:MAX_ERROR_CHARS]

    def _data(self, data: bytes, at_s: float) -> None:
        if data == b"[DONE]":
            self._is_done = True
            return
        try:
            event = read_json(data)
        except ValueError:
            self._fail(FailureKind.garbage, f"an event that is not JSON: {data[:60]!r}")
            return
        if not isinstance(event, dict):
            self._fail(FailureKind.garbage, f"an event that is no object: {data[:60]!r}")
        elif event.get("error") is not None:
            error = event["error"]
            reason = error.get("message", error) if isinstance(error, dict) else error
            self._fail(FailureKind.stream_error, f"the server failed: {reason}")
        else:
            self._usage(event.get("usage"))
            self._choice(event.get("choices"), at_s)

    def _usage(self, usage: Any) -> None:
        outcome = self._outcome
        self._n_told = _count_in(usage, "completion_tokens", self._n_told)
        outcome.prompt_tokens = _count_in(usage, "prompt_tokens", outcome.prompt_tokens)
        details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
        outcome.cached_tokens = _count_in(details, "cached_tokens", outcome.cached_tokens)

    def _choice(self, choices: Any, at_s: float) -> None:
        """Read an event's choices: a token, or the opening or the end of the answer."""
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return
        delta = choice.get("delta")
        text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
        ends = choice.get("finish_reason") is not None
        opens = isinstance(delta, dict) and "role" in delta and not text
        self._has_finish = self._has_finish or ends
        if opens and not ends:
            return
        self._outcome.latency_s = at_s - self._outcome.start_s
        # Half a character has no text yet; an end without text brings no token, unless nothing else came.
        if self._n_events == 0:
            self._outcome.ttft_s = self._outcome.latency_s
        elif text or not ends:
            self._outcome.itls_s.append(at_s - self._last_token_s)
        else:
            return
        self._last_token_s = at_s
        self._n_events += 1


def _count_in(fields: Any, name: str, before: Known) -> int | Known:
    """The count that a server reports in `fields`, else `before`."""
    count = fields.get(name) if isinstance(fields, dict) else None
    return count if type(count) is int and 0 <= count < 1 << 32 else before


CONNECT_S = 10.0
LONGEST_S = 600.0
"""The time limit of one request."""
KEEP_ALIVE_S = 3.0
"""Seconds that an idle connection is kept: fewer than on servers, so that none closes under a request."""
STALE_CONNECTIONS = 8
"""The number of kept connections that may prove closed before a request counts as failed."""

MAX_BODY_BYTES = 4 << 20
MAX_RETRY_AFTER_S = 3600.0

Prompt: TypeAlias = str | Sequence[int] | Sequence[str]


class LoadTestError(Exception):
    """The server cannot be measured at all. The message says what to do."""

    exit_code = 1


@dataclass(frozen=True)
class Target:
    """The server of a load, and settings of all requests. `base`: the server's address without /v1."""

    base: str
    model: str = ""
    is_chat: bool = False
    api_key: str | None = None
    unix_socket: Path | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of every body beside model, prompt and max_tokens."""
    makes_vectors: bool = False
    """True for embeddings: prompts are lists of texts, and answers are vectors, which do not stream."""

    @property
    def url(self) -> str:
        of_text = "chat/completions" if self.is_chat else "completions"
        return f"{self.base}/v1/{'embeddings' if self.makes_vectors else of_text}"

    def body(self, prompt: Prompt, max_tokens: int, *, streamed: bool = True) -> bytes:
        """The JSON of one request."""
        if self.makes_vectors:
            return json.dumps({"model": self.model, "input": prompt, **self.fields}).encode()
        asked: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens}
        asked |= {"messages": [{"role": "user", "content": prompt}]} if self.is_chat else {"prompt": prompt}
        if streamed:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps({**asked, **self.fields}).encode()


def base_of(url: str) -> str:
    """Return `http://host:8000` for that address, also behind /v1/. LoadTestError for any other text."""
    address = url if "://" in url else f"http://{url}"
    with suppress(ValueError):
        parts = urlsplit(address)
        if parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0:
            return address.rstrip("/").removesuffix("/v1").rstrip("/")
    raise LoadTestError(f"{url!r:.80} is no address of a server: write one like http://127.0.0.1:8000")


class LoadClient:
    """An open HTTP session with one server."""

    def __init__(self, session: aiohttp.ClientSession, target: Target) -> None:
        self._session = session
        self.target = target

    async def send(self, body: bytes, prompt_tokens: int, timeout_s: float | None = None) -> RequestOutcome:
        """Send one streamed request. Raises nothing but CancelledError.

        prompt_tokens: the count in the outcome unless the server reports another.
        """
        outcome = RequestOutcome(time.perf_counter(), prompt_tokens)
        stream = StreamReader(outcome)
        limit_s = min(LONGEST_S, timeout_s or LONGEST_S)
        try:
            async with self._post_again(body, limit_s) as response:
                if response.status != 200:
                    await _refusal(outcome, response)
                elif self.target.makes_vectors:
                    outcome.prompt_tokens = _tokens_in(await response.read())
                    outcome.latency_s = time.perf_counter() - outcome.start_s
                    return outcome
                else:
                    async for chunk in response.content.iter_any():
                        stream.feed(chunk, time.perf_counter())
                        if outcome.failure is not None:
                            break
        except (TimeoutError, OSError, ValueError, aiohttp.ClientError) as error:
            if outcome.failure is None and not stream.is_finished:
                outcome.failure, outcome.error = _kind(error), why(error)
        stream.close()
        return outcome

    @asynccontextmanager
    async def _post_again(self, body: bytes, limit_s: float) -> AsyncIterator[aiohttp.ClientResponse]:
        """Post `body`, again where a kept connection proves closed, up to STALE_CONNECTIONS times."""
        async with AsyncExitStack() as stack:
            for left in range(STALE_CONNECTIONS, -1, -1):
                try:
                    response = await stack.enter_async_context(self._post(body, limit_s))
                    break
                except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                    if left == 0 or isinstance(error, aiohttp.ClientConnectorError):
                        raise
            yield response

    def _post(self, body: bytes, limit_s: float) -> Any:
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_S)
        return self._session.post(self.target.url, data=body, allow_redirects=False, timeout=timeout)

    async def models(self) -> list[dict[str, Any]]:
        """The models of /v1/models. LoadTestError where there is no such list."""
        where = f"{self.target.base}/v1/models"
        try:
            async with self._session.get(where, timeout=aiohttp.ClientTimeout(total=CONNECT_S)) as response:
                listed = read_json(await response.content.read(MAX_BODY_BYTES))
                status = response.status
        except (TimeoutError, OSError, ValueError, aiohttp.ClientError) as error:
            raise LoadTestError(f"{where} does not answer: {why(error)}") from error
        cards = listed.get("data") if isinstance(listed, dict) else None
        if status != 200 or not isinstance(cards, list):
            raise LoadTestError(f"{where} lists no models (status {status}): name one with --model")
        return [card for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str)]

    async def count_prompt(self, prompt: Prompt) -> int | None:
        """The server's count of the tokens of `prompt`; None where it refuses or gives no count."""
        body = self.target.body(prompt, 1, streamed=False)
        try:
            async with self._post(body, LONGEST_S) as response:
                answer = read_json(await response.content.read(MAX_BODY_BYTES))
                usage = answer.get("usage") if response.status == 200 and isinstance(answer, dict) else None
        except (TimeoutError, OSError, ValueError, aiohttp.ClientError):
            return None
        count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        return count if type(count) is int and count > 0 else None


@asynccontextmanager
async def open_client(target: Target) -> AsyncIterator[LoadClient]:
    """A client without a limit on connections; the load decides how many are open."""
    socket = target.unix_socket
    connect = aiohttp.TCPConnector if socket is None else partial(aiohttp.UnixConnector, str(socket))
    connector = connect(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if target.api_key:
        headers["Authorization"] = f"Bearer {target.api_key}"
    cookies = aiohttp.DummyCookieJar()
    async with aiohttp.ClientSession(connector=connector, headers=headers, cookie_jar=cookies) as session:
        yield LoadClient(session, target)


def _tokens_in(raw: bytes) -> int:
    """Count the prompt tokens by the answer's usage, at its beginning or end; no vector is parsed."""
    start = raw.rfind(b'"usage"')
    try:
        usage = read_json(raw[start + 8 : raw.index(b"}", start) + 1].decode()) if start >= 0 else {}
        return int(usage.get("prompt_tokens", 0))
    except (ValueError, AttributeError):
        return 0


async def _refusal(outcome: RequestOutcome, response: aiohttp.ClientResponse) -> None:
    """Note the kind of a refusal, and its reason: an error's message in OpenAI's shape, else the body."""
    status, after = response.status, response.headers.get("Retry-After", "").strip()
    kind = FailureKind.broken_server if status >= 500 else FailureKind.rejected
    outcome.failure = FailureKind.overloaded if status == 429 else kind
    if after.isascii() and after.isdecimal():  # it may be a date
        outcome.retry_after_s = min(float(after[:9]), MAX_RETRY_AFTER_S)
    reason = (await response.content.read(4096)).decode("utf-8", "replace")
    with suppress(ValueError, TypeError, KeyError):
        reason = str(read_json(reason)["error"]["message"])
    outcome.error = f"status {status}: {' '.join(reason.split())}"[:MAX_ERROR_CHARS]


def _kind(error: Exception) -> FailureKind:
    match error:
        case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
            return FailureKind.refused
        case asyncio.TimeoutError():
            return FailureKind.timeout
        case aiohttp.ClientPayloadError() | aiohttp.ServerDisconnectedError() | OSError():
            return FailureKind.broken_stream
        case _:
            return FailureKind.garbage


def why(error: Exception) -> str:
    """The reason of an error that a request ended by, on one line."""
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason}"
    if isinstance(error, OSError) and error.errno == errno.ECONNREFUSED:
        return "connection refused; start a server there, or correct the URL"
    return (" ".join(str(error).split()) or type(error).__name__)[:MAX_ERROR_CHARS]
