"""Where two groups share the registers of x at m = 1: every product that counts meets the inputs of
its weights, by the same index functions that the kernel runs; no GPU needed.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("torch")

from halfbyte.backends.cuda.mma.accumulate import second_chain, x_index, x_register, x_unit

CASES = [(g, step, share) for g in (16, 32, 64, 128, 256) for step in (2, 4, 8) for share in (2, 4, 8) if share * g <= 64 * step]


def held(group: int, step: int, share: int, column: int, t: int) -> list[int | None]:
    """The pair of inputs of a step in each of a lane's registers of x; None where the lane holds
    zeros.
    """
    out: list[int | None] = []
    for v in range(step // 2):
        for half in (0, 1):
            for word in range(4):
                at, far, which = x_index.fn(column, t, word, half, group, group // 16, False)
                mine = (which + v * 64 // group) % (share // 2) == column // 2
                out.append((x_unit(v, group, group // 16) + far) * 32 + at if mine else None)
    return out


def pair_of(block: int, t: int, register: int, group: int) -> int:
    """The pair of inputs that a register of a block's operand holds (fragment order,
    docs/design/cuda.md).
    """
    unit, s, b = block // 4, block % 4 // 2, block % 2
    within = 8 * b + 2 * t + register if group == 16 else 4 * t + 2 * b + register
    return 32 * unit + 16 * s + within


@pytest.mark.parametrize(("group", "step", "share"), CASES)
def test_a_product_that_counts_meets_its_own_inputs(group, step, share):
    for column in range(8):
        for t in range(4):
            x = held(group, step, share, column, t)
            for block in range(4 * step):
                if second_chain(block, group // 16) != (column % 2 == 1):
                    continue  # the accumulator whose column this is gets another group's product, and is not read
                first = x_register(block, group // 16)
                mine = block * 16 // group % share == column
                want = [pair_of(block, t, r, group) for r in (0, 1)] if mine else [None, None]
                assert x[first : first + 2] == want
