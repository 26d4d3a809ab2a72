"""The dashboard of one run: converts its events to page data, shown in a browser by a live server or as one HTML file.

data_source.py      polls a run for new data; for a run that is down, reads the stored data
curves.py           losses, throughput and other metrics by step, each step once
event_timeline.py   all other events, with the newest progress before each
page_data.py        combines curves, timeline, tasks and output lines into the page data
html_page.py        the page as one file
assets/             HTML, CSS and one script; uPlot, vendored, draws the plots
prometheus.py       the page data as Prometheus metrics
server.py           the HTTP server; access_policy.py defines who may read it
"""
