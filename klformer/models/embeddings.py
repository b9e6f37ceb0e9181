"""From tokens or vectors to the model's inputs: embedding, neighbours, position, and the CLS token in front."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from klformer.checks import check_choice, check_count, check_probability
from klformer.errors import ArgumentError
from klformer.ops.rotary import places
from klformer.ops.spectral_product.parts import Parts, beyond_the_ends


def sinusoidal_positions(max_len: int, model_dim: int) -> Tensor:
    """(max_len, model_dim): sin and cos of the position at wavelengths from 2 pi to 20,000 pi."""
    position = torch.arange(max_len, dtype=torch.float64).unsqueeze(1)
    rate = torch.exp(torch.arange(0, model_dim, 2, dtype=torch.float64) * (-math.log(10_000.0) / model_dim))
    table = torch.zeros(max_len, model_dim, dtype=torch.float64)
    table[:, 0::2] = torch.sin(position * rate)
    table[:, 1::2] = torch.cos(position * rate)[:, : model_dim // 2]
    return table.float()


#: How many radians a wave of `ordered_start` turns from the middle of the tokens to an end: its deviation.
_TURN = 3.0


def ordered_start(vocab_size: int, model_dim: int) -> Tensor:
    """(vocab_size, model_dim): vectors of tokens that are amounts, such as the brightness of a pixel; tokens with
    neighbouring numbers are alike.

        e_t = sqrt(2) cos(w t + b),   t from -1 to 1,   w ~ N(0, 3^2),   b ~ U(0, 2 pi)

    These are random Fourier features of a Gaussian kernel: e_s.e_t / model_dim is exp(-4.5 (s - t)^2) in the mean. As
    in a table of independent vectors, entries have the size one.
    """
    amounts = torch.linspace(-1, 1, vocab_size).unsqueeze(1)
    rate, phase = torch.randn(model_dim) * _TURN, torch.rand(model_dim) * (2 * math.pi)
    return math.sqrt(2) * torch.cos(amounts * rate + phase)


class Neighbours(nn.Module):
    """A learned mixture of every position's neighbours, each entry of a vector by itself (a depthwise convolution).

        y_i = sum_o w_o * x_(i + o),   o from -(width - 1)/2 to (width - 1)/2

    What key_mask leaves out, and what is beyond the ends, counts as zero.

    Args:
        model_dim: Size of a vector.
        convolution_width: Positions that are mixed; odd.

    Raises:
        ArgumentError: the width is even.
    """

    def __init__(self, *, model_dim: int, convolution_width: int) -> None:
        super().__init__()
        check_count("convolution_width", convolution_width)
        if convolution_width % 2 == 0:
            raise ArgumentError(f"convolution_width must be odd, or 0 for none, got {convolution_width}")
        # The mixture has entries of size one, as the inputs have.
        self.weight = nn.Parameter(torch.empty(convolution_width, model_dim).normal_(std=convolution_width**-0.5))

    def forward(self, x: Tensor, key_mask: Tensor | None = None, parts: Parts | None = None) -> Tensor:
        """Vectors (B, L, model_dim) -> (B, L, model_dim); key_mask (B, L), True = keep; parts are those who have the
        other parts of the sequence, if it is in parts."""
        if key_mask is not None:
            x = x.masked_fill(~key_mask.unsqueeze(-1), 0)
        reach = len(self.weight) // 2
        if parts is None or parts.count == 1:
            extended = nn.functional.pad(x, (0, 0, reach, reach))
        else:
            before, after = beyond_the_ends(x, reach, parts)
            extended = torch.cat([before, x, after], dim=1)
        if not x.shape[1]:  # a convolution gives nothing no gradient, and other parts wait for it
            return extended[:, :0] * self.weight[0]
        # As an image of height one: (B, model_dim, 1, L), which torch has a fast depthwise convolution for.
        image, kernel = extended.transpose(1, 2).unsqueeze(2), self.weight.t()[:, None, None]
        return nn.functional.conv2d(image, kernel, groups=len(kernel)).squeeze(2).transpose(1, 2)


class SequenceEmbedding(nn.Module):
    """Tokens (B, L) or vectors (B, L, input_dim) -> (B, L or L + 1, model_dim): positions added, CLS put in front.

    Args:
        model_dim: Size of a token in the model.
        max_len: Longest sequence, without CLS; what comes after sees one token more with CLS.
        vocab_size: Number of tokens; give this or `input_dim`.
        input_dim: Size of input vectors; give this or `vocab_size`.
        positions: "sinusoidal" or "learned" are added; for "rotary" nothing is, because the attention rotates by them,
            nor for "none".
        cls: Put a learned token, zero at first, in front of every sequence.
        separator: Token between two texts in one sequence: a learned vector for each of the two, zero at first, is
            added to its positions. The separator belongs to the first.
        convolution_width: Add to every input a learned mixture of its neighbours, itself among them; 0 for none.
        token_start: How the vectors of tokens start: "independent" of each other, or "ordered", which is
            `ordered_start`.
        dropout: Applied to the sum.

    Raises:
        ArgumentError: a size is not allowed, not exactly one of `vocab_size` and `input_dim` is given, or vectors are
            to start ordered.

    Examples:
        >>> import torch
        >>> from klformer.models import SequenceEmbedding
        >>> embedding = SequenceEmbedding(model_dim=16, max_len=50, vocab_size=100)
        >>> tokens = torch.tensor([[5, 6, 7], [8, 9, 0]])
        >>> x, key_mask = embedding(tokens, torch.tensor([[True, True, True], [True, True, False]]))
        >>> x.shape  # CLS and three tokens
        torch.Size([2, 4, 16])
        >>> key_mask.tolist()
        [[True, True, True, True], [True, True, True, False]]
    """

    cls_token: nn.Parameter | None
    positions: Tensor | None
    types: nn.Parameter | None
    #: Those who have the parts of a sequence, if it is in parts.
    parts: Parts | None = None

    def __init__(
        self,
        *,
        model_dim: int,
        max_len: int,
        vocab_size: int | None = None,
        input_dim: int | None = None,
        positions: Literal["sinusoidal", "learned", "rotary", "none"] = "sinusoidal",
        cls: bool = True,
        separator: int | None = None,
        convolution_width: int = 0,
        token_start: Literal["independent", "ordered"] = "independent",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_count("model_dim", model_dim)
        check_count("max_len", max_len)
        check_choice("positions", positions, ("sinusoidal", "learned", "rotary", "none"))
        check_choice("token_start", token_start, ("independent", "ordered"))
        check_probability("dropout", dropout)
        if (vocab_size is None) == (input_dim is None):
            raise ArgumentError(f"give either vocab_size or input_dim, got {vocab_size!r} and {input_dim!r}")
        if separator is not None and vocab_size is None:
            raise ArgumentError("separator is a token; vectors have none")
        if token_start == "ordered" and vocab_size is None:
            raise ArgumentError("token_start must be independent where inputs are vectors, got ordered")
        self.max_len = max_len
        self.separator = separator
        self.inputs: nn.Embedding | nn.Linear
        if vocab_size is not None:
            check_count("vocab_size", vocab_size)
            if token_start == "ordered":
                start = ordered_start(vocab_size, model_dim)
                self.inputs = nn.Embedding.from_pretrained(start, freeze=False)  # type: ignore[no-untyped-call]
            else:
                self.inputs = nn.Embedding(vocab_size, model_dim)
        elif input_dim is not None:
            check_count("input_dim", input_dim)
            self.inputs = nn.Linear(input_dim, model_dim)
        self.neighbours = None
        if convolution_width:
            self.neighbours = Neighbours(model_dim=model_dim, convolution_width=convolution_width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, model_dim)) if cls else None
        self.types = None if separator is None else nn.Parameter(torch.zeros(2, model_dim))
        num_positions = max_len + int(cls)
        if positions == "learned":
            self.positions = nn.Parameter(torch.empty(num_positions, model_dim).normal_(std=0.02))
        elif positions in ("rotary", "none"):
            self.positions = None
        else:
            self.register_buffer("positions", sinusoidal_positions(num_positions, model_dim), persistent=False)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, inputs: Tensor, key_mask: Tensor | None = None, *, offset: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Embed, and extend the mask by the CLS token.

        Args:
            inputs: (B, L) token ids or (B, L, input_dim) vectors.
            key_mask: (B, L), True = keep.
            offset: Position of the first input, for decoding token by token; without CLS only.

        Returns:
            Inputs of a model (B, L or L + 1, model_dim), and their mask (B, L or L + 1); None if there was none.

        Raises:
            ArgumentError: the sequence is longer than `max_len`, or an offset is given where there is a CLS token.
        """
        if offset and self.cls_token is not None:
            raise ArgumentError(
                f"offset is for decoding, which has no CLS token; build with cls=False, got offset={offset}"
            )
        first = self._first_position(inputs, key_mask, offset)
        x = self.inputs(inputs)
        if self.types is not None:
            x = x + self.types[self._types(inputs)]
        if self.neighbours is not None:
            x = x + self.neighbours(x, key_mask, self.parts)
        if self.cls_token is not None:
            # In other parts none of it, and a gradient of 0: all processes have the same parameters.
            cls = self.cls_token.expand(x.shape[0], 1, -1).to(x.dtype)[:, : int(self.holds_cls)]
            x = torch.cat([cls, x], dim=1)
            if key_mask is not None:
                key_mask = torch.cat([key_mask.new_ones(cls.shape[:2]), key_mask], dim=1)
        if self.positions is not None:
            x = x + nn.functional.embedding(places(x.shape[1], key_mask, first=first, device=x.device), self.positions)
        return self.dropout(x), key_mask

    def _first_position(self, inputs: Tensor, key_mask: Tensor | None, offset: int) -> int | Tensor:
        """The position of the first vector that is made here, CLS included; (B,) by a mask of a sequence in parts.

        Raises:
            ArgumentError: the sequence, of all parts if it is in parts, is too long.
        """
        length = inputs.shape[1]
        end = offset + (length if self.parts is None else sum(self.parts.lengths(length, inputs.device).tolist()))
        if end > self.max_len:
            raise ArgumentError(f"sequence of {end} tokens is longer than max_len={self.max_len}")
        if self.parts is None:
            return offset
        before = self.parts.before(length if key_mask is None else key_mask.sum(1), inputs.device)
        return before + offset + int(self.cls_token is not None and not self.holds_cls)

    @property
    def holds_cls(self) -> bool:
        """Whether CLS is put in front here: in the first part, if a sequence is in parts."""
        return self.cls_token is not None and (self.parts is None or self.parts.index == 0)

    def _types(self, inputs: Tensor) -> Tensor:
        """0 up to the first separator, 1 after it: (B, L) -> (B, L)."""
        is_separator = torch.eq(inputs, self.separator or 0)
        seen = is_separator.cumsum(1)
        if self.parts is not None:
            seen = seen + self.parts.gather(is_separator.sum(1, keepdim=True))[: self.parts.index].sum(0)
        return (seen > is_separator.long()).long()
