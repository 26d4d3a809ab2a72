"""Estimates for a run that has not started: its memory, and its time per step."""
