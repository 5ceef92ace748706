"""Make a pack: a system prompt with its tools, computed once, for `serve --prefix-pack`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasewise._files import check_writable, read_input, write_file
from phasewise._words import counted
from phasewise.workflows.errors import UsageError, WorkflowError
from phasewise.workflows.opening.open_model import Weights, open_model
from phasewise.workflows.opening.refusals import check_settings
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.serving.engine.open_engine import ModelText, OpenEngine
    from phasewise.serving.prefix_store.pack_file import PackFacts

MOST_BYTES = 64 << 20
"""Most bytes of a text or of the tools."""
_FIRST_WORDS = ("A", "z", "0", "\n", "é", "<")
"""Messages of users begin with anything: the tokens before them are what all of these have in common."""


@dataclass(frozen=True)
class Beginning:
    """The content of a pack: a system prompt with tools, as conversations begin, or a text as it is."""

    system: str | None = None
    system_file: Path | None = None
    tools: Path | None = None
    text_file: Path | None = None


@dataclass(frozen=True)
class PackOptions:
    """The options of a server that decide the bits of keys and values, or the tokens."""

    weights: Weights
    kv_format: str = "auto"
    context_tokens: int | None = None
    tool_format: str = "auto"
    threads: int | None = None
    db: str | None = None


@dataclass(frozen=True)
class Packed:
    """A pack that was written."""

    path: str
    model: str
    n_tokens: int
    n_bytes: int
    arithmetic: str
    kv_format: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def pack_prefix(
    ref: str, beginning: Beginning, path: Path, options: PackOptions, report: Report = silent
) -> Packed:
    """Compute the beginning and write it to `path`. UsageError, WorkflowError, ModelError, ServingError."""
    from phasewise.serving.engine.engine_size import EngineSize
    from phasewise.serving.engine.open_engine import ModelText, open_engine
    from phasewise.serving.pools.contract import ALIGNMENT
    from phasewise.serving.prefix_store.pack_file import MOST_TOKENS
    from phasewise.serving.ranks.rank_layout import teams_of

    read = _read(beginning)
    try:
        check_writable(path)
    except OSError as error:
        raise WorkflowError(f"{path} cannot be written: {error.strerror}") from None
    check_settings(ref, options.weights, options.kv_format, report)
    opened = open_model(ref, options.weights, options.threads, options.db, report)
    text = ModelText(opened.model)
    token_ids = _tokens(text, read, options.tool_format)
    teams, context = teams_of(opened.plans), options.context_tokens
    size = EngineSize.for_many(opened.model, 1, context, None, options.kv_format, kv_shared=True, teams=teams)
    most = min(MOST_TOKENS, size.limits.context_length - 1)
    if not 1 <= len(token_ids) <= most:
        raise WorkflowError(
            f"the beginning has {counted(len(token_ids), 'token')}, and a pack of this model 1 to {most}"
        )
    with open_engine(opened.model, opened.plans, size, text, opened.schedules) as engine:
        report(f"computing {counted(len(token_ids), 'token')}")
        facts, records = _computed(engine, token_ids)
    if not records:
        raise WorkflowError(
            f"the beginning has {counted(len(token_ids), 'token')}, too few to keep any: a pack holds keys "
            f"and values of {ALIGNMENT} tokens at a time"
        )
    from phasewise.serving.prefix_store.pack_file import pack_head

    data = b"".join([pack_head(facts), *records])
    try:
        write_file(path, data)
    except OSError as error:
        raise WorkflowError(f"{path} cannot be written: {error.strerror}") from None
    identity = facts.identity
    return Packed(
        str(path),
        facts.model,
        len(token_ids),
        len(data),
        str(identity["arithmetic"]),
        str(identity["kv_format"]),
    )


@dataclass(frozen=True)
class _Read:
    """The beginning as it was read: a text, or a system prompt with tools."""

    text: str | None
    system: str | None
    tools: list[Any] | None


def _read(beginning: Beginning) -> _Read:
    given = [beginning.system, beginning.system_file, beginning.text_file]
    if sum(source is not None for source in given) > 1:
        raise UsageError("give one of --system, --system-file and --text-file")
    if beginning.text_file is not None:
        if beginning.tools is not None:
            raise UsageError("--tools go with a system prompt: a text is taken as it is")
        return _Read(_text(beginning.text_file), None, None)
    if all(source is None for source in given) and beginning.tools is None:
        raise UsageError("give what the pack holds: --system, --system-file, --tools or --text-file")
    system = beginning.system
    if beginning.system_file is not None:
        system = _text(beginning.system_file)
    tools = None
    if beginning.tools is not None:
        try:
            tools = json.loads(_text(beginning.tools))
        except (ValueError, RecursionError) as error:
            raise WorkflowError(f"{beginning.tools} is no JSON: {str(error)[:100]}") from None
        if not isinstance(tools, list):
            raise WorkflowError(f"{beginning.tools} has no list of tools, as requests to the API have one")
    return _Read(None, system, tools)


def _text(path: Path) -> str:
    try:
        return read_input(path, MOST_BYTES).decode()
    except UnicodeDecodeError as error:
        raise WorkflowError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise WorkflowError(f"{path} cannot be read: {error.strerror}") from None


def _tokens(text: ModelText, read: _Read, tool_format: str) -> tuple[int, ...]:
    """The tokens that every prompt has which begins so."""
    if read.text is not None:
        return tuple(text.encode(read.text, True))
    common: Sequence[int] | None = None
    for words in _FIRST_WORDS:
        ids = _conversation(text, read, words, tool_format)
        if common is None:
            common = ids
        same = [mine == theirs for mine, theirs in zip(common, ids, strict=False)]
        common = common[: same.index(False) if False in same else len(same)]
    assert common is not None
    return tuple(common)


def _conversation(text: ModelText, read: _Read, words: str, tool_format: str) -> list[int]:
    """A conversation as the server writes it out."""
    from pydantic import ValidationError

    from phasewise.serving.http.requests.calls import conversation_of
    from phasewise.serving.http.requests.schemas import ChatRequest
    from phasewise.serving.tools.dialect import dialect_of

    system = [] if read.system is None else [{"role": "system", "content": read.system}]
    told = {"model": "m", "messages": [*system, {"role": "user", "content": words}], "tools": read.tools}
    try:
        body = ChatRequest.model_validate(told)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise WorkflowError(f"the tools are not those of the API: {place}: {first['msg']}") from None
    tokenizer = text.tokenizer
    template = text.chat_template or ""
    turn = text.conversations.turn if text.has_template else None
    dialect = dialect_of(template, tokenizer.id_of, tokenizer.special_ids, tool_format, turn)
    conversation = conversation_of(body, dialect)
    return tokenizer.encode_marked(*text.conversations.write(conversation))


def _computed(opened: OpenEngine, token_ids: tuple[int, ...]) -> tuple[PackFacts, list[bytes]]:
    """The beginning's records, computed by an engine that does nothing else."""
    from phasewise.serving.engine.messages import Failure, Submit
    from phasewise.serving.engine.stored_prefixes import shape_of
    from phasewise.serving.prefix_store.blocks import write_record
    from phasewise.serving.prefix_store.copying import copied
    from phasewise.serving.prefix_store.pack_file import PackFacts

    engine, share = opened.engine, opened.engine.ranks.kv_share
    beginnings = engine.scheduler.reads_from(lambda *_: 0)
    engine.submit(Submit("pack", token_ids, 1, ignore_eos=True))
    while engine.has_work:
        for out in engine.step().outs:
            if isinstance(out, Failure):
                raise out.error
    shape = shape_of(share.shape)
    facts = PackFacts(opened.model.name, opened.fingerprint.of_keys_and_values, shape, token_ids)
    computed, memory = beginnings.take_computed()[-1], share.memory
    records = []
    for block in facts.blocks:
        held = copied(computed, block, shape, memory, memoryview(bytearray(shape.most_bytes)))
        assert held is not None, "nothing else is computed here"
        records.append(b"".join(write_record(facts.naming, block, 0.0, held)))
    return facts, records
