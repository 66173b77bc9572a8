"""Points small enough to measure in milliseconds, for tests to vary."""

from typing import Any

from lmlab.study.points import Point

PARAMETERS: dict[str, Any] = {
    "size": "custom",
    "context": 8,
    "batch": 2,
    "precision": "fp32",
    "mode": "train_step",
    "attention": "naive",
    "warmup": 1,
    "start": "warm",
}
MODEL = {key: PARAMETERS[key] for key in ("size", "context", "batch", "attention", "precision")}
SETTINGS: dict[str, Any] = {
    "model": "lmlab.model.transformer:TransformerLM",
    "vocab_size": 17,
    "d_model": 16,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "rope_theta": 10000.0,
    "seed": 0,
    "steps": 3,
    "time_cap_s": 30,
    "skip_if_too_large": False,
}


def end_to_end_point(**changes: Any) -> Point:
    """A train step of a model with a few thousand parameters, changed as asked."""
    return changed("end_to_end", PARAMETERS, SETTINGS, changes)


def precision_point(topic: str, **more: Any) -> Point:
    """A point of the precision chapter; `dtype` is a parameter, the rest are settings."""
    parameters = {"topic": topic, **({"dtype": more.pop("dtype")} if "dtype" in more else {})}
    return Point("precision", parameters, {"seed": 0, **more})


def profile_point(**changes: Any) -> Point:
    settings = {**SETTINGS, "warmup": 1, "profiler": "torch"}
    return changed("profile", MODEL, {**settings, "keep_traces": False}, changes)


def memory_point(topic: str = "timeline", **changes: Any) -> Point:
    """A point of the memory chapter; what is not in its identity is a setting."""
    own = {"keep_snapshots": False, "compile": False, "rounds": 1, "strategies": "none"}
    return changed("memory", {"topic": topic, **MODEL}, {**SETTINGS, **own}, changes)


def rank_point(chapter: str, sizes: dict[str, int], **settings: Any) -> Point:
    """A point of a chapter that trains on ranks; sizes are named by their width."""
    parameters = {"placement": "cpu", "world_size": 2, **MODEL}
    del parameters["size"]
    shape = {key: SETTINGS[key] for key in ("d_ff", "num_layers", "num_heads")}
    known = {key: SETTINGS[key] for key in ("model", "vocab_size", "rope_theta", "seed")}
    shapes = [{"size": name, "d_model": width, **shape} for name, width in sizes.items()]
    return Point(chapter, parameters, {**known, "nnodes": 1, "sizes": shapes, **settings})


def changed(
    chapter: str, parameters: dict[str, Any], settings: dict[str, Any], changes: dict[str, Any]
) -> Point:
    return Point(
        chapter,
        {key: changes.get(key, value) for key, value in parameters.items()},
        {key: changes.get(key, value) for key, value in settings.items()},
    )
