"""A model is loaded by import path, or one line says why not."""

from pathlib import Path

import pytest

from lmlab.model import loading
from lmlab.model.transformer import TransformerLM


@pytest.fixture(autouse=True)
def user_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_model.py").write_text("class Mine:\n    pass\n")
    (tmp_path / "broken_model.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_the_default_and_a_users_class_are_found() -> None:
    assert loading.load_class(loading.DEFAULT) is TransformerLM
    assert loading.load_class("own_model:Mine").__name__ == "Mine"


@pytest.mark.parametrize(
    ("path", "culprit"),
    [
        ("own_model.Mine", "own_model.Mine"),
        ("no_such_module_x:M", "no_such_module_x"),
        ("math:NoSuch", "NoSuch"),
        ("math:sqrt", "math:sqrt"),
        ("broken_model:Mine", "no_such_dependency"),
    ],
)
def test_a_wrong_path_is_one_line(path: str, culprit: str) -> None:
    with pytest.raises(ValueError, match=rf"^[^\n]*{culprit}[^\n]*$"):
        loading.load_class(path)
