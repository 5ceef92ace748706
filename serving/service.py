"""An open engine behind HTTP: the engine's thread, the routes and the socket, put together."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable

from phasewise.serving.engine_thread import EngineThread
from phasewise.serving.http.app import create_app
from phasewise.serving.http.client import EngineClient, Message
from phasewise.serving.http.served import HttpLimits, ServedModel
from phasewise.serving.http.server import run
from phasewise.serving.start import OpenEngine

_SWITCH_INTERVAL_S = 0.0005
"""Python lets a thread run 5 ms before another may, longer than a decode step: HTTP would stall it."""

_LAST_STEP_S = 2.0


def run_service(
    opened: OpenEngine,
    names: tuple[str, ...],
    limits: HttpLimits,
    listener: socket.socket,
    report: Callable[[str], None],
) -> None:
    """Serve until a signal ends it. `names`: what requests may call the model, its id first."""

    def send(message: Message) -> None:
        thread.send(message)

    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of every client that left in mid-stream
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    client = EngineClient(send, limits.max_live_requests)
    thread = EngineThread(opened.engine, client.deliver)
    app = create_app(_served(opened, names), client, limits, lambda: thread.is_alive)
    thread.start()
    try:
        run(app, listener, client, report)
    finally:
        if not thread.stop(_LAST_STEP_S):
            os._exit(0)  # a step cannot be interrupted, and nobody waits for it any more


def _served(opened: OpenEngine, names: tuple[str, ...]) -> ServedModel:
    return ServedModel(
        names=names,
        created_s=int(time.time()),
        context_length=opened.size.context_length,
        vocab_size=opened.model.config.vocab_size,
        end_token_ids=frozenset(opened.model.config.eos_token_ids),
        encode=opened.text.encode,
        piece=opened.text.tokenizer.piece,
        render_chat=opened.text.render_chat,
    )
