"""Nodes as processes on a machine: a folder per run, a process keeper per process, and a remote agent that answers requests over SSH.

Standard library only, Python 3.8 or newer: these modules are sent as a zip file over SSH to machines without swarmtrain.
"""
