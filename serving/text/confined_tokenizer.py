"""Risks of a tokenizer.json, found from its text, and the confined process of a risky one (`confined`).

A tokenizer.json is not trusted, and its parts are small programs: replacements multiply text, patterns
backtrack, templates repeat. A plainly harmless one runs in the server, as most do, others in bounds."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import tokenizers

from phasewise._json import read_json
from phasewise.serving.errors import ModelError, QueueFull, RequestError, ServingError
from phasewise.serving.sandbox.confined import Bounds, ConfinedError, ConfinedProcess, JobRefused, Unserved
from phasewise.serving.text.gguf_vocab import PRE_TOKENIZERS, PUBLISHED_PATTERNS

MOST_GROWTH = 8.0
"""The most bytes that one byte of a text may become."""
MOST_ADDED_BYTES = 4096
"""The most bytes that may be added to a text of any length."""
_MOST_PARTS = 64
_MOST_PATTERN = 4096
_MOST_LITERAL_BYTES = 256
_MOST_WORD = 1000
_MOST_TOKEN_CHARACTERS = 1024
_MOST_TEMPLATE_TOKENS = 256
_MOST_REPLACEMENT_BYTES = 64

KNOWN_PATTERNS = frozenset(PUBLISHED_PATTERNS).union(*(cutter.patterns for cutter in PRE_TOKENIZERS.values()))
"""Patterns of well-known families, each of which cuts a text in linear time."""

_CLASS = r"\[\^?(?:\\[pP]\{\^?\w+\}|\\x\{[0-9A-Fa-f]+\}|\\[^pPx]|[^\\\[\]])+\]"
_ATOM = rf"(?:\\[pP]\{{\^?\w+\}}|\\[sSdDwWrntfv]|\\[^\w\s]|{_CLASS}|[^\\\[\]().*+?{{}}|^$])"
_SIMPLE = re.compile(
    rf"(?P<first>(?:{_ATOM}\??){{0,4}}){_ATOM}(?P<last>[+*?]|\{{(?P<least>\d{{1,3}})(?:,\d{{0,3}})?\}})?"
)
"""A few characters or classes, of which only the last may repeat, so that matching never backtracks."""

_HARMLESS = {
    ("normalizer", "normalizers"): """NFC NFD NFKC NFKD Nmt Lowercase Strip StripAccents BertNormalizer
        ByteLevel Prepend Replace Precompiled""",
    ("pre_tokenizer", "pretokenizers"): """ByteLevel Metaspace Whitespace WhitespaceSplit BertPreTokenizer
        Punctuation Digits CharDelimiterSplit UnicodeScripts Split""",
    ("post_processor", "processors"): "ByteLevel BertProcessing RobertaProcessing TemplateProcessing",
    ("decoder", "decoders"): "ByteLevel ByteFallback Metaspace WordPiece Fuse Strip BPEDecoder CTC Replace",
}
"""The harmless kinds of each part of a tokenizer.json, by its field and the field of a sequence of parts."""
_FACTORS = {"BertNormalizer": 5 / 3, "ByteLevel": 2.0, "Metaspace": 3.0}
"""Factors of lengthening each time: spaces around a character of three bytes, two bytes for one."""

Json = Any


class Growth(NamedTuple):
    """The growth of a text: n bytes become at most `factor` n + `added`."""

    factor: float = 1.0
    added: float = 0.0

    def then(self, other: Growth) -> Growth:
        return Growth(self.factor * other.factor, self.added * other.factor + other.added)

    @property
    def is_small(self) -> bool:
        return self.factor <= MOST_GROWTH and self.added <= MOST_ADDED_BYTES


class _Risky(Exception):
    """A part of a tokenizer.json is not harmless; the message is the reason."""


def risk_of(text: str) -> str | None:
    """The reason, in a few words, why a tokenizer may not run in this process; None where it may. A text that
    is no tokenizer.json has no risk: reading it will say what is wrong."""
    try:
        fields = read_json(text, object_of=_without_doubles)
        if isinstance(fields, dict):
            for name, inner in _HARMLESS:
                if not growth_of(fields.get(name), name, inner).is_small:
                    raise _Risky("it can make texts many times longer")
            _check_model(fields.get("model"))
    except _Risky as risk:
        return str(risk)
    except ValueError:
        return None
    except (TypeError, KeyError, AttributeError):  # a field of another kind than it has in a tokenizer.json
        return "a part is not described as such parts are"
    return None


def growth_of(part: Json, name: str = "normalizer", inner: str = "normalizers") -> Growth:
    """The most that a part of a tokenizer.json can lengthen a text. Raises what `risk_of` catches."""
    growth, n_seen = Growth(), 0
    left = [] if part is None else [part]
    kinds = _HARMLESS[name, inner].split()
    while left:
        component = left.pop()
        kind, n_seen = component["type"], n_seen + 1
        if n_seen > _MOST_PARTS:
            raise _Risky(f"it has more than {_MOST_PARTS} {inner}")
        if kind == "Sequence":
            left += reversed(component[inner])
        elif kind not in kinds:
            raise _Risky(f"its {name} {kind!r:.40} is not known")
        else:
            growth = growth.then(_growth_of_one(component, kind))
    return growth


def _growth_of_one(part: Mapping[str, Json], kind: str) -> Growth:
    shortest = _check_pattern(part["pattern"]) if kind in ("Replace", "Split") else 0
    if kind == "Prepend":
        return Growth(added=_n_bytes(part["prepend"]))
    if kind == "Replace":
        content = _n_bytes(part["content"])
        return Growth(max(1.0, content / shortest)) if shortest else Growth(1.0 + content, content)
    if kind == "Precompiled":
        longest = _longest_replacement(part["precompiled_charsmap"])
        return Growth(1.0 if longest <= _MOST_REPLACEMENT_BYTES else float(longest))
    if kind == "TemplateProcessing":
        _check_template(part)
    return Growth(_FACTORS.get(kind, 1.0))


def _check_pattern(pattern: Mapping[str, str]) -> int:
    """The fewest bytes that a harmless pattern matches; `_Risky` for any other pattern."""
    ((kind, text),) = pattern.items()
    if kind == "String":
        if _n_bytes(text) > _MOST_LITERAL_BYTES:
            raise _Risky("it looks for a long text")
        return _n_bytes(text)
    if kind != "Regex" or len(text) > _MOST_PATTERN:
        raise _Risky("it has a long pattern")
    if text in KNOWN_PATTERNS:
        return 1
    simple = _SIMPLE.fullmatch(text)
    if simple is None:
        raise _Risky(f"its pattern {text!r:.60} is not known to be harmless")
    return int(simple["last"] not in ("*", "?") and int(simple["least"] or 1) > 0)


def _longest_replacement(charsmap: str | None) -> int:
    """Bytes of the longest replacement in a map of characters: a table, then texts that end in zeros."""
    try:
        table = base64.b64decode(charsmap or "", validate=True)
    except binascii.Error as error:
        raise _Risky("its table of characters cannot be read") from error
    begin = 4 + int.from_bytes(table[:4], "little")
    return max(map(len, table[begin:].split(b"\0")))


def _check_template(part: Mapping[str, Json]) -> None:
    ids = {name: len(token["ids"]) for name, token in part["special_tokens"].items()}
    for template, most in ((part["single"], 1), (part["pair"], 2)):
        tokens = [piece["SpecialToken"]["id"] for piece in template if "Sequence" not in piece]
        if max(len(template), sum(ids.get(token, 0) for token in tokens)) > _MOST_TEMPLATE_TOKENS:
            raise _Risky("it puts many tokens around a text")
        if len(template) - len(tokens) > most:
            raise _Risky("it repeats texts")


def _check_model(model: Json) -> None:
    kind = model.get("type") if isinstance(model, dict) else None
    if kind == "WordPiece" and model.get("max_input_chars_per_word", 0) > _MOST_WORD:
        raise _Risky("it looks for words of any length")
    if kind == "Unigram" and any(len(piece[0]) > _MOST_TOKEN_CHARACTERS for piece in model["vocab"]):
        raise _Risky("it has very long tokens")


def _n_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _without_doubles(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise _Risky("an object has the same key twice")
    return fields


def without_programs(text: str) -> str:
    """A risky tokenizer.json reduced to what turns tokens into text: its vocabulary and kind of decoder."""
    fields = read_json(text)
    decoder = json.dumps(fields.get("decoder"))
    kept = next((part for kind, part in DECODERS.items() if f'"type": "{kind}"' in decoder), None)
    emptied = ("normalizer", "pre_tokenizer", "post_processor", "truncation", "padding")
    return json.dumps({**fields, **dict.fromkeys(emptied), "decoder": kept})


DECODERS: Mapping[str, Json] = {
    "ByteLevel": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "ByteFallback": {"type": "ByteFallback"},
    "Metaspace": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": False},
}

BOUNDS = Bounds(seconds=1.0, memory_bytes=256 << 20, start_s=30.0)
"""Bounds of tokenizing one text, also of each text of a batch."""
Want = Literal["ids", "spans", "typed"]
Text = str | tuple[str, str]


class ConfinedTokenizer:
    """A tokenizer.json in a confined process, for any thread. ModelError where it cannot be read within the
    bounds; RequestError for a text that exceeds them; QueueFull if the machine is busy."""

    def __init__(self, text: str, bounds: Bounds = BOUNDS) -> None:
        self._process = ConfinedProcess("tokenizer", text.encode("utf-8", "surrogatepass"), bounds)
        try:
            self._process.start()
        except ConfinedError as error:
            raise ModelError(f"the tokenizer cannot be read: {error}; fetch the model again") from error

    def cut(self, want: Want, text: Text, *, special: bool, most: int | None = None) -> Any:
        """The entry of `cut` for one text."""
        request = {"want": want, "texts": [text], "special": special, "most": most}
        try:
            return json.loads(self._process.ask(json.dumps(request).encode()))[0]
        except JobRefused as error:
            raise RequestError(str(error)) from error
        except Unserved as error:
            raise QueueFull(f"the text was not cut into tokens: {error}; try again later", 1) from error
        except ConfinedError as error:
            raise RequestError(f"the model's tokenizer was stopped: {error}; send another text") from error


def cut(backend: tokenizers.Tokenizer, want: Want, texts: Sequence[Text], special: bool) -> list[Any]:
    """Token ids of each text, with spans or types by `want`. `special`: with the tokens around a text."""
    # A batch, though of one: for that alone the library lets other threads run meanwhile.
    encode = backend.encode_batch_fast if want == "ids" else backend.encode_batch
    encoded = encode(list(texts), add_special_tokens=special)
    if want == "ids":
        return [each.ids for each in encoded]
    return [(each.ids, each.offsets if want == "spans" else each.type_ids) for each in encoded]


def prepare(told: bytes) -> Callable[[bytes], bytes]:
    """The job of the confined process: a request of `ConfinedTokenizer` in, its answer out, both JSON."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of a library do not outlive a fork
    with library_errors(JobRefused, "the tokenizer cannot be read"):
        backend = tokenizers.Tokenizer.from_str(told.decode("utf-8", "surrogatepass"))
        backend.no_padding()
        backend.no_truncation()

    def job(request: bytes) -> bytes:
        asked = json.loads(request)
        most = asked.pop("most")
        texts = [text if isinstance(text, str) else tuple(text) for text in asked.pop("texts")]
        with library_errors(JobRefused, "the model's tokenizer cannot cut this text"):
            if most is not None:
                backend.enable_truncation(most, strategy="longest_first")
            out = json.dumps(cut(backend, texts=texts, **asked)).encode()
            backend.no_truncation()
        return out

    return job


@contextmanager
def library_errors(kind: type[ServingError], what: str, advice: str = "") -> Iterator[None]:
    """Raise `kind` for whatever the Rust library raises, whose panics are BaseExceptions."""
    try:
        yield
    except (MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise kind(f"{what}: {' '.join(str(error).split())[:200]}{advice}") from error
