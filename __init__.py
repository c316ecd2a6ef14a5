"""PatchedServe: profile, train, serve and evaluate text-to-image diffusion models whose requests mix resolutions.

The repository root is this package. Its sub-packages are floors, from top to bottom `psctl`, `eval`, `profiling`,
`serving`, `training`, `data`, `kernels`; each imports only from the floors below its own.
"""

__version__ = "0.1.0"
