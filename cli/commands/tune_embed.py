"""`phasewise tune-embed`: instances, cores and queues for an embedding model under an SLO."""

from __future__ import annotations

from phasewise._options import option, parse_budget
from phasewise.cli.options import JsonOption, ModelArgument
from phasewise.cli.present import note, print_json, say_words
from phasewise.workflows.options import DB, EMBED_DEVICE_HELP, FORMAT


def tune_embed(
    model: ModelArgument,
    slo: str = option("1s", "promised time of an answer, e.g. 1s or 0.5s", metavar="TIME"),
    tokens: int = option(75, "tokens of a typical input", min=1),
    embed_device: list[str] | None = option(None, EMBED_DEVICE_HELP, metavar="exec:COMMAND"),
    embed_accelerators: bool = option(
        True, "also measure GPUs, by torch", "--embed-accelerators/--no-embed-accelerators"
    ),
    instances: int | None = option(
        None, "try at most N instances [default: cores]", min=1, max=256, metavar="N"
    ),
    weight_format: str = FORMAT("native"),
    db: str | None = DB(None),
    as_json: JsonOption = False,
) -> None:
    """Find how many inputs this host can embed at once within --slo, and how.

    $ phasewise tune-embed all-minilm-l6-v2
    $ phasewise tune-embed all-minilm-l6-v2 --format int8 --slo 500ms

    Measures each accelerator, then one, two, four and more instances of
    MODEL on the CPU while the accelerators work, and keeps the plan that
    `serve` then uses: devices, cores, and how much each queue may hold.
    """
    from phasewise.tuner.measurement_lock import user_lock
    from phasewise.workflows.embed.accelerators import accelerators_here
    from phasewise.workflows.embed.tune import tune_embed as tune

    accelerators = accelerators_here(with_gpus=embed_accelerators, devices=embed_device)
    with user_lock(note).turn():
        tuned = tune(model, weight_format, parse_budget(slo), tokens, instances, note, accelerators, db=db)
    if as_json:
        print_json(vars(tuned))
        return
    say_words(tuned.plan.describe())
    note(f"kept in {tuned.database}")
