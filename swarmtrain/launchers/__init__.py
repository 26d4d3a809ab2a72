"""Launchers: one module for each kind of place that runs a job, selected by runner type and imported on first use.

base        the interface of all launchers
registry    creates launchers, and finds runs among them
planning    makes plans
common      what several launchers share
"""
