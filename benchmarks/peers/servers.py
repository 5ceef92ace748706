"""Servers of the OpenAI API that are measured one after another: how each is started, awaited and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

READY_S = 300.0
END_S = 20.0
LOG_LINES = 15


class NotServing(Exception):
    """A server cannot be measured; the message says why."""


@dataclass(frozen=True)
class Server:
    """How to start one. `is_kept`: it serves every number of clients without being started anew."""

    name: str
    kind: str
    """phasewise, llama.cpp or vLLM."""
    model: str
    is_kept: bool
    environment: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, object] = field(default_factory=dict)
    """Fields of every request: what switches its prompt cache off."""
    program: str = ""

    def command(self, port: int, n_clients: int, context: int, threads: int) -> list[str]:
        """With room for `n_clients` requests of `context` tokens each, and no reuse of prompts."""
        match self.kind:
            case "phasewise":
                return _phasewise(self.model, port, n_clients, context, threads)
            case "llama.cpp":
                return _llama_cpp(self.program, self.model, port, n_clients, context, threads)
            case "vLLM":
                return _vllm(self.program, self.model, port, n_clients, context)
            case _:
                raise ValueError(f"no way to start {self.kind!r}")


def phasewise(model: str, weight_format: str) -> Server:
    """This project's server; `weight_format` as `--format` has it."""
    return Server(f"phasewise {weight_format}", "phasewise", f"{model}:{weight_format}", is_kept=True)


def llama_cpp(program: str, model: Path) -> Server:
    """llama.cpp's server over a GGUF file, named by the file's format."""
    label = model.stem.rpartition(".")[2]
    body = {"cache_prompt": False}
    return Server(f"llama.cpp {label}", "llama.cpp", str(model), is_kept=False, body=body, program=program)


def vllm(python: str, folder: Path, threads: int) -> Server:
    """vLLM's CPU server over a folder of safetensors."""
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    return Server("vLLM bf16", "vLLM", str(folder), is_kept=True, environment=environment, program=python)


def _phasewise(model: str, port: int, n_clients: int, context: int, threads: int) -> list[str]:
    name, _, weight_format = model.rpartition(":")
    return [
        *(sys.executable, "-m", "phasewise", "serve", name, "--format", weight_format),
        *("--port", str(port), "--threads", str(threads), "--no-prefix-reuse"),
        *("--max-sequences", str(n_clients), "--context", str(context)),
    ]


def _llama_cpp(program: str, model: str, port: int, n_clients: int, context: int, threads: int) -> list[str]:
    return [
        *(program, "-m", model, "-t", str(threads), "-tb", str(threads)),
        *("-np", str(n_clients), "--ctx-size", str(n_clients * context), "--cont-batching"),
        *("--host", "127.0.0.1", "--port", str(port), "--no-webui"),
    ]


def _vllm(program: str, model: str, port: int, n_clients: int, context: int) -> list[str]:
    return [
        *(program, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", "bfloat16"),
        *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(context)),
        *("--max-num-seqs", str(n_clients), "--no-enable-prefix-caching"),
        *("--uvicorn-log-level", "warning"),
    ]


@contextlib.contextmanager
def running(server: Server, n_clients: int, context: int, threads: int) -> Iterator[str]:
    """Its address, while it runs. NotServing with the end of its log where it does not start."""
    port = _free_port()
    command = server.command(port, n_clients, context, threads)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **server.environment},
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            if not _is_ready(process, url):
                raise NotServing(f"{server.name} did not start: {' '.join(command)}\n{_end_of(log)}")
            yield url
        finally:
            _end(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _is_ready(process: subprocess.Popen[bytes], url: str) -> bool:
    deadline_s = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            if answer.status == 200:
                return True
        time.sleep(0.2)
    return False


def _end_of(log: object) -> str:
    log.seek(0)  # type: ignore[attr-defined]
    text: bytes = log.read()  # type: ignore[attr-defined]
    return "\n".join(text.decode("utf-8", "replace").splitlines()[-LOG_LINES:])


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
