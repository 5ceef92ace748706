"""Instance: an engine in a process of its own, with a role in a pool, that computes the requests of a front.

The main thread owns the sockets and does nothing that takes long: its heartbeats say that the instance lives.
The engine runs on its own thread, as behind HTTP; grammars are compiled on threads of their own; keys and
values leave on the sender's. An instance whose ranks die ends: its front starts another one and runs the
unanswered requests again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import zmq

from phasewise._version import __version__
from phasewise.cluster.real.handing_over.frames import Codec, parts_of
from phasewise.cluster.real.handing_over.receiver import ReceiveFailed, Receiver
from phasewise.cluster.real.handing_over.sender import (
    LinkBroken,
    Post,
    Sender,
    SharedLink,
    StreamLink,
)
from phasewise.cluster.real.instance_messages import (
    CannotStart,
    Dropped,
    FromInstance,
    HandOverFailed,
    Heartbeat,
    Identity,
    PromptBegun,
    Ready,
    SendKvTo,
    Stop,
    ToInstance,
    WireError,
    read_to_instance,
    write,
)
from phasewise.cython_kernels._native import KvMemory
from phasewise.serving.engine.engine_thread import EngineThread
from phasewise.serving.engine.messages import (
    Abort,
    Delivery,
    Failure,
    KvTargetReady,
    Submit,
)
from phasewise.serving.engine.open_engine import OpenEngine
from phasewise.serving.errors import RanksError, ServingError
from phasewise.serving.grammar.guides import Guide, GuideRecipe
from phasewise.serving.grammar.late_guides import GuideThread, GuideWanted
from phasewise.serving.processes.restarts import Restarts
from phasewise.serving.processes.sockets import Keys, Sockets, has_input
from phasewise.serving.ranks.kv_share import KvPlace, KvShare, map_place
from phasewise.serving.scheduling.held_prefixes import HeldPrefixes

HEARTBEAT_S = 0.25
STOP_S = 5.0
MOST_UNSENT_FRAMES = 256
"""Frames that may wait for a slow peer before hand-overs to that peer wait too."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Orders:
    """The addresses of an instance: its front's, and the one at which the instance listens."""

    name: str
    """Name of this life of the instance; the front ignores messages of an earlier life."""
    front: str
    listen: str
    """The address at which the instance takes keys and values, e.g. `tcp://10.0.0.2:*`."""
    keys: Keys | None = None


def host_name() -> str:
    """An id of kernel, PID namespace and user: processes that share it can open each other's /proc files."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{os.getuid()}"


def run_instance(opened: OpenEngine, orders: Orders, n_without_database: int = 0) -> int:
    """Compute for the front until it says Stop or the engine is lost; returns the process's exit code."""
    with Sockets(orders.keys) as sockets:
        return _Instance(opened, orders, sockets, n_without_database).run()


def say_cannot_start(orders: Orders, message: str) -> None:
    """Tell the front why this instance does not become ready."""
    with Sockets(orders.keys) as sockets:
        control = sockets.connect(zmq.DEALER, orders.front, orders.name)
        control.send(write(CannotStart(message)))


class _Instance:
    def __init__(self, opened: OpenEngine, orders: Orders, sockets: Sockets, n_without_database: int) -> None:
        self._opened = opened
        self._n_without_database = n_without_database
        self._orders = orders
        self._sockets = sockets
        engine = opened.engine
        self._share: KvShare = engine.ranks.kv_share
        self._memory = self._share.memory
        self._codec = _codec(opened, self._share)
        self._receiver = Receiver(self._codec, self._memory)
        self._sender = Sender(
            self._share.shape.n_layers,
            lambda: engine.ranks.progress,
            self._begun,
            lambda *why: self._put(HandOverFailed(*why)),
            len(parts_of(self._share.shape.state_bytes)),
        )
        self._posts = _Posts(sockets)
        self._guides = GuideThread(opened.text.guide_compiler())
        with suppress(ServingError):  # a model without a template that can be used
            opened.text.conversations.close()  # its ends of turns are known; the front writes conversations
        self._held = HeldPrefixes(
            engine.scheduler,
            self._codec.model_hash.hex(),
            None if engine.prefixes is None else engine.prefixes.kept,
        )
        self._outgoing: deque[FromInstance] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._next_heartbeat_s = 0.0
        self._is_lost = threading.Event()
        engine.hand_over.outbox, engine.on_begin = self._sender, self._begun
        engine.ranks.follow(self._sender)
        self._thread = EngineThread(
            engine, self._deliver, self._lost, restarts=Restarts(most=0), ends_on_bugs=True
        )

    def run(self) -> int:
        control = self._sockets.connect(zmq.DEALER, self._orders.front, self._orders.name)
        frames, endpoint = self._sockets.listen(zmq.PULL, self._orders.listen)
        self._sender.start()
        self._guides.start()
        self._thread.start()
        control.send(write(self._ready(endpoint)))
        poller = zmq.Poller()
        for source in (control, frames, self._wake):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._is_lost.is_set():
                ready = dict(poller.poll(int(HEARTBEAT_S * 1000)))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                while control in ready and has_input(control) and not self._is_heartbeat_due:
                    if not self._heard(control.recv()):
                        return 0
                self._take_frames(frames, ready)
                self._say(control)
        finally:
            self._sender.stop()
            self._guides.stop()
            self._thread.stop(STOP_S)
            self._say(control)
            os.close(self._wake)
        assert self._thread.lost is not None
        return self._thread.lost.exit_code

    # ---- what the front says -----------------------------------------------------------------------------

    def _heard(self, raw: bytes) -> bool:
        """Take one message of the front; False if it tells this instance to stop."""
        try:
            message: ToInstance = read_to_instance(raw)
        except WireError as error:
            log.error("%s", error)
            return True
        match message:
            case Submit():
                self._take(message)
            case Abort(request_id):
                self._drop(request_id)
            case SendKvTo():
                self._send_kv_to(message)
            case Stop():
                return False
        return True

    def _take(self, request: Submit) -> None:
        if request.part == "answer":
            self._receiver.expect(request.request_id, len(request.known_token_ids))
        if not isinstance(request.guide, GuideRecipe):
            self._thread.send(request)
            return

        def begin(guide: Guide) -> None:
            self._thread.send(replace(request, guide=guide))

        def refuse(error: ServingError) -> None:
            self._put(Delivery((Failure(request.request_id, error),), None, self._opened.engine.load()))

        self._guides.want(GuideWanted(request.request_id, request.client, request.guide, begin, refuse))

    def _drop(self, request_id: str) -> None:
        """Drop a request; once `Dropped` is sent, nothing is read or written for the request any more."""
        self._sender.cancel(request_id)
        self._receiver.forget(request_id)
        self._guides.forget(request_id)
        self._thread.send(Abort(request_id))
        self._put(Dropped(request_id))

    def _send_kv_to(self, target: SendKvTo) -> None:
        try:
            link = self._link(target)
        except RanksError as error:
            self._put(HandOverFailed(target.request_id, "mapping", str(error)))
            return
        self._sender.send_to(target.request_id, link)
        self._thread.send(KvTargetReady(target.request_id))

    def _link(self, target: SendKvTo) -> StreamLink:
        attempt = target.request_id, target.n_prompt
        own = *attempt, self._codec, self._memory, self._posts.post(target.endpoint)
        if target.place is None:
            return StreamLink(*own)
        return SharedLink(
            *own, self._posts.memory(target.endpoint, target.place, self._share), target.placement
        )

    # ---- what other instances send -----------------------------------------------------------------------

    def _take_frames(self, frames: zmq.Socket[bytes], ready: dict[object, int]) -> None:
        if frames not in ready:
            return
        while has_input(frames) and not self._is_heartbeat_due:
            parts = [frame.buffer for frame in frames.recv_multipart(copy=False)]
            try:
                arrived = self._receiver.take(parts)
            except ReceiveFailed as error:
                self._put(HandOverFailed(error.request_id, error.reason, str(error)))
                continue
            if arrived is not None:
                self._thread.send(arrived)

    # ---- what is told, from any thread -------------------------------------------------------------------

    def _put(self, message: FromInstance) -> None:
        self._outgoing.append(message)
        os.eventfd_write(self._wake, 1)

    def _deliver(self, delivery: Delivery) -> None:
        """Send the front what the engine delivers; called on the engine's thread. Where ranks are lost this
        instance ends, and its front decides about its requests: requests that have not begun run again."""
        for placed in delivery.placed:
            self._receiver.await_kv(placed.request_id, placed.placement)
        outs = []
        for out in delivery.outs:
            if isinstance(out, Failure):
                if isinstance(out.error, RanksError):
                    continue
                self._sender.cancel(out.request_id)
                self._receiver.forget(out.request_id)
            outs.append(out)
        self._put(delivery._replace(outs=tuple(outs), held=self._held.report()))

    def _begun(self, request_id: str) -> None:
        self._put(PromptBegun(request_id))

    def _lost(self) -> None:
        self._is_lost.set()
        os.eventfd_write(self._wake, 1)

    def _say(self, control: zmq.Socket[bytes]) -> None:
        while self._outgoing:
            control.send(write(self._outgoing.popleft()))
        if self._is_heartbeat_due:
            if self._held.has_changed:  # more than one report had room for, and nothing is computed
                self._thread.between_steps(lambda: None)  # it wakes, and tells what it has to tell
            self._next_heartbeat_s = time.monotonic() + HEARTBEAT_S
            refused = dict(self._receiver.refused)
            n_handing_over = self._sender.n_jobs + self._receiver.n_awaited
            control.send(
                write(Heartbeat(self._thread.n_turns, self._thread.is_computing, n_handing_over, refused))
            )

    @property
    def _is_heartbeat_due(self) -> bool:
        """True if it is time for a heartbeat, which is due however many messages are sent."""
        return time.monotonic() >= self._next_heartbeat_s

    def _ready(self, endpoint: str) -> Ready:
        opened, codec = self._opened, self._codec
        identity = Identity(
            __version__,
            codec.model_hash.hex(),
            codec.shape,
            codec.vocab_size,
            codec.context_length,
            opened.fingerprint,
            {adapter.name: adapter.content_hash for adapter in opened.model.adapters},
        )
        plans = tuple(plan.describe() for plan in opened.plans.values())
        kv = opened.size.kv
        return Ready(
            identity,
            os.getpid(),
            host_name(),
            kv.slots,
            endpoint,
            self._share.place,
            plans,
            opened.kv_bytes,
            tuple(sorted({core for plan in opened.plans.values() for core in plan.all_cores})),
            sum(weight.is_sparse for weight in opened.model.weights.values()),
            self._n_without_database,
        )


class _Posts:
    """Sockets to other instances, and the memory of other instances that is mapped here. A socket is used by
    one thread at a time: under the sender's lock."""

    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets
        self._open: dict[str, zmq.Socket[bytes]] = {}
        self._mapped: dict[str, KvMemory] = {}

    def post(self, endpoint: str) -> Post:
        """Get the function that sends to an instance; its socket is opened on the first use."""

        def send(parts: list[bytes]) -> bool:
            socket = self._open.get(endpoint)
            if socket is None:
                socket = self._sockets.connect(zmq.PUSH, endpoint, most_unsent=MOST_UNSENT_FRAMES)
                self._open[endpoint] = socket
            try:
                socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
            except zmq.ZMQError as error:
                raise LinkBroken(f"{endpoint} cannot be reached: {error}") from error
            return True

        return send

    def memory(self, endpoint: str, place: KvPlace, share: KvShare) -> KvMemory:
        """Map the memory of another instance's blocks, once; an instance started anew has another place."""
        key = f"{endpoint} {place.path}"
        if key not in self._mapped:
            self._mapped[key] = map_place(place, share.shape)
        return self._mapped[key]


def _codec(opened: OpenEngine, share: KvShare) -> Codec:
    model = opened.model
    told = model.content_hash.encode()  # of the numbers: native and bf16 may be the same ones
    return Codec(
        share.shape, model.config.vocab_size, opened.size.limits.context_length, hashlib.sha256(told).digest()
    )
