"""Which products the kernel for Hopper is asked for; any device will do, as the kernel only notes its calls."""

import pytest
import torch

pytest.importorskip("triton")

from torch.nn import functional as F

from qwen_engine.kernels.gpu import matrix_products


@pytest.fixture
def calls(monkeypatch):
    """Shapes of x of every call."""
    calls = []

    def product(x, weight, tiles, out=None, *, gated=False):
        calls.append(tuple(x.shape))
        result = F.linear(x, weight)
        return result[None] if out is None else out.copy_(result)[None]

    monkeypatch.setattr(matrix_products, "_hopper_product", lambda _: product)
    return calls


def operands(rows):
    return torch.randn(rows, 128).bfloat16(), torch.randn(64, 128).bfloat16()


def test_rows_of_a_result_that_lie_apart_are_written_by_the_library(calls):
    """The kernel puts a row of the result right behind the one before it."""
    x, weight = operands(3)
    whole = torch.zeros(3, 96).bfloat16()
    matrix_products.linear(x, weight, whole[:, :64])
    assert torch.equal(whole[:, :64], F.linear(x, weight))
    assert not whole[:, 64:].any()
    assert calls == []
    matrix_products.linear(x, weight, torch.empty(5, 64).bfloat16()[1:4])
    assert calls == [(3, 128)]


def test_operands_that_the_copy_engine_cannot_read_go_to_the_library(calls):
    x, weight = operands(4)
    for operand in (
        torch.randn(4 * 128 + 1).bfloat16()[1:].view(4, 128),  # begins between multiples of 16 bytes
        torch.randn(4, 132).bfloat16()[:, :128],  # and so do its rows
        torch.randn(128, 4).bfloat16().t(),
    ):
        assert torch.equal(matrix_products.linear(operand, weight), F.linear(operand, weight))
    assert torch.equal(matrix_products.linear(x.float(), weight.float()), F.linear(x.float(), weight.float()))
    assert calls == []
    matrix_products.linear(x, weight)
    assert calls == [(4, 128)]
