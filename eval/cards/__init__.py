"""The bundled models' cards: measuring their figures and writing them down."""
