#!/bin/bash
# Reward 1 if the file has the three earlier lines and the new one.
file=/app/names.txt
reward=0
if [ -f "$file" ] && [ ! -L "$file" ]; then
  names='alpha\nbravo\ncharlie\ndelta'
  if printf "$names" | cmp -s - "$file" || printf "$names\n" | cmp -s - "$file"; then
    reward=1
  fi
fi
echo "$reward" > /logs/verifier/reward.txt
