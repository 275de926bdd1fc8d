# Claude Code without a person, and the same session continued for a second question.
set -e
export CLAUDE_CONFIG_DIR="$PWD/.claude"
options="--model policy --permission-mode acceptEdits --allowedTools Bash"
claude $options -p "Write the sum of the numbers in a.txt, b.txt and c.txt into sum.txt."
claude $options --continue -p "And without c.txt?"
cat sum.txt
