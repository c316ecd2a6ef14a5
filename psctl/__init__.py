"""The command line `psctl`: one module per command that parses, calls the library and prints; no logic lives here.

`app` registers the commands and maps errors to exit codes, `output` owns all printing, `options` holds the options
that several commands share. Command modules import torch inside their functions, so that `psctl --help` is fast.
"""
