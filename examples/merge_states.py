"""Read every document of a folder once, into a state of fixed size; then ask any of them, without reading again.

    python examples/merge_states.py FOLDER "capital of" france.txt spain.txt

The state is that of attention from two words to the word that follows them. Each is kept beside its document, as
`.safetensors`. The states of the documents that are asked are merged, in any order: the answer is exactly that of
attention to all their texts in one.
"""

import argparse
import json
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


def read_document(text: str) -> tuple[KernelState, list[str]]:
    words = text.lower().split()
    pairs = [" ".join(words[i : i + 2]) for i in range(len(words) - 2)]
    state = KernelState.of(SHARPNESS * coded(pairs), coded(words[2:]), FREQUENCIES, feature_map="prf")
    return state, sorted(set(words[2:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("question", help="two words; the answer is what follows them")
    parser.add_argument("documents", nargs="*", help="names of documents; all, if none is given")
    asked = parser.parse_args()
    for document in asked.folder.glob("*.txt"):
        if not (kept := document.with_suffix(".safetensors")).exists():
            state, words = read_document(document.read_text())
            document.with_suffix(".json").write_text(json.dumps(words))
            state.save(kept)
            print(f"read {document.name} into {state.num_bytes:,} bytes")
    chosen = [asked.folder / name for name in asked.documents] or sorted(asked.folder.glob("*.txt"))
    merged = KernelState.merge(*(KernelState.load(document.with_suffix(".safetensors")) for document in chosen))
    answer = merged.read(SHARPNESS * coded([asked.question.lower()])).flatten()
    words = {word for document in chosen for word in json.loads(document.with_suffix(".json").read_text())}
    found = sorted(((answer @ coded([word]).flatten()).item(), word) for word in words)[::-1][:3]
    print(f"{asked.question} ... " + ", ".join(f"{word} ({weight:.0%})" for weight, word in found))


if __name__ == "__main__":
    main()
