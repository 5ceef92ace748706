"""Traces in files, in four public formats and phasewise's own, told apart by their content:

- Azure LLM inference traces: CSV with TIMESTAMP, ContextTokens, GeneratedTokens.
- splitwise-sim: CSV with arrival_timestamp (s), prompt_size, token_size.
- Mooncake: JSON lines with timestamp (ms), input_length, output_length, and hash_ids of the prompt's blocks.
- ShareGPT: JSON, or JSON lines, of conversations: the first question with an answer. Tokens are estimated
  from characters. Entries may state lengths instead: {"prompt_tokens": 512, "output_tokens": 64} or [512,
  64].
- A server's `--length-log` (`tuner.predictor.log`): prompts with their tokens and arrival times; lines of an
  earlier version give the time of the answer's end, which is used instead.

Files are not trusted: sizes, types and counts are bounded, and an error names the file and the row. Requests
without a prompt or without an answer are left out."""

from __future__ import annotations

import csv
import io
import lzma
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, NamedTuple, TextIO, TypeAlias

from phasewise._files import open_input
from phasewise._json import DECODER, read_json
from phasewise._words import counted
from phasewise.tuner.config.lengths import BLOCK_TOKENS, MAX_REQUESTS, RequestLengths, Trace, whole_tokens
from phasewise.tuner.errors import TraceError

MAX_FILE_BYTES = 1 << 30
MAX_UNPACKED_BYTES = 256 << 20
MAX_ROW_CHARS = 4 << 20
MAX_REASON_CHARS = 200
MAX_TURNS = 64
READ_CHARS = 1 << 16
"""Bytes to read of a list of conversations before its next entry is parsed."""

CHARS_A_TOKEN = 4.0
"""Characters per token of English text, for conversations without token counts."""


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Every request of a file, in order. TraceError, naming file and row, for invalid content."""
    name = os.fspath(path)
    try:
        with _opened(name) as file:
            trace = _checked(_rows(file.readline(MAX_ROW_CHARS), file, name), name)
    except OSError as error:
        raise TraceError(f"{name}: {error.strerror or error}") from None
    except (lzma.LZMAError, EOFError):
        raise TraceError(f"{name} is no whole xz file") from None
    except UnicodeDecodeError:
        raise TraceError(f"{name} is not UTF-8 text: no trace that phasewise reads") from None
    except ValueError as error:
        raise TraceError(f"{name!r:.80} names no file: {error}") from None
    return trace


def _opened(name: str) -> TextIO:
    """A file opened as text; a name that ends in .xz is decompressed into memory."""
    file = open_input(name)
    if not name.endswith(".xz"):
        if os.fstat(file.fileno()).st_size > MAX_FILE_BYTES:
            file.close()
            raise TraceError(f"{name} is larger than {MAX_FILE_BYTES >> 30} GiB: cut a part of it out")
        return io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    with file, lzma.open(file) as packed:
        data = packed.read(MAX_UNPACKED_BYTES + 1)
    if len(data) > MAX_UNPACKED_BYTES:
        raise TraceError(f"{name} unpacks to more than {MAX_UNPACKED_BYTES >> 20} MiB: cut a part of it out")
    return io.StringIO(data.decode("utf-8-sig"), newline="")


Row: TypeAlias = tuple[int, "RequestLengths | None"]
"""A row of a file: its number, from 1, and its request; None: nothing to serve."""


def _rows(first: str, rest: TextIO, name: str) -> Iterator[Row]:
    """The rows of a file, in the format that its first line shows."""
    if first.lstrip().startswith("["):
        return _conversations(first.lstrip(), rest, name)
    if first.lstrip().startswith("{"):
        return _json_lines(_lines(first, rest, name), name)
    header = [field.strip() for field in first.split(",")]
    if {"ContextTokens", "GeneratedTokens"} <= set(header):
        return _csv(header, rest, name, ("ContextTokens", "GeneratedTokens"), "TIMESTAMP", _instant_s)
    if {"arrival_timestamp", "prompt_size", "token_size"} <= set(header):
        return _csv(header, rest, name, ("prompt_size", "token_size"), "arrival_timestamp", _seconds)
    raise TraceError(
        f"{name} is no trace: CSV with ContextTokens and GeneratedTokens (Azure) or arrival_timestamp, "
        "prompt_size and token_size (splitwise-sim), JSON lines with "
        "input_length and output_length (Mooncake) or conversations (ShareGPT) expected"
    )


def _checked(rows: Iterator[Row], name: str) -> Trace:
    requests: list[RequestLengths] = []
    for number, request in rows:
        if request is not None:
            requests.append(request)
        if number > MAX_REQUESTS:
            raise TraceError(f"{name} has more than {counted(MAX_REQUESTS, 'row')}: cut a part of it out")
    if not requests:
        raise TraceError(f"{name} holds no request")
    return _from_first(requests)


def _from_first(requests: Sequence[RequestLengths]) -> Trace:
    """The requests with arrivals counted from the earliest."""
    arrivals = [request.arrival_s for request in requests if request.arrival_s is not None]
    if not arrivals:
        return tuple(requests)
    first = min(arrivals)
    return tuple(
        request if request.arrival_s is None else replace(request, arrival_s=request.arrival_s - first)
        for request in requests
    )


def _lines(first: str | None, rest: TextIO, name: str) -> Iterator[tuple[int, str]]:
    """The lines of a file with their numbers, without blank lines."""
    if first is not None and first.strip():
        yield 1, first
    for number, line in enumerate(iter(lambda: rest.readline(MAX_ROW_CHARS + 1), ""), 2):
        if len(line) > MAX_ROW_CHARS:
            raise TraceError(f"{name}, row {number}: longer than {MAX_ROW_CHARS} characters")
        if line.strip():
            yield number, line


def _csv(
    header: Sequence[str],
    rest: TextIO,
    name: str,
    lengths: tuple[str, str],
    arrival: str,
    seconds: Callable[[str], float],
) -> Iterator[Row]:
    """The rows of a CSV file. `lengths`: the columns of prompt tokens and answer tokens. `arrival`: the
    column of the arrival time, which `seconds` reads."""
    for number, line in _lines(None, rest, name):
        where = f"{name}, row {number}"
        fields = _fields(line, where)
        if len(fields) != len(header):
            raise TraceError(f"{where}: {counted(len(fields), 'field')}, {len(header)} expected")
        row = dict(zip(header, fields, strict=True))
        try:
            arrival_s = seconds(row[arrival]) if arrival in row else None
            prompt, output = (_count(row[column]) for column in lengths)
            yield number, RequestLengths(prompt, output, arrival_s) if prompt and output else None
        except TraceError as error:
            raise TraceError(f"{where}: {error}") from None


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1e12:
        raise TraceError(f"a time in seconds is expected, not {text!r:.40}")
    return value


def _fields(line: str, where: str) -> list[str]:
    try:
        return next(csv.reader([line]))
    except (csv.Error, StopIteration):
        raise TraceError(f"{where}: not CSV") from None


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()):
        raise TraceError(f"a number of tokens is expected, not {text!r:.40}")
    return int(text)


def _instant_s(text: str) -> float:
    """Unix seconds of a time like `2023-11-16 18:15:46.6805900`, of whose digits Python reads six."""
    try:
        moment = datetime.fromisoformat(re.sub(r"(\.[0-9]{6})[0-9]+", r"\1", text.strip()))
        return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
    except (ValueError, OverflowError):
        raise TraceError(f"a time like 2023-11-16 18:15:46.680590 is expected, not {text!r:.40}") from None


def _json_lines(lines: Iterator[tuple[int, str]], name: str) -> Iterator[Row]:
    for number, line in lines:
        yield number, _entry(_parsed(line, f"{name}, row {number}"), f"{name}, row {number}")


def _conversations(text: str, rest: TextIO, name: str) -> Iterator[Row]:
    """The entries of one JSON list, read entry by entry. `text` begins with `[`."""
    text, n_entries = text[1:].lstrip(), 0
    while True:
        entry, text = _next_entry(text, rest, f"{name}, entry {n_entries + 1}", may_end=n_entries == 0)
        if entry is not None:
            n_entries += 1
            yield n_entries, _entry(entry.value, f"{name}, entry {n_entries}")
        mark, text = text[:1], text[1:].lstrip()
        if mark == "]" and not (text + rest.read(READ_CHARS)).strip():
            return
        if mark != ",":
            raise TraceError(f"{name}: not JSON")


class _Parsed(NamedTuple):
    value: Any


def _next_entry(text: str, rest: TextIO, where: str, *, may_end: bool) -> tuple[_Parsed | None, str]:
    """The next entry, and the text from the mark after it on; None for an empty list."""
    n_read = READ_CHARS
    while True:
        try:
            if may_end and text.startswith("]"):
                return None, text
            value, end = DECODER.raw_decode(text)
            if after := text[end:].lstrip():
                return _Parsed(value), after
        except RecursionError:
            raise TraceError(f"{where}: nested too deeply") from None
        except ValueError:
            pass
        more = rest.read(n_read)
        if not more:
            raise TraceError(f"{where}: not JSON")
        if len(text) > MAX_ROW_CHARS:
            raise TraceError(f"{where}: not JSON, or longer than {MAX_ROW_CHARS} characters")
        text, n_read = (text + more).lstrip(), 2 * n_read


def _parsed(text: str, where: str) -> Any:
    try:
        return read_json(text)
    except ValueError:
        raise TraceError(f"{where}: not JSON") from None


PAIRS = (("input_length", "output_length"), ("prompt_tokens", "output_tokens"))
"""Pairs of fields that state both lengths: Mooncake's, and phasewise's."""


def _entry(entry: Any, where: str) -> RequestLengths | None:
    """The request that an entry states; None without a prompt or an answer."""
    if isinstance(entry, list) and len(entry) == 2:
        entry = dict(zip(PAIRS[-1], entry, strict=True))
    if not isinstance(entry, dict):
        raise TraceError(f"{where}: a JSON object, or a pair of lengths, expected")
    try:
        if "output_tokens" in entry and ("prompt_token_ids" in entry or "prompt" in entry):
            return _logged(entry)
        for pair in PAIRS:
            if pair[0] in entry or pair[1] in entry:
                return _stated(entry, pair)
        return _conversation(entry)
    except TraceError as error:
        raise TraceError(f"{where}: {str(error)[:MAX_REASON_CHARS]}") from None


def _stated(entry: Mapping[str, Any], pair: tuple[str, str]) -> RequestLengths | None:
    for name in pair:
        if type(entry.get(name)) is not int:
            raise TraceError(f"{name} must be a number of tokens, not {entry.get(name)!r:.40}")
    if any(entry[name] == 0 for name in pair):
        return None
    arrival_ms, blocks = entry.get("timestamp"), entry.get("hash_ids", [])
    is_list = isinstance(blocks, list) and len(blocks) <= entry[pair[0]] // BLOCK_TOKENS + 1
    if not is_list or any(type(block) is not int or not 0 <= block < 1 << 63 for block in blocks):
        raise TraceError(f"hash_ids must be numbers, one for every {BLOCK_TOKENS} tokens of the prompt")
    if arrival_ms is None:
        return RequestLengths(entry[pair[0]], entry[pair[1]], blocks=tuple(blocks))
    if type(arrival_ms) not in (int, float) or not 0 <= arrival_ms < 1e18:
        raise TraceError(f"timestamp must be milliseconds, not {arrival_ms!r:.40}")
    return RequestLengths(entry[pair[0]], entry[pair[1]], arrival_ms / 1000, tuple(blocks))


def _logged(entry: Mapping[str, Any]) -> RequestLengths | None:
    ids, text, output = entry.get("prompt_token_ids"), entry.get("prompt"), entry["output_tokens"]
    if type(output) is not int or not (isinstance(ids, list) or isinstance(text, str)):
        raise TraceError("an answer of a length log has a list prompt_token_ids and a number output_tokens")
    prompt = len(ids) if isinstance(ids, list) else _tokens_of(str(text))
    arrived_s = entry.get("arrived_at_s", entry.get("at_s"))
    if arrived_s is not None and (type(arrived_s) not in (int, float) or not 0 <= arrived_s < 1e12):
        raise TraceError(f"arrived_at_s must be Unix seconds, not {arrived_s!r:.40}")
    arrived_s = None if arrived_s is None else float(arrived_s)
    return RequestLengths(prompt, output, arrived_s) if prompt and output else None


HUMAN, MODEL = ("human", "user"), ("gpt", "assistant", "chatgpt", "bing", "bard")


def _conversation(entry: Mapping[str, Any]) -> RequestLengths | None:
    turns = entry.get("conversations", entry.get("items"))
    if not isinstance(turns, list):
        raise TraceError("neither lengths (input_length, output_length) nor conversations")
    texts = [_turn(turn) for turn in turns[:MAX_TURNS]]
    for (asker, question), (answerer, answer) in pairwise(texts):
        if asker in HUMAN and answerer in MODEL and question and answer:
            return RequestLengths(_tokens_of(question), _tokens_of(answer))
    return None


def _turn(turn: Any) -> tuple[str, str]:
    if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
        raise TraceError("a turn of a conversation must be an object with from and value")
    return str(turn.get("from")), turn["value"]


def _tokens_of(text: str) -> int:
    return whole_tokens(math.ceil(len(text) / CHARS_A_TOKEN))
