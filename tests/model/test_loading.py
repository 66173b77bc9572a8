"""A model named by import path is a class, or one line says why not."""

from pathlib import Path

import pytest

from lmlab.model import loading
from lmlab.model.transformer import TransformerLM


def test_the_default_is_the_model_of_this_package() -> None:
    assert loading.load_class(loading.DEFAULT) is TransformerLM


def test_a_users_own_class_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_model.py").write_text("class Mine:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)

    assert loading.load_class("own_model:Mine").__name__ == "Mine"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        pytest.param("own_model.Mine", "allowed is 'package.module:name'", id="no colon"),
        pytest.param("no_such_module_x:M", "No module named 'no_such_module_x'", id="no module"),
        pytest.param("math:NoSuch", "math has no attribute 'NoSuch'", id="no attribute"),
        pytest.param("math:sqrt", "'math:sqrt' is not a class", id="not a class"),
    ],
)
def test_a_wrong_path_is_one_line(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        loading.load_class(path)

    assert "\n" not in str(caught.value)


def test_a_broken_import_inside_the_users_module_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_model.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(ValueError, match="No module named 'no_such_dependency'"):
        loading.load_class("broken_model:Mine")
