"""`phasewise generate`: text from a prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phasewise.cli.options import (
    DbOption,
    DraftOption,
    ExplainOption,
    FormatOption,
    JsonOption,
    KvFormat,
    KvFormatOption,
    ModelArgument,
    ThreadsOption,
    WeightFormat,
)
from phasewise.cli.present import note, note_plans, print_json, read_stdin
from phasewise.workflows.drafts import find_drafts
from phasewise.workflows.open_model import open_model

if TYPE_CHECKING:
    from phasewise.serving.one_answer import OneAnswer
    from phasewise.serving.open_engine import OpenEngine


PromptOption = Annotated[
    str, typer.Option("-p", "--prompt", help="the text to continue; - reads it from stdin")
]


def generate(
    model: ModelArgument,
    prompt: PromptOption,
    n_tokens: Annotated[int, typer.Option("-n", "--n-tokens", min=1, help="generate at most N tokens")] = 64,
    weight_format: FormatOption = WeightFormat.native,
    kv_format: KvFormatOption = KvFormat.auto,
    threads: ThreadsOption = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always choose the likeliest token")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="choose among the K likeliest tokens")] = None,
    top_p: Annotated[
        float, typer.Option(help="keep the likeliest tokens whose probabilities sum to P")
    ] = 1.0,
    min_p: Annotated[float, typer.Option(help="drop tokens less likely than P times the likeliest")] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="above 1: make tokens that occurred before less likely")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same text")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="end the answer before this text [repeatable]")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="do not end at the end token")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="apply the chat template to the prompt")] = False,
    draft: DraftOption = None,
    db: DbOption = None,
    explain: ExplainOption = False,
    as_json: JsonOption = False,
) -> None:
    """Continue a text, or with --chat answer a message.

    The text goes to stdout as it is made, one line of times to stderr.

    The prompt is taken as it is, as by llama.cpp's -p. Special tokens written
    in it are recognised.
    """
    from phasewise.cli.render.explain_text import uses_fields, uses_text
    from phasewise.serving.messages import Submit
    from phasewise.serving.one_answer import OneAnswer
    from phasewise.serving.open_engine import EngineSize, ModelText, open_engine
    from phasewise.serving.sampling import SamplingParams

    if "" in (stop or ()):
        raise typer.BadParameter("a stop text must not be empty")
    sampling = SamplingParams(temperature, top_k, top_p, min_p, seed, repetition_penalty)
    text = read_stdin() if prompt == "-" else prompt
    found = open_model(model, weight_format, threads, db, note)
    note_plans(found.plans)
    drafts = find_drafts(draft, found, db, note)
    packed = found.model
    model_text = ModelText(packed)
    prompt_ids = tuple(model_text.chat_prompt(text) if chat else model_text.encode(text, True))
    size = replace(EngineSize.for_one(packed, len(prompt_ids), n_tokens), kv_format=kv_format.value)
    uses = None
    if explain:
        uses = found.explain(size.max_batch_tokens, size.max_sequences, kv_format)
        note(uses_text(uses))
    answer = OneAnswer(Submit("generate", prompt_ids, n_tokens, sampling, tuple(stop or ()), ignore_eos))
    with open_engine(packed, found.plans, size, model_text, found.schedules, drafts=drafts) as opened:
        for piece in answer.pieces(opened.engine):
            if not as_json:
                typer.echo(piece.encode("utf-8"), nl=False)
    if as_json:
        print_json(_fields(answer, opened) | ({} if uses is None else {"schedules": uses_fields(uses)}))
    else:
        typer.echo()
        note(_summary(answer))


def _fields(answer: OneAnswer, opened: OpenEngine) -> dict[str, Any]:
    from phasewise.cython_kernels._native import isa_active
    from phasewise.workflows.plan_json import plan_cores

    return {
        "model": opened.model.name,
        "format": opened.model.format,
        "isa": isa_active(),
        "plan": plan_cores(opened.plans),
        "text": answer.text,
        "prompt_token_ids": list(answer.request.prompt_token_ids),
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "ttft_ms": answer.ttft_ms,
        "tpot_ms": answer.tpot_ms,
        "tokens_per_second": answer.tokens_per_second,
        "drafts": None if answer.drafts is None else answer.drafts._asdict(),
    }


def _summary(answer: OneAnswer) -> str:
    parts = [
        f"{len(answer.request.prompt_token_ids)} prompt tokens, first token after {answer.ttft_ms:.0f} ms",
        f"{answer.n_generated} tokens",
    ]
    if answer.tokens_per_second is not None:
        parts.append(f"{answer.tokens_per_second:.1f} tokens/s")
    if answer.drafts is not None:
        accepted, rejected = answer.drafts
        parts.append(f"{accepted} of {accepted + rejected} drafted tokens accepted")
    return "; ".join(parts)
