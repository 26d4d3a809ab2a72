"""The dashboard of one run: its events → a value (page_data) → a page in a browser, live (server) or as one file (html_page).

data_source.py      polls a run for new data; of a run that is down, reads what was stored
curves.py           losses, throughput and other metrics by step, each step once
event_timeline.py   all other events, with the newest progress before each
page_data.py        curves, timeline, tasks and lines → the value that the page shows
html_page.py        the page as one file
assets/             HTML, CSS and one script; uPlot, vendored, draws the plots
prometheus.py       the same value as Prometheus metrics
server.py           the HTTP server; access_policy.py defines who may read it
"""
