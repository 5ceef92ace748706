"""Make tests/data/reference/embeddings.npz with sentence-transformers, in float32 on one thread.

    python tests/data/make_embeddings.py [--minilm DIRECTORY]

Runs by hand, in an environment that has sentence-transformers; the tests only read what it leaves: vectors
and scores of the tiny models of tests/support/models/encoder_models.py, and vectors of all-MiniLM-L6-v2.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from tests.support.models.encoder_models import CASES, PAIRS, TEXTS, write_encoder  # noqa: E402


def vectors_of(directory: Path) -> np.ndarray:
    """float32 [texts, hidden]."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(directory), device="cpu")
    return np.stack([model.encode(text) for text in TEXTS])  # one by one: no padding


def scores_of(directory: Path) -> np.ndarray:
    """Logits of pairs, float32 [pairs]."""
    import torch
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(directory), device="cpu")
    return np.array(
        [model.predict([pair], activation_fn=torch.nn.Identity())[0] for pair in PAIRS], dtype=np.float32
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minilm", type=Path, help="directory of all-MiniLM-L6-v2")
    options = parser.parse_args()
    found: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            directory = write_encoder(Path(folder) / name, name)
            found[name] = scores_of(directory) if case.pooling is None else vectors_of(directory)
    if options.minilm is not None:
        found["all-minilm-l6-v2"] = vectors_of(options.minilm)
    made_with = [f"{name} {version(name)}" for name in ("sentence-transformers", "transformers", "torch")]
    np.savez_compressed(
        ROOT / "tests/data/reference/embeddings.npz",
        allow_pickle=False,
        made_with=np.array(made_with),
        **found,
    )
    for name, values in found.items():
        print(name, values.shape, values.ravel()[:3])


if __name__ == "__main__":
    main()
