"""Texts per second of an embedding model beside other engines, in rounds of alternating order.

    python benchmarks/embedding_peers.py MODEL [--formats int8,bf16,f32] [--threads 2] [--rounds 5]
        [--python PEER_PYTHON --onnx FILE.onnx [--onnx ..] --openvino FILE.xml[:bf16] [--openvino ..]]
        [--llama-server PROGRAM --gguf FILE [--gguf ..]]

All texts have as many tokens. ONNX Runtime and OpenVINO compute batches in processes of their own, timed
there; ours computes in this one. llama.cpp is asked over HTTP for a batch of token arrays, as its server
is what it offers; ours over HTTP is in benchmarks/embedding_servers.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx

from phasewise.cython_kernels import isa
from phasewise.serving.encoder.embedder import Embedder
from phasewise.serving.encoder.text import Tokens
from phasewise.serving.loaders import load_model
from phasewise.topology import read_machine

WORKER = Path(__file__).parent / "peers" / "encoder_worker.py"
Timed = Callable[[int, int], float]
"""(texts, tokens) to seconds"""


@contextlib.contextmanager
def ours(ref: str, weight_format: str, threads: int) -> Iterator[Timed]:
    model = load_model(ref, weight_format)
    cores = sorted(read_machine().allowed_pus)[:threads]

    def timed(batch: int, tokens: int) -> float:
        inputs = [Tokens([1000 + (at * tokens + j) % 20000 for j in range(tokens)]) for at in range(batch)]
        began = time.perf_counter()
        embedder.embed(inputs)
        return time.perf_counter() - began

    with Embedder(model, cores) as embedder:
        yield timed


@contextlib.contextmanager
def peer(python: str, library: str, path: str, threads: int) -> Iterator[Timed]:
    file, _, precision = path.partition(":")
    command = [python, str(WORKER), library, file, str(threads), precision or "f32"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout
    if not stdout.readline():
        raise SystemExit(f"{library} cannot read {file}")

    def timed(batch: int, tokens: int) -> float:
        stdin.write(json.dumps({"batch": batch, "tokens": tokens}) + "\n")
        stdin.flush()
        return float(json.loads(stdout.readline())["ns"]) / 1e9

    try:
        yield timed
    finally:
        stdin.close()
        process.wait(20)


@contextlib.contextmanager
def llama_server(program: str, gguf: str, threads: int) -> Iterator[Timed]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    slots = 16
    command = [program, "-m", gguf, "--embeddings", "--port", str(port), "-t", str(threads)]
    command += ["-tb", str(threads), "-np", str(slots), "-c", str(512 * slots), "-b", "2048", "-ub", "2048"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)
    try:
        for _ in range(300):
            with contextlib.suppress(httpx.HTTPError):
                if client.get("/health").status_code == 200:
                    break
            time.sleep(0.1)

        def timed(batch: int, tokens: int) -> float:
            given = [[1000 + (at * tokens + j) % 20000 for j in range(tokens)] for at in range(batch)]
            began = time.perf_counter()
            answer = client.post("/v1/embeddings", json={"input": given, "encoding_format": "base64"})
            answer.raise_for_status()
            assert len(answer.json()["data"]) == batch
            return time.perf_counter() - began

        yield timed
    finally:
        client.close()
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--formats", default="int8,bf16,f32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=75)
    parser.add_argument("--python")
    parser.add_argument("--onnx", action="append", default=[])
    parser.add_argument("--openvino", action="append", default=[])
    parser.add_argument("--llama-server")
    parser.add_argument("--gguf", action="append", default=[])
    options = parser.parse_args()
    threads = options.threads
    with contextlib.ExitStack() as stack:
        systems: dict[str, Timed] = {}
        for one in options.formats.split(","):
            systems[f"phasewise {one}"] = stack.enter_context(ours(options.model, one, threads))
        for library, paths in (("onnxruntime", options.onnx), ("openvino", options.openvino)):
            for path in paths:
                system = stack.enter_context(peer(options.python, library, path, threads))
                systems[f"{library} {Path(path).name}"] = system
        for path in options.gguf:
            system = stack.enter_context(llama_server(options.llama_server, path, threads))
            systems[f"llama.cpp {Path(path).name}"] = system
        texts_per_s: dict[str, list[float]] = {name: [] for name in systems}
        for timed in systems.values():
            timed(options.batch, options.tokens)
        for at in range(options.rounds):
            for name in list(systems) if at % 2 == 0 else [*systems][::-1]:
                texts_per_s[name].append(options.batch / systems[name](options.batch, options.tokens))
    print(f"{options.tokens} tokens, {options.batch} texts, {threads} threads, {isa.usable()[-1]}; texts/s")
    first = statistics.median(texts_per_s[next(iter(systems))])
    for name, found in texts_per_s.items():
        median = statistics.median(found)
        print(f"{name:36} median {median:7.1f}  best {max(found):7.1f}  ours over it {first / median:5.2f}")


if __name__ == "__main__":
    main()
