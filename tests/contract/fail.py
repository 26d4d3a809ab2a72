"""Rank 1 fails; the others would run for a long time."""

import os
import sys
import time

if os.environ["RANK"] == "1":
    print("no such thing", flush=True)
    sys.exit(7)
time.sleep(600)
