"""What the OpenAI API accepts, and what phasewise adds. Types are strict; unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

StopText = Annotated[str, Field(min_length=1, max_length=256)]
Stop = StopText | Annotated[list[StopText], Field(max_length=16)]
TokenIds = Annotated[list[int], Field(min_length=1)]
Prompt = (
    str
    | TokenIds
    | Annotated[list[str], Field(min_length=1)]
    | Annotated[list[TokenIds], Field(min_length=1)]
)


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool = False


class GenerationRequest(Strict):
    """What completions and chat have in common. The last five fields are extensions."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = Field(None, description="0 and -1: no limit")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    ignore_eos: bool = False


class CompletionRequest(GenerationRequest):
    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def unsupported(self) -> str | None:
        """The name of a field that asks for what is not offered."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            return "best_of"
        return "echo" if self.echo else "suffix" if self.suffix else None


class ContentPart(Strict):
    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[ContentPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """As templates want it: the content as one text."""
        parts = self.content if isinstance(self.content, list) else []
        text = "".join(part.text for part in parts) if parts else self.content or ""
        return {**(self.model_extra or {}), "role": self.role, "content": text}


class ResponseFormat(Strict):
    type: str


class ChatRequest(GenerationRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None

    def unsupported(self) -> str | None:
        """The name of a field that asks for what is not offered."""
        if self.response_format is not None and self.response_format.type != "text":
            return "response_format"
        return "tools" if self.tools else "functions" if self.functions else None
