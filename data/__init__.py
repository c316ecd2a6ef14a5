"""What the other floors share and what is shipped: error types, files and workspace, resolutions, requests, traces,
table schemas, prompts and the bundled models. It imports no torch at module level.
"""
