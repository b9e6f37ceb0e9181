"""What a metric is called, which way is better, and how its values are written."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A number by which models are compared.

    Args:
        name: As in records and results.
        higher_is_better: The direction.
        percent: A share from 0 to 1, which people read in percent.
    """

    name: str
    higher_is_better: bool
    percent: bool = False

    def rank(self, value: float) -> float:
        """A number that is higher for the better of two values."""
        return value if self.higher_is_better else -value

    def reaches(self, value: float, target: float) -> bool:
        """Whether a value is as good as the target, or better."""
        return self.rank(value) >= self.rank(target)

    def show(self, value: float, digits: int = 2) -> str:
        """A value for people: in percent with so many digits, or as a number of two more significant ones."""
        return f"{100 * value:.{digits}f}%" if self.percent else f"{value:.{digits + 2}g}"

    @property
    def label(self) -> str:
        """The name with its unit, for headings and axes."""
        return f"{self.name}, %" if self.percent else self.name

    def best(self, values: Sequence[float]) -> float:
        """The best of some values."""
        return max(values, key=self.rank)

    def scaled(self, value: float) -> float:
        """A value in the unit in which people read it."""
        return 100 * value if self.percent else value

    def show_scaled(self, scaled: float) -> str:
        """A scaled value as tables have it, whose heading has the unit."""
        return f"{scaled:.2f}" if self.percent else f"{scaled:.4g}"

    def show_spread(self, value: float) -> str:
        """A deviation, without the sign of percent."""
        return f"{100 * value:.2f}" if self.percent else f"{value:.2g}"

    def as_dict(self) -> dict[str, str | bool]:
        return {"name": self.name, "higher_is_better": self.higher_is_better, "percent": self.percent}
