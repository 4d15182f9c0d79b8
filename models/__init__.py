"""The vocabulary: tables, message bodies and the rule of the idempotency key. No queries, no I/O."""
