"""Heads that draft, beside tiny models of `family_models`: random ones, and some that are right by
construction."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support.models import family_cases, family_gguf_files
from tests.support.models import family_models as families
from tests.support.models.reference_models import raw_values
from tests.support.models.tiny_models import safetensors_bytes

BACK = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")
"""Ends of names of what leads from halves of layers back to the stream."""
OF_LAYER = ("glm4_moe", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite")
"""Types of models whose head is a layer behind the last one."""


def write_with_head(folder: Path, name: str, branches: float | None = None) -> dict[str, np.ndarray]:
    """A directory of the family's model with a head; its tensors by the names of the files.

    branches: None: all of the head is random. Else the halves of all layers give so much of what they gave,
    and the head's input is the embedding alone: the next token depends nearly on the last one only, and the
    head says what the model says."""
    n_layers = family_cases.FAMILY_CASES[name].fields["num_hidden_layers"]
    families.write_family_hf(folder, name, {"num_nextn_predict_layers": 1})
    weights = {**families.family_weights(name), **_head_weights(name, n_layers)}
    if branches is not None:
        _agree(weights, name, branches, n_layers)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(weights))
    return weights


def head_names(name: str, n_layers: int) -> dict[str, str]:
    """Names in the files of a head's projection, norms and layer."""
    if family_cases.FAMILY_CASES[name].fields["model_type"] in OF_LAYER:
        stem = f"model.layers.{n_layers}."
        return {
            "projection": f"{stem}eh_proj.weight",
            "embed_norm": f"{stem}enorm.weight",
            "rows_norm": f"{stem}hnorm.weight",
            "last_norm": f"{stem}shared_head.norm.weight",
            "layer": stem,
        }
    return {
        "projection": "mtp.fc.weight",
        "embed_norm": "mtp.pre_fc_norm_embedding.weight",
        "rows_norm": "mtp.pre_fc_norm_hidden.weight",
        "last_norm": "mtp.norm.weight",
        "layer": "mtp.layers.0.",
    }


def _head_weights(name: str, n_layers: int) -> dict[str, np.ndarray]:
    """A layer of the shapes of the model's last one that attends, and what comes before and behind it."""
    own, names = families.family_weights(name), head_names(name, n_layers)
    hidden = family_cases.FAMILY_CASES[name].fields["hidden_size"]
    less = 1 if family_cases.FAMILY_CASES[name].unit_norms else 0
    last = max(layer for layer in range(n_layers) if f"model.layers.{layer}.self_attn.o_proj.weight" in own)
    stem = f"model.layers.{last}."
    weights = {
        names["layer"] + tensor.removeprefix(stem): raw_values(f"{name}/head/{tensor}", values.shape)
        - (less if "norm" in tensor else 0)
        for tensor, values in own.items()
        if tensor.startswith(stem)
    }
    weights[names["projection"]] = raw_values(f"{name}/head/projection", (hidden, 2 * hidden))
    for norm in ("embed_norm", "rows_norm", "last_norm"):
        weights[names[norm]] = raw_values(f"{name}/head/{norm}.norm", (hidden,)) - less
    if names["layer"] != "mtp.layers.0.":  # copies, as published files have them
        weights[f"{names['layer']}embed_tokens.weight"] = own["model.embed_tokens.weight"]
        weights[f"{names['layer']}shared_head.head.weight"] = own["lm_head.weight"]
    return {tensor: np.asarray(values, np.float32) for tensor, values in weights.items()}


def _agree(weights: dict[str, np.ndarray], name: str, branches: float, n_layers: int) -> None:
    names = head_names(name, n_layers)
    for tensor in weights:
        if tensor.endswith(BACK):
            weights[tensor] = weights[tensor] * np.float32(branches)
    hidden = len(weights["model.norm.weight"])
    weights[names["projection"]] = np.concatenate([np.eye(hidden), np.zeros((hidden, hidden))], 1).astype(
        np.float32
    )
    less = 1 if family_cases.FAMILY_CASES[name].unit_norms else 0
    weights[names["embed_norm"]] = np.full(hidden, 1 - less, np.float32)
    weights[names["last_norm"]] = weights["model.norm.weight"]


def write_gguf_with_head(path: Path, name: str) -> Path:
    """The same model with a random head, as llama.cpp's converter would write it."""
    n_layers = family_cases.FAMILY_CASES[name].fields["num_hidden_layers"]
    names, stem = head_names(name, n_layers), f"model.layers.{n_layers}."
    ends = {
        "projection": "eh_proj",
        "embed_norm": "enorm",
        "rows_norm": "hnorm",
        "last_norm": "shared_head.norm",
    }
    renamed = {theirs: f"{stem}{ends[part]}.weight" for part, theirs in names.items() if part in ends}
    head = {
        renamed.get(tensor, tensor.replace(names["layer"], stem)): values
        for tensor, values in _head_weights(name, n_layers).items()
        if not tensor.endswith(("embed_tokens.weight", "shared_head.head.weight"))
    }
    return family_gguf_files.write_family_gguf(path, name, head)
