"""config.yaml as typed data, checked whole before anything runs.

A study can take an hour, so a wrong key must not be found in its fortieth minute. The schema says
what each key may hold; what it cannot say (a size that no block defines, heads that do not divide
the width) is checked here. Every complaint is one line: the key, the value, what is allowed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, cast

import jsonschema

from lmlab.study.files import ROOT, SCHEMAS

# JSON's words for types, as the writer of a YAML file knows them.
TYPES = {
    "array": "a list",
    "boolean": "true or false",
    "integer": "one integer",
    "number": "one number",
    "object": "a mapping",
    "string": "a text",
}
OUR_MODEL = "lmlab.model.transformer:TransformerLM"
FLOATS = {"rope_theta", "term", "time_cap_s", "step_limit_s", "bucket_mb", "torch_bucket_mb"}
# Folders that hold what no report may be written among: of a checkout, and of any folder of work.
PROJECT_FOLDERS = (
    *(".ci", ".venv", "profiles", "rules", "src", "tests", "workflow"),
    *("report/references", "report/templates"),
)
RUN_FOLDERS = (".git", ".snakemake", "logs", "results", "snapshots", "traces")
SHELF_OF_REPORTS = "docs"  # a folder of reports, and none itself
STUDY_FOR_DEVICE = {"cuda": "full", "cpu": "tiny"}


class ConfigError(ValueError):
    """A configuration that cannot be studied, in one line."""


@dataclass(frozen=True)
class Size:
    """The hyper-parameters behind a model size's name."""

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int

    @property
    def weights(self) -> int:
        """Numbers in its blocks, by which sizes are ordered whatever the order of their names."""
        return self.num_layers * (4 * self.d_model**2 + 3 * self.d_model * self.d_ff)


@dataclass(frozen=True)
class Study:
    """One study, its choices made: what `config.yaml` says for the machine at hand."""

    name: str
    model: str
    sizes: Mapping[str, Size]
    common: Mapping[str, Any]
    chapters: Mapping[str, Mapping[str, Any]]
    ranks: Mapping[str, Any]

    def rank_settings(self) -> dict[str, Any]:
        """The settings that every point with several processes shares."""
        return {"nnodes": self.ranks["nnodes"], "time_cap_s": self.common["time_cap_s"]}

    def own_model(self) -> dict[str, str]:
        """A parameter that keeps the results of a user's own model apart from ours."""
        return {} if self.model == OUR_MODEL else {"own_model": self.model.replace(":", ".")}

    def sizes_smallest_first(self) -> list[str]:
        """All sizes of the configuration, the one with fewest weights first."""
        return sorted(self.sizes, key=lambda name: self.sizes[name].weights)

    def size_settings(self, size: str) -> dict[str, Any]:
        """What a size's name stands for, with the settings that every model point shares."""
        shape = self.sizes[size]
        return {
            "model": self.model,
            "vocab_size": self.common["vocab_size"],
            "d_model": shape.d_model,
            "d_ff": shape.d_ff,
            "num_layers": shape.num_layers,
            "num_heads": shape.num_heads,
            "rope_theta": self.common["rope_theta"],
            "seed": self.common["seed"],
        }

    def shapes(self, sizes: Iterable[str]) -> list[dict[str, Any]]:
        """What some sizes' names stand for, for a point that chooses among them where it runs."""
        return [{"size": size, **asdict(self.sizes[size])} for size in sizes]


def load(config: Mapping[str, Any], device: str) -> Study:
    """The study that a configuration asks for on a device, or a `ConfigError`."""
    _check_keys("", config)
    _check_schema(config)
    _check_report(config["report"])
    sizes = {name: Size(**shape) for name, shape in config["sizes"].items()}
    for name, shape in sizes.items():
        _check_size(name, shape)
    for name, blocks in config["studies"].items():
        _check_sizes_exist(name, blocks, sizes)
    name = STUDY_FOR_DEVICE[device] if config["study"] == "auto" else config["study"]
    blocks = dict(config["studies"][name])
    return Study(
        name=name,
        model=config["model"],
        sizes=sizes,
        common=_with_floats(blocks.pop("common")),
        chapters={
            key: _with_floats(block) for key, block in blocks.items() if block.get("enabled", True)
        },
        ranks=config["ranks"],
    )


def keys_of_config() -> list[str]:
    """The keys that a configuration has."""
    return list(cast(Mapping[str, Any], _validator().schema)["properties"])


def _with_floats(block: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers that need not be whole as floats: 120 and 120.0 are the same setting."""
    return {key: float(value) if key in FLOATS else value for key, value in block.items()}


@cache
def _validator() -> jsonschema.Draft202012Validator:
    schema = json.loads((SCHEMAS / "config.schema.json").read_text())
    plain = jsonschema.Draft202012Validator
    # JSON takes 5.0 for an integer and knows no infinity; a list of 16.0 tokens is a mistake here.
    strict = plain.TYPE_CHECKER.redefine_many(
        {
            "integer": lambda _, value: isinstance(value, int) and not isinstance(value, bool),
            "number": lambda _, value: _is_finite_number(value),
        }
    )
    return jsonschema.validators.extend(plain, type_checker=strict)(schema)


def _is_finite_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _check_keys(key: str, value: object) -> None:
    """Keys are texts: YAML also takes numbers for them, and then nothing below finds them."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if not isinstance(name, str):
                raise ConfigError(f"config: {_join(key, str(name))}: a key is a text, quote it")
            _check_keys(_join(key, name), inner)


def _check_schema(config: Mapping[str, Any]) -> None:
    errors = sorted(_validator().iter_errors(config), key=lambda error: list(map(str, error.path)))
    if errors:
        raise ConfigError(f"config: {_describe(errors[0])}")


def _check_report(report: str) -> None:
    """A page and its figures need a folder where nothing else lies."""
    folder = Path(report).resolve()
    if any(path.is_file() for path in (folder, *folder.parents)):
        fault = "leads to a file"
    elif folder == ROOT / SHELF_OF_REPORTS or any(map(folder.is_relative_to, _taken_folders())):
        fault = "is taken by the project"
    else:
        return
    raise ConfigError(
        f"config: report = {_short(report)} {fault}; allowed: a folder of its own, as report or "
        f"{SHELF_OF_REPORTS}/mine"
    )


def _taken_folders() -> list[Path]:
    of_the_project = [ROOT / name for name in PROJECT_FOLDERS]
    return [*of_the_project, *(Path(name).resolve() for name in RUN_FOLDERS)]


def _check_size(name: str, shape: Size) -> None:
    width, rest = divmod(shape.d_model, shape.num_heads)
    if rest == 0 and width % 2 == 0:
        return
    fault = (
        f"does not divide d_model = {shape.d_model}"
        if rest
        else f"makes heads of width {width} and rotary embedding needs an even width"
    )
    raise ConfigError(
        f"config: sizes.{name}.num_heads = {shape.num_heads} {fault}; "
        f"allowed: {_allowed_heads(shape.d_model)}"
    )


def _allowed_heads(d_model: int) -> str:
    """Numbers of heads that share a width evenly, each with pairs of features to rotate."""
    if d_model % 2:
        return f"none with d_model = {d_model}, which must be even"
    pairs = d_model // 2
    return ", ".join(str(heads) for heads in range(1, pairs + 1) if pairs % heads == 0)


def _check_sizes_exist(study: str, blocks: Mapping[str, Any], sizes: Mapping[str, Size]) -> None:
    for chapter, block in blocks.items():
        for key, size in _sizes_named(block):
            if size not in sizes:
                raise ConfigError(
                    f"config: studies.{study}.{chapter}.{key} names {size!r}; "
                    f"allowed: {', '.join(sizes)}"
                )


def _sizes_named(block: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every size that a block names: in its list, or as the one size of a part of it."""
    yield from (("sizes", size) for size in block.get("sizes", ()))
    for key, part in block.items():
        if isinstance(part, Mapping) and "size" in part:
            yield f"{key}.size", part["size"]


def _describe(error: jsonschema.ValidationError) -> str:
    """One line from a schema error: the key, the value, what is allowed."""
    schema, found = cast(dict[str, Any], error.schema), cast(Any, error.instance)
    key = ".".join(str(part) for part in error.absolute_path)
    if error.validator == "additionalProperties":
        unknown = next(name for name in found if name not in schema["properties"])
        return (
            f"{_join(key, unknown)} is not a key; allowed here: {', '.join(schema['properties'])}"
        )
    if error.validator == "required":
        missing = next(name for name in schema["required"] if name not in found)
        return f"{_join(key, missing)} is missing"
    return f"{key} = {_short(found)}; allowed: {_allowed(error, schema)}"


def _allowed(error: jsonschema.ValidationError, schema: Mapping[str, Any]) -> str:
    limit = cast(Any, error.validator_value)
    if "description" in schema:
        return str(schema["description"])
    if error.validator == "enum":
        return ", ".join(str(choice) for choice in limit)
    if error.validator == "type":
        kind = TYPES[limit]
        return f"{kind} of at least {schema['minimum']}" if "minimum" in schema else kind
    words = {
        "minimum": f"at least {limit}",
        "maximum": f"at most {limit}",
        "exclusiveMinimum": f"more than {limit}",
        "minItems": f"a list of at least {limit}",
        "minProperties": f"at least {limit} entry",
        "minLength": "a text that is not empty",
        "uniqueItems": "each value once",
    }
    return words.get(str(error.validator), error.message)


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
