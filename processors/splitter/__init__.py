"""Stream `imports` -> super stream `recipients`: `split.py` says what a record becomes, `processor.py` counts it."""
