"""Measurements: the import job beside a peer, kills, the split, memory. Run as `python -m bench`; needs no other part.

What is measured is the product as users run it: `python -m processors run ...` in processes of its own, with settings
in the environment. The folder is no part of the installed application.
"""
