"""Read every document of a folder once, into a state of fixed size; then ask any of them, without reading again.

The state is that of attention from two words to the word that follows them. Each is kept beside its document, as
`.safetensors`. The states of the documents that are asked are merged, in any order: the answer is exactly that of
attention to all their texts in one.
"""

import json
import tempfile
import zlib
from pathlib import Path

import torch

from klformer import KernelState

#: Codes of pairs of words, and of words. An exponential kernel of codes that are 0 but at one place: two pairs are
#: alike if they are the same. In a model both are learned.
CODES, SHARPNESS = 256, 6.0
FREQUENCIES = torch.eye(CODES).unsqueeze(0)  # (heads, R, D)


def coded(texts: list[str]) -> torch.Tensor:
    """One code for each text, (batch, heads, length, CODES)."""
    places = torch.tensor([zlib.crc32(text.encode()) % CODES for text in texts], dtype=torch.long)
    return torch.nn.functional.one_hot(places, CODES).float()[None, None]


def read(document: Path) -> None:
    words = document.read_text().lower().split()
    pairs = [" ".join(words[i : i + 2]) for i in range(len(words) - 2)]
    state = KernelState.of(SHARPNESS * coded(pairs), coded(words[2:]), FREQUENCIES, feature_map="prf")
    state.save(document.with_suffix(".safetensors"))
    document.with_suffix(".json").write_text(json.dumps(sorted(set(words))))
    print(f"read {document.name} into {state.num_bytes:,} bytes")


def ask(folder: Path, question: str, *names: str) -> None:
    """What follows two words, in the documents that are named, or in all."""
    for document in sorted(folder.glob("*.txt")):
        if not document.with_suffix(".safetensors").exists():
            read(document)
    chosen = [folder / name for name in names] or sorted(folder.glob("*.txt"))
    merged = KernelState.merge(*(KernelState.load(document.with_suffix(".safetensors")) for document in chosen))
    answer = merged.read(SHARPNESS * coded([question])).flatten()
    words = {word for document in chosen for word in json.loads(document.with_suffix(".json").read_text())}
    found = sorted(((answer @ coded([word]).flatten()).item(), word) for word in words)[::-1][:2]
    print(f"{question} ... " + ", ".join(f"{word} ({weight:.0%})" for weight, word in found))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "france.txt").write_text("The capital of France is Paris and its river is the Seine")
        (Path(place) / "spain.txt").write_text("In Spain the capital is Madrid where the river is shallow")
        ask(Path(place), "france is")
        ask(Path(place), "river is", "spain.txt")
        ask(Path(place), "river is")
