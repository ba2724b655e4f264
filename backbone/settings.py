"""Build frozen settings dataclasses from YAML mappings, with one-line errors.

Every key is known or refused with the nearest valid one; every value is converted to the type its field
is annotated with (``1e-5`` arrives from YAML as a string) or refused.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping


def nearest(word: str, allowed: Iterable[str]) -> str:
    """``; did you mean 'x'?`` or the list of what is allowed."""
    allowed = [str(a) for a in allowed]
    close = difflib.get_close_matches(str(word), allowed, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(allowed)}"


def build(kind: type, values: object, where: str):
    """An instance of dataclass ``kind`` from a mapping; ``where`` names the mapping in errors.

    Raises:
        ValueError: an unknown or missing key, or a value of the wrong type or range.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} is {values!r}: give a mapping of keys and values")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in values:
        if key not in fields:
            raise ValueError(f"{where}: unknown key {key!r}; {nearest(key, fields)}")
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise ValueError(f"{where}: the key {name!r} is missing")
    converted = {key: convert(hints[key], value, f"{where}.{key}") for key, value in values.items()}
    try:
        return kind(**converted)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def convert(hint: object, value: object, where: str):
    """``value`` as the annotated type, or a ValueError that names ``where``."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return convert(next(a for a in arguments if a is not type(None)), value, where)
    if dataclasses.is_dataclass(hint):
        return build(hint, value, where)
    if origin is tuple:
        return _tuple(arguments, value, where)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} is {value!r}: give a mapping of keys and values")
        return {str(key): convert(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    return _scalar(hint, value, where)


def _tuple(arguments: tuple, value: object, where: str) -> tuple:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{where} is {value!r}: give a list")
    if arguments[-1] is Ellipsis:
        return tuple(convert(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if len(value) != len(arguments):
        raise ValueError(f"{where} is {list(value)!r}: give a list of {len(arguments)} values")
    return tuple(convert(kind, item, where) for kind, item in zip(arguments, value, strict=True))


def _scalar(hint: object, value: object, where: str):
    if hint is typing.Any or hint is object:
        return value
    if hint is bool:
        if isinstance(value, bool):
            return value
        raise ValueError(f"{where} is {value!r}: give true or false")
    if hint is str:
        if isinstance(value, str):
            return value
        raise ValueError(f"{where} is {value!r}: give a text")
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{where} is {value!r}: give a {'whole number' if hint is int else 'number'}")
    try:
        number = float(value)
        if hint is int and not number.is_integer():
            raise ValueError
        return int(number) if hint is int else number
    except (ValueError, OverflowError):
        raise ValueError(f"{where} is {value!r}: give a {'whole number' if hint is int else 'number'}") from None
