"""The command `klformer`: one file a command.

A command's module has a dataclass with the options, a function that takes it, and both together as `COMMAND`.
Modules are imported when their command is called; their names and summaries are in `main`.
"""
