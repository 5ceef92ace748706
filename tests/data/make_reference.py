"""Make the reference fixtures in tests/data/reference, with transformers, PyTorch and llama-cpp-python.

    python make_reference.py all --gguf SmolLM2-135M-Instruct.Q4_1.gguf

Runs by hand, in an environment of its own; the tests only read what it leaves. `tokens`: hashes of
llama.cpp's ids of ten thousand lines for every vocabulary; `model`: greedy tokens and logits of the default
model in float32; `tiny` and `families`: the same of tiny models of every architecture; `shapes`: tensors of
families that are new; `long`: of some of them after 8,192 tokens; `chats`: conversations rendered by
templates; `perplexity`: of the fixed English text; `converted`: what llama.cpp's converter writes of each
family (in the project's environment, with PHASEWISE_LLAMA_CPP and PHASEWISE_PEERS_PYTHON as `make test-files`
sets them). Token ids of the default model come from llama.cpp: transformers' import of a GGUF loses its pre-
tokenizer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from tests.support.models import reference_models as layout  # noqa: E402
from tests.support.models.mixed_text import mixed_lines  # noqa: E402
from tests.support.models.token_blocks import N_LINES, block_hashes  # noqa: E402

LONGEST_LIST = 64
PROMPT_LENGTHS = (
    5, 6, 8, 11, 15, 20, 27, 33, 48, 64, 65, 96, 127, 128, 200, 256, 400, 511, 700, 900,
)  # fmt: skip


def llama_ids(gguf: Path, texts: Sequence[str], add_special: bool = False) -> list[list[int]]:
    """llama.cpp's token ids."""
    from llama_cpp import Llama

    model = Llama(model_path=str(gguf), vocab_only=True, verbose=False)
    return [model.tokenize(text.encode(), add_bos=add_special, special=True) for text in texts]


def make_tokens(gguf: Path) -> None:
    """tokens.json: for every vocabulary, hashes of the ids of blocks of lines."""
    from tests.support.models.tiny_vocabs import TINY_VOCABULARIES, write_vocabulary

    lines = list(mixed_lines(N_LINES))
    blocks = {"smollm2-135m-instruct": block_hashes(llama_ids(gguf, lines, add_special=True))}
    with tempfile.TemporaryDirectory() as folder:
        for name, metadata in TINY_VOCABULARIES.items():
            path = Path(folder) / f"{name}.gguf"
            write_vocabulary(path, metadata())
            blocks[name] = block_hashes(llama_ids(path, lines, add_special=True))
    _write_json("tokens.json", {"made_with": _versions(), "blocks": blocks})


def load_gguf_model(gguf: Path) -> Any:
    """The default model with its weights dequantised to float32, as transformers imports them."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    return model.eval()


def greedy(model: Any, prompt: list[int], n_tokens: int) -> np.ndarray:
    """Logits [n_tokens, vocabulary]: row 0 follows the prompt, each later one the argmax before it."""
    import torch

    rows: list[np.ndarray] = []
    with torch.inference_mode():
        out = model(torch.tensor([prompt]), use_cache=True)
        for _ in range(n_tokens):
            rows.append(out.logits[0, -1].numpy().copy())
            token = torch.tensor([[int(rows[-1].argmax())]])
            if len(rows) < n_tokens:
                out = model(token, past_key_values=out.past_key_values, use_cache=True)
    return np.stack(rows)


def margins(logits: np.ndarray) -> np.ndarray:
    """By how much the best logit of each row beats the second."""
    best = np.sort(logits, axis=1)[:, -2:]
    return best[:, 1] - best[:, 0]


def _keep(
    arrays: dict[str, np.ndarray], key: str, model: Any, prompt: list[int], steps: Sequence[int]
) -> None:
    """Keep the greedy tokens after a prompt, up to the last step, their margins, and logits of the steps."""
    logits = greedy(model, prompt, steps[-1] + 1)
    arrays[f"{key}/tokens"] = logits.argmax(axis=1).astype(np.int32)
    arrays[f"{key}/margins"] = margins(logits)
    arrays[f"{key}/logits"] = logits[list(steps)]
    print(key, len(prompt), "margin", margins(logits).min(), np.abs(logits).max(), file=sys.stderr)


def make_model(gguf: Path) -> None:
    """smollm2-135m-instruct.npz: prompts, greedy tokens, margins, and some logits of some steps."""
    from perplexity import english_text

    (ids,) = llama_ids(gguf, [english_text()])
    model = load_gguf_model(gguf)
    prompts = [ids[index * 997 : index * 997 + length] for index, length in enumerate(PROMPT_LENGTHS)]
    steps = list(layout.CHECKED_STEPS)
    kept: dict[str, list[np.ndarray]] = {
        key: [] for key in ("tokens", "margins", "largest", "top_ids", "top", "spread")
    }
    for prompt in prompts:
        logits = greedy(model, prompt, layout.N_GREEDY)
        checked = logits[steps]
        top_ids = np.argsort(-checked, axis=1)[:, : layout.N_TOP]
        kept["tokens"].append(logits.argmax(axis=1).astype(np.int32))
        kept["margins"].append(margins(logits))
        kept["largest"].append(np.abs(checked).max(axis=1))
        kept["top_ids"].append(top_ids.astype(np.int32))
        kept["top"].append(np.take_along_axis(checked, top_ids, axis=1))
        kept["spread"].append(checked[:, layout.spread_ids(logits.shape[1])])
        print(len(prompt), "margin", kept["margins"][-1].min(), file=sys.stderr)
    arrays = {key: np.stack(values) for key, values in kept.items()}
    arrays["prompts"] = np.array([token for prompt in prompts for token in prompt], np.int32)
    arrays["prompt_lengths"] = np.array([len(prompt) for prompt in prompts], np.int32)
    np.savez_compressed(layout.FIXTURES / "smollm2-135m-instruct.npz", **arrays)


def make_tiny() -> None:
    """tiny_models.npz: per model and prompt the greedy tokens, their margins, logits of some steps."""
    import torch
    from transformers import AutoModelForCausalLM

    arrays: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in layout.TINY_CASES:
            path = layout.write_tiny_case(Path(folder) / name, name)
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            expected = set(model.state_dict()) - (
                {"lm_head.weight"} if model.config.tie_word_embeddings else set()
            )
            assert expected == set(layout.tiny_case_weights(name)), name
            for index, prompt in enumerate(layout.tiny_prompts(name)):
                _keep(arrays, f"{name}/{index}", model, prompt, layout.CHECKED_TINY_STEPS)
    np.savez_compressed(layout.FIXTURES / "tiny_models.npz", **arrays)


def make_shapes(only: str) -> None:
    """family_shapes.json: by family, the shapes of tensors as transformers saves them, of experts the first
    one's, of the family that `--only` names and of those that the file lacks."""
    import torch
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from tests.support.models import family_cases

    path = layout.FIXTURES / "family_shapes.json"
    recorded: dict[str, Any] = json.loads(path.read_text())
    for name in (name for name in family_cases.ALL_CASES if only == name or name not in recorded):
        fields = dict(family_cases.ALL_CASES[name].fields)
        with tempfile.TemporaryDirectory() as folder, torch.device("cpu"):
            kind, auto = fields.pop("model_type"), AutoModelForCausalLM
            if "vision_config" in fields:
                auto = AutoModelForImageTextToText
                fields = {"vision_config": fields.pop("vision_config"), "text_config": fields}
            auto.from_config(AutoConfig.for_model(kind, **fields)).save_pretrained(folder)
            with safe_open(Path(folder) / "model.safetensors", "np") as file:
                shapes = {tensor: file.get_slice(tensor).get_shape() for tensor in file.keys()}  # noqa: SIM118
        left_out = re.compile(r"experts\.[1-9]|\.visual\.")
        alike = {tensor: shape for tensor, shape in shapes.items() if not left_out.search(tensor)}
        recorded[name] = dict(sorted(alike.items()))
        print(name, len(shapes), "tensors", file=sys.stderr)
    lines = (json.dumps({name: recorded[name]}, separators=(",", ":"))[1:-1] for name in recorded)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def make_families(only: str) -> None:
    """families.npz: per family and prompt the greedy tokens, their margins, logits of some steps. Families
    whose names lack `only` stay as they are."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.support.models import family_cases
    from tests.support.models import family_models as families

    file = layout.FIXTURES / "families.npz"
    arrays: dict[str, np.ndarray] = dict(np.load(file)) if only else {}
    with tempfile.TemporaryDirectory() as folder:
        for name in (name for name in family_cases.FAMILY_CASES if only in name):
            path = families.write_family_hf(Path(folder) / name, name)
            model, loading = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
            )
            assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), (
                loading
            )
            for index, prompt in enumerate(families.family_prompts(name)):
                _keep(arrays, f"{name}/{index}", model.eval(), prompt, family_cases.CHECKED_STEPS)
    np.savez_compressed(file, **arrays)


def make_long_context() -> None:
    """long_context.npz: the same after prompts of 8,192 tokens, of families with windows and YaRN."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.support.models import family_cases
    from tests.support.models import family_models as families

    arrays: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in family_cases.LONG_CASES:
            path = families.write_long_hf(Path(folder) / name, name)
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, attn_implementation="eager"
            )
            _keep(arrays, name, model.eval(), families.long_prompt(name), family_cases.CHECKED_STEPS)
    np.savez_compressed(layout.FIXTURES / "long_context.npz", **arrays)


def make_perplexity(gguf: Path) -> None:
    """perplexity.json: of the default model in float32, over windows that do not overlap."""
    import torch
    from perplexity import N_TOKENS, WINDOW_TOKENS, english_text

    from phasewise.workflows.evaluate.figures import perplexity, token_losses
    from phasewise.workflows.evaluate.run import windows

    (ids,) = llama_ids(gguf, [english_text()])
    model = load_gguf_model(gguf)
    with torch.inference_mode():
        losses = [
            token_losses(model(torch.tensor([chunk.ids])).logits[0].numpy()[:-1], chunk.next_ids)
            for chunk in windows(ids[:N_TOKENS], WINDOW_TOKENS)
        ]
    _write_json(
        "perplexity.json",
        {
            "made_with": _versions(),
            "n_tokens": N_TOKENS,
            "window_tokens": WINDOW_TOKENS,
            "ids_sha256": ids_digest(ids[:N_TOKENS]),
            "perplexity": perplexity(np.concatenate(losses)).value,
            "perplexity_of_first_windows": perplexity(
                np.concatenate(losses[: layout.N_TESTED_WINDOWS])
            ).value,
        },
    )


def make_chats() -> None:
    """chats.json: what transformers renders, for every template and conversation."""
    from peer_tokens import transformers_chats

    from tests.support.models.chat_templates import SPECIAL, TEMPLATES, chats_for
    from tests.support.models.tiny_models import tokenizer_json

    with tempfile.TemporaryDirectory() as folder:
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
        (Path(folder) / "tokenizer.json").write_text(tokenizer_json())
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))
        rendered = {
            name: transformers_chats({"folder": folder, "template": template, "chats": chats_for(name)})
            for name, template in TEMPLATES.items()
        }
    _write_json("chats.json", rendered)


def make_converted(only: str) -> None:
    """converted.json: by family, the metadata without long lists, type and shape of each tensor, and the
    values of those that belong to RoPE. Families whose names lack `only` stay as they are."""
    from phasewise.serving.loaders.formats.gguf_file import open_gguf
    from tests.support.models.converted_models import CONVERTED, converted

    path = layout.FIXTURES / "converted.json"
    recorded: dict[str, Any] = json.loads(path.read_text()) if only else {}
    for name in (name for name in CONVERTED if only in name):
        with tempfile.TemporaryDirectory() as folder:
            _, gguf = converted(name, Path(folder))
            file, header = open_gguf(gguf)
            file.close()
            raw = gguf.read_bytes()
        told = {key: value for key, value in header.metadata.items() if _is_recorded(key, value)}
        kinds = {info.name: [info.type_name, *info.shape] for info in header.tensors.values()}
        values = {
            info.name: np.frombuffer(raw, np.float32, info.n_bytes // 4, info.offset).tolist()
            for info in header.tensors.values()
            if info.name.startswith("rope_")
        }
        recorded[name] = {"metadata": told, "values": values, "tensors": kinds}
        print(name, len(told), "keys", len(kinds), "tensors", file=sys.stderr)
    listed = [{name: recorded[name]} for name in CONVERTED if name in recorded]
    lines = (json.dumps(record, separators=(",", ":"))[1:-1] for record in listed)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _is_recorded(key: str, value: Any) -> bool:
    named = ("general.architecture", "general.type", "general.file_type")
    is_long = isinstance(value, list) and len(value) > LONGEST_LIST
    return not is_long and (not key.startswith("general.") or key in named)


def ids_digest(ids: Sequence[int]) -> str:
    """Tells whether a tokenizer cuts the text as llama.cpp does."""
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("llama-cpp-python", "transformers", "torch", "tokenizers")}


def _write_json(name: str, value: object) -> None:
    (layout.FIXTURES / name).write_text(json.dumps(value, indent=1) + "\n")


MAKERS: dict[str, Callable[[argparse.Namespace], None]] = {
    "tokens": lambda options: make_tokens(options.gguf),
    "tiny": lambda options: make_tiny(),
    "families": lambda options: make_families(options.only),
    "long": lambda options: make_long_context(),
    "chats": lambda options: make_chats(),
    "model": lambda options: make_model(options.gguf),
    "perplexity": lambda options: make_perplexity(options.gguf),
    "shapes": lambda options: make_shapes(options.only),
    "converted": lambda options: make_converted(options.only),
}
APART = ("shapes", "converted")
"""What `all` leaves out."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["all", *MAKERS])
    parser.add_argument(
        "--gguf", type=Path, help="the default model; tiny, families, long and chats do without"
    )
    parser.add_argument("--only", default="", help="families whose names contain this text")
    options = parser.parse_args()
    layout.FIXTURES.mkdir(parents=True, exist_ok=True)
    for name, make in MAKERS.items():
        if options.what == name or (options.what == "all" and name not in APART):
            make(options)


if __name__ == "__main__":
    main()
