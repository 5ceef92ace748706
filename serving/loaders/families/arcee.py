"""Arcee (AFM): a Llama whose feed-forward layers have no gate: down(relu(up(x))^2)."""

from phasewise.serving.loaders.families.family import Family

ARCEE = Family(
    "arcee",
    hf=("arcee",),
    gguf=("arcee",),
    hf_defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    activation="relu2",
    gated=False,
    gguf_interleaved_heads=True,
)
