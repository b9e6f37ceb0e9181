"""Gradients of several precisions are averaged in the same order by all processes."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from klformer.distributed import average_gradients

DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.float64]


@pytest.mark.parametrize("order", [DTYPES, DTYPES[::-1], DTYPES[2:] + DTYPES[:2]])
def test_the_order_is_that_of_the_parameters(monkeypatch, order):
    """A set of dtypes has another order in another process: then they would add up what does not belong together."""
    sent, reduce = [], torch.distributed.all_reduce

    def spy(x, *given, **named):
        sent.append(x.dtype)
        return reduce(x, *given, **named)

    model = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (*order, *order)])
    for parameter in model:
        parameter.grad = torch.full_like(parameter, 2.0)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(torch.distributed, "all_reduce", spy)
        average_gradients(model, init_device_mesh("cpu", (1,)))
    finally:
        torch.distributed.destroy_process_group()
    assert sent == order
    assert all(parameter.grad.eq(2).all() for parameter in model)
