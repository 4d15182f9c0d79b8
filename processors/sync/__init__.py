"""Outgoing events to the systems that must hear of them, over HTTP."""
