"""Schemas of the OpenAI API's requests, and of phasewise's extensions. Types are strict. Unknown fields are
ignored, and named in the answer's header X-Ignored-Fields. Long lists stop at their first error, and a union
is decided by the value's type (`kind_of`): otherwise a body of some megabytes would be tried against each
member and every error be recorded, while all answers wait."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationError,
    WithJsonSchema,
)

from phasewise.serving.grammar.grammar_limits import MOST_CHOICES, MOST_TEXT_CHARACTERS
from phasewise.serving.http.errors import bad_request, from_validation

_MOST_PROMPTS = 1024
_MOST_STOPS = 16
MOST_MESSAGES = 10_000
MOST_PARTS = 1024
_MOST_BIASES = 4096
MOST_INT = 2**31 - 1
MOST_LOGPROBS = 20


def kind_of(value: object) -> str:
    """The type name of a value; for a list, `list of` the type of its first item. Discriminates unions."""
    if isinstance(value, list):
        first = value[0] if value else ""
        return "list of list" if isinstance(first, list) else f"list of {kind_of(first)}"
    if isinstance(value, BaseModel):  # written out again
        return "dict"
    return type(value).__name__


def _biases(given: dict[str, Any]) -> dict[int, float]:
    if len(given) > _MOST_BIASES:
        raise ValueError(f"at most {_MOST_BIASES} tokens can have one")
    biases = {}
    for token, bias in given.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise ValueError(f"{token[:40]!r} is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError(f"the bias of token {token} must be a number from -100 to 100")
        biases[int(token)] = float(bias)
    return biases


# Python cannot even write an integer of thousands of digits: its limit for that raises ValueError.
AnswerTokens = Annotated[int, Field(ge=1, le=MOST_INT)]
ChoiceText = Annotated[str, Field(min_length=1, max_length=MOST_TEXT_CHARACTERS)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]
StopTexts = Annotated[list[StopText], Field(fail_fast=True, max_length=_MOST_STOPS)]
Stop = Annotated[
    Annotated[StopText, Tag("str")] | Annotated[StopTexts, Tag("list of str")], Discriminator(kind_of)
]
Temperature = Annotated[float, Field(ge=0, le=100)]
TopP = Annotated[float, Field(gt=0, le=1)]
MinP = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100)]
CacheSalt = Annotated[
    str,
    Field(
        min_length=1,
        max_length=256,
        description="keys and values of the prompt are reused only by requests with the same salt",
    ),
]
TokenIds = Annotated[list[int], Field(fail_fast=True, min_length=1)]
Prompt = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[TokenIds, Tag("list of int")]
    | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=_MOST_PROMPTS), Tag("list of str")]
    | Annotated[
        list[TokenIds], Field(fail_fast=True, min_length=1, max_length=_MOST_PROMPTS), Tag("list of list")
    ],
    Discriminator(kind_of),
]
_BIAS_SCHEMA = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "maxProperties": _MOST_BIASES,
}
LogitBias = Annotated[dict[Any, Any], AfterValidator(_biases), WithJsonSchema(_BIAS_SCHEMA)]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool = False


class NamedSchema(Strict):
    """A schema with a name. `strict` makes no difference: an answer always keeps the schema."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Strict):
    """vLLM's constraints on the answer, of which exactly one must be given."""

    json_: dict[str, Any] | None = Field(None, alias="json", description="a JSON schema")
    json_object: bool | None = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: (
        Annotated[list[ChoiceText], Field(fail_fast=True, min_length=1, max_length=MOST_CHOICES)] | None
    ) = None


Json = dict[str, Any]

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_MOST_NAMED = 16


class OpenRequest(Strict):
    """A body whose unknown fields are ignored, and named in the answer."""

    model_config = ConfigDict(extra="allow")

    not_offered: ClassVar[tuple[str, ...]] = ()
    """Unsupported fields of the API that would change the answer."""
    without_effect: ClassVar[frozenset[str]] = frozenset()
    """Unread fields of the API that change no answer here."""

    _left_out: set[str] = PrivateAttr(default_factory=set)

    def leave_out(self, names: Iterable[str]) -> None:
        """Add names of dropped parts of the request, for the answer's header."""
        self._left_out.update(names)

    def ignored(self) -> tuple[str, ...]:
        """Names of unknown fields and dropped parts that a header can carry: plain ones, at most 16."""
        silent = self.without_effect.union(self.not_offered)
        names = self._left_out.union(self.model_extra or ()).difference(silent)
        return tuple(sorted(filter(_PLAIN_NAME.fullmatch, names))[:_MOST_NAMED])


class AnswerRequest(OpenRequest):
    """A request that a model answers."""

    def unsupported(self) -> str | None:
        """Name of a given field that this server does not support; None if there is none."""
        given = self.model_extra or {}
        return next((name for name in self.not_offered if given.get(name)), None)

    def refuse_unsupported(self) -> None:
        """Raise ApiError for a field that would change the answer and is not supported."""
        field = self.unsupported()
        if field is not None:
            raise bad_request(f"{field} is not supported by this server", field, "unsupported_parameter")


class GenerationRequest(AnswerRequest):
    """The fields that completions and chat share. The last ten fields are extensions."""

    not_offered = (
        *("functions", "function_call", "audio", "web_search_options", "prediction", "suffix"),
        *("use_beam_search", "prompt_embeds", "stop_token_ids", "min_tokens", "bad_words"),
        *("allowed_token_ids", "length_penalty", "guided_json", "guided_regex", "guided_choice"),
        *("guided_grammar", "continue_final_message", "logits_processors", "return_token_ids"),
    )
    without_effect = frozenset(
        (
            *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
            *("verbosity", "prompt_cache_retention", "add_generation_prompt", "skip_special_tokens"),
            "moderation",
        )
    )

    model: str
    max_tokens: AnswerTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    top_k: Annotated[int, Field(ge=-1, le=MOST_INT)] | None = Field(None, description="0 and -1: no limit")
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    ignore_eos: bool = False
    cache_salt: CacheSalt | None = None
    receipt: bool = Field(
        False, description="each choice comes with a receipt that `phasewise replay` checks"
    )
    return_progress: bool = Field(
        False,
        description="llama-server's: events of a stream with `prompt_progress` while the prompt is computed",
    )
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = Field(
        None, description="vLLM's: log-probabilities of the prompt's tokens, and of the N likeliest"
    )

    @property
    def most_tokens(self) -> int | None:
        """Limit on the answer's tokens; None: the rest of the context."""
        return self.max_tokens

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Self:
        """Validate the fields that are not None. Raises ApiError."""
        try:
            return cls.model_validate({name: value for name, value in fields.items() if value is not None})
        except ValidationError as error:
            raise from_validation(error) from error


class CompletionRequest(GenerationRequest):
    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=MOST_INT)] | None = Field(
        None, description="0, with echo or prompt_logprobs: the prompt alone"
    )
    echo: bool | None = Field(
        None, description="true: the text begins with the prompt, and logprobs with those of its tokens"
    )
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = Field(None, description="the same as n, or absent")

    @property
    def most_tokens(self) -> int:
        """Limit on the answer's tokens, 16 by default as in OpenAI's API."""
        return 16 if self.max_tokens is None else self.max_tokens

    def unsupported(self) -> str | None:
        if self.best_of is not None and self.best_of != (self.n or 1):
            return "best_of"
        if (self.model_extra or {}).get("tools"):
            return "tools"
        return super().unsupported()


class DetokenizeRequest(OpenRequest):
    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]
