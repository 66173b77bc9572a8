"""Commands run in their own folder, with one thread and a lock of their own."""

from pathlib import Path

import pytest
import torch

from lmlab.jobs import job, record, run
from lmlab.measure import warm_start


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The project's config.yaml is found from wherever a command runs."""
    monkeypatch.setenv("LMLAB_LOCK_DOMAIN", tmp_path.name)
    monkeypatch.setenv("LMLAB_WARM_START", "0")
    monkeypatch.setattr(run, "set_threads", lambda: torch.set_num_threads(1))
    # In this process, where tests replace what is measured.
    programs = {job.RUNNER: run.main, job.RECORDER: record.main}
    monkeypatch.setattr(warm_start, "run", lambda name, argv, **_: programs[name](argv))
    monkeypatch.chdir(tmp_path)
