"""Plan → what is sent: commands as argv lists and environments, stack documents, sbatch scripts. Values in, values out."""
