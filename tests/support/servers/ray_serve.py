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
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import zmq
from ray.cluster_utils import Cluster

from phasewise.cluster.real.instance_messages import CannotStart, Stop, write
from tests.support.servers.pools import is_there

PHASEWISE = [sys.executable, "-m", "phasewise"]
PROMPTS = ["abc " * 60, "b", "the cat " * 90]
PATIENCE_S = 90.0
NODE = {"num_cpus": 2, "object_store_memory": 80 << 20}


@contextlib.contextmanager
def cluster_of(**head: int) -> Iterator[Cluster]:
    """A local Ray cluster of one node, until the block ends. head: what this node has other than in NODE."""
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False, **head})
    try:
        yield cluster
    finally:
        cluster.shutdown()


def ended(*words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A `phasewise` command after its end. env: its environment, else this process's."""
    command = [*PHASEWISE, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=env)


def main(model: Path) -> dict[str, object]:
    os.environ["PHASEWISE_SPLIT_ABOVE"] = "8"
    alone = {"--threads": "1"}
    with serving(model, alone) as url:
        whole = answers(url)
    with cluster_of() as cluster:
        cluster.add_node(**NODE)
        refusals = refused(model, cluster.address)
        asked = {"--cluster": cluster.address, "--prompt-pool": "1x1", "--token-pool": "1x1"}
        with serving(model, asked, "--spread") as url:
            heard = strangers(url, cluster.address)
            with serving(model, asked, "--spread") as other:  # on the same cluster
                beside = [answers(url), answers(other)]
                wait_until(lambda: is_whole(cluster.address, 4))
                together = status(cluster.address)["instances"]
                n_actors = len(together)
            observed = seen(url, cluster.address)
        return {
            **observed,
            "whole": whole,
            "refusals": refusals,
            "beside": beside,
            "n_actors": n_actors,
            "cpus": [(instance["node_id"], instance["cpus"]) for instance in together],
            "n_ports": len(heard),
            "after_strangers": heard,
            "outlived": outlived(model, cluster.address),
        }


def outlived(model: Path, address: str) -> list[int]:
    """Instances that are left when their server was killed, one of which was stopped."""
    with serving(model, {"--cluster": address, "--mixed-pool": "2x1"}) as url:
        wait_until(lambda: is_whole(address, 2))
        pids = [instance["pid"] for instance in status(address)["instances"]]
        os.kill(pids[0], signal.SIGSTOP)
        os.kill(server_pid(url), signal.SIGKILL)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not any(map(is_there, pids)))
    left = [pid for pid in pids if is_there(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def seen(url: str, address: str) -> dict[str, object]:
    first = answers(url)
    wait_until(
        lambda: any(
            instance["role"] == "prompt" and instance["pid"] for instance in status(address)["instances"]
        )
    )
    pid = next(instance["pid"] for instance in status(address)["instances"] if instance["role"] == "prompt")
    with ThreadPoolExecutor(4) as pool:  # the prompt instance dies with requests on their way
        going = [pool.submit(answers, url) for _ in range(4)]
        os.kill(pid, signal.SIGKILL)
        under_way = [future.result(PATIENCE_S) for future in going]
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


def is_whole(address: str, n_instances: int) -> bool:
    """True if so many instances run, and no other one is to start."""
    return [instance["state"] for instance in status(address)["instances"]] == ["running"] * n_instances


def strangers(url: str, address: str) -> dict[int, list[str]]:
    """The server's answers after strangers were at each TCP port of its front and instances, by port."""
    own = {port_of(url)}
    wait_until(lambda: is_whole(address, 2))
    pids = [instance["pid"] for instance in status(address)["instances"]]
    ports = {port for pid in (*pids, server_pid(url)) for port in listening_ports(pid)} - own
    by_port = {}
    for port in sorted(ports):
        for raw in (b"GET / HTTP/1.1\r\n\r\n", bytes(4096), b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE", b""):
            with (
                contextlib.suppress(OSError),
                socket.create_connection((node_of(address), port), 2.0) as there,
            ):
                there.sendall(raw)
        with zmq.Context() as context:
            for kind, name in ((zmq.DEALER, "prompt-0-1"), (zmq.PUSH, ""), (zmq.DEALER, "")):
                false = context.socket(kind)
                false.linger = 0
                public, false.curve_secretkey = zmq.curve_keypair()
                false.curve_publickey, (false.curve_serverkey, _) = public, zmq.curve_keypair()
                if name:
                    false.setsockopt_string(zmq.IDENTITY, name)
                false.connect(f"tcp://{node_of(address)}:{port}")
                with contextlib.suppress(zmq.Again):  # it was turned away before it had said all
                    for raw in (
                        write(Stop()),
                        write(CannotStart("a stranger says so")),
                        b"{",
                        bytes(1 << 16),
                    ):
                        false.send(raw, zmq.NOBLOCK)
                time.sleep(0.2)
                false.close()
        by_port[port] = answers(url)
    return by_port


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def node_of(address: str) -> str:
    return address.rpartition(":")[0]


def server_pid(url: str) -> int:
    """The process that listens there."""
    for path in Path("/proc").glob("[0-9]*"):
        if port_of(url) in listening_ports(int(path.name)):
            return int(path.name)
    raise AssertionError(f"nothing listens on {url}")


def listening_ports(pid: int) -> set[int]:
    """TCP ports of one process, as /proc shows them."""
    inodes = set()
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(link))
    rows = [
        row.split()
        for name in ("tcp", "tcp6")
        for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    listens = "0A"
    return {
        int(row[1].rpartition(":")[2], 16)
        for row in rows
        if row[3] == listens and f"socket:[{row[9]}]" in inodes
    }


def new_prompt_instance(address: str, old_pid: int) -> bool:
    instances = status(address)["instances"]
    return any(
        instance["role"] == "prompt"
        and instance["pid"] not in (None, old_pid)
        and instance["state"] == "running"
        for instance in instances
    )


def refused(model: Path, address: str) -> dict[str, tuple[int, str]]:
    """Exit code and stderr of commands whose wishes cannot be met, by what is wrong. They have no setting
    that is without effect, and no database that is down: of both a line would say so.
    """
    aside = {"PHASEWISE_SPLIT_ABOVE", "PHASEWISE_DB"}
    beside = {name: value for name, value in os.environ.items() if name not in aside}
    command = ["serve", str(model), "--port", "0", "--cluster"]
    wrong = {
        "placement": ([*command, address, "--mixed-pool", "1x64"], {}),
        "token": ([*command, address, "--mixed-pool", "1x1"], {"RAY_AUTH_MODE": "disabled"}),
        "false": ([*command, address, "--mixed-pool", "1x1"], {"RAY_AUTH_TOKEN": "00" * 16}),
    }
    outcomes = {name: ended(*asked, env={**beside, **changes}) for name, (asked, changes) in wrong.items()}
    return {name: (done.returncode, done.stderr) for name, done in outcomes.items()}


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
        process.wait(60)


def wait_until(holds: Callable[[], bool]) -> None:
    """As `until`, seldom: nobody reads the lines that a server writes of what it is asked."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def status(address: str) -> Any:
    done = ended("cluster", "status", "--cluster", address, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("{"), (done.stdout, done.stderr)
    return json.loads(done.stdout)


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
