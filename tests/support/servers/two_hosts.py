"""A program of its own, in a network namespace of its own: `two_hosts.py MODEL`.

It makes a second namespace and joins the two by two pairs of veth devices, one for control and one for keys
and values. The front and the prompt instance run here, the token instance there. It slows and cuts links
while keys and values are on their way, and prints what became of the requests as one JSON object.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from phasewise.cluster.real.front import Front
from phasewise.cluster.real.instance import Orders
from phasewise.cluster.real.local_instances import LocalInstances
from phasewise.cluster.real.supervisor import FrontSettings
from phasewise.serving.engine.messages import Submit
from phasewise.serving.processes.restarts import Restarts
from phasewise.serving.processes.sockets import Keys
from phasewise.serving.sampling.sampling import GREEDY
from phasewise.workflows.opening.settings import Weights
from phasewise.workflows.serve.instance_process import MODULE, InstanceSpec
from tests.support.servers.pools import (
    PATIENCE_S,
    PoolServer,
    guides_of,
    mixed_requests,
    open_alone,
    plans_of,
    prompt,
    run_alone,
    size_of,
    texts,
)

CLONE_NEWNET = 0x40000000
CONTROL, DATA = "10.77.1", "10.77.2"
"""Networks: `.1` is here, `.2` there. Devices: `control` and `data`, on both sides."""
HAND_OVER_S = 2.0
SLOW, TOO_SLOW = "30mbit", "200kbit"
"""Keys and values of the long prompts come within a busy machine's patience, or not within `HAND_OVER_S`."""


def main(model: Path) -> dict[str, object]:
    with other_namespace() as there:
        return run(model, there)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextlib.contextmanager
def other_namespace() -> Iterator[int]:
    """The process that holds it; joined to this one."""
    holder = subprocess.Popen(["unshare", "--net", "sleep", "1000"])
    try:
        here = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{holder.pid}/ns/net") == here:
            time.sleep(0.01)
        inside = ["nsenter", "--target", str(holder.pid), "--net", "ip"]
        ip("link", "set", "lo", "up")
        for name, network in (("control", CONTROL), ("data", DATA)):
            ip("link", "add", name, "type", "veth", "peer", "name", name, "netns", str(holder.pid))
            ip("addr", "add", f"{network}.1/24", "dev", name)
            ip("link", "set", name, "up")
            subprocess.run([*inside, "addr", "add", f"{network}.2/24", "dev", name], check=True)
            subprocess.run([*inside, "link", "set", name, "up"], check=True)
        yield holder.pid
    finally:
        for name in ("control", "data"):  # the kernel takes its time to end them with the namespace
            subprocess.run(["ip", "link", "del", name], check=False, stderr=subprocess.DEVNULL)
        holder.kill()
        holder.wait()


class OneThere(LocalInstances):
    """Instance 1 runs in another namespace: a child is in that of the thread that starts it."""

    def __init__(self, spec: InstanceSpec, there: int) -> None:
        super().__init__(MODULE, [spec.tell] * 2)
        self._there = there

    def launch(self, index: int, orders: Orders) -> None:
        if index == 0:
            super().launch(index, orders)
            return
        with in_namespace(self._there):
            super().launch(index, orders)


@contextlib.contextmanager
def in_namespace(of_process: int) -> Iterator[None]:
    """This thread, for now."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as here, open(f"/proc/{of_process}/ns/net") as there:
        if libc.setns(there.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        try:
            yield
        finally:
            if libc.setns(here.fileno(), CLONE_NEWNET):
                os._exit(3)


def run(model: Path, there: int) -> dict[str, object]:
    mixed = mixed_requests(guides_of(model))
    long = [Submit(f"long{salt}", prompt(1900, salt), 8, GREEDY, ignore_eos=True) for salt in range(2)]
    size = size_of(model)
    with open_alone(model, size) as opened:
        whole = texts(run_alone(opened, [*mixed, *long]))
    spec = InstanceSpec(str(model), Weights(), size, plans_of(1), pinned=False)
    settings = FrontSettings(
        f"tcp://{CONTROL}.1:*",
        lambda index, life: f"tcp://{DATA}.{index + 1}:*",
        Keys.new(),
        hand_over_s=PATIENCE_S,
        silent_s=PATIENCE_S,
        kv_transfer="tcp",
    )
    server = PoolServer(front=None)  # type: ignore[arg-type]
    server.front = Front(
        ["prompt", "token"],
        OneThere(spec, there),
        settings,
        server.deliver,
        restarts=lambda: Restarts(most=100, longest_pause_s=0.1),
    )
    server.front.start()
    try:
        server.wait_until(lambda: server.front.state != "starting", "the instances start")
        assert server.front.lost is None, server.front.lost
        return Scenes(server, mixed, long, whole).all()
    finally:
        server.front.stop(PATIENCE_S)


class Scenes:
    """Scenes one after the other over one pair of instances: links are left alone, slowed or cut."""

    def __init__(
        self, server: PoolServer, mixed: list[Submit], long: list[Submit], whole: dict[str, str]
    ) -> None:
        self.server, self.mixed, self.long, self.whole = server, mixed, long, whole
        self.failed = 0

    def all(self) -> dict[str, object]:
        quiet = self.scene("quiet", self.mixed)
        with slowed("data", SLOW):
            slow = self.scene("slow", self.long)
        with slowed("data", TOO_SLOW):
            too_slow = self.scene("too slow", self.long)
        cut = self.scene("data link cut", self.long, cut="data")
        lost = self.scene("control link cut", self.long, cut="control")
        after = self.scene("after", self.mixed)
        return {"scenes": [quiet, slow, too_slow, cut, lost, after]}

    def scene(self, name: str, requests: Sequence[Submit], cut: str | None = None) -> dict[str, object]:
        """Send requests; where a link is to be cut, slow it first, so that it is cut in the middle."""
        server, front = self.server, self.server.front
        named = [replace(request, request_id=f"{request.request_id} {name}") for request in requests]
        divided, failed, life = front.n_divided, sum(front.failed.values()), dict(front.pids)
        began_s, patient = time.monotonic(), front.settings
        with slowed("data", TOO_SLOW) if cut else contextlib.nullcontext():
            for request in named:
                front.send(request)
            if cut is not None:
                server.wait_until(self.is_handing_over, "no hand-over begins")
                ip("link", "set", cut, "down")
            if cut == "data" or name == "too slow":
                front.settings = replace(patient, hand_over_s=HAND_OVER_S)
            if cut == "control":
                server.stopped.add(life[1])  # nothing is heard of it
            server.wait_for(len(named))
        front.settings = patient
        took_s = time.monotonic() - began_s
        if cut is not None:
            ip("link", "set", cut, "up")
        server.wait_until(lambda: len(front.pids) == 2, "an instance stays away")
        server.wait_until(server.is_empty, "keys and values stay behind")
        wrong = [request for request in named if not self.is_right(request.request_id)]
        return {
            "name": name,
            "took_s": took_s,
            "divided": front.n_divided - divided,
            "failed": sum(front.failed.values()) - failed,
            "failed_requests": [
                request.request_id for request in named if request.request_id in server.failures
            ],
            "replaced": [index for index, pid in front.pids.items() if life.get(index) != pid],
            "wrong": [request.request_id for request in wrong],
            "refused": dict(front.refused_frames),
        }

    def is_handing_over(self) -> bool:
        return any(member["handing_over"] for member in self.server.front.members())

    def is_right(self, name: str) -> bool:
        """An error is right where the answer had begun; else the whole answer must be there."""
        if name in self.server.failures:
            return name in self.server.pieces
        return texts(self.server.pieces)[name] == self.whole[name.partition(" ")[0]]


@contextlib.contextmanager
def slowed(device: str, rate: str, burst: str = "4kb") -> Iterator[None]:
    """Limit what leaves here by `device` to `rate`; burst: what may leave at once."""
    add = ["tc", "qdisc", "add", "dev", device, "root", "tbf"]
    subprocess.run([*add, "rate", rate, "burst", burst, "latency", "2s"], check=True)
    try:
        yield
    finally:
        subprocess.run(["tc", "qdisc", "del", "dev", device, "root"], check=True)


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
