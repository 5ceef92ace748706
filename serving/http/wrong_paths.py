"""Advice for those who ask for a path that is not here: what they look for is mostly near."""

from __future__ import annotations

from collections.abc import Collection

_OPENAI = "this server speaks OpenAI's API: POST /v1/chat/completions, or GET /v1/models for what is served"
_OLLAMA = "of Ollama's API there are /api/chat, /api/generate, /api/show, /api/tags, /api/ps and /api/version"
_DOCUMENT = "GET /openapi.json describes the API, and GET /v1/models lists what is served"
_OF_TEXT = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize"}
    | {"/api/chat", "/api/generate", "/api/tags", "/api/show", "/tokenizer_info"}
)
_OF_VECTORS = frozenset({"/v1/embeddings", "/v1/rerank", "/rerank", "/api/embed", "/api/embeddings"})
_OF_OTHER_SERVERS = ("/api/", "/v1/complete", "/v2/", "/generate", "/completion", "/chat", "/embed", "/infer")
"""The first parts of the paths of Ollama, Anthropic, llama-server, text-generation-inference and KServe."""


def advice(path: str, paths: Collection[str]) -> str:
    """The path to ask for in place of `path`. `paths`: those that this server has."""
    asked = path.rstrip("/")
    for near in (asked, f"/v1{asked}", asked.removeprefix("/v1")):
        if near in paths and near != path:
            return f"use {near}"
    if asked in _OF_TEXT:
        return "the model of this server makes vectors and no text: POST /v1/embeddings, or /v1/rerank"
    if asked in _OF_VECTORS:
        return (
            "no embedding model is served here: start a server for one, phasewise serve EMBEDDING_MODEL; "
            "a server of one language model also takes --embed-model"
        )
    if asked == "":
        main = "/v1/chat/completions" if "/v1/chat/completions" in paths else "/v1/embeddings"
        return f"POST {main}; {_DOCUMENT}"
    if asked == "/v1":
        return f"it is where the API begins, the base_url of a client: {_DOCUMENT}"
    if path.startswith("/api/") and "/api/chat" in paths:
        return _OLLAMA
    if path.startswith(_OF_OTHER_SERVERS) and "/v1/chat/completions" in paths:
        return _OPENAI
    return _DOCUMENT
