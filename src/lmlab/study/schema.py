"""Check values against JSON schemas, with errors that say what is allowed instead."""

import json
from collections.abc import Mapping
from functools import cache
from math import isfinite
from typing import Any, cast

import jsonschema

from lmlab.study.files import SCHEMAS

TYPES = {
    "array": "a list",
    "boolean": "true or false",
    "integer": "one integer",
    "number": "one number",
    "object": "a mapping",
    "string": "a string",
}
LIMITS = {
    "minimum": "at least {}",
    "maximum": "at most {}",
    "exclusiveMinimum": "more than {}",
    "minItems": "a list of at least {}",
    "minProperties": "at least {} entry",
    "minLength": "a non-empty string",
    "uniqueItems": "each value once",
}
RENAMED = {
    "arms": "variants",
    "arm_cap_s": "variant_cap_s",
    "kept": "block_m",
    "walked": "block_n",
    "size": "sizes",
    "context": "contexts",
}

# JSON Schema accepts 5.0 as an integer, and YAML accepts infinity; here both are errors.
STRICT_TYPES = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine_many(
    {
        "integer": lambda _, value: type(value) is int,
        "number": lambda _, value: type(value) is int or (type(value) is float and isfinite(value)),
    }
)
Validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=STRICT_TYPES)


@cache
def config_schema() -> dict[str, Any]:
    """The schema of config.yaml with every `$ref` inlined: following references takes half the
    time of a check."""
    whole = json.loads((SCHEMAS / "config.schema.json").read_text())

    def inlined(schema: Any) -> Any:
        if isinstance(schema, dict):
            if "$ref" in schema:
                return inlined(whole["$defs"][schema["$ref"].rpartition("/")[2]])
            return {key: inlined(inner) for key, inner in schema.items()}
        return [inlined(inner) for inner in schema] if isinstance(schema, list) else schema

    return inlined(whole)


def why_invalid(value: object, schema: Mapping[str, Any] | None = None) -> str | None:
    """The first error of a value in one line, or None; `schema` defaults to config.yaml's."""
    errors = Validator(schema or config_schema()).iter_errors(value)
    first = min(errors, key=lambda error: list(map(str, error.path)), default=None)
    return _describe(first) if first else None


def _describe(error: jsonschema.ValidationError) -> str:
    """An error in one line: the key, the value, what is allowed."""
    schema, found = cast(dict[str, Any], error.schema), cast(Any, error.instance)
    parts = [str(part) for part in error.absolute_path]
    if error.validator == "additionalProperties":
        unknown = next(name for name in found if name not in schema["properties"])
        key = ".".join([*parts, unknown])
        if RENAMED.get(unknown) in schema["properties"]:
            return f"{key} is now called {RENAMED[unknown]}"
        return f"{key} is not a key; allowed here: {', '.join(schema['properties'])}"
    if error.validator == "required":
        missing = next(name for name in schema["required"] if name not in found)
        return f"{'.'.join([*parts, missing])} is missing"
    shown = f"{'.'.join(parts)} = {short(found)}; " if parts else ""
    return f"{shown}allowed: {_allowed(error, schema)}"


def _allowed(error: jsonschema.ValidationError, schema: Mapping[str, Any]) -> str:
    limit = cast(Any, error.validator_value)
    if "description" in schema:
        return str(schema["description"])
    if error.validator == "enum":
        return ", ".join(str(choice) for choice in limit)
    if error.validator == "type":
        return TYPES[limit] + (f" of at least {schema['minimum']}" if "minimum" in schema else "")
    return LIMITS.get(str(error.validator), error.message).format(limit)


def short(value: object) -> str:
    """A value as one short line."""
    try:
        text = json.dumps(value, default=str)
    except ValueError:  # an integer of more digits than Python prints
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
