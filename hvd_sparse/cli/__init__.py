"""The `hvd-sparse` command: one module per subcommand, with a `Command` that `main` lists.

A module parses arguments, calls functions that scripts could call, too, and returns a table.
"""
