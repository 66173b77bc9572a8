"""Which tests are slow, and which files share a worker because their setup is expensive.

Modules that render many pages or start many processes are marked slow here, single tests where they
are defined. `make test-fast` skips both.
"""

import gc
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    from tests.parallel.launcher import RankPool

# How long an example takes depends on the load of the machine.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

TESTS = Path(__file__).parent
SLOW = (
    *("chapters/attention/test_page.py", "chapters/test_end_to_end_page.py"),
    *("chapters/test_memory_page.py", "chapters/test_profile_page.py"),
    *("chapters/test_rank_pages.py", "cli/test_ab.py", "cli/test_compare.py"),
    *("jobs/test_launch.py", "report/test_compare_page.py", "report/test_golden.py"),
)
# Each group runs in one worker of `pytest -n`, longest first. Other files are scheduled singly.
GROUPS = (
    ("workflow/test_slurm.py",),
    # These share a measured study.
    tuple(f"workflow/test_{name}.py" for name in ("command", "clone", "stale")),
    # These share a helper that has imported torch.
    ("workflow/",),
    # These share rank processes.
    ("parallel/", "chapters/test_parallel_chapters.py"),
    *(("report/test_mutations.py",), ("report/test_golden.py",), ("study/test_drawn_configs.py",)),
    *(("jobs/test_launch.py",), ("cli/test_ab.py",)),
)


@pytest.fixture(autouse=True, scope="session")
def _signals_are_not_ignored() -> None:
    """Reset signals that nohup or a background shell ignores: child processes inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU")


def group_of(path: str) -> int:
    """The index in `GROUPS` of a file below tests/, or `len(GROUPS)` for all other files."""
    found = (number for number, files in enumerate(GROUPS) if path.startswith(files))
    return next(found, len(GROUPS))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests, and put the longest groups first."""
    paths = {item: item.path.relative_to(TESTS).as_posix() for item in items}
    for item, path in paths.items():
        if path in SLOW or "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: group_of(paths[item]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, the files of a group go to the same worker."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Grouped(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            group = group_of(file.removeprefix("tests/"))
            return file if group == len(GROUPS) else str(group)

    return Grouped(config, log)


@pytest.fixture(scope="module", autouse=True)
def _few_objects_to_collect() -> None:
    """Measuring often runs the garbage collector, which takes a second with all modules loaded."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ranks() -> Iterator["RankPool"]:
    """Processes that run a function as the ranks of one group."""
    from tests.parallel.launcher import RankPool

    pool = RankPool()
    yield pool
    pool.stop()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group with a single rank, in this process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
