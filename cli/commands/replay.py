"""`phasewise replay`: check receipts of answers."""

from __future__ import annotations

import sys
from pathlib import Path

from phasewise._options import REQUIRED, argument, option
from phasewise._words import counted
from phasewise.cli.options import JsonOption
from phasewise.cli.present import EXIT_REFUSED, note, on_one_line
from phasewise.cli.tables import present
from phasewise.workflows.opening.settings import ReadWeights
from phasewise.workflows.options import ModelCores


def replay(
    *,
    receipts: list[Path] = argument(
        REQUIRED, "files with receipts, with answers, or with lines of them", "RECEIPT"
    ),
    model: str = option(
        REQUIRED, "a known name, a GGUF file, a Hugging Face directory or a hub name", metavar="MODEL"
    ),
    weights: ReadWeights,
    placement: ModelCores,
    as_json: JsonOption = False,
) -> None:
    """Confirm that answers are the model's, or name the first token that is not.

    $ phasewise replay answer.json --model smollm2-135m-instruct
    $ phasewise replay answers/*.json --model model.gguf

    A receipt is what `serve --receipts` gives with an answer. Prompt and
    answer are computed together in one prefill, every token is chosen again
    with the recorded settings and seed, and the digests of the logits are
    compared; so are the text and the usage of an answer with its tokens.

    Each receipt is judged by itself, by the name of its file. The exit code
    is 0 if every receipt is confirmed, and 3 if any is refused.
    """
    from phasewise.workflows.replay.run import replay_files

    verdicts = replay_files(receipts, model, weights, placement, report=note)
    n_refused = sum(not verdict.is_confirmed for verdict in verdicts)
    n_confirmed = len(verdicts) - n_refused
    lines = []
    for verdict in verdicts:
        name = f"{on_one_line(verdict.source)} {on_one_line(verdict.request_id)}".rstrip()
        if verdict.is_confirmed:
            lines.append(f"confirmed: {name}: {counted(verdict.n_tokens, 'token')}")
        else:
            lines.append(f"refused: {name}: {on_one_line('; '.join(verdict.problems))}")
    lines.append(f"{counted(len(verdicts), 'receipt')}: {n_confirmed} confirmed, {n_refused} refused")
    receipts_told = [verdict.to_json() for verdict in verdicts]
    fields = {"confirmed": n_confirmed, "refused": n_refused, "receipts": receipts_told}
    present(as_json, fields, lines)
    if n_refused:
        sys.exit(EXIT_REFUSED)
