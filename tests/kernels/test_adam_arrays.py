"""The table of arrays, and the numbers of a step, are the C++ side's."""

import re
from dataclasses import fields

import cpp

from jax_fp8.kernels.adam_arrays import ARRAYS, Coefficients, Layout, Scales
from jax_fp8.kernels.shared_cast import TILED_ARRAYS


def test_bits_of_a_layout():
    theirs = cpp.enum("adam.cc", "Layout")
    assert theirs.pop("HAS_ALL") == sum(Layout) - Layout.DECAYS
    assert {bit.name: bit.value for bit in Layout} == theirs


def test_order_of_arrays_and_numbers():
    of_leaf, of_shared_cast = cpp.source("adam.cc").split("void read_shared_cast")
    assert list(ARRAYS) == names_read(of_leaf)
    assert list(TILED_ARRAYS) == names_read(of_shared_cast)
    assert [*names_in(Coefficients), "adam_scalars"] == lower(cpp.enum("adam.h", "AdamScalar"))
    assert [*Scales._fields, "adam_scales"] == lower(cpp.enum("adam.h", "AdamScale"))


def names_read(source) -> list[str]:
    return re.findall(r'\b(?:operand|updated|scalar)\("(\w+)"', source)


def names_in(dataclass) -> list[str]:
    return [field.name for field in fields(dataclass)]


def lower(members) -> list[str]:
    return [name.lower() for name in members]
