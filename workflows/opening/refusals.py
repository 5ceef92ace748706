"""Settings that a model cannot have, refused before it is read."""

from __future__ import annotations

from phasewise.workflows.opening.open_model import Weights
from phasewise.workflows.report import Report, silent


def check_settings(ref: str, weights: Weights, kv_format: str = "auto", report: Report = silent) -> None:
    """ModelError for a format of keys and values, or for adapters, that the model `ref` cannot have.

    The head of its files says that, which is read where there is a model that could not have them.
    """
    from phasewise.serving.models.parts.latent import LATENT_KV_FORMATS, check_kv_format

    may_have = ("auto", *LATENT_KV_FORMATS)
    if kv_format in may_have and not weights.lora:
        return
    from phasewise.serving.loaders import config_of_model
    from phasewise.serving.loaders.fetching.resolve import cache_root, locate

    config = config_of_model(ref, weights.weight_format, report=report)
    if kv_format not in may_have:
        check_kv_format(config.latent, locate(ref, cache_root(None), report).name, kv_format)
    if weights.lora:
        from phasewise.serving.loaders.adapters.load_adapter import check_takes_adapters
        from phasewise.serving.loaders.adapters.named_paths import named_paths

        for _, path in named_paths(weights.lora):
            check_takes_adapters(config, path)
