"""What lives on a machine that runs nodes as processes: a folder for each run, a keeper for each process, a hand that is asked.

Standard library only, Python 3.11 or newer: over SSH these modules travel, as a zip file, to machines that need have nothing of ours.
"""
