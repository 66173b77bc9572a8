"""A cut is chosen for every case, fits the device, and is written as one line of the table."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlab.kernels import configs
from lmlab.kernels.configs import Case, Tiles, architecture, choose, line_of, look_up, shared_bytes

KIB = 1024
SHARED_LIMIT = {"ampere": 99 * KIB, "ada": 99 * KIB, "hopper": 227 * KIB, "blackwell": 99 * KIB}
"""The least that a GPU of the architecture has: RTX 3090, RTX 4090, H100, RTX 5090."""

cases = st.builds(
    Case,
    direction=st.sampled_from(["forward", "backward"]),
    architecture=st.sampled_from(sorted(SHARED_LIMIT)),
    bits=st.sampled_from([16, 32]),
    head_dim=st.integers(1, 256),
    is_causal=st.booleans(),
    sequence=st.integers(1, 2**20),
    rows=st.integers(1, 2**30),
)


@given(cases)
def test_every_case_has_tiles_that_fit(case: Case) -> None:
    limit = SHARED_LIMIT[case.architecture]

    chosen = choose(case, limit)

    assert all(shared_bytes(case, tiles) <= limit for tiles in chosen)
    assert all(tiles.kept >= 16 and tiles.walked >= 16 for tiles in chosen)


@given(cases)
def test_what_is_tried_next_needs_less(case: Case) -> None:
    sizes = [shared_bytes(case, tiles) for tiles in choose(case, SHARED_LIMIT[case.architecture])]

    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)


@given(cases)
def test_sizes_of_one_bucket_choose_alike(case: Case) -> None:
    assert look_up(case) == look_up(case.bucket())


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("bits", [16, 32])
def test_the_interpreter_has_tiles_too(direction: configs.Direction, bits: int) -> None:
    case = Case(
        direction=direction,
        architecture="cpu",
        bits=bits,
        head_dim=256,
        is_causal=True,
        sequence=1,
        rows=1,
    )

    assert choose(case, 2**30)


CASE = Case(
    direction="forward",
    architecture="hopper",
    bits=16,
    head_dim=64,
    is_causal=True,
    sequence=16384,
    rows=262144,
)


@pytest.mark.parametrize(
    "tiles",
    [
        Tiles(kept=128, walked=64, warps=8, stages=3),
        Tiles(kept=64, walked=32, warps=4, stages=2, descriptors=True, persistent=True),
        Tiles(kept=192, walked=64, warps=8, stages=2, descriptors=True, specialised=True),
        Tiles(kept=64, walked=32, warps=4, stages=2, paired=False, products="tf32x3"),
        Tiles(kept=64, walked=64, warps=4, stages=3, own_delta=True),
    ],
)
def test_a_line_of_the_table_says_what_it_was_made_of(tiles: Tiles) -> None:
    row = configs._row(line_of(CASE, tiles))

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
        {"rows": 2**20},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_line_does_not_speak_of_other_cases(other: dict[str, object]) -> None:
    row = configs._row(line_of(CASE, Tiles(kept=128, walked=64, warps=8, stages=3)))

    assert not row.covers(replace(CASE, **other))  # type: ignore[arg-type]


def test_the_first_line_that_covers_a_case_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (
        configs._row(
            line_of(replace(CASE, sequence=n), Tiles(kept=k, walked=16, warps=4, stages=2))
        )
        for n, k in ((1024, 16), (16384, 64))
    )
    monkeypatch.setattr(configs, "rows", lambda: (small, large))

    assert look_up(replace(CASE, sequence=1000)).kept == 16
    assert look_up(replace(CASE, sequence=1025)).kept == 64


def test_a_head_dim_too_large_for_the_device_is_one_line() -> None:
    with pytest.raises(ValueError, match="does not fit the 2 KiB of shared memory"):
        choose(CASE, 2 * KIB)


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((7, 5), None),
        ((8, 0), "ampere"),
        ((8, 6), "ampere"),
        ((8, 9), "ada"),
        ((9, 0), "hopper"),
        ((10, 0), "blackwell"),
        ((12, 0), "blackwell"),
    ],
)
def test_architectures(capability: tuple[int, int], name: str | None) -> None:
    assert architecture(*capability) == name
