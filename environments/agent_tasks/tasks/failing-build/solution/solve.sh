#!/bin/bash
cd /app || exit 1
cat > Makefile <<'MAKE'
# Builds dist/handbook.txt, all chapters one after the other, and dist/index.txt.

CHAPTERS := $(sort $(wildcard chapters/*.txt))
PYTHON := python3

all: dist/handbook.txt dist/index.txt

dist/handbook.txt: $(CHAPTERS)
	mkdir -p dist
	for chapter in $(CHAPTERS); do cat $$chapter; echo; done > $@

dist/index.txt: scripts/index.py $(CHAPTERS)
	mkdir -p dist
	$(PYTHON) scripts/index.py $(CHAPTERS) > $@

clean:
	rm -rf dist

.PHONY: all clean
MAKE
cat > scripts/index.py <<'PYTHON'
"""Print a numbered index: the first line of each chapter that is named."""

import sys

for number, name in enumerate(sys.argv[1:], 1):
    with open(name) as file:
        print(f"{number}. {file.readline().rstrip()}")
PYTHON
