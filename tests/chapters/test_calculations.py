"""The question of the configuration, worked out: the numbers that the page prints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import yaml

from lmlab.chapters.calculations.measure import measure
from lmlab.jobs.catalog import points_of
from lmlab.study.config import load
from lmlab.study.files import ROOT


@pytest.fixture(scope="module")
def data() -> Any:
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    [point] = points_of(load({**config, "study": "full"}, "cuda"), "calculations")
    return measure(point, torch.device("cpu")).data


def test_the_model_needs_44_gpus_for_its_state(data: Any) -> None:
    assert data["parameters"] == 219_848_638_464
    assert data["state_bytes"]["total"] == 3_517_578_215_424
    assert data["state_devices"] == 44


def test_every_batch_says_how_many_devices_it_takes(data: Any) -> None:
    rows = {row["tokens"]: row for row in data["batches"]}
    assert rows[4096]["fewest_devices"] == 61
    assert rows[4096]["bytes_a_device"] == pytest.approx(94.19e9, rel=1e-3)
    assert rows[4096]["gpus_unsharded"] == 45


def test_the_mesh_is_compute_bound_from_320_tokens_a_device(data: Any) -> None:
    mesh = data["mesh"]
    assert mesh["devices"] == 64
    assert mesh["tokens_hidden"] == pytest.approx(20444.4, abs=0.1)
    assert mesh["block_s"]["compute"] == pytest.approx(mesh["block_s"]["weights"])


def test_every_lever_lowers_the_batch(data: Any) -> None:
    before, *after = (lever["tokens"] for lever in data["levers"])
    assert before == pytest.approx(data["mesh"]["tokens_hidden"])
    assert all(tokens < before for tokens in after)


def test_two_ranks_send_the_same_bytes_either_way(data: Any) -> None:
    two = data["rings"][0]
    assert (two["ranks"], two["ring_bytes"], two["gather_bytes"]) == (2, 1.0, 1.0)
