"""`/v1/embeddings`, `/v1/rerank` and Ollama's `/api/embed`: read and tokenize the inputs, send the tokens to
the embedding queues, and write out the vectors."""

from __future__ import annotations

import asyncio
import base64
import math
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from phasewise.serving.embedding.encoder.input_tokens import EncoderText, InputKind, Text, Tokens, too_long
from phasewise.serving.embedding.encoder.pooling import PRECISIONS, Floats, truncated
from phasewise.serving.errors import QueueFull, ServingError
from phasewise.serving.http.errors import bad_request, from_engine, other_purpose, unknown_model
from phasewise.serving.http.monitoring.access_log import note_model, record_of
from phasewise.serving.http.requests.body import BodyReader
from phasewise.serving.http.requests.request_threads import MOST_LONG, FairLane, while_there
from phasewise.serving.http.requests.schemas import MOST_INT, OpenRequest, Strict, TokenIds, kind_of
from phasewise.serving.http.routes.middleware import client_of
from phasewise.serving.http.routes.openapi import Routes
from phasewise.serving.http.transport.connection import Connection, connection_of
from phasewise.serving.http.transport.server import Lifecycle

if TYPE_CHECKING:
    from phasewise.serving.embedding.client import Asker, EmbeddingClient

MOST_INPUTS = 2048  # OpenAI's
_LONG_CHARACTERS = 256 * 1024
EncodingFormat = Literal["float", "base64", "int8", "binary", "ubinary"]
_NUMBER_BYTES: dict[EncodingFormat, float] = {"float": 24, "base64": 6, "int8": 5, "binary": 1, "ubinary": 1}
"""Most bytes of one number of a vector in JSON, by encoding."""
_TCP_INFO_BYTES = 64
_LAST_DATA_RECEIVED = 52
"""Offset of `tcpi_last_data_recv` in Linux's tcp_info: milliseconds, an integer of four bytes."""
_CAME_S = "phasewise.came_s"
"""Key in an ASGI scope of the time at which the whole request had come."""

Texts = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MOST_INPUTS)]
Input = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[TokenIds, Tag("list of int")]
    | Annotated[Texts, Tag("list of str")]
    | Annotated[
        list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MOST_INPUTS), Tag("list of list")
    ],
    Discriminator(kind_of),
]


class EmbeddingRequest(OpenRequest):
    """OpenAI's request; `truncate`, `input_type`, `task` and the quantized formats are extensions."""

    model: str
    input: Input
    encoding_format: EncodingFormat | None = Field(
        None,
        description="int8: a vector times 127 over its largest magnitude, rounded; ubinary: bytes of 8 bits,"
        " 1 for a number above 0, the first the highest; binary: these bytes less 128",
    )
    dimensions: Annotated[int, Field(ge=1, le=MOST_INT)] | None = None
    input_type: Annotated[str, Field(max_length=256)] | None = Field(
        None,
        description='"query", "document" or the name of one of the model\'s prompts, which is put before each'
        " text; absent: the model's default prompt, if it has one",
    )
    task: Annotated[str, Field(max_length=256)] | None = Field(
        None,
        description="one of the model's tasks, where it has some: of jina v3 retrieval.query,"
        " retrieval.passage, separation, classification and text-matching, as in Jina's API; absent: none",
    )
    truncate: bool = Field(False, description="cut inputs that are too long; else they are refused")


class OllamaEmbedRequest(OpenRequest):
    """Ollama's request for embeddings."""

    without_effect = frozenset({"options"})

    model: str
    keep_alive: str | float | None = Field(None, description="ignored: models stay")
    input: str | Annotated[list[str], Field(fail_fast=True, max_length=MOST_INPUTS)]
    dimensions: Annotated[int, Field(ge=1, le=MOST_INT)] | None = None
    truncate: bool = Field(True, description="cut inputs that are too long; else they are refused")


class Document(Strict):
    text: str


class RerankRequest(OpenRequest):
    """The request to rerank documents, as in Cohere's and Jina's APIs."""

    model: str | None = Field(None, description="needs not be named: one reranker is served")
    query: str
    documents: Annotated[
        Annotated[Texts, Tag("str")]
        | Annotated[list[Document], Field(fail_fast=True, min_length=1, max_length=MOST_INPUTS), Tag("dict")],
        Discriminator(lambda given: kind_of(given).removeprefix("list of ")),
    ]
    top_n: Annotated[int, Field(ge=1, le=MOST_INT)] | None = None
    instruction: str | None = Field(
        None, description="what makes a document fit a query, for models that take it; absent: their own"
    )
    return_documents: bool = False
    truncate: bool = Field(True, description="cut what is too long; else it is refused")

    @property
    def given(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]


def card_of(model_id: str, created_s: int) -> dict[str, Any]:
    """The fields that every entry of `/v1/models` has."""
    return {"id": model_id, "object": "model", "created": created_s, "owned_by": "phasewise"}


@dataclass(frozen=True)
class EmbeddingModel:
    """An embedding model. `names`: names that requests may use, its id first. `width`: dimensions of a
    vector. `scores`: True for a cross-encoder. `client`: embeds with it."""

    names: tuple[str, ...]
    text: EncoderText
    width: int
    scores: bool
    client: EmbeddingClient
    created_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_id(self) -> str:
        return self.names[0]

    def card(self) -> dict[str, Any]:
        return {**card_of(self.model_id, self.created_s), "max_model_len": self.text.max_tokens}


@dataclass
class EmbeddingRoutes:
    """The handlers of the embedding routes; used on one event loop. `generates`: True for the name of a
    text-generating model of the same server; None: there is none."""

    model: EmbeddingModel
    _bodies: BodyReader
    _life: Lifecycle
    _max_response_bytes: int
    _generates: Callable[[str], Awaitable[bool]] | None
    _texts: FairLane = field(default_factory=lambda: FairLane("input"))
    _long: FairLane = field(default_factory=lambda: FairLane("long input", 1, MOST_LONG))

    async def embeddings(self, request: Request) -> Response:
        """Vectors of texts or of token ids."""
        body = await self._read(request, EmbeddingRequest)
        vectors, n_tokens = await self._embedded(request, body)

        def write(vector: Floats) -> Any:
            if body.encoding_format == "base64":  # float32, little-endian, as OpenAI's clients read it
                return base64.b64encode(vector.astype("<f4").tobytes()).decode()
            return PRECISIONS[body.encoding_format or "float"](vector).tolist()

        written = await asyncio.to_thread(_written, vectors, write, self.model.model_id, n_tokens)
        return Response(written, media_type="application/json")

    async def ollama_embed(self, request: Request) -> Response:
        """The same of texts, in Ollama's form."""
        began_s = time.monotonic()
        asked = await self._read(request, OllamaEmbedRequest)
        name = asked.model.removesuffix(":latest")  # the tag that every model has in this API
        how: dict[str, Any] = {"dimensions": asked.dimensions, "truncate": asked.truncate}
        if asked.input:
            body = EmbeddingRequest(model=name, input=asked.input, **how)
            vectors, n_tokens = await self._embedded(request, body)
        else:  # that is how a client of Ollama loads a model
            await self._check_model(request, name)
            vectors, n_tokens = [], 0
        duration_ns = int((time.monotonic() - began_s) * 1e9)
        facts = {"total_duration": duration_ns, "load_duration": 0, "prompt_eval_count": n_tokens}
        rows = await asyncio.to_thread(lambda: [vector.tolist() for vector in vectors])
        return _json({"model": asked.model, "embeddings": rows, **facts})

    async def _embedded(self, request: Request, body: EmbeddingRequest) -> tuple[list[Floats], int]:
        """Vectors of the inputs, and the number of tokens in all inputs."""
        await self._check_model(request, body.model)
        if self.model.scores:
            raise bad_request(f"{self.model.model_id} is a reranker: use /v1/rerank", "model")
        if body.dimensions is not None and body.dimensions > self.model.width:
            raise bad_request(
                f"dimensions is {body.dimensions}; this model's vectors have {self.model.width}", "dimensions"
            )
        rows: list[Any] = [body.input] if isinstance(body.input, str) else list(body.input)
        if isinstance(rows[0], int):
            rows = [rows]
        self._refuse_too_large(body, len(rows))
        is_text = isinstance(rows[0], str)
        task = self._checked_kind(body, is_text=is_text).task
        how: dict[str, Any] = {"truncate": body.truncate}

        def cut() -> list[Tokens]:
            if is_text:
                return self.model.text.tokens(rows, **how, input_type=body.input_type, task=body.task)
            return [self._token_ids(index, own, **how)._replace(task=task) for index, own in enumerate(rows)]

        inputs = await self._prepared(request, sum(map(len, rows)), cut)  # a token id counts as a character
        vectors = await self._vectors(request, inputs)
        if body.dimensions is not None:
            vectors = [truncated(vector, body.dimensions) for vector in vectors]
        return vectors, sum(len(tokens.ids) for tokens in inputs)

    async def rerank(self, request: Request) -> Response:
        """Scores of documents for a query, from 0 to 1, the best first."""
        body = await self._read(request, RerankRequest)
        texts, model = body.given, self.model
        await self._check_model(request, body.model or model.model_id)
        if not model.scores:
            raise bad_request(
                f"{model.model_id} makes vectors and scores no pairs: serve a cross-encoder", "model"
            )
        if body.instruction is not None and not model.text.takes_instruction:
            raise bad_request(f"{model.model_id} takes no instruction", "instruction")
        pairs: list[Text] = [(body.query, text) for text in texts]
        n_repeated = (len(body.query) + len(body.instruction or "")) * len(texts)

        def cut() -> list[Tokens]:
            return model.text.tokens(pairs, truncate=body.truncate, instruction=body.instruction)

        inputs = await self._prepared(request, sum(map(len, texts)) + n_repeated, cut)
        n_tokens = sum(len(tokens.ids) for tokens in inputs)
        scores = [float(vector[0]) for vector in await self._vectors(request, inputs)]
        ranked = sorted(enumerate(map(_logistic, scores)), key=lambda pair: -pair[1])[: body.top_n]
        results = [
            {
                "index": index,
                "relevance_score": score,
                **({"document": {"text": texts[index]}} if body.return_documents else {}),
            }
            for index, score in ranked
        ]
        return _json(
            {
                "model": model.model_id,
                "results": results,
                "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
            }
        )

    def _refuse_too_large(self, body: EmbeddingRequest, n_inputs: int) -> None:
        """Raise ApiError for a too large answer, which is sent whole, before any vector is computed."""
        per_number = _NUMBER_BYTES[body.encoding_format or "float"]
        n_bytes = n_inputs * (body.dimensions or self.model.width) * per_number
        if n_bytes > self._max_response_bytes:
            raise bad_request(
                f"the answer takes more than {self._max_response_bytes} bytes; send fewer inputs, "
                "or ask for fewer dimensions or base64",
                "input",
            )

    # ---- steps -------------------------------------------------------------------------------------------

    async def _read(self, request: Request, kind: Any) -> Any:
        self._life.refuse_unless_open()
        connection = connection_of(request.scope)
        body = await self._bodies.read(request, kind)
        request.scope[_CAME_S] = None if connection is None else _came_s(connection)
        return body

    def _checked_kind(self, body: EmbeddingRequest, *, is_text: bool) -> InputKind:
        """The kind of the inputs by `input_type` and `task`; token ids take a task only. Raises ApiError."""
        if body.input_type is not None and not is_text:
            raise bad_request("token ids are taken as they are: input_type goes with texts", "input_type")
        if body.input_type is not None and body.task is not None:
            raise bad_request("input_type and task say the same: give one of them", "task")
        name = "input_type" if body.task is None else "task"
        try:
            return self.model.text.kind_of(body.input_type, body.task)
        except ValueError as error:
            raise bad_request(f"{name} is {error}", name) from error

    async def _check_model(self, request: Request, name: str) -> None:
        if name not in self.model.names:
            if self._generates is not None and await self._generates(name):
                raise other_purpose(name, "generates text and makes no vectors", "/v1/chat/completions")
            raise unknown_model(name, self.model.model_id)
        note_model(request.scope, self.model.model_id)

    def _token_ids(self, index: int, ids: Sequence[int], *, truncate: bool) -> Tokens:
        """Check and truncate a client's token ids, which already include the special tokens."""
        most = self.model.text.max_tokens
        if min(ids) < 0 or max(ids) >= self.model.text.vocab_size:
            raise bad_request(f"token ids must be 0 to {self.model.text.vocab_size - 1}", "input")
        if len(ids) > most and not truncate:
            raise too_long(index, len(ids), most)
        return Tokens(list(ids[:most]))

    async def _prepared(
        self, request: Request, n_characters: int, cut: Callable[[], list[Tokens]]
    ) -> list[Tokens]:
        lane = self._long if n_characters > _LONG_CHARACTERS else self._texts
        with _refusals(request):
            asker = _asker(request)
            self.model.client.refuse_if_full(asker)
            return await while_there(request, lane.run(asker.name, cut))

    async def _vectors(self, request: Request, inputs: Sequence[Tokens]) -> list[Floats]:
        self._life.refuse_unless_open()
        record_of(request.scope).n_prompt = sum(len(tokens.ids) for tokens in inputs)
        with _refusals(request):
            vectors = await while_there(request, self.model.client.embed(inputs, _asker(request)))
        _vouch(request)
        return vectors


def add_routes(routes: Routes, own: EmbeddingRoutes) -> None:
    """Add the embedding and rerank routes."""
    routes.add("/v1/embeddings", "POST", EmbeddingRequest)(own.embeddings)
    routes.add("/api/embed", "POST", OllamaEmbedRequest)(own.ollama_embed)
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        routes.add(path, "POST", RerankRequest)(own.rerank)


def _came_s(connection: Connection) -> float:
    """The time at which the client's last bytes reached the kernel, where they may have waited to be read, by
    the loop's clock; now if the kernel does not tell."""
    link = connection.transport.get_extra_info("socket")
    try:
        info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except (OSError, AttributeError):  # a Unix socket, or a system without it
        return connection.loop.time()
    age_ms = int.from_bytes(info[_LAST_DATA_RECEIVED : _LAST_DATA_RECEIVED + 4], sys.byteorder)
    return connection.loop.time() - 1e-3 * age_ms


def _asker(request: Request) -> Asker:
    """The sender of a request whose body has been read."""
    from phasewise.serving.embedding.client import Asker

    name, connection = client_of(request.scope).name, connection_of(request.scope)
    if connection is None:
        return Asker(name)
    return Asker(name, request.scope[_CAME_S], connection.at_end)


def _vouch(request: Request) -> None:
    connection = connection_of(request.scope)
    if connection is not None:
        connection.mark_answered()


@contextmanager
def _refusals(request: Request) -> Iterator[None]:
    """Raise ApiError in place of the queues' errors. QueueFull raises the connection's share of loop time, as
    an answer does: otherwise clients that came while the server was full would hardly be read."""
    try:
        yield
    except ServingError as error:
        if isinstance(error, QueueFull):
            _vouch(request)
        raise from_engine(error) from error


def _written(
    vectors: Sequence[Floats], write: Callable[[Floats], Any], model_id: str, n_tokens: int
) -> bytes:
    """The JSON answer. Vectors are written one at a time, because other Python threads wait meanwhile."""
    parts = (
        to_json({"object": "embedding", "index": index, "embedding": write(vector)})
        for index, vector in enumerate(vectors)
    )
    rest = to_json({"model": model_id, "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens}})
    return b'{"object":"list","data":[' + b",".join(parts) + b"]," + rest[1:]


def _logistic(score: float) -> float:
    if score >= 0:
        return 1 / (1 + math.exp(-score))
    small = math.exp(score)
    return small / (1 + small)


def _json(content: Any) -> Response:
    return Response(to_json(content), media_type="application/json")
