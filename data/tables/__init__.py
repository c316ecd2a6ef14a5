"""Tables that commands hand on to each other: their columns, types and units, as parquet or CSV. No torch."""
