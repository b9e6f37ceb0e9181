"""What is written down of a converted attention, so that it can be built again."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from klformer.attention import AttentionMechanism, AttentionSpec
from klformer.config import Config
from klformer.errors import FileError

#: Of what is written; other numbers are refused.
FORMAT = 1


class SiteRecord(Config):
    """The attention of a site, all its options written out, and its sizes."""

    attention: AttentionSpec
    num_heads: int
    head_dim: int
    value_dim: int

    @property
    def num_frequencies(self) -> int | None:
        """Of the attention; None if it has none."""
        count = self.attention.options.get("num_frequencies")
        return count if isinstance(count, int) else None

    def having(self, option: str, value: Any) -> "SiteRecord":
        """The same with another value of an option."""
        options = {**self.attention.options, option: value}
        return self.model_copy(update={"attention": AttentionSpec(name=self.attention.name, options=options)})

    def build(self) -> AttentionMechanism:
        """The attention, with fresh parameters."""
        return self.attention.build(num_heads=self.num_heads, head_dim=self.head_dim, value_dim=self.value_dim)


def read_records(file: Path, section: Any) -> dict[str, SiteRecord]:
    """The attentions by their sites, from a section of a JSON file.

    Raises:
        FileError: it is not what a conversion wrote.
    """
    if not isinstance(section, Mapping) or "attentions" not in section:
        raise FileError(f"{file} has no section 'klformer': this is not a converted model")
    if section.get("format") != FORMAT:
        raise FileError(f"{file}: format {section.get('format')!r} of conversions is not {FORMAT}, which is read here")
    try:
        return {name: SiteRecord(**record) for name, record in section["attentions"].items()}
    except (ValidationError, TypeError, ValueError) as error:
        raise FileError(f"{file}: the attentions in its section 'klformer' can't be built: {error}") from error
