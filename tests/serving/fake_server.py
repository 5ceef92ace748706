"""A real HTTP server over the fake engine, on a free loopback port."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fake_engine import END, VOCAB_SIZE, FakeRanks, encode, make_engine, piece

from phasewise.serving.engine import Engine
from phasewise.serving.engine_thread import EngineThread
from phasewise.serving.errors import ServingError
from phasewise.serving.http.app import create_app
from phasewise.serving.http.client import EngineClient
from phasewise.serving.http.served import HttpLimits, ServedModel
from phasewise.serving.http.server import bind, url_of

CONTEXT = 500


def render_chat(messages: Sequence[dict[str, Any]]) -> str:
    if any(message["role"] == "refused" for message in messages):
        raise ServingError("the template knows no role 'refused'")
    return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"


@dataclass
class FakeServer:
    """What a test may look at and turn while the server runs."""

    url: str
    engine: Engine
    ranks: FakeRanks
    client: EngineClient
    thread: EngineThread
    app: Any = field(repr=False, default=None)

    def wait_until_idle(self, timeout_s: float = 10.0) -> None:
        """Until the engine holds no request and no slot."""
        deadline = time.monotonic() + timeout_s
        while self.engine.has_work or self.client.n_live:
            assert time.monotonic() < deadline, (
                f"{self.client.n_live} live, {self.engine.scheduler.request_ids()}"
            )
            time.sleep(0.005)
        self.engine.scheduler.check()
        assert self.engine.scheduler.pool.n_used == 0


@contextlib.contextmanager
def fake_server(limits: HttpLimits | None = None, *, has_template: bool = True) -> Iterator[FakeServer]:
    ranks = FakeRanks()
    engine = make_engine(ranks, context_length=CONTEXT, kv_slots=4 * CONTEXT)
    limits = limits or HttpLimits()
    client = EngineClient(lambda message: thread.send(message), limits.max_live_requests)
    thread = EngineThread(engine, client.deliver)
    model = ServedModel(
        ("fake", "alias"),
        1_700_000_000,
        CONTEXT,
        VOCAB_SIZE,
        frozenset({END}),
        encode,
        piece,
        render_chat if has_template else None,
    )
    app = create_app(model, client, limits, lambda: thread.is_alive)
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on"))
    web = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    url = url_of(listener)
    thread.start()
    web.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield FakeServer(url, engine, ranks, client, thread, app)
    finally:
        server.should_exit = True
        thread.stop()
        web.join(20)
