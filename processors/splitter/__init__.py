"""Stream `imports` -> super stream `recipients`: `split.py` is what a record becomes, `processor.py` how it is counted."""
