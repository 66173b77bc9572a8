"""A kernel that takes the GPU's context with it costs its own point."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

READS_OUT_OF_BOUNDS = """
import torch

def attend(q, k, v, is_causal):
    return (q + k + v).index_select(0, torch.tensor([q.shape[0]], device=q.device))
"""
LMLAB = "import sys; from lmlab.cli import main; sys.exit(main(sys.argv[1:]))"
POINT = ["topic=benchmark", "precision=fp32", "head_dim=16", "sequence=64"]


@pytest.mark.gpu
def test_a_lost_context_is_recorded_and_the_next_point_has_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text(READS_OUT_OF_BOUNDS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("LMLAB_LOCK_DOMAIN", tmp_path.name)
    found = []
    for variant in ("broken:attend", "naive"):
        command = [sys.executable, "-c", LMLAB, "measure", "attention", *POINT]
        out = tmp_path / "result.json"
        subprocess.run([*command, f"variants={variant}", "--out", str(out)], check=False)
        found.append(json.loads(out.read_text()))
    assert "CUDA error" in json.dumps(found[0])
    assert all(record["status"] == "ok" for record in found[1]["measurements"])
