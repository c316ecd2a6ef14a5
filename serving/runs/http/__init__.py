"""Assembly of the batch server: its engine, or the replicas or the cascade that draw, and the front end around it."""
