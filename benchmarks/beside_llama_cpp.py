"""Prefill and decode of GGUF files beside llama.cpp's own programs, in turns, on the same threads.

    python benchmarks/beside_llama_cpp.py BIN FILE.gguf... [-p 512] [-n 64] [-t 2] [-r 2] [--sequences 8]

BIN: the folder that has llama-bench and llama-batched-bench. Each round runs both on each file, the first one
changing with the round; rates are tokens a second, ratios those of the medians. `--sequences N` also
times decode of N sequences at once. `phasewise bench machine` says what the machine reads in a second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

Rates = dict[str, float]


def _rows(command: list[str]) -> list[dict[str, Any]]:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"{command[0]} ended with {result.returncode}: {result.stderr[-400:].strip()}")
    text = result.stdout.strip()
    found = json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]
    return list(found)


def ours(file: str, asked: argparse.Namespace) -> Rates:
    """Rates of `phasewise bench run`."""
    sequences = f"1,{asked.sequences}" if asked.sequences > 1 else "1"
    command = [
        sys.executable,
        "-m",
        "phasewise",
        "bench",
        "run",
        file,
        "-p",
        str(asked.p),
        "-n",
        str(asked.n),
    ]
    rows = _rows([*command, "--n-sequences", sequences, "-r", "1", "--threads", str(asked.t), "-o", "json"])
    return {
        _name(row["n_prompt"], row["n_gen"], row.get("n_sequences", 1)): row["avg_ts"]
        for row in rows
        if not (row["n_prompt"] and row.get("n_sequences", 1) > 1)
    }


def theirs(file: str, asked: argparse.Namespace) -> Rates:
    """Rates of llama-bench, and of llama-batched-bench for several sequences."""
    folder = Path(asked.bin)
    common = ["-m", file, "-t", str(asked.t)]
    once = ["-p", str(asked.p), "-n", str(asked.n), "-r", "1", "-o", "json"]
    found = {
        _name(row["n_prompt"], row["n_gen"], 1): row["avg_ts"]
        for row in _rows([str(folder / "llama-bench"), *common, *once])
    }
    if asked.sequences > 1:
        context = asked.sequences * (asked.n + 16)
        several = ["-npp", "16", "-ntg", str(asked.n), "-npl", str(asked.sequences), "-c", str(context)]
        command = [str(folder / "llama-batched-bench"), *common, *several, "--output-format", "jsonl"]
        found[_name(0, asked.n, asked.sequences)] = _rows(command)[-1]["speed_tg"]
    return found


def _name(n_prompt: int, n_gen: int, sequences: int) -> str:
    what = f"prefill {n_prompt}" if n_prompt else f"decode {n_gen}"
    return what if sequences == 1 else f"{what} x{sequences}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bin")
    parser.add_argument("files", nargs="+")
    parser.add_argument("-p", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("-n", type=int, default=64, help="tokens that are decoded")
    parser.add_argument("-t", type=int, default=2, help="threads")
    parser.add_argument("-r", type=int, default=2, help="rounds")
    parser.add_argument("--sequences", type=int, default=1)
    asked = parser.parse_args()
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for turn in range(asked.r):
        for file in asked.files:
            pair = {"phasewise": ours, "llama.cpp": theirs}
            for who in sorted(pair, reverse=bool(turn % 2)):
                for what, rate in pair[who](file, asked).items():
                    print(f"{who} {Path(file).stem} {what}: {rate:.1f}", file=sys.stderr)
                    found.setdefault((Path(file).stem, what), {}).setdefault(who, []).append(rate)
    print(f"{'file':18} {'what':14} {'phasewise':>22} {'llama.cpp':>22} {'ratio':>6}")
    for (file, what), both in found.items():
        rates = [" ".join(f"{one:.1f}" for one in both.get(who, [])) for who in ("phasewise", "llama.cpp")]
        ratio = statistics.median(both["phasewise"]) / statistics.median(both.get("llama.cpp", [1]))
        print(f"{file:18} {what:14} {rates[0]:>22} {rates[1]:>22} {ratio:6.2f}")


if __name__ == "__main__":
    main()
