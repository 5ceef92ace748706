"""Lines of text that are hard to cut into tokens, made from a seed: the same on every machine and version."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

Maker = Callable[[random.Random], str]


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# First and last code point of runs whose characters every Unicode version since 13 classifies alike.
SCRIPTS = {
    "latin": (0x00C0, 0x024F),
    "greek": (0x03B1, 0x03C9),
    "cyrillic": (0x0400, 0x045F),
    "hebrew": (0x05D0, 0x05EA),
    "arabic": (0x0620, 0x064A),
    "devanagari": (0x0905, 0x0939),
    "thai": (0x0E01, 0x0E2E),
    "hangul": (0xAC00, 0xD7A3),
    "kana": (0x3041, 0x3096),
    "han": (0x4E00, 0x9FA5),
    "georgian": (0x10D0, 0x10F0),
    "gothic": (0x10330, 0x10340),
    "combining": (0x0300, 0x036F),
    "devanagari signs": (0x093E, 0x094D),
    "arabic digits": (0x0660, 0x0669),
    "roman numerals": (0x2160, 0x2188),
    "fractions": (0x2150, 0x215E),
    "superscripts": (0x2074, 0x2079),
    "circled": (0x2460, 0x2473),
    "arrows": (0x2190, 0x21FF),
    "mathematics": (0x2200, 0x22FF),
    "boxes": (0x2500, 0x257F),
    "punctuation": (0x2010, 0x2027),
    "currency": (0x20A0, 0x20BF),
    "full width": (0xFF01, 0xFF5E),
    "faces": (0x1F600, 0x1F64F),
    "pictures": (0x1F300, 0x1F3FA),
    "private": (0xE000, 0xE010),
}
SPACES = " \t\n\r\x0b\x0c\u00a0\u2003\u2028\u3000\u0085"
CONTROLS = "\x00\x01\x07\x08\x1b\x1c\x1f\x7f\u0080\u009f\u200b\u200d\ufeff\ufffd"
SIGNS = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
WORDS = _listed(
    "the of and a to in is you that it he was for on are as with his they I at be this have from or "
    "one had by word but not what all were we when your can said there use an each which she do how "
    "their if will up other about out many then them these so some her would make like him into time "
    "has look two more write go see number no way could people my than first water been call who oil "
    "its now find long down day did get come made may part internationalisation Thermodynamics mRNA "
    "iPhone McDonald's O'Neill don't WE'LL they'RE I'd you've 'tis rock'n'roll naïve café Straße "
    "İstanbul ﬁne Ångström e.g. U.S.A. 3rd 1st"
)
LOOK_ALIKES = _listed(
    "<|im_start|> <|im_end|> <|endoftext|> <s> </s> <unk> <|im_start| im_end|> <|im_end|>> "
    "<<|im_start|> < |im_end|> <|IM_END|> <|eot_id|> <|begin_of_text|> [INST] [/INST] <0x0A> <0xFF> "
    "<repo_name> <file_sep> <filename> <issue_start> <|fim_prefix|> ▁ Ġ Ċ ĠĠ"
)
CODE = (
    "def f(x: int = 0) -> int:\n    return x**2  # squared",
    "for (size_t i = 0; i < n; ++i) { sum += a[i] * b[i]; }",
    "SELECT count(*) FROM t WHERE a >= 10 AND b != 'x';",
    '{"key": [1, 2.5e-3, null], "nested": {"ok": true}}',
    'if err != nil {\n\t\treturn nil, fmt.Errorf("%w", err)\n\t}',
    '<div class="a b">\r\n  <p>&amp;</p>\r\n</div>',
    "\\frac{1}{2} \\sum_{i=0}^{n} x_i^2",
    "https://example.org/a/b?c=d&e=%20f#g",
    "0xDEADBEEF 1_000_000 3.14159 -1e10 127.0.0.1 2024-02-29T23:59:60Z",
    "🏳️‍🌈 👩‍👩‍👧‍👦 👍🏽 🇩🇪 ❤️",
)


def mixed_lines(count: int, seed: int = 20240229) -> Iterator[str]:
    """`count` texts, most of them one line of some dozen characters; the first is empty."""
    rng = random.Random(seed)
    yield ""
    for _ in range(count - 1):
        yield "".join(_pick(rng, _MAKERS)(rng) for _ in range(rng.randrange(1, 9)))


def _pick(rng: random.Random, choices: tuple[Maker, ...]) -> Maker:
    return choices[rng.randrange(len(choices))]


def _one_of(rng: random.Random, texts: list[str] | tuple[str, ...] | str) -> str:
    return texts[rng.randrange(len(texts))]


def _words(rng: random.Random) -> str:
    joint = _one_of(rng, (" ", " ", " ", "  ", ", ", "-", "", ". "))
    chosen = (_one_of(rng, WORDS) for _ in range(rng.randrange(1, 12)))
    return joint.join(_cased(rng, word) for word in chosen)


def _cased(rng: random.Random, word: str) -> str:
    return (word, word, word, word.upper(), word.capitalize())[rng.randrange(5)]


def _script(rng: random.Random) -> str:
    first, last = SCRIPTS[_one_of(rng, tuple(SCRIPTS))]
    letters = "".join(chr(rng.randrange(first, last + 1)) for _ in range(rng.randrange(1, 10)))
    return _one_of(rng, ("", " ")) + letters


def _digits(rng: random.Random) -> str:
    return _one_of(rng, ("", " ", "-", "+", "$", ".")) + str(rng.randrange(10 ** rng.randrange(1, 16)))


def _spaces(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return _one_of(rng, " \t\n") * rng.randrange(1, 40)
    return "".join(_one_of(rng, SPACES) for _ in range(rng.randrange(1, 8)))


def _controls(rng: random.Random) -> str:
    return "".join(_one_of(rng, CONTROLS) for _ in range(rng.randrange(1, 4)))


def _signs(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return _one_of(rng, SIGNS) * rng.randrange(1, 30)
    return _one_of(rng, ("", " ")) + "".join(_one_of(rng, SIGNS) for _ in range(rng.randrange(1, 6)))


def _look_alike(rng: random.Random) -> str:
    return _one_of(rng, LOOK_ALIKES) + _one_of(rng, ("", "", " ", "\n"))


def _code(rng: random.Random) -> str:
    return _one_of(rng, CODE)


_MAKERS: tuple[Maker, ...] = (
    _words, _words, _words, _words, _script, _script, _digits, _spaces, _controls, _signs, _look_alike, _code,
)  # fmt: skip
