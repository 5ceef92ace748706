"""A model's config as plain JSON values, and back: what packed files, ranks and fingerprints hold of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from phasewise.serving.models.fields import LATER
from phasewise.serving.models.packed_model import ModelConfig
from phasewise.serving.models.rope import SCALINGS


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """Write the config as plain JSON values; `config_from_json` is the inverse."""
    different = tuple(dict.fromkeys(config.forms))
    values: dict[str, Any] = _plain(config)
    return {
        **values,
        "forms": _plain(different),
        "layers": [different.index(form) for form in config.forms],
    }


def config_from_json(values: Mapping[str, Any]) -> ModelConfig:
    """The config that `config_to_json` wrote; KeyError, TypeError or ModelError for anything else."""
    own = dict(values)
    layers = own.pop("layers")
    config: ModelConfig = _value(ModelConfig, {**own, "forms": [own["forms"][form] for form in layers]})
    return config


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    if not is_dataclass(value):
        return value
    named = {"kind": type(value).__name__} if type(value).__name__ in SCALINGS else {}
    own = [(field, getattr(value, field.name)) for field in fields(value)]
    kept = {
        field.name: _plain(of_field)
        for field, of_field in own
        if not (LATER.items() <= field.metadata.items() and of_field == field.default)
    }
    return {**named, **kept}


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _value(hint: Any, plain: Any) -> Any:
    """Read a value of type `hint` from plain JSON values."""
    if plain is None:
        return _number_or_text(hint, plain)
    if get_origin(hint) is tuple:
        return tuple(_value(get_args(hint)[0], entry) for entry in plain)
    classes = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and is_dataclass(kind)]
    if not classes or not isinstance(plain, Mapping):
        return _number_or_text(hint, plain)
    own = dict(plain)
    kind = classes[0] if len(classes) == 1 else SCALINGS[own.pop("kind")]
    return kind(**{name: _value(_hints(kind)[name], entry) for name, entry in own.items()})


def _number_or_text(hint: Any, plain: Any) -> Any:
    """`plain`, which must be of one of the types that `hint` names; a whole number is a float too."""
    allowed = get_args(hint) or (hint,)
    if type(plain) in allowed or plain in allowed or (type(plain) is int and float in allowed):
        return plain
    raise TypeError(f"{plain!r:.80} where {hint} is expected")
