#!/bin/bash
# Reward 1 if the copy is a file with the content of the draft, which the agent cannot change here.
file=/app/final.txt
reward=0
if [ -f "$file" ] && [ ! -L "$file" ] && cmp -s /app/draft.txt "$file"; then
  reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
