"""Commands typed as a user would, inside of the test's own process."""

import pytest

from klformer.lab.cli.main import main


def run(capsys, *arguments):
    """What a command prints."""
    main([str(a) for a in arguments])
    return capsys.readouterr().out


def fails(capsys, code, *arguments):
    """What a command that fails says, and that its exit code is `code`."""
    with pytest.raises(SystemExit) as caught:
        main([str(a) for a in arguments])
    assert caught.value.code == code
    return capsys.readouterr().err
