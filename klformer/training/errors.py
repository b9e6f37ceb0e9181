"""Ends of a run that are somebody's to act on, as opposed to bugs."""


class TrainingError(Exception):
    """Training can't go on; the message says what happened, what is safe and what to do."""


class OtherProcessFailedError(Exception):
    """The main process has found an error and says what it is."""


class Interrupted(Exception):  # noqa: N818 - not an error: somebody asked for it
    """Training was asked to stop and has saved its state."""
