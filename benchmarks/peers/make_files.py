"""Other forms of a GGUF file, so that engines can be compared on the same weights in each precision.

    PEER_PYTHON benchmarks/peers/make_files.py MODEL.gguf FOLDER [--forms Q8_0,BF16,F16] [--hugging-face]

Runs under an interpreter that has llama-cpp-python; `--hugging-face` also writes FOLDER/hf in bfloat16, for
engines that read no GGUF, and needs transformers and torch. The values are the file's own, widened or rounded
again: good for speed, not for judging a format's quality.
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path

FORMS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "BF16": 32}
"""llama.cpp's numbers of file types."""


def requantise(source: Path, target: Path, form: str) -> None:
    """One file in another form, by llama.cpp itself."""
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = FORMS[form]
    parameters.allow_requantize = True
    parameters.nthread = 1
    paths = str(source).encode(), str(target).encode()
    if llama_cpp.llama_model_quantize(*paths, ctypes.byref(parameters)):
        raise SystemExit(f"llama.cpp could not write {target}")


def write_hugging_face(source: Path, target: Path) -> None:
    """A directory of safetensors in bfloat16, with the tokenizer that transformers makes of the file's."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    loaded = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.bfloat16)
    del loaded.config.quantization_config  # it counts as quantised and would not be written
    plain = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.bfloat16)
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(**place).save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--forms", default="Q8_0,BF16,F16")
    parser.add_argument("--hugging-face", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for form in options.forms.split(","):
        target = options.folder / f"{options.model.name.split('.')[0]}.{form}.gguf"
        requantise(options.model, target, form)
        print(target)
    if options.hugging_face:
        write_hugging_face(options.model, options.folder / "hf")
        print(options.folder / "hf")


if __name__ == "__main__":
    main()
