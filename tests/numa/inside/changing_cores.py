"""CPUs go offline and come back, a cpuset shrinks and grows, a quota is halved and lifted, all under four
clients: every answer is the undisturbed one, and the server says by which plan it goes on.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from phasewise.tuner.plans import parse_cores
from tests.numa.checks import Figures, check
from tests.numa.inside.topology_checks import CPUS
from tests.numa.machines import CHANGING
from tests.support.machines.own_cgroup import OwnCgroup, own_cgroup
from tests.support.servers.asking_clients import Clients
from tests.support.servers.warm import Forked

SMALL_MODEL = "SMALL_MODEL"
N_CHANGES = "N_CHANGES"
"""Variables: the model's file, and how many changes are drawn."""

PROMPTS = ("a", "the cat", "one two three", "x" * 40)
N_TOKENS = 24
SEED = 32
START_S = 300.0
BOUND_S = 100.0
"""Emulated processors are slow; how long it takes is told, and a hang fails."""
SOON_S = 5.0
ALL = tuple(cpu for node in CHANGING.nodes for cpu in node.cpus)
RANKS_SHARE = 5
"""Several ranks are opened anew for each change: so many times fewer are drawn for them."""


class Served:
    """A `phasewise serve` of a small model, and the lines that it has said."""

    def __init__(self, process: Forked, said: int) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, args=(said,), daemon=True)
        self._reader.start()
        until(lambda: self._url() is not None, "it does not listen", self, START_S)
        self.url = str(self._url())

    def _read(self, said: int) -> None:
        with open(said, encoding="utf-8") as stderr:
            for line in stderr:
                self.lines.append(line.rstrip("\n"))

    def _url(self) -> str | None:
        said = [match[1] for line in self.lines if (match := re.match(r"listening on (\S+)", line))]
        return said[0] if said else None

    def told_cores(self, phase: str) -> tuple[int, ...] | None:
        """Those of the newest plan that it has told after a change, ascending; None before the first."""
        pattern = rf"cores of this process have changed: {phase}: \d+ ranks? on cores? ([\d,\- |]+)"
        said = [match[1] for line in self.lines if (match := re.search(pattern, line))]
        return tuple(sorted(parse_cores(said[-1].strip().replace(" | ", ",")))) if said else None

    def told_by_instances(self) -> dict[str, str]:
        """The cores of each instance's newest plan for decode that it has told after a change."""
        pattern = r"(.*): the cores of this process have changed: decode: 1 rank on cores? ([\d,\-]+)"
        return {match[1]: match[2] for line in self.lines if (match := re.search(pattern, line))}

    def get(self, path: str) -> str:
        """Also what it says with an error, as /ready does while ranks are opened."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=BOUND_S) as reply:
                text: str = reply.read().decode()
        except urllib.error.HTTPError as error:
            text = error.read().decode()
        return text

    def answer(self, prompt: str) -> str:
        fields = {"model": "small", "prompt": prompt, "max_tokens": N_TOKENS, "seed": 5, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps({**fields, "temperature": 1}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=BOUND_S) as reply:
            fields_of_answer: dict[str, Any] = json.load(reply)
        text: str = fields_of_answer["choices"][0]["text"]
        return text

    def is_running_on(self, cores: tuple[int, ...]) -> bool:
        """True once both phases run on these cores, and it has told so."""
        ready = json.loads(self.get("/ready"))
        assert "status" in ready, ready
        threads = {"prefill": len(cores), "decode": len(cores)}
        if ready["status"] != "running" or ready.get("threads") != threads:
            return False
        return all((self.told_cores(phase) or ALL) == cores for phase in threads)

    def counted(self, name: str) -> int:
        pattern = rf"^phasewise_{name}(?:_total)?(?:\{{.*\}})? (\S+)$"
        match = re.search(pattern, self.get("/metrics"), re.MULTILINE)
        assert match
        return int(float(match[1]))


def until(holds: Callable[[], bool], what: str, server: Served, within_s: float = BOUND_S) -> float:
    """Seconds until it holds."""
    began_s = time.monotonic()
    while not holds():
        is_over = time.monotonic() > began_s + within_s or server.process.poll() is not None
        assert not is_over, f"{what}: {server.lines[-20:]}"
        time.sleep(0.02)
    return time.monotonic() - began_s


@contextmanager
def serving(*flags: str) -> Iterator[Served]:
    command = ["serve", os.environ[SMALL_MODEL], "--port", "0", *flags]
    environment = {**os.environ, "PHASEWISE_CONFIG": "/dev/null", "PHASEWISE_KV_BUDGET": "64M"}
    said, stderr = os.pipe()
    process = Forked(command, environment, (0, 1, stderr))
    os.close(stderr)
    try:
        yield Served(process, said)
    finally:
        process.kill()
        process.wait()


@dataclass
class Limits:
    """CPUs and time that the machine and its cgroup leave to the server."""

    group: OwnCgroup
    online: set[int] = field(default_factory=lambda: set(ALL))
    cpuset: set[int] = field(default_factory=lambda: set(ALL))
    quota: int | None = None

    @property
    def cores(self) -> tuple[int, ...]:
        """Those of a plan of one rank, one thread a core; an empty cpuset is as wide as its parent's."""
        allowed = sorted(self.cpuset & self.online) or sorted(self.online)
        return tuple(allowed[: self.quota])

    def change(self, random: Random) -> str:
        """One change; in words what it was."""
        how = random.choice(("online", "cpuset", "quota"))
        if how == "online":
            cpu = random.choice(ALL[1:])  # the first one of a machine stays
            self.online ^= {cpu}
            (CPUS / f"cpu{cpu}/online").write_text(str(int(cpu in self.online)))
            return f"cpu{cpu} {'on' if cpu in self.online else 'off'}"
        if how == "cpuset":
            self.cpuset = set(random.sample(ALL, random.randint(1, len(ALL))))
            self.group.allow(sorted(self.cpuset))
            return f"cpuset {sorted(self.cpuset)}"
        self.quota = None if self.quota == 1 else (self.quota or len(ALL)) // 2
        self.group.set_quota(self.quota)
        return f"quota {self.quota}"

    def restore(self) -> None:
        for cpu in set(ALL) - self.online:
            (CPUS / f"cpu{cpu}/online").write_text("1")


def _let_groups_be_limited() -> None:
    Path("/sys/fs/cgroup/cgroup.subtree_control").write_text("+cpuset +cpu")


def _answers_go_on(n_changes: int, *flags: str) -> Figures:
    _let_groups_be_limited()
    random, took_s, words = Random(SEED), list[float](), list[str]()
    with serving(*flags) as server, own_cgroup(server.process.pid, [*ALL]) as group:
        limits = Limits(group)
        wanted = {prompt: server.answer(prompt) for prompt in PROMPTS}
        try:
            with Clients(PROMPTS, server.answer) as clients:
                for _ in range(n_changes):
                    words.append(limits.change(random))
                    took_s.append(_back_after(limits.cores, server, clients, words))
        finally:
            limits.restore()
        figures = {"moves": server.counted("core_moves"), "ranks that died": server.counted("ranks_replaced")}
    for prompt, texts in clients.texts.items():
        assert set(texts) <= {wanted[prompt]}, (prompt, words)
    return {
        "changes": len(took_s),
        "answers": clients.n_answers,
        **figures,
        "median s": round(median(took_s), 2),
        "worst s": round(max(took_s), 2),
        f"within {SOON_S:g} s": sum(seconds <= SOON_S for seconds in took_s),
    }


def _back_after(cores: tuple[int, ...], server: Served, clients: Clients, words: list[str]) -> float:
    """Seconds until it runs on the cores that there are; some answer has come since."""
    n_answers = clients.n_answers
    seconds = until(lambda: server.is_running_on(cores), f"not on cores {cores} after {words}", server)
    until(lambda: clients.n_answers > n_answers, f"no answers after {words}", server)
    return seconds


@check(CHANGING.name)
def answers_go_on_while_cores_come_and_go() -> Figures:
    return _answers_go_on(int(os.environ[N_CHANGES]))


@check(CHANGING.name)
def two_ranks_follow_too() -> Figures:
    return _answers_go_on(-(-int(os.environ[N_CHANGES]) // RANKS_SHARE), "--ranks", "2")


@check(CHANGING.name)
def instances_divide_a_quota() -> Figures:
    """Two of two cores each have a thread each under a quota of two CPUs, and both of theirs without one."""
    _let_groups_be_limited()
    with (
        serving("--mixed-pool", "0-1", "--mixed-pool", "2-3") as server,
        own_cgroup(server.process.pid, [*ALL]) as group,
    ):
        for pid in _descendants(server.process.pid):
            group.add(pid)
        until(lambda: json.loads(server.get("/ready"))["status"] == "running", "not ready", server, START_S)
        wanted = {prompt: server.answer(prompt) for prompt in PROMPTS}
        with Clients(PROMPTS, server.answer) as clients:
            for quota, told in ((2, {"0", "2"}), (None, {"0-1", "2-3"})):
                group.set_quota(quota)
                until(
                    lambda told=told: set(server.told_by_instances().values()) == told,  # type: ignore[misc]
                    f"not on {told}",
                    server,
                )
                n_answers = clients.n_answers
                until(lambda n=n_answers: clients.n_answers > n, "no answers", server)  # type: ignore[misc]
    for prompt, texts in clients.texts.items():
        assert set(texts) <= {wanted[prompt]}, prompt
    return {"answers": clients.n_answers, "instances": sorted(server.told_by_instances())}


def _descendants(pid: int) -> list[int]:
    parent_of = {
        int(folder.name): int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        for folder in Path("/proc").iterdir()
        if folder.name.isdigit()
    }
    family = [pid]
    for own in family:
        family += [child for child, parent in parent_of.items() if parent == own]
    return family
