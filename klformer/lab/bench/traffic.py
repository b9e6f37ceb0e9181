"""What a sequence in parts costs, on paper: bytes that are said, and bytes that are kept. Checked against counted ones.

B sequences, H heads, F features of R frequencies, E values, N processes, b bytes a number. A layer says, whatever the
length is,

    bidirectional   B H m b           all-reduce of maxima: m = R for exponential maps, 1 for others
                    B H F (E + 1) b   all-reduce of sums, forward; the same of gradients, backward
    causal          B H m b           all-gather of maxima
                    B H F (E + 1) b   all-gather of sums, forward; the same of gradients, backward

With smoothing (RKS) there is one feature more; with pairs of frequencies there are twice as many. A ring hands every
byte of an all-reduce on 2 (N - 1) / N times, and brings every process (N - 1) times what it gives to an all-gather.
"""

from dataclasses import dataclass

from klformer.attention.kernelized import KernelizedAttention
from klformer.errors import ArgumentError
from klformer.models.transformer import TransformerDecoder, TransformerEncoder


@dataclass(frozen=True)
class LayerTraffic:
    """What one process hands over for one layer and one step of training, in bytes."""

    maxima: int
    sums: int
    gradients: int

    @property
    def payload(self) -> int:
        return self.maxima + self.sums + self.gradients

    def on_the_wire(self, num_processes: int, *, causal: bool) -> float:
        """Bytes that a process sends with the usual rings."""
        others = num_processes - 1
        return self.payload * (others if causal else 2 * others / num_processes)


def layer_traffic(attention: KernelizedAttention, *, batch_size: int, itemsize: int = 4) -> LayerTraffic:
    """What a layer says in a step."""
    if attention.window:
        raise ArgumentError(f"the model of costs is for kernels alone, got attention with window={attention.window}")
    kernel, rows = attention.present(), batch_size * attention.num_heads
    maxima = kernel.num_projections(attention.head_dim) if kernel.feature_map.exponential else 1
    sums = rows * kernel.state_features(attention.head_dim) * (attention.value_dim + 1) * itemsize
    return LayerTraffic(rows * maxima * itemsize, sums, sums)


def model_traffic(model: TransformerEncoder | TransformerDecoder, *, batch_size: int) -> list[LayerTraffic]:
    """What each layer of self-attention says in a step."""
    found = []
    for index in range(len(model.layers)):
        mechanism = model.layer(index).self_attention.mechanism
        if not isinstance(mechanism, KernelizedAttention):
            raise ArgumentError(f"layers.{index} has {type(mechanism).__name__}: the model of costs is for kernels")
        found.append(layer_traffic(mechanism, batch_size=batch_size))
    return found
