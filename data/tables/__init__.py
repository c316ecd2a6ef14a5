"""Tables that commands exchange: their columns, types and units, as parquet or CSV. No torch."""
