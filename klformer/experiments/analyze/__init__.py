"""`klformer analyze`: every claim of the paper as a command, on any trained run."""
