"""`klformer doctor`: the library's own command, which works without the laboratory, too."""

from klformer.lab.cli.command import Command
from klformer.testing.doctor import parse, run

COMMAND = Command(parse, run)
