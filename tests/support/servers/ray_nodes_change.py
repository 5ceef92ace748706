"""A program of its own, since Ray reads its environment when it is imported: `ray_nodes_change.py MODEL`.

Two servers on one Ray cluster; a node is lost while a stream runs, another one joins; an instance is drained.
Prints what it saw as one JSON object.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ |= {"RAY_health_check_initial_delay_ms": "500", "RAY_health_check_period_ms": "500"}
import httpx

from tests.support.servers.ray_serve import (
    NODE,
    PROMPTS,
    answers,
    cluster_of,
    ended,
    serving,
    status,
    wait_until,
)

WANTED_TOKENS = 3500


class Stream:
    """An answer that is read as it comes."""

    def __init__(self, url: str) -> None:
        self.stamps_s: list[float] = []
        self._url = url
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        asked = {"model": "tiny", "prompt": PROMPTS[1], "max_tokens": WANTED_TOKENS, "stream": True}
        more = {"temperature": 0, "seed": 1, "ignore_eos": True}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=asked | more, timeout=90) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                    self.stamps_s.append(time.monotonic())

    def end(self) -> None:
        self._thread.join(120)

    def longest_pause_ms(self, begin_s: float, end_s: float) -> float:
        """Between two pieces in this time."""
        stamps_s = [stamp_s for stamp_s in self.stamps_s if begin_s <= stamp_s <= end_s]
        return 1000 * max((b - a for a, b in itertools.pairwise(stamps_s)), default=0.0)


def main(model: Path) -> dict[str, object]:
    with serving(model, {"--threads": "1"}) as url:
        whole = answers(url)
    with cluster_of(num_cpus=0) as cluster:
        kept, lost = cluster.add_node(**NODE), cluster.add_node(**NODE)
        asked = {"--cluster": cluster.address, "--mixed-pool": "2x1", "--draft": "off"}  # a piece is a token
        with serving(model, asked, "--spread") as first, serving(model, asked, "--spread") as other:
            wait_until(lambda: n_running(cluster.address) == 4)
            cpus = [cpus_of(cluster.address)]
            told = [answers(first), answers(other)]
            streams = [Stream(url) for url in (first, other) for _ in range(2)]
            wait_until(lambda: all(len(stream.stamps_s) > 20 for stream in streams))
            begun_s = time.monotonic()
            time.sleep(4)
            lost_s = time.monotonic()
            cluster.remove_node(lost, allow_graceful=False)
            wait_until(lambda: n_waiting(cluster.address) == 2)
            waited = next(text for text in problems(cluster.address) if "room" in text)
            told += [answers(first), answers(other)]
            cpus.append(cpus_of(cluster.address))
            for stream in streams:
                stream.end()
            whole_streams = [stream for stream in streams if len(stream.stamps_s) >= WANTED_TOKENS // 4]
            new = cluster.add_node(**NODE)
            wait_until(lambda: n_running(cluster.address) == 4)
            cpus.append(cpus_of(cluster.address))
            told += [answers(first), answers(other)]
            return {
                "whole": whole,
                "answers": told,
                "cpus": cpus,
                "waited": waited,
                "wanted_tokens": True,
                "stream_tokens": len(whole_streams) >= 2,
                "pause_before_ms": [stream.longest_pause_ms(begun_s, lost_s) for stream in whole_streams],
                "pause_ms": [stream.longest_pause_ms(lost_s, lost_s + 8) for stream in whole_streams],
                "on_new_node": sum(node == new.node_id for node, _ in cpus[-1]),
                **drained(cluster.address, first),
                "kept": kept.node_id,
            }


def drained(address: str, url: str) -> dict[str, object]:
    """An instance of the first server is drained and comes back; the last one is not drained."""
    server = status(address)["instances"][0]["server"]
    first, second = (
        f"{instance['name']}@{server}"
        for instance in status(address)["instances"]
        if instance["server"] == server
    )
    ended = json.loads(command(address, "drain", first, "--json")[1])["instances"]
    after = [instance for instance in status(address)["instances"] if instance["state"] == "drained"]
    answers(url)
    last = command(address, "drain", second)
    back = json.loads(command(address, "drain", first, "--undo", "--json")[1])["instances"]
    return {
        "drained": [instance["state"] for instance in ended],
        "drained_cpus_free": all(instance["cpus"] == [] for instance in after),
        "back": [instance["state"] for instance in back],
        "last": last,
        "unknown": command(address, "drain", "nobody"),
        "status_text": command(address, "status")[1],
    }


def command(address: str, *words: str) -> tuple[int, str]:
    """Exit code, and stdout or what was wrong."""
    done = ended("cluster", *words, "--cluster", address)
    return done.returncode, done.stdout if done.returncode == 0 else done.stderr


def instances(address: str) -> list[Any]:
    shown: list[Any] = status(address)["instances"]
    return shown


def n_running(address: str) -> int:
    return sum(instance["state"] == "running" for instance in instances(address))


def n_waiting(address: str) -> int:
    return sum("room" in text for text in problems(address))


def problems(address: str) -> list[str]:
    return [instance["problem"] for instance in instances(address)]


def cpus_of(address: str) -> list[tuple[str, list[int]]]:
    """Node and CPUs of every instance that runs."""
    return [
        (instance["node_id"], instance["cpus"])
        for instance in instances(address)
        if instance["state"] == "running"
    ]


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
