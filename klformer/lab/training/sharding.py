"""Sharded training: every process keeps a share of the weights, the gradients and the optimiser's averages (FSDP2).

torch's `fully_shard` gathers the weights of a layer when it is reached and lets go of them afterwards. Tensors that are
shared out are DTensors; here is what turns them into whole ones, for checkpoints that any number of processes can read,
and back.
"""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from klformer.models.transformer import TransformerLayer

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Share out the parameters of a model over a mesh of one dimension, layer by layer. Changed in place.

    Gradients are averaged over the mesh, as in data parallelism. The optimiser must be made afterwards.
    """
    from torch.distributed.fsdp import fully_shard  # takes a second, and few need it

    for module in model.modules():
        if isinstance(module, TransformerLayer):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole(x: Tensor) -> Tensor:
    """A tensor of which every process has a share, whole; any other as it is. All processes must call it."""
    return x.full_tensor() if _is_shared(x) else x


def is_sharded(model: nn.Module) -> bool:
    """Whether the parameters of a model are shared out."""
    return any(_is_shared(parameter.data) for parameter in model.parameters())


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a model, as if it were not shared out. All processes must call it, if it is."""
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


def shared_like(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Whole weights, shared out as those of the model are."""
    return {
        name: placed_like(tensors[name], present) if name in tensors else present
        for name, present in model.state_dict().items()
    }


def placed_like(x: Tensor, present: Tensor) -> Tensor:
    """A whole tensor on the device of another, shared out as that is."""
    x = x.to(present.device)
    if not _is_shared(present):
        return x
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x, present.device_mesh, present.placements)


def _is_shared(x: Tensor) -> "TypeGuard[DTensor]":
    """Where nobody has imported what makes shared tensors, none is."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)
