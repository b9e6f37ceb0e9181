"""`python -m klformer` is the command `klformer`; torchrun starts it this way."""

from klformer.cli.main import main

if __name__ == "__main__":
    main()
