"""Quality of a model in several formats of weights, or of keys and values, beside a reference.

    python benchmarks/perplexity.py smollm2-135m-instruct --formats f32,bf16,int8,native
    python benchmarks/perplexity.py smollm2-135m-instruct --formats native --kv-formats f32,f16,bf16,int8
    python benchmarks/perplexity.py K_QUANTS.gguf --formats f32,native --arithmetics groups,blocks

A line for each combination, with the figures of `phasewise eval MODEL --against REFERENCE` on the text that
is shipped: perplexity as llama-perplexity measures it and its ratio to the reference's, the mean
Kullback-Leibler divergence, the root mean square of the change of a token's probability, and how often both
find the same token likeliest.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import Annotated, Any

from typer import Option

from benchmarks.harness import Model, Yielded, commands, listed, note
from phasewise.workflows.evaluate.run import TEXT, evaluate
from phasewise.workflows.evaluate.settings import EvalSettings

TEXT_SHA256 = "af94397088d12541d0e19740f18732ad244bfa272b77d43205aee4c34c006028"
N_TOKENS = 20_480
WINDOW_TOKENS = 512


def english_text() -> str:
    """The fixed text; a changed one is refused."""
    raw = TEXT.read_bytes()
    if hashlib.sha256(raw).hexdigest() != TEXT_SHA256:
        raise SystemExit(f"{TEXT} is not the text that the stored figures were measured on; restore it")
    return raw.decode()


def formats(
    model: Model,
    weights: Annotated[str, Option("--formats", help="native, f32, bf16, int8, int4")] = "bf16,int8,native",
    kv_formats: Annotated[str, Option(help="auto, f32, f16, bf16, int16, int8, int4")] = "auto",
    arithmetics: Annotated[str, Option(help="tuned, canonical, groups, blocks")] = "tuned",
    against: Annotated[str, Option(help="the reference: a format, or a model")] = "f32",
    tokens: Annotated[int, Option(help="of the text, in chunks of 512")] = N_TOKENS,
    threads: Annotated[int | None, Option()] = None,
) -> Yielded:
    choices: list[list[Any]] = [listed(weights), listed(kv_formats), listed(arithmetics)]
    for name, kv_format, arithmetic in itertools.product(*choices):
        settings = EvalSettings(
            against=against,
            chunks=tokens // WINDOW_TOKENS,
            threads=threads,
            weight_format=name,
            kv_format=kv_format,
            arithmetic=arithmetic,
        )
        evaluation = evaluate(model, settings, report=note)
        if not evaluation.is_whole or evaluation.text is None or evaluation.text.divergence is None:
            raise KeyboardInterrupt
        beside = evaluation.text.divergence
        yield {
            "format": name,
            "KV": evaluation.kv_format,
            "arithmetic": arithmetic,
            "perplexity": f"{evaluation.text.perplexity.value:.4f}",
            "ratio": f"{beside.ratio.value:.6f} +/- {beside.ratio.error:.6f}",
            "KL divergence": f"{beside.kl.value:.6f} +/- {beside.kl.error:.6f}",
            "RMS of p": f"{100 * beside.delta_p_rms.value:.3f}%",
            "same token": f"{100 * beside.same_top.value:.2f}%",
        }


app = commands(__doc__, formats)

if __name__ == "__main__":
    app()
