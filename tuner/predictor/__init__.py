"""Prediction of an answer's length from its prompt, trained and run with numpy alone.

`log` reads facts of requests; `features` turns them into numbers, `network` into scores of length bins;
`train` fits the network; `distribution` reads lengths from the scores; `model` is the trained predictor,
`files` stores it, `live` follows finished answers. `evaluate` compares it with S3's fixed buckets (decision
0022)."""

from __future__ import annotations

from pathlib import Path

from phasewise._places import user_folder

SUFFIX = ".predictor.safetensors"


def default_file(model_name: str) -> Path:
    """The path of a model's predictor, in the XDG data directory."""
    safe = "".join(letter if letter.isalnum() or letter in "-._" else "_" for letter in model_name)
    return user_folder("data") / "predictors" / f"{safe.lstrip('.') or 'model'}{SUFFIX}"
