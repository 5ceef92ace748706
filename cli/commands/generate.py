"""`phasewise generate`: text from a prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasewise._options import argument, changed, option, refuse_unused
from phasewise._words import counted
from phasewise.cli.options import EXPLAIN, JsonOption, ModelArgument
from phasewise.cli.present import note, print_json, read_stdin, write_text
from phasewise.workflows.generate.answer_settings import AnswerSettings, SamplingChoice, prompt_from
from phasewise.workflows.options import DB

if TYPE_CHECKING:
    from phasewise.workflows.generate.run import Generated
    from phasewise.workflows.opening.drafts import DraftRule
    from phasewise.workflows.opening.memory_placement import MemoryPlacement
    from phasewise.workflows.opening.tuned_schedules import ScheduleUse


def generate(
    model: ModelArgument,
    settings: AnswerSettings,
    sampling: SamplingChoice,
    text: str | None = argument(None, "the prompt; -: read it from stdin", "TEXT"),
    prompt: str | None = option(None, "the prompt; -: read it from stdin", "-p", "--prompt", metavar="TEXT"),
    file: Path | None = option(None, "read the prompt from a UTF-8 file", "-f", "--file", metavar="FILE"),
    db: str | None = DB(None),
    explain: bool = EXPLAIN(False),
    as_json: JsonOption = False,
) -> None:
    """Continue a text, or with --chat answer a message.

    $ phasewise generate smollm2-135m-instruct -p 'The capital of France is'
    $ phasewise generate model.gguf --chat -p 'What is a cache?' --temperature 0.7

    The text goes to stdout as it is made, one line of times to stderr.

    The prompt is taken as it is, as by llama.cpp's -p. Special tokens written
    in it are recognised. Without a prompt it is read from stdin, unless that
    is a terminal. Without --temperature the likeliest token is chosen always.
    """
    from phasewise.cli.explain_text import uses_text
    from phasewise.workflows.generate.run import generate_text

    if sampling.temperature is None:
        choosing = changed(sampling, "top_k", "top_p", "min_p", "seed")
        refuse_unused("without --temperature", choosing, "the likeliest token is chosen always; add one")
    explained: dict[str, Any] = {}

    def tell(uses: list[ScheduleUse], memory: MemoryPlacement | None, drafts: DraftRule | None) -> None:
        explained.update(schedules=uses, memory=memory, draft_rule=drafts)
        note(uses_text(uses, memory, drafts))

    generated = generate_text(
        model,
        _prompt(text, prompt, file),
        settings,
        sampling,
        db=db,
        on_text=(lambda piece: None) if as_json else write_text,
        report=note,
        explain=tell if explain else None,
    )
    if as_json:
        print_json(generated.fields() | explained)
    else:
        write_text("\n")
        note(_summary(generated))


def _prompt(text: str | None, prompt: str | None, file: Path | None) -> str:
    is_given = not (text is None and prompt is None and file is None)
    chosen = prompt_from(text, prompt, file, None if is_given or sys.stdin.isatty() else read_stdin())
    return read_stdin() if chosen == "-" and is_given and file is None else chosen


def _summary(generated: Generated) -> str:
    answer = generated.answer
    prompt = counted(len(answer.request.prompt_token_ids), "prompt token")
    parts = [f"{prompt}, first token after {answer.ttft_ms:.0f} ms", counted(answer.n_generated, "token")]
    if answer.tokens_per_second is not None:
        parts.append(f"{answer.tokens_per_second:.1f} tokens/s")
    accepted, rejected = answer.drafts or (0, 0)
    if accepted + rejected:
        parts.append(f"{accepted} of {accepted + rejected} drafted tokens accepted")
    if generated.is_cut:
        parts.append(f"cut at {counted(generated.n_tokens, 'token')} (-n allows more)")
    return "; ".join(parts)
