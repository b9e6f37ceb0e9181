"""Sequence parallelism: every process has a contiguous part of the sequence, and the same model.

What a kernel attention needs of the other parts is a state of fixed size. One exchange of it a layer, and one of the
inputs at the ends of parts if there is a convolution over neighbours, is all that is said between processes;
projections, feed-forward parts and norms see positions one by one and know nothing of it.
"""

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from klformer.attention import AttentionMechanism
from klformer.distributed.collectives import ProcessParts
from klformer.errors import ArgumentError
from klformer.models.embeddings import SequenceEmbedding
from klformer.models.transformer import TransformerDecoder, TransformerEncoder
from klformer.ops.spectral_product.parts import Parts

#: The dimension of a mesh along which sequences are cut.
DIMENSION = "sequence"
#: Modules of torch that look at neighbours, or at all positions.
MIXES_POSITIONS = (
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
)
#: Classes that have to know of the parts.
_AWARE = (AttentionMechanism, SequenceEmbedding, TransformerEncoder, TransformerDecoder)

Model = TypeVar("Model", bound=nn.Module)


def sequence_parallel(model: Model, mesh: DeviceMesh) -> Model:
    """Make a model work on sequences of which every process has one part, in the order of the ranks.

    Afterwards every process calls the model with its part of the inputs and of the masks. Parts may differ in length,
    and may be empty. Outputs are those of the part; a vector or scores of the whole sequence, off CLS or the mean, are
    the same on all processes. CLS is put in front of the first part. Positions are those in the whole sequence.

    Every process must call the model, and `backward`, as often and in the same order. The loss is the mean of what the
    processes call `backward` on, as everywhere in data parallelism: wrap the model in DistributedDataParallel, or call
    `average_gradients` once after `backward`. For a loss that sums over positions multiply it by the number of
    processes. Parameters, and noise, must be the same on all; `klformer.resample` with equal generators keeps them so.

    Args:
        model: Of kernel attentions. Changed in place: its state dict stays that of a model in one process.
        mesh: Of one dimension, or with one that is called "sequence"; another may be there for data parallelism.

    Returns:
        The model.

    Raises:
        ArgumentError: something in the model needs whole sequences; the message names it.

    Examples:
        One process, which has the only part. With torchrun there are several, and the lines are the same.

        >>> import torch, klformer
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from klformer.distributed import average_gradients, own_part, sequence_parallel
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> model = sequence_parallel(klformer.TransformerEncoder(klformer.EncoderConfig()), mesh)
        >>> model(own_part(torch.randn(2, 100, 64), mesh)).sum().backward()
        >>> average_gradients(model, mesh)
        >>> torch.distributed.destroy_process_group()
    """
    parts = ProcessParts(_group(mesh))
    attentions = [module for module in model.modules() if isinstance(module, AttentionMechanism)]
    of_attention = {inner for attention in attentions for inner in attention.modules()} - {*attentions}
    for name, module in model.named_modules():
        if module not in of_attention:  # which says itself what it can do
            _check(name or type(model).__name__, module)
    for module in model.modules():
        if isinstance(module, _AWARE):
            module.parts = parts
    return model


def whole_sequences(model: Model) -> Model:
    """Undo `sequence_parallel`: the model takes whole sequences again.

    Args:
        model: Changed in place.

    Returns:
        The model.

    Examples:
        >>> import klformer
        >>> from klformer.distributed import parts_of, whole_sequences
        >>> model = klformer.TransformerEncoder(klformer.EncoderConfig(model_dim=16))
        >>> parts_of(whole_sequences(model)) is None
        True
    """
    for module in model.modules():
        if isinstance(module, _AWARE):
            module.parts = None
    return model


def parts_of(model: nn.Module) -> Parts | None:
    """Who has the parts of the sequences that a model takes.

    Args:
        model: Any module.

    Returns:
        The parts that `sequence_parallel` gave to the model; None if it takes whole sequences.

    Examples:
        >>> import klformer
        >>> from klformer.distributed import parts_of
        >>> parts_of(klformer.TransformerEncoder(klformer.EncoderConfig(model_dim=16))) is None
        True
    """
    return next((module.parts for module in model.modules() if isinstance(module, _AWARE)), None)


def own_part(x: Tensor, mesh: DeviceMesh, *, dim: int = 1) -> Tensor:
    """This process's part of a sequence that all have.

    Args:
        x: The same on all processes: inputs (B, L, ...), or a mask (B, L).
        mesh: As in `sequence_parallel`.
        dim: The dimension of the length.

    Returns:
        A view of x. Parts are nearly equal; the first ones are longer by one at most.

    Raises:
        ArgumentError: the mesh has several dimensions, and none is called "sequence".

    Examples:
        One process has all of it.

        >>> import torch
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from klformer.distributed import own_part
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> own_part(torch.randn(2, 100, 16), init_device_mesh("cpu", (1,))).shape
        torch.Size([2, 100, 16])
        >>> torch.distributed.destroy_process_group()
    """
    group = _group(mesh)
    return x.tensor_split(dist.get_world_size(group), dim)[dist.get_rank(group)]


@torch.no_grad()
def average_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replace every gradient by its mean over all processes of the mesh: one all-reduce for each precision.

    For who does not wrap the model in DistributedDataParallel, which does the same while backward is under way.

    Args:
        model: After `backward`. Parameters without a gradient are left alone; they must be the same on all processes.
        mesh: All of its dimensions count, those of data parallelism as well.

    Examples:
        >>> import torch
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from klformer.distributed import average_gradients
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> model = torch.nn.Linear(2, 1)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> average_gradients(model, init_device_mesh("cpu", (1,)))
        >>> model.weight.grad
        tensor([[1., 1.]])
        >>> torch.distributed.destroy_process_group()
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    # In the order of the parameters, which all processes have in common; that of a set differs from one to the next.
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        alike = [gradient for gradient in gradients if gradient.dtype == dtype]
        flat = torch.cat([gradient.flatten() for gradient in alike])
        for dimension in range(mesh.ndim):
            dist.all_reduce(flat, group=mesh.get_group(dimension))
        flat /= mesh.size()
        for gradient, mean in zip(alike, torch.split(flat, [gradient.numel() for gradient in alike]), strict=True):
            gradient.copy_(mean.view_as(gradient))


def _group(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim == 1:
        return mesh.get_group()
    if DIMENSION not in (mesh.mesh_dim_names or ()):
        raise ArgumentError(
            f"mesh must have one dimension, or one that is called {DIMENSION!r}, got {mesh.mesh_dim_names} of the "
            f"shape {tuple(mesh.shape)}"
        )
    return mesh.get_group(DIMENSION)


def _check(name: str, module: nn.Module) -> None:
    """Raises ArgumentError if a module needs whole sequences."""
    if isinstance(module, AttentionMechanism) and not module.supports_parts:
        raise ArgumentError(
            f"{name} is a {type(module).__name__}, which looks at keys one by one and has no state of fixed size: its "
            "sequences can't be in parts. Kernel attentions (gmm-rks, fastfood-prf, performer, ...) can; "
            "klformer.convert makes one of softmax attention"
        )
    if isinstance(module, MIXES_POSITIONS):
        raise ArgumentError(f"{name} is a {type(module).__name__}, which needs whole sequences: they can't be in parts")
    if type(module).__module__.startswith("transformers."):
        raise ArgumentError(
            f"{name} is a {type(module).__name__} of transformers, which counts positions from 0 in every part: "
            "only klformer's own models know where a part begins"
        )
