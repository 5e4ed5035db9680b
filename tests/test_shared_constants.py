"""Numbers that Python repeats from the sources of kernels: they must be the same in both."""

import pathlib
import re

import pytest

from jflux._ops.attention import _blockwise, _flash_decode_primitive, flash_attention
from jflux._ops.collectives import _quantized_exchange
from jflux._ops.experts import routing
from jflux._ops.products import _grouped_primitives

CC = pathlib.Path(__file__).resolve().parents[1] / "cc"
FLASH = "ops/flash_attention/flash_attention.h"
pytestmark = pytest.mark.skipif(not CC.exists(), reason="the sources are not here")


def value_of(file: str, name: str) -> int:
    """Of a constexpr number in a source file."""
    names = {"INT32_MAX": str(2**31 - 1)}
    found = re.findall(rf"\b{name} = ([^;,]+)[;,]", (CC / file).read_text())
    assert len(found) == 1, f"{file} has {len(found)} definitions of {name}"
    text = names.get(found[0], found[0])
    assert re.fullmatch(r"[\d\s()<+*-]+", text), f"{name} is {text!r}"
    return eval(text)  # digits and operators alone


@pytest.mark.parametrize(
    ("file", "name", "here"),
    [
        ("core/group_tiles.h", "kMostGroups", _grouped_primitives._MOST_GROUPS),
        ("ops/moe_route/moe_route.cu", "kMostExperts", routing._MOST_EXPERTS),
        ("ops/moe_route/moe_route.cu", "kMostExpertsPortable", routing._MOST_EXPERTS_PORTABLE),
        (FLASH, "kAttentionPadding", flash_attention._PADDING),
        (FLASH, "kFurthest", flash_attention._FURTHEST),
        (FLASH, "kNowhere", _blockwise.NOWHERE),
        (FLASH, "kSome", flash_attention._SOME),
        (FLASH, "kAll", flash_attention._ALL),
        ("ops/all_reduce/all_reduce.h", "kLeastWireBytes", _quantized_exchange.LEAST_BYTES),
        ("ops/flash_decode/flash_decode.cu", "kMostWarps", _flash_decode_primitive._MOST_WARPS),
    ],
)
def test_numbers(file, name, here):
    assert value_of(file, name) == here


def test_widths_of_heads():
    source = (CC / "ops/flash_decode/flash_decode.cu").read_text()
    kernels = tuple(map(int, re.findall(r"^    case (\d+):$", source, re.M)))
    assert kernels == _flash_decode_primitive.WIDTHS
    assert set(_flash_decode_primitive.WIDTHS_PORTABLE) < set(kernels)
