"""config.yaml as typed data, fully validated before anything runs.

A study can take an hour, so a wrong key must be found before it starts. The schema says what each
key may hold; what a schema cannot express (an undefined size, heads that do not divide the width)
is checked here. Every error is one line: the key, the value, what is allowed.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lmlab.study.files import ROOT
from lmlab.study.schema import short, why_invalid

OUR_MODEL = "lmlab.model.transformer:TransformerLM"
FLOATS = {"rope_theta", "term", "time_cap_s", "step_limit_s", "bucket_mb", "torch_bucket_mb"}
# Folders of a checkout, and of any working folder, that a report must not be written into.
PROJECT_FOLDERS = (
    *(".ci", ".venv", "profiles", "rules", "src", "tests", "workflow"),
    *("report/references", "report/templates"),
)
RUN_FOLDERS = (".git", ".snakemake", "logs", "results", "snapshots", "traces")
REPORTS_FOLDER = "docs"  # holds reports, one folder each
STUDY_FOR_DEVICE = {"cuda": "full", "cpu": "tiny"}


@dataclass(frozen=True)
class Size:
    """The hyper-parameters of a model size."""

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int


@dataclass(frozen=True)
class Study:
    """One study of `config.yaml`, chosen for the machine at hand."""

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

    def size_settings(self, size: str) -> dict[str, Any]:
        """A size's hyper-parameters with the settings that every model point shares."""
        return {
            "model": self.model,
            "vocab_size": self.common["vocab_size"],
            **asdict(self.sizes[size]),
            "rope_theta": self.common["rope_theta"],
            "seed": self.common["seed"],
        }

    def shapes(self, sizes: Iterable[str]) -> list[dict[str, Any]]:
        """Hyper-parameters of several sizes, for a point that chooses one at run time."""
        return [{"size": size, **asdict(self.sizes[size])} for size in sizes]


def load(config: Mapping[str, Any], device: str) -> Study:
    """The study that a configuration asks for on a device, or a one-line ValueError."""
    _check_keys("", config)
    if error := why_invalid(config):
        raise ValueError(f"config: {error}")
    _check_report(config["report"])
    sizes = {name: Size(**shape) for name, shape in config["sizes"].items()}
    for name, shape in sizes.items():
        _check_size(name, shape)
    for key, size in _sizes_named(config["studies"]):
        if size not in sizes:
            allowed = ", ".join(sizes)
            raise ValueError(f"config: studies.{key} names {size!r}; allowed: {allowed}")
    name = STUDY_FOR_DEVICE[device] if config["study"] == "auto" else config["study"]
    # 120 and 120.0 are the same setting.
    blocks = {
        name: {key: float(v) if key in FLOATS else v for key, v in block.items()}
        for name, block in config["studies"][name].items()
    }
    return Study(
        name=name,
        model=config["model"],
        sizes=sizes,
        common=blocks.pop("common"),
        chapters={key: block for key, block in blocks.items() if block.get("enabled", True)},
        ranks=config["ranks"],
    )


def _check_keys(key: str, value: object) -> None:
    """Reject keys that are not strings, such as an unquoted number; string lookups would fail."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            path = f"{key}.{name}" if key else str(name)
            if not isinstance(name, str):
                raise ValueError(f"config: {path}: keys must be strings, quote it")
            _check_keys(path, inner)


def _check_report(report: str) -> None:
    """Check that the report path, with links resolved, is a separate folder."""
    folder = Path(report).resolve()
    taken = [ROOT / name for name in PROJECT_FOLDERS]
    taken += [Path(name).resolve() for name in RUN_FOLDERS]
    if not folder.is_relative_to(Path.cwd().resolve()):
        fault = "leads out of this folder"
    elif any(path.is_file() for path in (folder, *folder.parents)):
        fault = "leads to a file"
    elif folder == ROOT / REPORTS_FOLDER or any(map(folder.is_relative_to, taken)):
        fault = "is taken by the project"
    else:
        return
    raise ValueError(
        f"config: report = {short(report)} {fault}; allowed: a separate folder, such as report or "
        f"{REPORTS_FOLDER}/mine"
    )


def _check_size(name: str, shape: Size) -> None:
    """Check that the head dimension is an even integer: rotary embedding rotates pairs."""
    pairs, odd = divmod(shape.d_model, 2)
    if odd or pairs % shape.num_heads:
        allowed = ", ".join(str(heads) for heads in range(1, pairs + 1) if pairs % heads == 0)
        raise ValueError(
            f"config: sizes.{name}.num_heads = {shape.num_heads} gives no heads of even width at "
            f"d_model = {shape.d_model}; allowed: {'an even d_model' if odd else allowed}"
        )


def _sizes_named(block: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Key and name of every size that a block or its nested blocks mention, in a list or alone."""
    yield from (("sizes", size) for size in block.get("sizes", ()))
    if "size" in block:
        yield "size", block["size"]
    for key, part in block.items():
        for inner in part if isinstance(part, list) else [part]:
            if isinstance(inner, Mapping):
                yield from ((f"{key}.{name}", size) for name, size in _sizes_named(inner))
