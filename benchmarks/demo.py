"""From nothing to an answer: fetch the default model, serve it, ask it, show the speed beside the limit.

`make demo` runs this after building. Every step is a `phasewise` command that a shell could have run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

from tabulate import tabulate

from benchmarks.peers.servers import phasewise, running

MODEL = "smollm2-135m-instruct"
QUESTION = "Anna is 34 years old and lives in Oslo. Who is she? Answer in JSON."
FIELDS = {"name": "string", "age": "integer", "city": "string"}
SCHEMA = {
    "type": "object",
    "properties": {field: {"type": kind} for field, kind in FIELDS.items()},
    "required": list(FIELDS),
    "additionalProperties": False,
}
NEXT_STEPS = """
Next, with a model of your own (a GGUF file or a Hugging Face directory):
  phasewise serve MODEL.gguf            an OpenAI-compatible server on this machine
  phasewise doctor                      what on this host holds models back, with a remedy for each
  phasewise tune-kernels MODEL.gguf     faster schedules for this machine, kept and shared in a database\
"""
PHASEWISE = [sys.executable, "-m", "phasewise"]


def say(text: str) -> None:
    print(text, flush=True)


def phasewise_json(*arguments: str) -> Any:
    """Run one command, show its progress, return what it printed."""
    return json.loads(subprocess.run([*PHASEWISE, *arguments], check=True, stdout=subprocess.PIPE).stdout)


def ask(url: str, question: str) -> Iterator[str]:
    """The answer to one question, held to SCHEMA, piece by piece, through the OpenAI chat API."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 80,
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    yield choice["delta"].get("content") or ""


def speed_table(rows: list[dict[str, Any]], first: dict[str, Any]) -> str:
    """TTFT, TPOT and tokens per second, with the share of the limit that bounds each phase."""
    prefill = next(row for row in rows if row["n_prompt"])
    decode = next(row for row in rows if row["n_gen"])
    n_prompt = len(first["prompt_token_ids"])
    table = [
        (f"TTFT, {n_prompt} prompt tokens", f"{first['ttft_ms']:.0f} ms", ""),
        ("TPOT", f"{first['tpot_ms']:.1f} ms", ""),
        (
            f"prefill, {prefill['n_prompt']} tokens",
            f"{prefill['avg_ts']:.0f} tok/s",
            f"{prefill['peak_fraction']:.0%} of {prefill['peak_flops_per_s'] / 1e9:.0f} GFLOP/s",
        ),
        (
            f"decode, {decode['n_gen']} tokens",
            f"{decode['avg_ts']:.0f} tok/s",
            f"{decode['bandwidth_fraction']:.0%} of {decode['read_limit_bytes_per_s'] / 1e9:.1f} GB/s",
        ),
    ]
    headers = [f"{MODEL}, {decode['n_threads']} cores, {decode['isa']}", "measured", "share of the limit"]
    return tabulate(table, headers=headers, tablefmt="github", colalign=("left", "right", "right"))


def main() -> None:
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    say(f"$ phasewise models pull {MODEL}")
    subprocess.run([*PHASEWISE, "models", "pull", MODEL], check=True)
    say(f"\n$ phasewise serve {MODEL} &\n$ curl .../v1/chat/completions   # {QUESTION}")
    say(f"#    held to a schema: {', '.join(FIELDS)}")
    with running(phasewise(MODEL, "native", "--log-level", "info"), 1, 0, 1) as url:
        for piece in ask(url, QUESTION):
            print(piece, end="", flush=True)
        say("")
    say("\nmeasuring, a few seconds ...")
    first = phasewise_json("generate", MODEL, "-p", QUESTION * 8, "-n", "32", "--temperature", "0", "--json")
    rows = phasewise_json("bench", "run", MODEL, "-p", "512", "-n", "64", "-r", "3", "-o", "json")
    say("\n" + speed_table(rows, first))
    say(NEXT_STEPS)


if __name__ == "__main__":
    main()
