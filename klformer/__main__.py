"""The command `klformer`, also as `python -m klformer`; torchrun starts it this way."""

import sys

from klformer.errors import MissingExtraError


def main() -> None:
    """Run the command line, which is part of the laboratory; `doctor` works without it."""
    try:
        from klformer.lab.cli.main import main as run
    except MissingExtraError as error:
        if sys.argv[1:2] == ["doctor"]:
            from klformer.testing.doctor import main as examine

            examine()
            return
        print(f"klformer: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    run()


if __name__ == "__main__":
    main()
