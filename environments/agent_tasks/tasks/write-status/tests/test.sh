#!/bin/bash
# Reward 1 if the file holds the word, with or without a line break.
file=/app/status.txt
reward=0
if [ -f "$file" ] && [ ! -L "$file" ]; then
  if printf 'ready' | cmp -s - "$file" || printf 'ready\n' | cmp -s - "$file"; then
    reward=1
  fi
fi
echo "$reward" > /logs/verifier/reward.txt
