"""The command `klformer`: one file a command."""
