"""Make reference/adapters.json: logits of transformers with PEFT for adapters of a tiny model.

Run where torch, transformers and peft are installed: `python tests/data/make_adapters.py`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))


def main() -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from tests.support.models.adapters import CASES, REFERENCE, TINY_CASE, write_case
    from tests.support.models.reference_models import tiny_prompts, write_tiny_case

    prompt = tiny_prompts(TINY_CASE)[2]
    logits: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        base = write_tiny_case(Path(folder) / "base", TINY_CASE)
        for name in CASES:
            model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
            adapted = PeftModel.from_pretrained(model, write_case(Path(folder) / name, name)).float()
            rows = adapted(torch.tensor([prompt])).logits[0]
            logits[name] = {
                "last": [float(f"{x:.7g}") for x in rows[-1].tolist()],
                "chosen": rows.argmax(-1).tolist(),
            }
    REFERENCE.write_text(json.dumps(logits, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
