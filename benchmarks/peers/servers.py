"""Servers of the OpenAI API that are measured beside each other: how each is started, awaited and ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.servers.ports import reserved_port

READY_S = 300.0
END_S = 20.0
LOG_LINES = 15

Fields = Mapping[str, Any]
"""The fields that `phasewise bench serve -o json` prints."""


class NotServing(Exception):
    """A server cannot be measured; the message says why."""


@dataclass(frozen=True)
class Server:
    """A server and the way to start it. `command`: of port, clients, context of each, threads."""

    name: str
    command: Callable[[int, int, int, int], list[str]]
    is_ours: bool = False
    is_kept: bool = True
    """It serves every number of clients without being started anew."""
    environment: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, object] = field(default_factory=dict)
    """Fields of every request: what switches its prompt cache off."""


def phasewise(model: str, weight_format: str, *options: str) -> Server:
    """This project's server; `weight_format` as `--format` has it."""

    def command(port: int, n_clients: int, context: int, threads: int) -> list[str]:
        sizes = ["--max-sequences", str(n_clients), "--context", str(context)]
        own = [sys.executable, "-m", "phasewise", "serve", model, "--format", weight_format]
        return [*own, "--port", str(port), *(options or ["--threads", str(threads), *sizes])]

    return Server(f"phasewise {weight_format}", command, is_ours=True)


def llama_cpp(program: str, model: Path, *, embeddings: bool = False) -> Server:
    """llama.cpp's server over a GGUF file, named by the file's format."""

    def command(port: int, n_clients: int, context: int, threads: int) -> list[str]:
        own = [program, "-m", str(model), "-t", str(threads), "-tb", str(threads), "-np", str(n_clients)]
        own += ["--ctx-size", str(n_clients * context), "--host", "127.0.0.1", "--port", str(port)]
        if embeddings:
            return [*own, "--embeddings", "-b", "2048", "-ub", "2048"]
        return [*own, "--cont-batching", "--no-webui"]

    label = f"llama.cpp {model.stem.rpartition('.')[2]}"
    return Server(label, command, is_kept=embeddings, body={} if embeddings else {"cache_prompt": False})


def vllm(python: str, folder: Path, threads: int) -> Server:
    """vLLM's CPU server over a folder of safetensors."""

    def command(port: int, n_clients: int, context: int, _threads: int) -> list[str]:
        own = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        own += ["--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(port)]
        own += ["--max-model-len", str(context), "--max-num-seqs", str(n_clients)]
        return [*own, "--no-enable-prefix-caching", "--uvicorn-log-level", "warning"]

    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    return Server("vLLM bf16", command, environment=environment)


def others(
    llama_server: str | None,
    ggufs: Sequence[Path],
    vllm_python: str | None,
    vllm_model: Path | None,
    threads: int,
) -> list[Server]:
    """llama.cpp's servers and vLLM's, as the options of a benchmark name them."""
    if ggufs and llama_server is None:
        raise SystemExit("--gguf needs --llama-server, the program that serves it")
    if (vllm_python is None) != (vllm_model is None):
        raise SystemExit("--vllm and --vllm-model belong together")
    servers = [llama_cpp(llama_server, path) for path in ggufs] if llama_server is not None else []
    if vllm_python is not None and vllm_model is not None:
        servers.append(vllm(vllm_python, vllm_model, threads))
    return servers


def bench_serve(url: str, server: Server, *options: str) -> Fields:
    """`phasewise bench serve` in a process of its own, as a user would run it. NotServing where it fails."""
    command = [
        *(sys.executable, "-m", "phasewise", "bench", "serve", url, "-o", "json", "--ignore-eos"),
        *options,
        *("--extra-body", json.dumps(dict(server.body))),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotServing(f"{server.name}: {' '.join(command)}\n{done.stderr}")
    fields: Fields = json.loads(done.stdout)
    return fields


@contextlib.contextmanager
def running(server: Server, n_clients: int, context: int, threads: int) -> Iterator[str]:
    """Its address, while it runs. NotServing with the end of its log where it does not start."""
    port = reserved_port()
    command = server.command(port, n_clients, context, threads)
    environment = {**os.environ, **server.environment}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            if not _is_ready(process, url):
                log.seek(0)
                said = "\n".join(log.read().splitlines()[-LOG_LINES:])
                raise NotServing(f"{server.name} did not start: {' '.join(command)}\n{said}")
            yield url
        finally:
            _end(process)


def _is_ready(process: subprocess.Popen[bytes], url: str) -> bool:
    deadline_s = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            if answer.status == 200:
                return True
        time.sleep(0.2)
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and whatever it started: asked first, then made to."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
