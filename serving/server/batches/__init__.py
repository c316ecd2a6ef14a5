"""OpenAI's Files and Batches: files of requests, drawn while nobody waits, and what has become of them. No torch."""
