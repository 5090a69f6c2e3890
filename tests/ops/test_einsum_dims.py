"""Einsums as products of matrices, against NumPy's own einsum on whole numbers; and those that are none."""

import numpy as np
import pytest

from jax_fp8.ops.einsum_dims import EinsumDims

SIZES = {"B": 2, "T": 3, "S": 3, "D": 4, "N": 5, "H": 6, "C": 2, "K": 3}
# The einsum, and the dims of the input.
CASES = {
    "BD,DH->BH": "BD",
    "BTD,NDH->BTNH": "BTD",
    "BTD,DNH->BTNH": "BTD",
    "BTNH,NHD->BTD": "BTNH",
    "BTNH,HND->BTD": "BTNH",
    "BSD,CKDH->CBSKH": "BSD",
    "DB,HD->HB": "DB",
    "... D, D H -> ... H": "BTD",
    "...TD,DH->...HT": "BCTD",
    "D,DH->H": "D",
    "BDT...,DH->B...TH": "BDTCK",
}


@pytest.mark.parametrize("text", CASES)
def test_a_product_of_matrices_is_the_einsum(text):
    dims, names = EinsumDims.parse(text), CASES[text]
    random = np.random.default_rng(0)
    x = random.integers(-9, 9, [SIZES[name] for name in names])
    kernel = random.integers(-9, 9, [SIZES[name] for name in dims.kernel])
    rows, contracted, result = dims.of_input(x.ndim)
    k = int(np.prod([SIZES[name] for name in dims.contracted]))
    matrix = kernel.transpose(dims.order).reshape(k, -1)
    flat = x.transpose([*rows, *contracted]).reshape(-1, k)
    found = (flat @ matrix).reshape([*(x.shape[dim] for dim in rows), *(SIZES[name] for name in dims.columns)])
    expected = np.einsum(text.replace(" ", ""), x, kernel)
    assert expected.any()
    np.testing.assert_array_equal(found.transpose(result), expected)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("BTD", 'its einsum must be "input,kernel->result", and is "BTD"'),
        ("BTD,DH,HK->BTK", "must be"),
        ("BDD,DH->BH", "a label is twice in one array"),
        ("BD,...DH->B...H", r'its kernel has "\.\.\."'),
        ("BED,EDH->BEH", "has a product for each E"),
        ("BTD,DH->BH", "sums over other labels"),
        ("BTD,DHK->BTH", "sums over other labels"),
        ("BD,HK->BDHK", "sums over other labels"),
        ("BD,DH->BHZ", "sums over other labels"),
    ],
)
def test_what_is_none_has_a_reason(text, reason):
    with pytest.raises(ValueError, match=reason):
        EinsumDims.parse(text)


def test_an_input_of_other_dims_is_refused():
    dims = EinsumDims.parse("BTD,DH->BTH")
    for ndim in (2, 4):
        with pytest.raises(ValueError, match="needs 3 dims"):
            dims.of_input(ndim)
    with pytest.raises(ValueError, match="dims"):
        EinsumDims.parse("...TD,DH->...TH").of_input(1)
