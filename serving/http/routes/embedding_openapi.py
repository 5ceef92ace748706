"""The OpenAPI document's part of embeddings and reranking (`openapi`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Json = dict[str, Any]

_TEXT, _COUNT, _NUMBER = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "number"}


def embedding_paths(refusals_of: Callable[..., Json]) -> Json:
    """Paths of an application that embeds. refusals_of: answers other than 200, by status."""
    refusals, ollama_refusals = refusals_of(), refusals_of(refusal="OllamaRefusal")
    return {
        "/api/embed": _post(
            "ollama_embed", "The same as Ollama does", "OllamaEmbedRequest", "OllamaVectors", ollama_refusals
        ),
        "/api/embeddings": _post(
            "ollama_embeddings",
            "The vector of one text, as Ollama did",
            "OllamaEmbeddingsRequest",
            "OllamaVector",
            ollama_refusals,
        ),
        "/v1/embeddings": _post("embeddings", "Vectors of texts", "EmbeddingRequest", "Embeddings", refusals),
        "/embed": _post("tei_embed", "The same as TEI does", "TeiEmbedRequest", "TeiVectors", refusals),
        "/v1/rerank": _post("rerank", "Documents by a query", "RerankRequest", "Ranking", refusals),
        "/rerank": _post("short_rerank", "The same", "RerankRequest", "Ranking", refusals),
    }


def embedding_answers() -> Json:
    """Schemas of what is given."""
    numbers: Json = {"type": "array", "items": _NUMBER}
    numbers_or_bytes = {"anyOf": [numbers, _TEXT]}
    vector = _object(object={"const": "embedding"}, index=_COUNT, embedding=numbers_or_bytes)
    usage = _object(prompt_tokens=_COUNT, total_tokens=_COUNT)
    ranked = _object(index=_COUNT, relevance_score=_NUMBER)
    return {
        "OllamaVectors": _object(
            model=_TEXT,
            embeddings={"type": "array", "items": numbers},
            total_duration=_COUNT,
            load_duration=_COUNT,
            prompt_eval_count=_COUNT,
        ),
        "OllamaVector": _object(embedding=numbers),
        "Embeddings": _object(
            object={"const": "list"}, data={"type": "array", "items": vector}, model=_TEXT, usage=usage
        ),
        "Ranking": {
            "anyOf": [
                _object(model=_TEXT, results={"type": "array", "items": ranked}, usage=usage),
                {"type": "array", "items": _object(index=_COUNT, score=_NUMBER)},
            ]
        },
        "TeiVectors": {"type": "array", "items": numbers},
    }


def _post(name: str, summary: str, body: str, answer: str, refusals: Json) -> Json:
    return {
        "post": {
            "operationId": name,
            "summary": summary,
            "requestBody": {"required": True, "content": _content(body)},
            "responses": {"200": {"description": "the answer", "content": _content(answer)}, **refusals},
        }
    }


def _content(schema: str) -> Json:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def _object(**properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties)}
