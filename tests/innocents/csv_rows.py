"""Its only memory is results.csv, to which it appends a row for each of its experiments."""

import csv
import sys
import time
from pathlib import Path

steps, seconds = int(sys.argv[1]), float(sys.argv[2])
table = Path("results.csv")
done = {row[0] for row in csv.reader(table.open())} if table.exists() else set()
for number in range(steps):
    if str(number) in done:
        continue
    time.sleep(seconds)
    with table.open("a", newline="") as file:
        csv.writer(file).writerow([number, number**0.5])
    print("experiment", number, flush=True)
