"""Decoding token by token: a state of constant size takes the place of a cache that grows with every token."""

import torch

import klformer

torch.manual_seed(0)
config = klformer.EncoderConfig(
    model_dim=64, num_layers=2, num_heads=4, ffn_dim=128, rotary=True, attention="gmm-prf:num_frequencies=64"
)
decoder = klformer.TransformerDecoder(config).eval()
tokens = torch.randn(1, 200, 64)  # embeddings; a language model would embed what it has just said


def numbers_in(state: object) -> int:
    """Return how many numbers the states of all layers hold."""
    return sum(layer.own.inner.num_bytes // 4 for layer in state)


with torch.no_grad():
    whole = decoder(tokens)  # all positions at once, causal
    state = decoder.prepare_decoding(batch_size=1)  # frequencies are computed once
    streamed, sizes = [], []
    for position in range(tokens.shape[1]):
        out, state = decoder.step(tokens[:, position : position + 1], state)
        streamed.append(out)
        sizes.append(numbers_in(state))

print(f"largest difference from computing all at once: {(torch.cat(streamed, 1) - whole).abs().max().item():.1e}")
print(f"numbers in the state after 1, 100 and 200 tokens: {sizes[0]:,}, {sizes[99]:,}, {sizes[199]:,}")
print(f"a cache of keys and values would hold {2 * 2 * 200 * 64:,} after 200 tokens, and go on growing")
