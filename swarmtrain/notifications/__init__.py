"""Notifications about a run: their contents, their channels, and the ways to deliver them. Standard library only.

The coordinator sends the notifications of a run; `swarmtrain notify-test` sends one from the launcher.
"""
