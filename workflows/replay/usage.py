"""The usage that an answer states, held against the tokens of its receipts."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


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
