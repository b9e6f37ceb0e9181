"""The processes that share a sequence, and what they say to each other: differentiable, under way while others work.

The loss is the sum of what all processes call backward on. The gradient of a sum that all of them see is then the sum
of all their gradients: the backward of an all-reduce is an all-reduce, and that of an all-gather with factors is one
with the factors turned round. No process ever waits for another but here.
"""

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from klformer.errors import ArgumentError
from klformer.ops.spectral_product.parts import Parts, Pending


@dataclass
class Traffic:
    """What one process has handed over to be sent, by kind: payloads, before a network multiplies them."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, x: Tensor) -> None:
        self.calls[kind] += 1
        self.bytes[kind] += x.nbytes

    def clear(self) -> None:
        self.calls.clear()
        self.bytes.clear()


class ProcessParts(Parts):
    """The processes of a group of torch.distributed, in the order of their ranks.

    Args:
        group: The group; this process is one of it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.index = dist.get_rank(group)
        self.count = dist.get_world_size(group)
        self.traffic = Traffic()

    def largest(self, x: Tensor) -> Tensor:
        result = x.detach().clone()
        self.traffic.add("largest", result)
        dist.all_reduce(result, dist.ReduceOp.MAX, group=self.group)
        return result

    def gather(self, x: Tensor) -> Tensor:
        x = x.detach().contiguous()
        gathered = x.new_empty(self.count, *x.shape)
        self.traffic.add("gather", x)
        dist.all_gather(list(gathered.unbind(0)), x, group=self.group)
        return gathered

    def begin_sum(self, x: Tensor) -> Pending:
        return _begin(_Sum(self), x)

    def begin_combination(self, x: Tensor, factors: Tensor, of_others: Tensor) -> Pending:
        return _begin(_Combination(self, factors, of_others), x)

    def __deepcopy__(self, memo: Any) -> "ProcessParts":
        return self  # a copy of a model speaks to the same processes

    def __reduce__(self) -> NoReturn:
        raise ArgumentError("a model that is spread over processes can't be pickled; save its state_dict()")


class _Exchange(ABC):
    """One exchange of values, and later one of gradients; each is begun, and ended by whoever needs its result."""

    def __init__(self, parts: ProcessParts) -> None:
        self.parts = parts
        self._work: Any = None
        self._sent: Tensor | None = None

    @abstractmethod
    def begin(self, x: Tensor) -> None:
        """Send x."""

    @abstractmethod
    def end(self) -> Tensor:
        """What all have sent, brought together."""

    @abstractmethod
    def begin_back(self, d_result: Tensor) -> None:
        """Send the gradient of what `end` gave."""

    @abstractmethod
    def end_back(self) -> Tensor:
        """The gradient of x."""

    def _begin_sum(self, kind: str, x: Tensor) -> None:
        self._sent = x.detach().clone(memory_format=torch.contiguous_format)
        self.parts.traffic.add(kind, self._sent)
        self._work = dist.all_reduce(self._sent, group=self.parts.group, async_op=True)

    def _begin_gather(self, kind: str, x: Tensor) -> None:
        x = x.detach().contiguous()
        self._sent = x.new_empty(self.parts.count, *x.shape)
        self.parts.traffic.add(kind, x)
        self._work = dist.all_gather(list(self._sent.unbind(0)), x, group=self.parts.group, async_op=True)

    def _wait(self) -> Tensor:
        assert self._sent is not None, "an exchange is ended once, after it was begun"
        self._work.wait()
        result, self._sent, self._work = self._sent, None, None
        return result


class _Sum(_Exchange):
    """Everybody's x in one sum: an all-reduce each way."""

    def begin(self, x: Tensor) -> None:
        self._begin_sum("sum", x)

    def end(self) -> Tensor:
        return self._wait()

    def begin_back(self, d_result: Tensor) -> None:
        self._begin_sum("sum of gradients", d_result)

    def end_back(self) -> Tensor:
        return self._wait()


class _Combination(_Exchange):
    """Everybody's x with a factor each: an all-gather each way."""

    def __init__(self, parts: ProcessParts, factors: Tensor, of_others: Tensor) -> None:
        super().__init__(parts)
        self._factors, self._of_others = factors, of_others

    def begin(self, x: Tensor) -> None:
        self._begin_gather("gather of sums", x)

    def end(self) -> Tensor:
        return _combined(self._wait(), self._factors)

    def begin_back(self, d_result: Tensor) -> None:
        self._begin_gather("gather of gradients", d_result)

    def end_back(self) -> Tensor:
        return _combined(self._wait(), self._of_others)


def _combined(everybodys: Tensor, factors: Tensor) -> Tensor:
    """sum_p factors_p x_p, one after the other: no second copy of all."""
    result = everybodys[0] * factors[0]
    for x, factor in zip(everybodys[1:], factors[1:], strict=True):
        result.addcmul_(x, factor)
    return result


def _begin(exchange: _Exchange, x: Tensor) -> Pending:
    token = _Begin.apply(x, exchange)  # type: ignore[no-untyped-call]
    return lambda: _End.apply(token, exchange)  # type: ignore[no-untyped-call]


class _Begin(torch.autograd.Function):
    """Sends x. What stands between this and `_End` is worked on meanwhile, and so are its gradients in backward: nodes
    that were made later go first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.begin(x)
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.end_back(), None


class _End(torch.autograd.Function):
    """Waits for what `_Begin` has sent."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.end()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_result: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.begin_back(d_result)
        # The gradient comes with the exchange; this stands in its place until then.
        return d_result, None
