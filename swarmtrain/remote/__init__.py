"""Nodes as processes on a machine: a folder per run, a process keeper per process, and a remote agent that answers requests over SSH.

Standard library only, Python 3.11 or newer: over SSH these modules are copied, as a zip file, to machines without swarmtrain.
"""
