"""The text and the usage that an answer shows, held against the tokens of its receipt.

A receipt says which tokens the model chose; what a person reads is the text beside it. A chat's answer may be
divided into thoughts, calls and text, by the format of its model or by one that an operator chose, so each
way of reading the tokens is tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from phasewise.serving.engine.live_request import AnswerText
from phasewise.serving.sampling.sampling import SampledToken
from phasewise.serving.tools.dialect import FORMATS, dialect_of
from phasewise.serving.tools.parts import Begun, Call, Piece, Reader, Reasoning, Text

if TYPE_CHECKING:
    from phasewise.serving.engine.open_engine import ModelText
    from phasewise.serving.engine.receipts import Receipt


Json = dict[str, Any]
Shown = tuple[str, str, list[tuple[str, str]]]
"""The parts of a shown answer: text, thoughts, and the names and arguments of calls."""


def says_its_tokens(choice: Json, receipt: Receipt, text: ModelText, ends: frozenset[int]) -> bool:
    """True unless a choice of an answer shows something else than its receipt's tokens."""
    given = _given_text(receipt, text, ends)
    if "text" in choice:
        said = choice["text"]
        if said != given and not (isinstance(said, str) and _is_echo(said, given, receipt, text)):
            return False
    reason = choice.get("finish_reason", receipt.finish_reason)
    if "message" not in choice:
        return bool(reason == receipt.finish_reason)
    shown = _shown_by(choice["message"])
    if shown is None or reason not in (receipt.finish_reason, "tool_calls" if shown[2] else None):
        return False
    readers = _readers(shown, receipt, text)
    return shown == (given, "", []) or any(shown == _read(reader, given) for reader in readers)


def _given_text(receipt: Receipt, text: ModelText, ends: frozenset[int]) -> str:
    """The answer's text as the server gave it out: up to a stop text, without the end token."""
    settings, ids = receipt.settings, receipt.token_ids
    answer = AnswerText(text.open_stream(frozenset(settings.shown)), settings.stop)
    has_end = ids[-1] in ends.union(settings.ends) and not settings.ignore_eos
    for token_id in ids[:-1] if has_end else ids:
        answer.push(SampledToken(token_id))
        if answer.stopped:
            break
    return answer.take(finished=True)[0]


def _is_echo(said: str, given: str, receipt: Receipt, text: ModelText) -> bool:
    """True if `said` is the prompt with the answer behind it."""
    if not said.endswith(given):
        return False
    echoed, prompt = said[: len(said) - len(given)], list(receipt.prompt_token_ids)
    if any(text.tokenizer.encode(echoed, add_special) == prompt for add_special in (True, False)):
        return True
    stream = text.open_stream()
    return echoed == "".join(map(stream.push, prompt)) + stream.flush()


def _shown_by(message: Any) -> Shown | None:
    """The parts of a message; None for any other JSON value."""
    try:
        content, thoughts = message.get("content") or "", message.get("reasoning_content") or ""
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        called = [(call["name"], call["arguments"]) for call in calls]
    except (TypeError, KeyError, AttributeError):
        return None
    parts = [content, thoughts, *(part for call in called for part in call)]
    return (content, thoughts, called) if all(isinstance(part, str) for part in parts) else None


def _readers(shown: Shown, receipt: Receipt, text: ModelText) -> Iterator[Reader]:
    """Each way in which a server may have read the answer, by its format and what it was told of calls."""
    tokenizer = text.tokenizer
    called: dict[str, Any] = {name: {} for name, _ in shown[2]}
    turn = text.conversations.turn if text.has_template else None
    for forced in ("auto", *FORMATS):
        dialect = dialect_of(text.chat_template or "", tokenizer.id_of, tokenizer.special_ids, forced, turn)
        in_thought = dialect.opens_thought(receipt.prompt_token_ids, tokenizer.piece)
        for functions in (called,) if called else (None, called):
            for is_held in (False, True):
                yield dialect.reader(functions, in_thought=in_thought, calls_are_held=is_held)


def _read(reader: Reader, given: str) -> Shown:
    content, thoughts = "", ""
    calls: list[tuple[str, str]] = []
    for part in (*reader.feed(given), *reader.finish()):
        match part:
            case Reasoning(text=thought):
                thoughts += thought
            case Text(text=words):
                content += words
            case Call(name=name, arguments=arguments):
                calls.append((name, arguments))
            case Begun(name=name):
                calls.append((name, ""))
            case Piece(text=piece) if calls:
                calls[-1] = (calls[-1][0], calls[-1][1] + piece)
    return content, thoughts, calls


def usage_counts_its_tokens(answer: Json) -> bool:
    """False where the usage of a whole answer states other counts than its receipts have tokens.

    The tokens of a prompt count once for all its choices, and a receipt does not say how many those are:
    each number of choices per prompt is tried that the prompts allow. An event of a stream may state the
    usage of other events too, and is not looked at.
    """
    choices, usage = answer["choices"], answer.get("usage")
    try:
        if usage is None or not any("text" in choice or "message" in choice for choice in choices):
            return True
        receipts = [choice["receipt"] for choice in sorted(choices, key=lambda choice: int(choice["index"]))]
        prompts = [receipt["prompt_token_ids"] for receipt in receipts]
        n_generated = sum(len(receipt["token_ids"]) for receipt in receipts)
        return any(
            _states(usage, sum(map(len, prompts[::n_each])), n_generated)
            for n_each in range(1, len(prompts) + 1)
            if len(prompts) % n_each == 0
            and all(prompt == prompts[place - place % n_each] for place, prompt in enumerate(prompts))
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        return False


def _states(usage: Json, n_prompt: int, n_generated: int) -> bool:
    counts = (
        (usage["prompt_tokens"], n_prompt),
        (usage["completion_tokens"], n_generated),
        (usage["total_tokens"], n_prompt + n_generated),
    )
    prompt, answer = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    parts = (
        ((prompt or {}).get("cached_tokens", 0), n_prompt),
        ((answer or {}).get("accepted_prediction_tokens", 0), n_generated),
    )
    return all(type(stated) is int and stated == counted for stated, counted in counts) and all(
        type(stated) is int and 0 <= stated <= most for stated, most in parts
    )
