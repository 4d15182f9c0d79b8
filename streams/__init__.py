"""The engine: messages, offsets, claims and retries. It has never heard of e-mail."""
