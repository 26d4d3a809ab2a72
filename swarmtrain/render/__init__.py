"""Plan → what is sent: commands as argv lists and environments, stack documents. Values in, values out."""
