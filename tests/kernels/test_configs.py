"""Every case gets tiles that fit the device, and a choice is one row of the table."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlab.kernels import configs
from lmlab.kernels.configs import (
    Case,
    DeviceInfo,
    Tiles,
    architecture,
    choose,
    format_row,
    look_up,
    orient,
    shared_bytes,
)

KIB = 1024
SHARED_LIMIT = {
    "ampere": 99 * KIB,  # RTX 3090
    "ada": 99 * KIB,  # RTX 4090
    "hopper": 227 * KIB,  # H100
    "blackwell": 99 * KIB,  # RTX 5090
    "cpu": 2**30,
}
"""The least that a GPU of the architecture has."""

cases = st.builds(
    Case,
    direction=st.sampled_from(["forward", "backward"]),
    architecture=st.sampled_from(sorted(SHARED_LIMIT)),
    bits=st.sampled_from([16, 32]),
    head_dim=st.integers(1, 256),
    is_causal=st.booleans(),
    sequence=st.integers(1, 2**20),
    blocks_per_sm=st.floats(2**-20, 2**20),
    is_whole=st.booleans(),
)


@given(cases)
def test_every_case_has_ever_smaller_tiles_that_fit(case: Case) -> None:
    limit = SHARED_LIMIT[case.architecture]

    chosen = choose(case, DeviceInfo(case.architecture, 132, limit, 2**20))

    sizes = [shared_bytes(case, tiles) for tiles in chosen]
    assert max(sizes) <= limit
    assert sizes == sorted(set(sizes), reverse=True)
    assert all(min(tiles.block_m, tiles.block_n) >= 16 for tiles in chosen)


CASE = Case(
    direction="forward",
    architecture="hopper",
    bits=16,
    head_dim=64,
    is_causal=True,
    sequence=16384,
    blocks_per_sm=32.0,
)
TILES = Tiles(block_m=128, block_n=64, warps=8, stages=3)


@given(
    st.builds(
        Tiles,
        block_m=st.sampled_from([16, 64, 192]),
        block_n=st.sampled_from([32, 128]),
        warps=st.sampled_from([4, 8]),
        stages=st.integers(1, 5),
        tma=st.booleans(),
        paired=st.booleans(),
        persistent=st.booleans(),
        warp_specialized=st.booleans(),
        fused=st.booleans(),
        inline_delta=st.booleans(),
        fp32_dot=st.sampled_from(["ieee", "tf32x3", "bf16x6"]),
    )
)
def test_a_row_of_the_table_round_trips(tiles: Tiles) -> None:
    row = configs._parse(format_row(CASE, tiles))

    assert row.tiles == tiles
    assert row.covers(CASE)


@pytest.mark.parametrize(
    "other",
    [
        {"direction": "backward"},
        {"architecture": "ada"},
        {"bits": 32},
        {"head_dim": 128},
        {"is_causal": False},
        {"sequence": 32768},
        {"blocks_per_sm": 32.5},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_row_does_not_cover_other_cases(other: dict[str, object]) -> None:
    row = configs._parse(format_row(CASE, TILES))

    assert not row.covers(replace(CASE, **other))  # type: ignore[arg-type]


def test_the_first_row_that_covers_a_case_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (
        configs._parse(format_row(replace(CASE, sequence=n), replace(TILES, block_m=m)))
        for n, m in ((1024, 16), (16384, 64))
    )
    monkeypatch.setattr(configs, "rows", lambda: (small, large))

    assert look_up(replace(CASE, sequence=1000)).block_m == 16
    assert look_up(replace(CASE, sequence=1025)).block_m == 64


def test_rows_for_whole_tiles_do_not_cover_ragged_lengths() -> None:
    row = configs._parse(format_row(CASE, TILES) + " whole")

    assert row.covers(CASE)
    assert not row.covers(replace(CASE, is_whole=False))


def test_queries_are_resident_in_the_forward_and_keys_in_the_backward() -> None:
    assert TILES.rows("forward") == (TILES.block_m, TILES.block_n)
    assert TILES.rows("backward") == (TILES.block_n, TILES.block_m)
    assert orient("backward", *TILES.rows("backward")) == (TILES.block_m, TILES.block_n)


def test_a_device_too_small_for_any_tile_is_a_one_line_error() -> None:
    with pytest.raises(ValueError, match="does not fit the 2 KiB of shared memory"):
        choose(CASE, DeviceInfo("hopper", 132, 2 * KIB, 2**20))


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((7, 5), None),
        ((8, 6), "ampere"),
        ((8, 9), "ada"),
        ((9, 0), "hopper"),
        ((12, 0), "blackwell"),
    ],
)
def test_architectures(capability: tuple[int, int], name: str | None) -> None:
    assert architecture(*capability) == name
