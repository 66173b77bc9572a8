"""What `lmlab.parallel` offers, and that asking for it is what imports torch."""

import subprocess
import sys

import pytest

import lmlab.parallel

NAMES = ["FSDP", "BucketedDDP", "FlatDDP", "NaiveDDP", "OverlappedDDP", "ShardedOptimizer"]


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_the_class_of_that_name(name: str) -> None:
    assert getattr(lmlab.parallel, name).__name__ == name
    assert name in dir(lmlab.parallel)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'ZeRO'"):
        lmlab.parallel.ZeRO  # noqa: B018


def test_importing_the_package_imports_no_torch() -> None:
    program = "import sys, lmlab.parallel; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
