"""Instances of pools that die while they answer."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from tests.soak import raw_http
from tests.soak.fault_rows.ranks import judge
from tests.soak.fault_rows.setting import Setting, expect, text_alone, wait_until_free, wait_until_ready
from tests.soak.row_runner import Skipped
from tests.soak.served_process import ServerProcess

MODULE = "serve.instance_process"


def instance_killed(setting: Setting) -> str:
    """One of two while both stream: every stream goes on, and its text is that of an undisturbed one."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise Skipped("two instances need two cores")
    n_tokens = 900
    bodies = [setting.body(f"Answer {i}", n_tokens, temperature=0.9, seed=i) for i in range(8)]
    pools = [part for core in cores for part in ("--mixed-pool", str(core))]
    with setting.server(*pools) as server:
        wait_until_ready(server)
        wanted = [text_alone(server, body) for body in bodies]
        answers, n_pieces = asyncio.run(_storm(server, bodies))
        judge(answers, wanted)
        continued = server.metrics()["phasewise_answers_continued_total"]
        expect(continued > 0, "no answer went on")
        wait_until_ready(server)
        server.wait_until(lambda: len(instances_of(server)) == len(cores), 60, "starts no other instance")
        wait_until_free(server)
    n_continued = f"{continued:.0f} of {len(bodies)}"
    return f"killed after {n_pieces} pieces: {n_continued} streams went on, all as undisturbed"


async def _storm(
    server: ServerProcess, bodies: list[dict[str, object]]
) -> tuple[list[tuple[raw_http.Reply | None, raw_http.Streamed]], int]:
    """All streamed at once; an instance is killed when each has said something."""
    said = [raw_http.Streamed() for _ in bodies]
    asked = [asyncio.create_task(_read(server, *pair)) for pair in zip(bodies, said, strict=True)]
    while not all(stream.n_pieces for stream in said):
        await asyncio.sleep(0.005)
    n_pieces = sum(stream.n_pieces for stream in said)
    os.kill(instances_of(server)[0], signal.SIGKILL)
    await asyncio.gather(*asked)
    return [(None, stream) for stream in said], n_pieces


async def _read(server: ServerProcess, body: dict[str, object], said: raw_http.Streamed) -> None:
    connection = await raw_http.Connection.open(server.port)
    await connection.send("POST", "/v1/completions", {**body, "stream": True})
    _, headers = await connection.head()
    async for event in connection.events(headers):
        said.take(event)
    connection.abort()


def instances_of(server: ServerProcess) -> list[int]:
    """The processes of its instances."""
    children = [
        int(pid)
        for task in Path(f"/proc/{server.pid}/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]
    return [pid for pid in children if MODULE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
