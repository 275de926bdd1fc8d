# Codex without a person, and the same session resumed for a second question.
set -e
export CODEX_HOME="$PWD/.codex"
mkdir "$CODEX_HOME"
cat > "$CODEX_HOME/config.toml" <<END
model = "policy"
model_provider = "policy"
model_context_window = 100000

[model_providers.policy]
name = "policy"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
END
options="--skip-git-repo-check --dangerously-bypass-approvals-and-sandbox"
codex exec $options "Write the sum of the numbers in a.txt, b.txt and c.txt into sum.txt." </dev/null
codex exec resume --last $options "And without c.txt?" </dev/null
cat sum.txt
