"""The dashboard: page data of one run, of a cluster, or of two compared runs, shown in a browser by a live server or as one HTML file.

data_source.py      polls a run for new data; for a run that is down, reads the stored data
curves.py           losses, throughput and other metrics by step, each step once
event_timeline.py   all other events, with the newest progress before each
page_data.py        combines curves, timeline, tasks and output lines into the page data
run_comparison.py   the comparison of two runs, from their page data and configs
cluster_page.py     the page data of a cluster: runs, queue, machines; cluster_machines.py has the machines and who has their GPUs
cluster_reader.py   reads them from the launchers and the swarm; cluster_source.py polls it, and keeps the runs' data sources
html_page.py        the page of a run, or a comparison, as one file
assets/             HTML, CSS and one script; uPlot, vendored, draws the plots
prometheus.py       the page data of a run as Prometheus metrics; cluster_metrics.py adds the queue and the machines
routes.py           the routes of a run and of a cluster
server.py           the HTTP server; access_policy.py defines who may read it
"""
