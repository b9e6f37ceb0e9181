"""Turing machines: a text format, a parser that says where a file is wrong, and a plain simulator.

    # a comment
    name: binary increment       what to call it (default: the name of the file)
    blank: _                     the symbol of empty cells
    start: carry                 the first state
    halt: done                   the states in which the machine stops; none for a machine that runs for ever
    input: 1011                  the word on the tape, unless another is asked for
    steps: 100                   the most steps to take, unless another number is asked for
    carry 1 -> 0 L carry         in state carry, reading 1: write 0, move left, go on in state carry

A symbol is one character. `*` stands for every symbol that no other rule of the state reads; written, it is the symbol
that was read. As in the paper, a move is left or right, the machine starts on the last cell of its input, and the word
has no blanks. The tape has no ends.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from klformer.checks import check_count, suggestion

MOVES = {"L": -1, "R": 1}
ANY = "*"
KEYS = ("name", "blank", "start", "halt", "input", "steps")
NEEDED = ("blank", "start", "halt")


class MachineError(ValueError):
    """A machine or a word that can't be used; the message says where, what is wrong and what would be right."""

    def __init__(self, problem: str, *, file: str | None = None, line: int | None = None) -> None:
        where = "" if file is None else f"{file}: " if line is None else f"{file}, line {line}: "
        super().__init__(where + problem)


@dataclass(frozen=True)
class Action:
    """What a machine does in a state at a symbol."""

    write: str
    move: int
    """-1 or 1."""
    state: str
    """The next state."""


@dataclass(frozen=True)
class Configuration:
    """A machine between two steps."""

    state: str
    symbol: str
    """The symbol under the head."""
    head: int
    """The cell of the head; the first cell of the input is 0."""
    move: int
    """The move that led here; 0 at the very start."""


@dataclass(frozen=True)
class TuringMachine:
    """A deterministic machine with one tape; every state that does not halt has a rule for every symbol."""

    name: str
    states: tuple[str, ...]
    symbols: tuple[str, ...]
    """Without the blank."""
    blank: str
    start: str
    halt: frozenset[str]
    rules: Mapping[tuple[str, str], Action]
    word: str = ""
    """The input, unless another is asked for."""
    steps: int = 100
    """The limit of steps, unless another is asked for."""

    def check_word(self, word: str) -> None:
        """Raises MachineError unless the word consists of the machine's symbols other than the blank."""
        for symbol in word:
            if symbol not in self.symbols:
                known = " ".join(self.symbols) or "none"
                raise MachineError(
                    f"input {word!r} of {self.name} has the symbol {symbol!r}; its symbols but for the blank: {known}"
                )

    def run(self, word: str, max_steps: int) -> list[Configuration]:
        """Run the machine on a tape that is a dictionary.

        Args:
            word: The input; the machine starts on its last cell.
            max_steps: Steps to take unless the machine halts before.

        Returns:
            The configuration at the start and after each step.
        """
        self.check_word(word)
        tape = dict(enumerate(word))
        head = len(word) - 1
        trace = [Configuration(self.start, tape.get(head, self.blank), head, 0)]
        for _ in range(max_steps):
            state = trace[-1].state
            if state in self.halt:
                break
            action = self.rules[state, tape.get(head, self.blank)]
            tape[head] = action.write
            head += action.move
            trace.append(Configuration(action.state, tape.get(head, self.blank), head, action.move))
        return trace


def example_names() -> list[str]:
    """The machines that come with the package."""
    return sorted(file.name.removesuffix(".tm") for file in _examples().iterdir() if file.name.endswith(".tm"))


def load_machine(name: str) -> TuringMachine:
    """The example of this name, or the machine in the file of this name.

    Raises:
        MachineError: There is neither, or the text is not that of a machine.
    """
    examples = example_names()
    if name in examples:
        return parse_machine(_examples().joinpath(f"{name}.tm").read_text(encoding="utf-8"), file=f"{name}.tm")
    path = Path(name)
    if not path.is_file():
        raise MachineError(
            f"no file and no example is called {name!r}{suggestion(name, examples)} Examples: {', '.join(examples)}"
        )
    try:
        return parse_machine(path.read_text(encoding="utf-8"), file=str(path))
    except UnicodeDecodeError as error:
        raise MachineError(f"not text in UTF-8: {error.reason}", file=str(path)) from error


def _examples() -> Traversable:
    return files("research.turing").joinpath("machines")


def parse_machine(text: str, *, file: str = "machine") -> TuringMachine:
    """Read the format that this file opens with.

    Args:
        file: What to call the text in errors.

    Raises:
        MachineError: With the file and the line.
    """
    return _Parser(file).parse(text)


class _Parser:
    def __init__(self, file: str) -> None:
        self.file = file
        self.settings: dict[str, tuple[str, int]] = {}
        self.rules: dict[tuple[str, str], tuple[Action, int]] = {}

    def parse(self, text: str) -> TuringMachine:
        for number, raw in enumerate(text.splitlines(), start=1):
            line = raw.split("#", maxsplit=1)[0].strip()
            if "->" in line:
                self._rule(line, number)
            elif line:
                self._setting(line, number)
        for key in NEEDED:
            if key not in self.settings:
                raise MachineError(f"there is no line '{key}: ...'", file=self.file)
        return self._machine()

    def _fail(self, problem: str, line: int) -> MachineError:
        return MachineError(problem, file=self.file, line=line)

    def _setting(self, line: str, number: int) -> None:
        key, colon, value = (part.strip() for part in line.partition(":"))
        if not colon:
            raise self._fail(f"neither 'key: value' nor 'state read -> write move next': {line!r}", number)
        if key not in KEYS:
            raise self._fail(f"unknown key {key!r}{suggestion(key, KEYS)} Keys: {', '.join(KEYS)}", number)
        if key in self.settings:
            raise self._fail(f"{key} was set before, in line {self.settings[key][1]}", number)
        self.settings[key] = value, number

    def _rule(self, line: str, number: int) -> None:
        left, right = (side.split() for side in line.split("->", maxsplit=1))
        if len(left) != 2 or len(right) != 3:
            raise self._fail(f"a rule is 'state read -> write move next', got {line!r}", number)
        (state, read), (write, move, target) = left, right
        for symbol in (read, write):
            if len(symbol) != 1:
                raise self._fail(f"a symbol is one character, got {symbol!r}", number)
        if move not in MOVES:
            raise self._fail(f"a move is L or R, got {move!r}", number)
        if write == ANY and read != ANY:
            raise self._fail(f"'{ANY}' can only be written where '{ANY}' is read", number)
        if (state, read) in self.rules:
            earlier = self.rules[state, read][1]
            raise self._fail(f"state {state!r} has a rule for {read!r} already, in line {earlier}", number)
        self.rules[state, read] = Action(write, MOVES[move], target), number

    def _machine(self) -> TuringMachine:
        blank, blank_line = self.settings["blank"]
        if len(blank) != 1 or blank == ANY:
            raise self._fail(f"blank must be one character other than '{ANY}', got {blank!r}", blank_line)
        word, word_line = self.settings.get("input", ("", 0))
        written = {symbol for (_, read), (action, _) in self.rules.items() for symbol in (read, action.write)}
        symbols = tuple(sorted((written | set(word)) - {ANY, blank}))
        if blank in word:
            raise self._fail(f"input {word!r} has the blank {blank!r} in it", word_line)
        halt, halt_line = frozenset(self.settings["halt"][0].split()), self.settings["halt"][1]
        lines = {state: line for (state, _), (_, line) in reversed(self.rules.items())}
        for state in halt & set(lines):
            raise self._fail(f"state {state!r} halts (line {halt_line}) and has a rule", lines[state])
        start, start_line = self.settings["start"]
        for state, line in [(start, start_line)] + [(action.state, line) for action, line in self.rules.values()]:
            if state not in lines and state not in halt:
                raise self._fail(f"state {state!r} has no rules and is not among those that halt", line)
        rules = {}
        for state in lines:
            for symbol in (*symbols, blank):
                found = self.rules.get((state, symbol)) or self.rules.get((state, ANY))
                if found is None:
                    raise self._fail(f"state {state!r} has no rule for {symbol!r}", lines[state])
                action = found[0]
                rules[state, symbol] = Action(
                    symbol if action.write == ANY else action.write, action.move, action.state
                )
        return TuringMachine(
            name=self.settings.get("name", (Path(self.file).stem, 0))[0],
            states=tuple(sorted({start} | set(lines) | halt)),
            symbols=symbols,
            blank=blank,
            start=start,
            halt=halt,
            rules=rules,
            word=word,
            steps=self._steps(),
        )

    def _steps(self) -> int:
        text, line = self.settings.get("steps", ("100", 0))
        try:
            steps = int(text)
            check_count("steps", steps)
        except ValueError as error:
            raise self._fail(f"steps must be a whole number of at least 1, got {text!r}", line) from error
        return steps
