"""Coding agents' command lines that sit in a role: their session, its door to the model and to the run, its walls."""
