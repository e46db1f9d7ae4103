"""The `hvd-sparse` command: one module per subcommand, each a `Command` that `main` lists."""
