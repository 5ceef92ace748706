"""The values that `phasewise serve` opens: all that would listen, load, compute or start a process is a fake
that keeps what it was given. Two runs of equal options open equal values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib
import pickle
import sys
import types
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from phasewise.cluster.real.instance import Orders
from phasewise.serving.engine.engine_host import OWN_CORES
from phasewise.serving.engine.open_engine import ModelText, OpenEngine
from phasewise.serving.model_table import Predictor
from phasewise.serving.pools.contract import Estimate
from phasewise.topology import Machine
from tests.cli import command
from tests.support.machines.paper_machines import xeon

ESTIMATE = Estimate(7, 0.0)


@dataclasses.dataclass
class Run:
    """The end of a run of `serve`. `opened`: what it opened, by kind; empty where it was refused before."""

    exit_code: int
    said: str
    opened: dict[str, Any]


class _Closes:
    """A thing that has only to be closed."""

    def close(self) -> None: ...


class _Engine(_Closes):
    """An engine whose one rank follows its cores."""

    def __init__(self) -> None:
        self.ranks = types.SimpleNamespace(moves_in_place=True)


class _Opened(contextlib.AbstractContextManager[Any]):
    """A value that is used in `with`, of these attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __exit__(self, *_error: object) -> None: ...


def plain(value: Any) -> Any:
    """The value as one that can be compared: settings by their fields, models by what was chosen of them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {name: plain(field_value) for name, field_value in fields.items() if not name.startswith("_")}
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(member) for member in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if value is None or isinstance(value, str | int | float | bool | Path | enum.Enum):
        return value
    return type(value).__name__


def everywhere(patch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    """Replace what `MODULE.NAME` is, in each of our modules that has it by this name too."""
    module, _, attribute = name.rpartition(".")
    own = getattr(importlib.import_module(module), attribute)
    ours = [each for each in sys.modules.values() if each.__name__.startswith("phasewise.")]
    for each in ours:
        if vars(each).get(attribute) is own:
            patch.setattr(each, attribute, value)


class Boundary:
    """The fakes, and what they were given since `begin`."""

    def __init__(self, patch: pytest.MonkeyPatch, machine: Machine | None = None) -> None:
        self.opened: dict[str, Any] = {}
        self._patch = patch
        self._machine = machine or xeon()
        self._replace()

    def keep(self, kind: str, value: Any) -> None:
        self.opened.setdefault(kind, []).append(plain(value))

    def _replace(self) -> None:
        for late in ("run", "embedding", "model_folder", "instance_process"):
            importlib.import_module(f"phasewise.workflows.serve.{late}")
        set_ = partial(everywhere, self._patch)
        set_("phasewise.topology.read_machine", lambda *_: self._machine)
        set_("phasewise.serving.processes.headroom.use_one_heap", lambda: None)
        set_("phasewise.serving.processes.headroom.available_bytes", lambda: 1 << 36)
        set_("phasewise.serving.engine.engine_size.available_bytes", lambda: 1 << 36)
        set_("phasewise.serving.http.transport.listening.allow_many_connections", lambda: 1 << 14)
        set_("phasewise.serving.http.transport.listening.TcpAddress", self._tcp)
        set_("phasewise.serving.http.transport.listening.UnixAddress", self._unix)
        set_("phasewise.serving.http.transport.listening.tls_context", lambda *files: files)
        set_("phasewise.serving.embedding.devices.accelerators", lambda: ["cuda:0"])
        set_("phasewise.serving.embedding.open_embedding.open_embedding", self._embedding)
        set_("phasewise.serving.engine.open_engine.open_engine", self._engine)
        set_("phasewise.serving.service.run_service", self._serve)
        set_("phasewise.workflows.opening.first_start.pull_what_fits", self._pull)
        set_("phasewise.workflows.serve.opened_models.open_predictor", self._predictor)
        set_("phasewise.cli.explain_text.uses_text", self._explained)
        set_("phasewise.cluster.real.local_instances.LocalInstances", self._instances)
        set_("phasewise.cluster.real.front.Front", self._front)
        set_("phasewise.cluster.real.ray_connection.ray_connection", self._ray)
        set_("phasewise.cluster.real.ray_desk.DeskThread", lambda *_: _Closes())
        set_("phasewise.cluster.real.ray_cluster.RayInstances", self._ray_instances)
        self._watch_loading()

    def _watch_loading(self) -> None:
        from phasewise.serving import loaders
        from phasewise.workflows.opening import tuned_schedules

        load = loaders.load_model

        def loading(ref: str, format: str, *rest: Any, **more: Any) -> Any:
            storage = more.get("storage")
            stored = storage and (storage.mode, storage.sequences)
            self.keep("loaded", (str(ref), str(format), more.get("pack"), stored))
            return load(ref, format, *rest, **more)

        schedules = tuned_schedules.schedules_for

        def looking(db: Any, *rest: Any, **more: Any) -> Any:
            self.keep("loaded", ("schedules", db))
            return schedules(db, *rest, **more)

        everywhere(self._patch, "phasewise.serving.loaders.load_model", loading)
        everywhere(self._patch, "phasewise.workflows.opening.tuned_schedules.schedules_for", looking)

    def _tcp(self, host: str, port: int, *, secure: bool = False) -> Any:
        self.keep("address", (host, port, secure))
        return _Opened()

    def _unix(self, path: Path) -> Any:
        self.keep("address", path)
        return _Opened()

    def _embedding(
        self,
        model: Any,
        ref: str,
        weight_format: str,
        plan: Any,
        *,
        is_canonical: bool,
        commands: Any,
        report: Any,
        other_cores: int,
    ) -> Any:
        del report
        self.keep("cores beside embeddings", other_cores)
        opened = (model.name, model.format, ref, str(weight_format), dict(commands), plan, is_canonical)
        self.keep("embedding", opened)
        text = _Opened(max_tokens=64)
        return _Opened(model=model, text=text, plan=plan, scores=False, width=8, client=None)

    def _engine(
        self,
        model: Any,
        plans: Any,
        size: Any,
        text: ModelText,
        schedules: Any,
        drafts: Any = None,
        prefixes: Any = None,
    ) -> Any:
        multiplied = {phase: lookup.asked_choice for phase, lookup in schedules.items()}
        drafter = None if drafts is None else "lookup" if drafts.model is None else drafts.model.name
        if drafts is not None and drafts.n_tokens is not None:
            drafter = f"{drafter}, {drafts.n_tokens} tokens"
        self.keep(
            "engine",
            (
                model.name,
                model.format,
                [adapter.name for adapter in model.adapters],
                plans,
                size,
                vars(text)["allow_special"],
                multiplied,
                drafter,
                prefixes,
            ),
        )
        return OpenEngine(model, text, plans, size, _Engine())  # type: ignore[arg-type]

    def _pull(self, remote: Any, *_rest: Any) -> None:
        self.keep("remote", remote)

    def _predictor(self, text: str, model_name: str, *_rest: Any) -> Predictor | None:
        self.keep("predictor", (text, model_name))
        return None if text == "off" else Predictor(lambda facts: ESTIMATE, lambda facts, tokens: None)

    def _explained(self, uses: Any, *_memory_and_drafts: Any) -> str:
        self.keep("explained", [(use.phase, use.used_for) for use in uses])
        return ""

    def _instances(self, _module: str, tells: Any) -> str:
        for tell in tells:
            self.keep("instance", pickle.loads(tell(Orders("", "", "")).partition(b"\n")[2])[0])
        return "local"

    def _front(self, roles: Any, launcher: Any, settings: Any, *_rest: Any) -> None:
        self.keep("front", (roles, settings.split_above_tokens))

    @contextlib.contextmanager
    def _ray(self, address: str) -> Iterator[str]:
        self.keep("cluster", address)
        yield "127.0.0.1"

    def _ray_instances(self, _module: str, wanted: Any, *, spread: bool) -> Any:
        self.keep("placed", (wanted, spread))

        def tell_with(tells: Any) -> None:
            for tell in tells:
                self.keep("instance", pickle.loads(tell(Orders("", "", "")).partition(b"\n")[2])[0])

        nodes = [f"node {number}" for number, _ in enumerate(wanted)]
        return _Opened(
            nodes=nodes,
            free_bytes=lambda: dict.fromkeys(nodes, 1 << 36),
            n_cores_here=0,
            tell_with=tell_with,
            server="5",
            close=lambda: None,
        )

    def _serve(self, table: Any, settings: Any, _address: Any, _report: Any) -> None:
        """One model of a folder is opened."""
        log = settings.length_log
        self.keep("service", dataclasses.replace(settings, length_log=None))
        self.keep("length log", None if log is None else log.path)
        for row in table.models:
            if not isinstance(row.open_host, partial):
                row.open_host(lambda delivery: None, lambda: None, OWN_CORES)
                self._forget_loads_of_the_front(table.embedding)
                self.keep("size", row.size)
            self._keep_row(row)
        if table.embedding is not None:
            self.keep("embedding row", table.embedding.names)
        if table.folder is not None:
            self.keep("folder", (table.folder.budget_bytes, table.folder.keep_s))
            with contextlib.ExitStack() as stack:
                row = table.folder.measure(next(iter(table.folder.files()))).open(stack)
                self._keep_row(row)
                if not isinstance(row.open_host, partial):
                    row.open_host(lambda delivery: None, lambda: None, OWN_CORES)

    def _keep_row(self, row: Any) -> None:
        text = vars(row.text)["allow_special"]
        self.keep("row", (row.names, row.sampling, row.predictor, row.answers, text))

    def _forget_loads_of_the_front(self, embedding: Any) -> None:
        """It computes nothing. What embeds beside it does."""
        name = None if embedding is None else embedding.names[0]
        self.opened["loaded"] = [load for load in self.opened["loaded"] if Path(str(load[0])).name == name]

    def serve(self, *arguments: object, **environment: str) -> Run:
        """Run the command in this process."""
        self.opened = {}
        done = command.run("serve", *arguments, env={"PHASEWISE_CONFIG": "/dev/null", **environment})
        return Run(done.exit_code, " ".join(done.stderr.split()), self.opened)
