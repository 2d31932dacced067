"""The command line: one module a command, work imported inside the command."""
