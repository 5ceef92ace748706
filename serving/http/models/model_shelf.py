"""Models of a folder, loaded when a request names one and unloaded when unused. Runs on the event loop. One
model at a time is loaded or unloaded, on a separate thread. A request holds its model from before its prompt
is tokenized until its answer is sent, and a held model is never unloaded."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from phasewise.serving.errors import ServingError
from phasewise.serving.http.errors import ApiError, unknown_model
from phasewise.serving.http.http_settings import ModelFacts, ServedModel


@dataclass(slots=True)
class Resident:
    """A model in memory. `n_users`: requests that hold it. `used_s`: time at which the last of them ended."""

    name: str
    n_bytes: int
    used_s: float
    keep_s: float
    """Seconds that the model stays while unused; infinite: until other models need its room."""
    n_users: int = 0
    is_leaving: bool = False
    """True if the model takes no new requests and is unloaded once it has no users."""

    @property
    def ends_s(self) -> float:
        """Time at which the model is unloaded if still unused; infinite while it has users."""
        return math.inf if self.n_users else self.used_s + self.keep_s


class ModelRoom:
    """The models in memory. `budget_bytes`: most bytes of all models together; None: unlimited."""

    def __init__(self, budget_bytes: int | None) -> None:
        self.budget_bytes = budget_bytes
        self.residents: dict[str, Resident] = {}

    @property
    def n_bytes(self) -> int:
        return sum(resident.n_bytes for resident in self.residents.values())

    def holds_alone(self, n_bytes: int) -> bool:
        """True if a model of this size fits into the empty room."""
        return self.budget_bytes is None or n_bytes <= self.budget_bytes

    def fits(self, n_bytes: int) -> bool:
        """True if a model of this size fits beside the residents."""
        return self.budget_bytes is None or self.n_bytes + n_bytes <= self.budget_bytes

    def makes_way(self, n_bytes: int) -> list[Resident]:
        """Models that must leave for one of `n_bytes`: unused ones first, then the least recently used."""
        chosen: list[Resident] = []
        in_order = sorted(
            self.residents.values(), key=lambda resident: (resident.n_users > 0, resident.used_s)
        )
        left = self.n_bytes + n_bytes - (self.budget_bytes or 0)
        for resident in in_order:
            if self.budget_bytes is None or left <= 0:
                break
            chosen.append(resident)
            left -= resident.n_bytes
        return chosen

    def enter(self, name: str, n_bytes: int, now_s: float, keep_s: float) -> Resident:
        """Add a model to those in memory; it must fit."""
        assert self.fits(n_bytes), f"no room for {name}"
        resident = self.residents[name] = Resident(name, n_bytes, now_s, keep_s)
        return resident

    def leave(self, name: str) -> None:
        """Remove an unused model from those in memory."""
        assert not self.residents[name].n_users, f"{name} answers"
        del self.residents[name]

    def end(self, name: str, now_s: float, keep_s: float) -> Resident:
        """Count one user less of a model, and keep the model for `keep_s` from now on."""
        resident = self.residents[name]
        resident.n_users -= 1
        resident.used_s, resident.keep_s = now_s, keep_s
        return resident

    def overdue(self, now_s: float) -> list[Resident]:
        """Models that have been unused for longer than their `keep_s`."""
        return [resident for resident in self.residents.values() if resident.ends_s <= now_s]

    @property
    def next_end_s(self) -> float:
        """Time at which the next model is overdue; infinite if none will be."""
        return min((resident.ends_s for resident in self.residents.values()), default=math.inf)


FAILED_S = 5.0
"""Seconds for which a model that failed to load is not tried again."""
_FIRST_LOAD_S = 5.0
"""Expected loading time before the first load."""

ModelState = Literal["loaded", "loading", "unloading", "unloaded", "failed"]
Made = TypeVar("Made")
log = logging.getLogger("phasewise.models")


class ModelFile(NamedTuple):
    n_bytes: int
    modified_s: int


@dataclass
class LoadedModel:
    """A model in memory, until `close`. `adapted`: the model once for each of its adapters."""

    served: ServedModel
    adapted: Sequence[ServedModel]
    stack: ExitStack

    def close(self) -> None:
        """Free the memory of the model, which must be unused."""
        with self.stack:
            del self.served, self.adapted


@dataclass(frozen=True)
class MeasuredModel(Generic[Made]):
    """A model that is not yet in memory. `n_bytes`: bytes of weights, keys and values once it is. `open`:
    loads it, and may raise ServingError; the stack unloads it."""

    n_bytes: int
    open: Callable[[ExitStack], Made]


@dataclass(frozen=True)
class ModelFolder(Generic[Made]):
    """A folder of models. `files`: its present files by the names that requests use. `measure`: sizes up a
    model, with little memory; may raise ServingError. `facts`: of a model that is not in memory, as far as
    its file states them. All are called on threads. `budget_bytes`: most bytes of all models in memory
    together; None: what the machine has. `keep_s`: seconds that an unused model stays."""

    files: Callable[[], Mapping[str, ModelFile]]
    measure: Callable[[str], MeasuredModel[Made]]
    facts: Callable[[str], ModelFacts]
    budget_bytes: int | None
    keep_s: float


@dataclass(slots=True)
class ShelfCounts:
    """Models of a folder: how many are in memory now, with their bytes, and counters since the start."""

    loaded: int = 0
    n_bytes: int = 0
    loads: int = 0
    failures: int = 0
    unloads: int = 0
    load_seconds: float = 0.0


class ModelShelf:
    """Loads and unloads the models of `folder`. `load`: brings one into memory; it may raise ServingError,
    and its second argument is called once the model's engine is lost. `admit_shadows`: ends and refuses the
    batch requests of a model whose room is needed, or admits them again."""

    def __init__(
        self,
        folder: ModelFolder[Made],
        load: Callable[[MeasuredModel[Made], Callable[[], None]], LoadedModel],
        report: Callable[[str], None],
        admit_shadows: Callable[[str, bool], None] = lambda _name, _admitted: None,
    ) -> None:
        self.keep_s = folder.keep_s
        self.counts = ShelfCounts()
        self.room = ModelRoom(folder.budget_bytes)
        self._folder: ModelFolder[Any] = folder
        self._load_measured: Callable[[MeasuredModel[Any], Callable[[], None]], LoadedModel] = load
        self._report = report
        self._admit_shadows = admit_shadows
        self._loaded: dict[str, LoadedModel] = {}
        self._failed: dict[str, tuple[float, ApiError]] = {}
        self._waiting: dict[str, dict[asyncio.Future[None], bool]] = {}
        """Waiters for a model by its name; True for a request of a batch."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Loads in progress or queued, by model name."""
        self._lost: set[str] = set()
        """Names of loaded models whose engines have given up."""
        self._fresh: LoadedModel | None = None
        """A model that the loading thread has opened and the event loop has not yet registered."""
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="phasewise-models")
        self._one_at_a_time = asyncio.Lock()
        self._freed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[None]] = set()

    # ---- what is there -----------------------------------------------------------------------------------

    def counted(self) -> ShelfCounts:
        return replace(self.counts, loaded=len(self.room.residents), n_bytes=self.room.n_bytes)

    async def files(self) -> Mapping[str, ModelFile]:
        return await asyncio.to_thread(self._folder.files)

    async def facts(self, name: str) -> ModelFacts:
        return await asyncio.to_thread(self._folder.facts, name)

    def state(self, name: str) -> ModelState:
        resident = self.room.residents.get(name)
        if resident is not None:
            return "unloading" if resident.is_leaving and not resident.n_users else "loaded"
        if name in self._tasks:
            return "loading"
        failed = self._failed.get(name)
        return "failed" if failed is not None and time.monotonic() < failed[0] else "unloaded"

    def served(self, name: str) -> ServedModel | None:
        """The model if it is loaded; valid only until the next await."""
        loaded = self._loaded.get(name)
        return None if loaded is None or self.state(name) != "loaded" else loaded.served

    def adapted(self, name: str) -> Sequence[ServedModel]:
        """The adapters of a loaded model; empty if the model is not loaded."""
        return self._loaded[name].adapted if self.served(name) is not None else ()

    # ---- holding -----------------------------------------------------------------------------------------

    async def hold(self, name: str, *, in_shadow: bool = False) -> ServedModel:
        """Return the model, loaded if need be, and hold it until `release`. Raises ApiError if it cannot be
        loaded. `in_shadow`: for a request of a batch, which is refused if there is no room."""
        resident = self.room.residents.get(name)
        if resident is not None and not resident.is_leaving:
            resident.n_users += 1
            return self._loaded[name].served
        files = await self.files()
        if name not in files:
            raise unknown_model(name, ", ".join(files) or "an empty folder")
        until_s, error = self._failed.get(name, (0.0, None))
        if error is not None and time.monotonic() < until_s:
            raise error
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, {})[waiter] = in_shadow
        if name not in self._tasks:
            self._tasks[name] = asyncio.ensure_future(self._load(name))
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release(name)
            raise
        return self._loaded[name].served

    def release(self, name: str, keep_s: float | None = None) -> None:
        """End one `hold`. `keep_s`: seconds that the model then stays unused; None: the server's default."""
        kept_s = self.keep_s if keep_s is None else keep_s
        self.room.end(name, time.monotonic(), 0.0 if name in self._lost else kept_s)
        self._freed.set()
        self._look()

    def _not_yet(self, why: str) -> ApiError:
        counts = self.counts
        expected_s = counts.load_seconds / counts.loads if counts.loads else _FIRST_LOAD_S
        after_s = max(1, math.ceil(expected_s))
        return ApiError(503, f"{why}; try again in {after_s} s", code="model_loading", retry_after_s=after_s)

    # ---- loading -----------------------------------------------------------------------------------------

    async def _load(self, name: str) -> None:
        try:
            async with self._one_at_a_time:
                while (resident := self.room.residents.get(name)) is not None and resident.is_leaving:
                    await self._when_unused([name])  # one that is here and takes no requests goes first
                if name not in self.room.residents:
                    await self._bring(name)
        except Exception as error:
            self._tell_failure(name, error)
        else:
            self._hand_out(name)
        finally:
            del self._tasks[name]
            for resident in self.room.residents.values():  # room enough was made
                resident.is_leaving = resident.name in self._lost
                self._admit_shadows(resident.name, True)
        self._look()

    async def _bring(self, name: str) -> None:
        began_s = time.monotonic()
        measured = await self._on_worker(lambda: self._folder.measure(name))
        n_bytes = measured.n_bytes
        if not self.room.holds_alone(n_bytes):
            raise ServingError(
                f"it takes {_mib(n_bytes)}, and all models together may take "
                f"{_mib(self.room.budget_bytes or 0)}: raise --models-memory, or lower --kv-budget"
            )
        while not self.room.fits(n_bytes):
            if not self._is_wanted(name):
                return
            leaving = self.room.makes_way(n_bytes)
            for resident in leaving:
                resident.is_leaving = True
                self._admit_shadows(resident.name, False)
            await self._when_unused([resident.name for resident in leaving])
        loop, has_given_up = asyncio.get_running_loop(), threading.Event()

        def on_lost() -> None:
            has_given_up.set()
            with suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(self._lose, name)

        def opened() -> LoadedModel:
            self._fresh = self._load_measured(measured, on_lost)
            return self._fresh

        loaded = await self._on_worker(opened)
        self._fresh = None
        took_s = time.monotonic() - began_s
        self.room.enter(name, n_bytes, time.monotonic(), self.keep_s)
        self._loaded[name] = loaded
        self._failed.pop(name, None)
        if has_given_up.is_set():  # before it was known here
            self._lose(name)
        self.counts.loads += 1
        self.counts.load_seconds += took_s
        self._report(f"{name} is loaded, in {took_s:.1f} s: {_mib(n_bytes)}")

    def _is_wanted(self, name: str) -> bool:
        """True if a request waits for the model that belongs to no batch."""
        waiters = self._waiting.get(name, {})
        return any(not (waiter.done() or in_shadow) for waiter, in_shadow in waiters.items())

    def _hand_out(self, name: str) -> None:
        """Let all waiters hold the model, before it can be unloaded again. If the model was not loaded for
        want of room, the waiters (all of batches) get an error."""
        for waiter in self._waiting.pop(name, {}):
            if waiter.done():
                continue
            if name in self.room.residents:
                self.room.residents[name].n_users += 1
                waiter.set_result(None)
            else:
                waiter.set_exception(self._not_yet(f"other models are in the room of {name}"))

    def _tell_failure(self, name: str, error: Exception) -> None:
        if not isinstance(error, ServingError):
            log.error("the model %s could not be loaded", name, exc_info=error)
        told = str(error) if isinstance(error, ServingError) else f"{type(error).__name__}: {error}"
        line = " ".join(f"the model {name} could not be loaded: {told}".split())
        self.counts.failures += 1
        self._report(line)
        again_s = math.ceil(FAILED_S)
        failure = ApiError(503, line, param="model", code="model_not_loaded", retry_after_s=again_s)
        self._failed[name] = (time.monotonic() + FAILED_S, failure)
        for waiter in self._waiting.pop(name, {}):
            if not waiter.done():
                waiter.set_exception(failure)

    # ---- unloading ---------------------------------------------------------------------------------------

    async def _when_unused(self, names: list[str]) -> None:
        """Unload the unused models of `names`; if all are used, wait until a request ends."""
        unused = [name for name in names if not self.room.residents[name].n_users]
        for name in unused:
            await self._unload(name)
        if not unused:
            self._freed.clear()
            await self._freed.wait()

    async def _unload(self, name: str) -> None:
        """Unload a model; its bytes count until then. It is gone even if its `close` raised."""
        self.room.residents[name].is_leaving = True
        try:
            await self._on_worker(lambda: self._loaded.pop(name).close())
        except Exception as error:
            log.error("the model %s did not end in order", name, exc_info=error)
        self.room.leave(name)
        self._lost.discard(name)
        self.counts.unloads += 1
        self._report(f"{name} is unloaded")

    def _look(self) -> None:
        """Unload overdue models, and set a timer for the next one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        next_s = self.room.next_end_s
        if next_s == math.inf:
            return
        left_s = next_s - time.monotonic()
        if left_s > 0:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._look)
            return
        task = asyncio.ensure_future(self._unload_overdue())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _unload_overdue(self) -> None:
        async with self._one_at_a_time:
            for resident in self.room.overdue(time.monotonic()):
                if resident.ends_s <= time.monotonic():  # nobody has come while others were unloaded
                    await self._unload(resident.name)
        self._look()

    def _lose(self, name: str) -> None:
        """Mark a model whose engine has given up; the next request loads it anew."""
        resident = self.room.residents.get(name)
        if resident is not None:
            self._lost.add(name)
            resident.is_leaving, resident.keep_s = True, 0.0
            self._look()

    async def _on_worker(self, work: Callable[[], Made]) -> Made:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def close(self) -> None:
        """Unload all models after the event loop has ended. May be called from any thread."""
        self._worker.shutdown(cancel_futures=True)
        for loaded in (*self._loaded.values(), *([self._fresh] if self._fresh else [])):
            loaded.close()
        self._loaded.clear()


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 20):.0f} MiB"
