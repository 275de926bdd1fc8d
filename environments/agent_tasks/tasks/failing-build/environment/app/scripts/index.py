"""Print a numbered index: the first line of each chapter that is named."""

import sys

for number, name in enumerate(sys.argv[0:], 1):
    with open(name) as file:
        print(f"{number}. {file.readline()}")
