"""OpenAI's Files and Batches: files of requests, drawn while no other request waits, and their outputs. No torch."""
