"""Requests to other systems: described as data, sent by the same rules for all, and told of without secrets."""
