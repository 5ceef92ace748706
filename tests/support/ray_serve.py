"""A program of its own, since Ray reads its environment when it is imported: `ray_serve.py MODEL`.

`phasewise serve --cluster` on two nodes of a local Ray cluster: it answers, an instance is killed while it
answers, it answers again. Prints what it saw as one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from ray.cluster_utils import Cluster

PHASEWISE = [sys.executable, "-m", "phasewise"]
PROMPTS = ["abc " * 60, "b", "the cat " * 90]
PATIENCE_S = 90.0


def main(model: Path) -> dict[str, object]:
    alone = {"--threads": "1"}
    with serving(model, alone) as url:
        whole = answers(url)
    node = {"num_cpus": 2, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        cluster.add_node(**node)
        refusals = refused(model, cluster.address)
        asked = {"--cluster": cluster.address, "--prompt": "1x1", "--token": "1x1", "--split-above": "8"}
        with serving(model, asked, "--spread") as url:
            return {**seen(url, cluster.address), "whole": whole, "refusals": refusals}
    finally:
        cluster.shutdown()


def seen(url: str, address: str) -> dict[str, object]:
    first = answers(url)
    pid = next(one["pid"] for one in status(address)["instances"] if one["role"] == "prompt")
    with ThreadPoolExecutor(4) as pool:  # the prompt instance dies with requests on their way
        going = [pool.submit(answers, url) for _ in range(4)]
        os.kill(pid, signal.SIGKILL)
        under_way = [one.result(PATIENCE_S) for one in going]
    began_s = time.monotonic()
    wait_until(lambda: new_prompt_instance(address, pid))
    replaced_s = time.monotonic() - began_s
    return {
        "first": first,
        "under_way": under_way,
        "again": answers(url),
        "replaced_s": replaced_s,
        "metrics": httpx.get(f"{url}/metrics").text,
    }


def new_prompt_instance(address: str, old_pid: int) -> bool:
    instances = status(address)["instances"]
    return any(
        one["role"] == "prompt" and one["pid"] not in (None, old_pid) and one["state"] == "running"
        for one in instances
    )


def refused(model: Path, address: str) -> dict[str, tuple[int, str]]:
    """What is said of wishes that cannot be met."""
    command = [*PHASEWISE, "serve", str(model), "--port", "0", "--cluster"]
    wrong = {
        "placement": ([*command, address, "--mixed", "1x64"], {}),
        "token": ([*command, address, "--mixed", "1x1"], {"RAY_AUTH_MODE": "disabled"}),
    }
    found = {}
    for name, (asked, changes) in wrong.items():
        done = subprocess.run(
            asked, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **changes}
        )
        found[name] = done.returncode, done.stderr
    return found


def answers(url: str) -> list[str]:
    return [
        httpx.post(
            f"{url}/v1/completions",
            json={"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, "seed": 1},
            timeout=PATIENCE_S,
        )
        .raise_for_status()
        .json()["choices"][0]["text"]
        for prompt in PROMPTS
    ]


@contextlib.contextmanager
def serving(model: Path, options: dict[str, str], *flags: str) -> Iterator[str]:
    """The server's address, once it is ready."""
    command = [*PHASEWISE, "serve", str(model), "--port", "0", "--kv-budget", "64M", *flags]
    for name, value in options.items():
        command += [name, value]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if match := re.match(r"listening on (\S+)", line):
                url = match[1]
                break
        else:
            raise SystemExit("".join(lines))
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 200)
        yield url
    finally:
        process.terminate()
        process.stderr.close()
        process.wait(30)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def status(address: str) -> Any:
    command = [*PHASEWISE, "cluster", "status", "--cluster", address, "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
