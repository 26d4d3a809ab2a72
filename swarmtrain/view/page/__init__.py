"""A page to look at, of one run: its events → a value (data) → a page in a browser, live (server) or as one file (report).

source.py      what is new of a run, read as it comes; of one that is down, what was kept
curves.py      losses, speeds and their like by step, each step once
story.py       all other events, and of progress what was said last before each of them
data.py        curves, story, tasks and lines → the value that the page shows
assets/        the page itself: HTML, CSS and one script; plots are drawn by uPlot, which lies beside it
prometheus.py  the same value as text that Prometheus reads
"""
