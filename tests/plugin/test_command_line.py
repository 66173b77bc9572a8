"""The promised command line parses, also without a home; every other one stays as typed."""

from pathlib import Path

import pytest

from snakemake_logger_plugin_lmlab.command_line import ensure_writable, is_snakemake, repair

TARGET = "report/writeup.md"
SWALLOWED = {
    f"snakemake --cores 1 --resources gpu=1 {TARGET}": (
        f"snakemake {TARGET} --cores 1 --resources gpu=1"
    ),
    f"/venv/bin/snakemake --resources gpu=1 mem=2 {TARGET} --cores 1": (
        f"/venv/bin/snakemake {TARGET} --resources gpu=1 mem=2 --cores 1"
    ),
    f"snakemake --config study=tiny {TARGET} -n": f"snakemake {TARGET} --config study=tiny -n",
    "snakemake --res gpu=1 a b -n": "snakemake a b --res gpu=1 -n",
}
LEFT_ALONE = [
    "snakemake",
    f"snakemake --resources gpu=1 --cores 1 {TARGET}",
    f"snakemake --cores 1 --resources gpu=1 -- {TARGET}",
    "snakemake --resources gpu",
    "snakemake --cores 1 --forcerun a b",
]


@pytest.mark.parametrize(
    ("typed", "read"), [*SWALLOWED.items(), *((typed, typed) for typed in LEFT_ALONE)]
)
def test_only_a_swallowed_target_is_moved_to_the_front(typed: str, read: str) -> None:
    argv = typed.split()
    assert is_snakemake(argv)
    repair(argv)
    assert argv == read.split()
    assert not is_snakemake(["pytest", *argv])


def test_a_home_that_cannot_be_written_is_replaced_as_a_cache(tmp_path: Path) -> None:
    """A file in place of the folder stops even the superuser."""
    (tmp_path / "file").touch()
    for home, usable in ((tmp_path, True), (tmp_path / "file", False)):
        environment = {"HOME": str(home)}
        ensure_writable(environment)
        assert ("XDG_CACHE_HOME" not in environment) is usable
    assert Path(environment["XDG_CACHE_HOME"]).is_dir()
