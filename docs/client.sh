#!/usr/bin/env bash
# A complete client of the trajectory service in curl and jq; docs/wire.md explains each call.
#
#   docs/client.sh trainer     http://localhost:8000 COUNT    take COUNT batches, print their scores
#   docs/client.sh environment http://localhost:8000 COUNT    post COUNT groups of two trajectories
#
# TOKEN=... authenticates where the service asks for it.
set -euo pipefail
role=$1 url=${2%/} count=$3

call() { # METHOD PATH [BODY [HEADER]]: prints the response; retries failures, after the pause in `Retry-After` if there is one
    curl --silent --show-error --fail-with-body --retry 8 --retry-connrefused --max-time 60 \
        --request "$1" --header "Content-Type: application/json" ${4:+--header "$4"} \
        ${TOKEN:+--header "Authorization: Bearer $TOKEN"} ${3:+--data-binary "$3"} "$url$2"
}

trainer() {
    call POST /register '{"wandb_group": "", "wandb_project": "", "batch_size": 2, "max_token_len": 512,
        "checkpoint_dir": "", "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 10}' >&2
    for ((step = 0; step < count;)); do
        answer=$(call GET "/batch?lease=600&wait=10")
        if [ "$(jq '.batch == null' <<<"$answer")" = true ]; then sleep 0.1 && continue; fi
        jq -c '[.batch[].scores[]]' <<<"$answer" # train here; .tokens and .masks lie beside .scores
        batch_id=$(jq -r '.batch_id // empty' <<<"$answer")
        if [ -n "$batch_id" ]; then call POST "/batch/$batch_id/ack" >&2; fi
        step=$((step + 1))
    done
}

environment() {
    joining='{"max_token_length": 512, "desired_name": "shell", "weight": 1.0, "group_size": 2}'
    until env_id=$(call POST /register-env "$joining" | jq -e .env_id); do sleep 0.1; done
    for ((i = 0; i < count; i++)); do
        call GET "/status-env?env_id=$env_id" | jq -c '{current_step, queue_size}' >&2
        group='{"tokens": [[1, 15, 2], [1, 16, 2]], "masks": [[-100, 15, 2], [-100, 16, 2]],
            "scores": ['$i'.5, -'$i'.5], "env_id": '$env_id'}'
        call POST /scored_data "$group" "Idempotency-Key: $env_id-$i-$$-$RANDOM" | jq -c .
    done
    call POST /disconnect-env "{\"env_id\": $env_id}" >&2
}

"$role"
