# Completion of dynctl in bash. Written by `dynctl completion bash`; do not edit.
#
#   source <(dynctl completion bash)                                        in this shell
#   dynctl completion bash > ~/.local/share/bash-completion/completions/dynctl      permanently
#
# Commands, options and fixed words are in this file. Only the names of running models, workers and
# domains and of contexts come from `dynctl __complete`, which takes at most 0.2 s.

# Sets subs, flags, arguments and more (the argument that repeats) of the command $1.
__dynctl_command() {
    subs='' arguments=() more=''
    flags='--frontend --view --recording --at --demo --token --token-env --ca-cert --context --discovery --dyn-namespace --file-kv --etcd-endpoints --etcd-client --nats-server --namespace -n --all-namespaces -A --kube-context --kubeconfig --reach --no-color --debug --help -h'
    case $1 in
        '')
            subs='demo serve route workers topology replay top decisions events thresholds config context check explain why hits audit record bundle completion version options help'
            flags+=' --version -V --output -o --timeout --token-file --wait'
            ;;
        'demo')
            flags+=' --keep --load --story --no-story --port --output -o --timeout --token-file --wait'
            ;;
        'serve')
            subs='frontend router indexer observe attach epp engine'
            flags+=' --output -o --timeout --token-file --wait --http-host --host --http-port --port --worker --workers-file --model-path --trust-template --tokenizer --model-name --kv-cache-block-size --admin-token --api-token --log-decisions --log-format --log-level --decision-memory --record --record-max-bytes --index-memory --drain-timeout --system-port --announce --router --router-token --router-token-file --share-port --processes --process-timeout --namespace-prefix --event-plane --response-port --migration-limit --migration-max-seq-len --answer-parsing --admin-token-file --api-key --api-key-file --key-requests-per-minute --key-concurrency --engine-api-key --engine-api-key-file --tls-cert --tls-key --unix-socket --system-host --compressed-requests --otlp-endpoint --otlp-sample-ratio --header-timeout --keep-alive-timeout --peer-connections --first-byte-timeout --idle-timeout --eject-after --eject-pause --eject-max-pause --panic-threshold --router-replica-bind --router-replica-peer --router-replica-nats --router-replica-group --index-peer --preset --router-mode --router-kv-overlap-score-credit --router-kv-overlap-score-credit-decay --router-prefill-load-scale --router-decode-active-request-weight --router-temperature --router-track-active-blocks --no-router-track-active-blocks --router-track-output-blocks --no-router-track-output-blocks --router-assume-kv-reuse --no-router-assume-kv-reuse --router-track-prefill-tokens --no-router-track-prefill-tokens --active-decode-blocks-threshold --active-prefill-tokens-threshold --active-prefill-tokens-threshold-frac --router-kv-transfer-topology-level --kv-transfer-enforcement --router-kv-transfer-mismatch-policy --kv-transfer-preferred-weight --router-decode-capacity-guard --no-router-decode-capacity-guard --router-pair-selection --router-kv-transfer-weight --router-kv-transfer-qos --router-own-domains --router-conditional-disagg --no-router-conditional-disagg --router-conditional-disagg-config --router-bypass-policy --router-bypass-eff-isl-threshold --router-bypass-eff-isl-ratio-threshold --router-bypass-prefill-busy-threshold --router-bypass-decode-busy-threshold --router-bypass-require-can-prefill --no-router-bypass-require-can-prefill --router-taints-in-all-modes --no-router-taints-in-all-modes --router-on-degraded --router-session-affinity-ttl-secs --router-session-affinity-mode --router-session-affinity-yield-blocks --router-active-request-expiry-secs --http-overload-status-code --router-kv-events --no-router-kv-events --router-approximate-cache-policy --router-ttl-secs --router-max-tree-size --router-prune-target-ratio --router-queue-threshold --router-queue-policy --router-policy-config --router-queue-max-requests --router-queue-max-wait-secs --router-host-cache-hit-weight --router-disk-cache-hit-weight --router-replica-sync --no-router-replica-sync --router-predicted-ttl-secs --router-prefill-load-model --ais-backend --ais-backend-version --ais-system --ais-model-path --ais-tp-size --encoder-cuda-to-cpu-ratio --serve-indexer --no-serve-indexer --use-remote-indexer --no-use-remote-indexer --router-durable-kv-events --no-router-durable-kv-events --router-reset-states --no-router-reset-states'
            ;;
        'serve frontend')
            flags+=' --http-host --host --http-port --port --worker --workers-file --model-path --trust-template --tokenizer --model-name --kv-cache-block-size --admin-token --api-token --log-decisions --log-format --log-level --decision-memory --record --record-max-bytes --index-memory --drain-timeout --system-port --announce --router --router-token --router-token-file --share-port --processes --process-timeout --namespace-prefix --event-plane --response-port --migration-limit --migration-max-seq-len --answer-parsing --admin-token-file --api-key --api-key-file --key-requests-per-minute --key-concurrency --engine-api-key --engine-api-key-file --tls-cert --tls-key --unix-socket --system-host --compressed-requests --otlp-endpoint --otlp-sample-ratio --header-timeout --keep-alive-timeout --peer-connections --first-byte-timeout --idle-timeout --eject-after --eject-pause --eject-max-pause --panic-threshold --router-replica-bind --router-replica-peer --router-replica-nats --router-replica-group --index-peer --preset --router-mode --router-kv-overlap-score-credit --router-kv-overlap-score-credit-decay --router-prefill-load-scale --router-decode-active-request-weight --router-temperature --router-track-active-blocks --no-router-track-active-blocks --router-track-output-blocks --no-router-track-output-blocks --router-assume-kv-reuse --no-router-assume-kv-reuse --router-track-prefill-tokens --no-router-track-prefill-tokens --active-decode-blocks-threshold --active-prefill-tokens-threshold --active-prefill-tokens-threshold-frac --router-kv-transfer-topology-level --kv-transfer-enforcement --router-kv-transfer-mismatch-policy --kv-transfer-preferred-weight --router-decode-capacity-guard --no-router-decode-capacity-guard --router-pair-selection --router-kv-transfer-weight --router-kv-transfer-qos --router-own-domains --router-conditional-disagg --no-router-conditional-disagg --router-conditional-disagg-config --router-bypass-policy --router-bypass-eff-isl-threshold --router-bypass-eff-isl-ratio-threshold --router-bypass-prefill-busy-threshold --router-bypass-decode-busy-threshold --router-bypass-require-can-prefill --no-router-bypass-require-can-prefill --router-taints-in-all-modes --no-router-taints-in-all-modes --router-on-degraded --router-session-affinity-ttl-secs --router-session-affinity-mode --router-session-affinity-yield-blocks --router-active-request-expiry-secs --http-overload-status-code --router-kv-events --no-router-kv-events --router-approximate-cache-policy --router-ttl-secs --router-max-tree-size --router-prune-target-ratio --router-queue-threshold --router-queue-policy --router-policy-config --router-queue-max-requests --router-queue-max-wait-secs --router-host-cache-hit-weight --router-disk-cache-hit-weight --router-replica-sync --no-router-replica-sync --router-predicted-ttl-secs --router-prefill-load-model --ais-backend --ais-backend-version --ais-system --ais-model-path --ais-tp-size --encoder-cuda-to-cpu-ratio --serve-indexer --no-serve-indexer --use-remote-indexer --no-use-remote-indexer --router-durable-kv-events --no-router-durable-kv-events --router-reset-states --no-router-reset-states --output -o --timeout --token-file --wait'
            ;;
        'serve router')
            flags+=' --http-host --host --http-port --port --worker --workers-file --model-path --trust-template --tokenizer --model-name --kv-cache-block-size --admin-token --api-token --log-decisions --log-format --log-level --decision-memory --record --record-max-bytes --index-memory --drain-timeout --system-port --announce --endpoint --rpc-host --response-port --select-service-port --slot-tracker-port --admin-token-file --api-key --api-key-file --key-requests-per-minute --key-concurrency --engine-api-key --engine-api-key-file --tls-cert --tls-key --unix-socket --system-host --compressed-requests --otlp-endpoint --otlp-sample-ratio --header-timeout --keep-alive-timeout --peer-connections --first-byte-timeout --idle-timeout --eject-after --eject-pause --eject-max-pause --panic-threshold --router-replica-bind --router-replica-peer --router-replica-nats --router-replica-group --index-peer --preset --router-mode --router-kv-overlap-score-credit --router-kv-overlap-score-credit-decay --router-prefill-load-scale --router-decode-active-request-weight --router-temperature --router-track-active-blocks --no-router-track-active-blocks --router-track-output-blocks --no-router-track-output-blocks --router-assume-kv-reuse --no-router-assume-kv-reuse --router-track-prefill-tokens --no-router-track-prefill-tokens --active-decode-blocks-threshold --active-prefill-tokens-threshold --active-prefill-tokens-threshold-frac --router-kv-transfer-topology-level --kv-transfer-enforcement --router-kv-transfer-mismatch-policy --kv-transfer-preferred-weight --router-decode-capacity-guard --no-router-decode-capacity-guard --router-pair-selection --router-kv-transfer-weight --router-kv-transfer-qos --router-own-domains --router-conditional-disagg --no-router-conditional-disagg --router-conditional-disagg-config --router-bypass-policy --router-bypass-eff-isl-threshold --router-bypass-eff-isl-ratio-threshold --router-bypass-prefill-busy-threshold --router-bypass-decode-busy-threshold --router-bypass-require-can-prefill --no-router-bypass-require-can-prefill --router-taints-in-all-modes --no-router-taints-in-all-modes --router-on-degraded --router-session-affinity-ttl-secs --router-session-affinity-mode --router-session-affinity-yield-blocks --router-active-request-expiry-secs --http-overload-status-code --router-kv-events --no-router-kv-events --router-approximate-cache-policy --router-ttl-secs --router-max-tree-size --router-prune-target-ratio --router-queue-threshold --router-queue-policy --router-policy-config --router-queue-max-requests --router-queue-max-wait-secs --router-host-cache-hit-weight --router-disk-cache-hit-weight --router-replica-sync --no-router-replica-sync --router-predicted-ttl-secs --router-prefill-load-model --ais-backend --ais-backend-version --ais-system --ais-model-path --ais-tp-size --encoder-cuda-to-cpu-ratio --serve-indexer --no-serve-indexer --use-remote-indexer --no-use-remote-indexer --router-durable-kv-events --no-router-durable-kv-events --router-reset-states --no-router-reset-states --output -o --timeout --token-file --wait'
            ;;
        'serve indexer')
            flags+=' --http-host --host --port --http-port --workers --replays --block-size --model-name --routing-group --peers --snapshot --snapshot-interval --admin-token --api-token --admin-token-file --index-memory --log-format --log-level --announce --output -o --timeout --wait'
            ;;
        'serve observe')
            flags+=' --http-host --host --http-port --port --frontend-log --model-path --admin-token --api-token --log-format --log-level --decision-memory --record --record-max-bytes --index-memory --system-port --announce --admin-token-file --tls-cert --tls-key --unix-socket --system-host --header-timeout --keep-alive-timeout --peer-connections --output -o --timeout --token-file --wait'
            ;;
        'serve attach')
            flags+=' --engine --engine-type --model-path --max-num-seqs --tool-call-parser --reasoning-parser --endpoint --event-plane --request-plane --host --request-port --system-port --drain-timeout --announce --log-format --log-level --output -o --timeout --token-file --wait'
            ;;
        'serve epp')
            flags+=' --host --port --health-port --tls --no-tls --tls-cert --tls-key --body-limit --stream-timeout --http-host --http-port --pool --pod-kv-events --pod-replay --pod-role-label --pod-domain --dynamo-frontend --namespace-prefix --event-plane --worker --workers-file --model-path --trust-template --tokenizer --model-name --kv-cache-block-size --admin-token --api-token --log-decisions --log-format --log-level --decision-memory --record --record-max-bytes --index-memory --drain-timeout --system-port --announce --admin-token-file --engine-api-key --engine-api-key-file --unix-socket --system-host --otlp-endpoint --otlp-sample-ratio --header-timeout --keep-alive-timeout --peer-connections --eject-after --eject-pause --eject-max-pause --panic-threshold --router-replica-bind --router-replica-peer --router-replica-nats --router-replica-group --index-peer --preset --router-mode --router-kv-overlap-score-credit --router-kv-overlap-score-credit-decay --router-prefill-load-scale --router-decode-active-request-weight --router-temperature --router-track-active-blocks --no-router-track-active-blocks --router-track-output-blocks --no-router-track-output-blocks --router-assume-kv-reuse --no-router-assume-kv-reuse --router-track-prefill-tokens --no-router-track-prefill-tokens --active-decode-blocks-threshold --active-prefill-tokens-threshold --active-prefill-tokens-threshold-frac --router-kv-transfer-topology-level --kv-transfer-enforcement --router-kv-transfer-mismatch-policy --kv-transfer-preferred-weight --router-decode-capacity-guard --no-router-decode-capacity-guard --router-pair-selection --router-kv-transfer-weight --router-kv-transfer-qos --router-own-domains --router-conditional-disagg --no-router-conditional-disagg --router-conditional-disagg-config --router-bypass-policy --router-bypass-eff-isl-threshold --router-bypass-eff-isl-ratio-threshold --router-bypass-prefill-busy-threshold --router-bypass-decode-busy-threshold --router-bypass-require-can-prefill --no-router-bypass-require-can-prefill --router-taints-in-all-modes --no-router-taints-in-all-modes --router-on-degraded --router-session-affinity-ttl-secs --router-session-affinity-mode --router-session-affinity-yield-blocks --router-active-request-expiry-secs --http-overload-status-code --router-kv-events --no-router-kv-events --router-approximate-cache-policy --router-ttl-secs --router-max-tree-size --router-prune-target-ratio --router-queue-threshold --router-queue-policy --router-policy-config --router-queue-max-requests --router-queue-max-wait-secs --router-host-cache-hit-weight --router-disk-cache-hit-weight --router-replica-sync --no-router-replica-sync --router-predicted-ttl-secs --router-prefill-load-model --ais-backend --ais-backend-version --ais-system --ais-model-path --ais-tp-size --encoder-cuda-to-cpu-ratio --serve-indexer --no-serve-indexer --use-remote-indexer --no-use-remote-indexer --router-durable-kv-events --no-router-durable-kv-events --router-reset-states --no-router-reset-states --output -o --timeout --token-file --wait'
            ;;
        'serve engine')
            flags+=' --name --model --model-path --role --can-prefill --no-can-prefill --host --advertise-host --port --block-size --total-blocks --host-blocks --disk-blocks --host-gb-per-s --disk-gb-per-s --kv-bytes-per-token --max-model-len --max-num-seqs --max-waiting --max-num-batched-tokens --data-parallel-size --lora --prefill-tokens-per-s --decode-itl-ms --speedup-ratio --default-output-tokens --seed --kv-transfer-ms-per-block --kv-transfer-cross-domain-factor --kv-load-failure-policy --kv-hold-timeout-s --kv-events --replay --kv-events-topic --kv-events-buffer-steps --max-body-bytes --drain-timeout-s --fault-slow-factor --fault-refuse --fault-die-mid-stream-after --fault-stop-publishing --no-fault-stop-publishing --fault-drop-events --output -o --timeout --token-file --wait'
            ;;
        'route')
            flags+=' --explain --all --raw --messages --tokens --model --model-path --require-taint --prefer-taint --lora --cache-salt --session --session-id --follow --pin-prefill --pin-decode --set --save-view --output -o --timeout --token-file --wait'
            arguments=('free')
            ;;
        'workers')
            subs='list show cordon uncordon drain add remove'
            flags+=' --output -o --timeout --token-file --wait'
            ;;
        'workers list')
            flags+=' --model --role --selector -l --sort-by --no-headers --watch -w --output -o --timeout --token-file --wait'
            ;;
        'workers show')
            flags+=' --output -o --timeout --token-file --wait'
            arguments=('live:worker')
            ;;
        'workers cordon')
            flags+=' --dry-run --yes -y --output -o --timeout --token-file --wait'
            arguments=('live:worker')
            ;;
        'workers uncordon')
            flags+=' --dry-run --yes -y --output -o --timeout --token-file --wait'
            arguments=('live:worker')
            ;;
        'workers drain')
            flags+=' --wait --dry-run --yes -y --output -o --timeout --token-file'
            arguments=('live:worker')
            ;;
        'workers add')
            flags+=' --dry-run --yes -y --output -o --timeout --token-file --wait'
            arguments=('free')
            ;;
        'workers remove')
            flags+=' --dry-run --yes -y --output -o --timeout --token-file --wait'
            arguments=('live:worker')
            ;;
        'topology')
            subs='show verify plan lint render sync wait'
            flags+=' --output -o --timeout --token-file --wait'
            ;;
        'topology show')
            flags+=' --domain --model --selector -l --sort-by --no-headers --watch -w --output -o --timeout --token-file --wait'
            ;;
        'topology verify')
            flags+=' --dgd --exec --logs --probe --path --domain --file -f --fail-on --suppress --wait --list-checks --output -o --timeout --token-file'
            ;;
        'topology plan')
            flags+=' --capacity --file -f --domain --over --ratio --target --enforcement --model --dgd --no-headers --output -o --timeout --token-file --wait'
            ;;
        'topology lint')
            flags+=' --file -f --fail-on --suppress --against --output -o --timeout --token-file --wait'
            arguments=('file')
            more='file'
            ;;
        'topology render')
            flags+=' --controller --domain --label-key --enforcement --weight --container --mount-path --init-wait --image --init-timeout --level --name --kind --controller-namespace --watch-namespace --stale --output -o --timeout --token-file --wait'
            arguments=('words:pod cluster-topology controller')
            ;;
        'topology sync')
            flags+=' --stale --once --dry-run --leader-elect --no-leader-elect --lease-namespace --system-host --system-port --output -o --timeout --token-file --wait'
            ;;
        'topology wait')
            flags+=' --path --domain --timeout --output -o --token-file --wait'
            ;;
        'replay')
            flags+=' --generate --workload --trace-block-size --speed --spread --limit --model --skip-bad --policy --routers --sync --no-sync --sync-delay-ms --seed --seeds --workers --zones --capacity --file -f --domain --data-parallel-size --bootstrap --no-bootstrap --enforcement --preferred-weight --block-bytes --events-delay-ms --events-loss --lose --migration-limit --migration-max-seq-len --ttft-limit --itl-limit-ms --plot --loads --max-regress --fail-on --search --block-size --total-blocks --host-blocks --disk-blocks --max-num-seqs --max-waiting --max-num-batched-tokens --prefill-tokens-per-s --decode-itl-ms --kv-transfer-ms-per-block --kv-transfer-cross-domain-factor --host-gb-per-s --disk-gb-per-s --kv-bytes-per-token --output -o --timeout --token-file --wait'
            arguments=('file')
            ;;
        'top')
            flags+=' --once --rate --domain --readonly --speed --frontend-log --output -o --timeout --token-file --wait'
            ;;
        'decisions')
            subs='list tail'
            flags+=' --output -o --timeout --token-file --wait --refused --outcome --moved --model --zone --worker --limit --no-headers --frontend-log'
            ;;
        'decisions list')
            flags+=' --refused --outcome --moved --model --zone --worker --limit --no-headers --frontend-log --output -o --timeout --token-file --wait'
            ;;
        'decisions tail')
            flags+=' --refused --outcome --moved --model --zone --worker --tail --limit --duration --no-headers --frontend-log --output -o --timeout --token-file --wait'
            ;;
        'events')
            subs='tail'
            flags+=' --output -o --timeout --token-file --wait'
            ;;
        'events tail')
            flags+=' --worker --selector -l --kind --load --limit --duration --no-headers --output -o --timeout --token-file --wait'
            ;;
        'thresholds')
            subs='get set watch'
            flags+=' --output -o --timeout --token-file --wait'
            ;;
        'thresholds get')
            flags+=' --ranks --ask --watch -w --output -o --timeout --token-file --wait'
            arguments=('live:model')
            ;;
        'thresholds set')
            flags+=' --active-decode-blocks --active-decode-blocks-threshold --active-prefill-tokens --active-prefill-tokens-threshold --active-prefill-tokens-frac --active-prefill-tokens-threshold-frac --dry-run --partial --wait --canary --revert-if --min-requests --yes -y --output -o --timeout --token-file'
            arguments=('live:model')
            ;;
        'thresholds watch')
            flags+=' --rate --limit --duration --output -o --timeout --token-file --wait'
            ;;
        'config')
            subs='show'
            flags+=' --output -o --timeout --token-file --wait'
            ;;
        'config show')
            flags+=' --advise --namespace-prefix --event-plane --migration-limit --migration-max-seq-len --model-name --kv-cache-block-size --index-memory --first-byte-timeout --idle-timeout --eject-after --eject-pause --eject-max-pause --panic-threshold --router-replica-bind --router-replica-peer --router-replica-nats --router-replica-group --index-peer --preset --router-mode --router-kv-overlap-score-credit --router-kv-overlap-score-credit-decay --router-prefill-load-scale --router-decode-active-request-weight --router-temperature --router-track-active-blocks --no-router-track-active-blocks --router-track-output-blocks --no-router-track-output-blocks --router-assume-kv-reuse --no-router-assume-kv-reuse --router-track-prefill-tokens --no-router-track-prefill-tokens --active-decode-blocks-threshold --active-prefill-tokens-threshold --active-prefill-tokens-threshold-frac --router-kv-transfer-topology-level --kv-transfer-enforcement --router-kv-transfer-mismatch-policy --kv-transfer-preferred-weight --router-decode-capacity-guard --no-router-decode-capacity-guard --router-pair-selection --router-kv-transfer-weight --router-kv-transfer-qos --router-own-domains --router-conditional-disagg --no-router-conditional-disagg --router-conditional-disagg-config --router-bypass-policy --router-bypass-eff-isl-threshold --router-bypass-eff-isl-ratio-threshold --router-bypass-prefill-busy-threshold --router-bypass-decode-busy-threshold --router-bypass-require-can-prefill --no-router-bypass-require-can-prefill --router-taints-in-all-modes --no-router-taints-in-all-modes --router-on-degraded --router-session-affinity-ttl-secs --router-session-affinity-mode --router-session-affinity-yield-blocks --router-active-request-expiry-secs --http-overload-status-code --router-kv-events --no-router-kv-events --router-approximate-cache-policy --router-ttl-secs --router-max-tree-size --router-prune-target-ratio --router-queue-threshold --router-queue-policy --router-policy-config --router-queue-max-requests --router-queue-max-wait-secs --router-host-cache-hit-weight --router-disk-cache-hit-weight --router-replica-sync --no-router-replica-sync --router-predicted-ttl-secs --router-prefill-load-model --ais-backend --ais-backend-version --ais-system --ais-model-path --ais-tp-size --encoder-cuda-to-cpu-ratio --serve-indexer --no-serve-indexer --use-remote-indexer --no-use-remote-indexer --router-durable-kv-events --no-router-durable-kv-events --router-reset-states --no-router-reset-states --output -o --timeout --token-file --wait'
            ;;
        'context')
            subs='list use add show remove'
            flags+=' --output -o --timeout --token-file --wait'
            ;;
        'context list')
            flags+=' --output -o --timeout --token-file --wait'
            ;;
        'context use')
            flags+=' --none --output -o --timeout --token-file --wait'
            arguments=('live:context')
            ;;
        'context add')
            flags+=' --force --output -o --timeout --token-file --wait'
            arguments=('free')
            ;;
        'context show')
            flags+=' --output -o --timeout --token-file --wait'
            arguments=('live:context')
            ;;
        'context remove')
            flags+=' --output -o --timeout --token-file --wait'
            arguments=('live:context')
            ;;
        'check')
            flags+=' --fail-on --suppress --output -o --timeout --token-file --wait'
            ;;
        'explain')
            flags+=' --output -o --timeout --token-file --wait'
            arguments=('words:DYR0101 DYR0102 DYR0103 DYR0104 DYR0201 DYR0202 DYR0203 DYR0204 DYR0205 DYR0206 DYR0207 DYR0208 DYR0209 DYR0210 DYR0211 DYR0212 DYR0301 DYR0302 DYR0303 DYR0304 DYR0305 DYR0306 DYR0307 DYR0308 DYR0309 DYR0401 DYR0402 DYR0403 DYR0404 DYR0405 DYR0406 DYR0407 DYR0408 DYR0409 DYR0410 DYR0411 DYR0412 DYR0501 DYR0502 DYR0503 DYR0701 DYR0702 DYR0703 DYR0704 DYR0705 DYR0706 DYR0707 DYR0708 DYR0709 DYR0710 DYR0711 DYR0712 DYR0713 DYR0714 DYR0715 DYR0716 DYR0717 DYR0718 DYR0719 DYR0720 DYR0721 DYR0722 DYR0723 DYR0724 DYR0725 DYR0726 DYR0727 DYR0728 DYR0730 DYR0734 DYR0740 DYR0741 DYR0742 DYR0743 DYR0744 DYR0745 DYR0746 DYR0748 DYR0760 DYR0761 DYR0762 DYR0763 DYR0764 DYR0765 DYR0766 DYR0767 DYR0768 DYR0769 DYR0780 DYR0785 DYR0790 DYT0001 DYT0002 DYT0003 DYT0004 DYT0005 DYT0101 DYT0102 DYT0103 DYT0104 DYT0105 DYT0106 DYT0107 DYT0108 DYT0109 DYT0110 DYT0111 DYT0112 DYT0113 DYT0114 DYT0115 DYT0116 DYT0117 DYT0118 DYT0119 DYT0120 DYT0201 DYT0202 DYT0203 DYT0204 DYT0205 DYT0206 DYT0207 DYT0208 DYT0209 DYT0210 DYT0211 DYT0212 DYT0213 DYT0214 DYT0215 DYT0301 DYT0302 DYT0303 DYT0304 DYT0401 DYT0402 DYT0403 DYT0404 DYT0405 DYT0406 DYT0407 DYT0408 DYT0409 DYT0410 DYT0411 DYT0501 DYT0502 DYT0503 DYT0504 DYT0505 DYT0506 DYT0507 DYT0601 DYT0602 DYT0603 DYT0604 DYT0701 DYT0702 DYT0703 DYT0704 DYT0705 DYT0706 DYT0707 DYT0708 DYT0709 DYT0710 DYT0801 DYT0802 DYT0803 DYT0804 DYT0805 DYT0901 DYT0902 DYT0903 DYT0904 DYT0905 DYT0906 DYT0907 DYT0908 DYT0909 BACKGROUND_TASK_FAILED BLOCKS_NOT_LISTED BLOCK_SIZE_MISMATCH CAPACITY_UNKNOWN DISCOVERY_INTERRUPTED ENGINE_ALREADY_ATTACHED ENGINE_NOT_READY ENGINE_RESTARTED ENGINE_TOKENIZERS_DIFFER EVENTS_LOST EVENTS_OVERFLOW EXTRA_KEYS_NOT_MODELLED FOREIGN_PUBLISHER GROUP_IGNORED INDEXER_LOST INDEX_OVER_LIMIT LEASE_LOST LEVEL_NOT_PUBLISHED LOAD_OVERDUE MALFORMED_BATCH MALFORMED_MESSAGE MODEL_FILES_DIFFER MODEL_FILES_INVALID MODEL_NOT_SERVED NO_TOKENIZER NO_WORKERS POLICY_CONFLICT PROCESS_RESTARTED REGISTRATION_INTERRUPTED REPLAY_UNAVAILABLE REPLICA_BEHIND REPLICA_OVER_LIMIT REPLICA_SILENT REPLICA_WORKERS_DIFFER REQUEST_PLANE_LOST ROUTER_LOST SNAPSHOT_NOT_WRITTEN SNAPSHOT_REFUSED SPEC_DIFFERS_FROM_ENGINE STREAM_DISCONNECTED TIER_NOT_DESCRIBED TOKENIZER_DIFFERS TOKEN_IDS_TOO_SHORT TOO_FEW_WELL TRACES_NOT_EXPORTED TRANSFER_CROSSED UNKNOWN_ADAPTER UNKNOWN_EVENT UNKNOWN_MEDIUM WORKERS_BUSY WORKERS_FILE_INVALID WORKER_CORDONED WORKER_EJECTED WORKER_REJECTED WORKER_UNREACHABLE')
            ;;
        'why')
            flags+=' --last --all --output -o --timeout --token-file --wait'
            arguments=('free')
            ;;
        'hits')
            flags+=' --for --record --by --from --to --skip-bad --generate --policy --workers --total-blocks --routers --limit --seed --output -o --timeout --token-file --wait'
            arguments=('file')
            more='file'
            ;;
        'audit')
            flags+=' --min-rate --duration --log --output -o --timeout --token-file --wait'
            ;;
        'record')
            flags+=' --output -o --for --max-bytes --show --skip-bad --timeout --token-file --wait'
            arguments=('file')
            ;;
        'bundle')
            flags+=' --to --output -o --force --kubernetes --timeout --token-file --wait'
            arguments=('file')
            ;;
        'completion')
            flags+=' --output -o --timeout --token-file --wait'
            arguments=('words:bash zsh fish')
            ;;
        'version')
            flags+=' --client --output -o --timeout --token-file --wait'
            ;;
        'options')
            flags+=' --output -o --timeout --token-file --wait'
            ;;
        'help')
            flags+=' --output -o --timeout --token-file --wait'
            arguments=('words:demo serve route workers topology replay top decisions events thresholds config context check explain why hits audit record bundle completion version options help')
            more='words:demo serve route workers topology replay top decisions events thresholds config context check explain why hits audit record bundle completion version options help'
            ;;
    esac
}

# Sets meaning to the possible values of option $2 of the command $1; empty: a switch.
__dynctl_meaning() {
    case $1:$2 in
        'thresholds set:--active-decode-blocks-threshold' | 'thresholds set:--active-prefill-tokens-threshold' | 'thresholds set:--active-prefill-tokens-threshold-frac')
            meaning='words:off' ;;
        'bundle:--to')
            meaning='file' ;;
        'topology render:--enforcement')
            meaning='words:required preferred' ;;
        'replay:--enforcement')
            meaning='words:none preferred required fallback' ;;
        'events tail:--kind')
            meaning='words:stored removed cleared unknown gap restart malformed foreign disconnect reconnect joined left skipped load booked prefilled freed' ;;
        'demo:--output' | 'top:--output' | 'completion:--output' | 'demo:-o' | 'top:-o' | 'completion:-o')
            meaning='words:table wide json jsonl yaml' ;;
        'topology verify:--output' | 'topology lint:--output' | 'check:--output' | 'topology verify:-o' | 'topology lint:-o' | 'check:-o')
            meaning='words:table wide json jsonl yaml name junit' ;;
        'topology render:--output' | 'topology render:-o')
            meaning='words:table yaml json' ;;
        'replay:--output' | 'replay:-o')
            meaning='words:table wide json jsonl yaml name csv' ;;
        'decisions tail:--output' | 'events tail:--output' | 'thresholds watch:--output' | 'decisions tail:-o' | 'events tail:-o' | 'thresholds watch:-o')
            meaning='words:table wide jsonl' ;;
        'decisions:--worker' | 'decisions list:--worker' | 'decisions tail:--worker' | 'events tail:--worker')
            meaning='live:worker' ;;
        'topology render:--domain' | 'serve engine:--model')
            meaning='free' ;;
        *:--active-decode-blocks | *:--active-prefill-tokens | *:--active-prefill-tokens-frac)
            meaning='words:off' ;;
        *:--admin-token-file | *:--api-key-file | *:--ca-cert | *:--engine-api-key-file | *:--file | *:--frontend-log | *:--kubeconfig | *:--log | *:--messages | *:--plot | *:--record | *:--recording | *:--router-kv-transfer-qos | *:--router-policy-config | *:--router-token-file | *:--save-view | *:--tls-cert | *:--tls-key | *:--token-file | *:--tokens | *:--view | *:--workers-file | *:-f)
            meaning='file' ;;
        *:--against | *:--kube-context)
            meaning='live:kube-context' ;;
        *:--ais-backend)
            meaning='words:vllm sglang trtllm' ;;
        *:--ais-model-path | *:--file-kv | *:--model-path | *:--mount-path | *:--path | *:--snapshot)
            meaning='folder' ;;
        *:--answer-parsing)
            meaning='words:text dynamo-1.6' ;;
        *:--by)
            meaning='words:model domain tenant hour worker' ;;
        *:--context)
            meaning='live:context' ;;
        *:--discovery)
            meaning='words:file etcd kubernetes' ;;
        *:--domain)
            meaning='live:domain' ;;
        *:--enforcement)
            meaning='words:required preferred fallback none' ;;
        *:--engine-type)
            meaning='words:auto vllm sglang' ;;
        *:--etcd-client)
            meaning='words:etcd3 gateway' ;;
        *:--event-plane)
            meaning='words:zmq nats' ;;
        *:--exec | *:--logs)
            meaning='words:auto all sample none' ;;
        *:--fail-on)
            meaning='words:fail warn' ;;
        *:--generate)
            meaning='words:agentic chat rag batch' ;;
        *:--kind)
            meaning='words:ClusterTopologyBinding ClusterTopology' ;;
        *:--kv-load-failure-policy)
            meaning='words:recompute fail' ;;
        *:--kv-transfer-enforcement)
            meaning='words:required preferred fallback' ;;
        *:--log-decisions)
            meaning='words:off winner all' ;;
        *:--log-format)
            meaning='words:text json' ;;
        *:--log-level)
            meaning='words:debug info warning error' ;;
        *:--model)
            meaning='live:model' ;;
        *:--output | *:-o)
            meaning='words:table wide json jsonl yaml name' ;;
        *:--over)
            meaning='live:domain-value' ;;
        *:--pin-decode | *:--pin-prefill)
            meaning='live:worker' ;;
        *:--preset)
            meaning='words:dynamo-1.6 dynamo-0.9 ttft throughput' ;;
        *:--reach)
            meaning='words:auto direct port-forward' ;;
        *:--request-plane)
            meaning='words:tcp nats' ;;
        *:--require-taint)
            meaning='live:taint' ;;
        *:--role)
            meaning='words:aggregated prefill decode' ;;
        *:--router-approximate-cache-policy)
            meaning='words:ttl lru' ;;
        *:--router-bypass-policy)
            meaning='words:isl-bounding prefill-load isl-or-load' ;;
        *:--router-kv-transfer-mismatch-policy)
            meaning='words:fail fallback' ;;
        *:--router-mode)
            meaning='words:kv round-robin random power-of-two least-loaded direct device-aware-weighted' ;;
        *:--router-on-degraded)
            meaning='words:discount approximate load-only full' ;;
        *:--router-pair-selection)
            meaning='words:greedy best' ;;
        *:--router-prefill-load-model)
            meaning='words:none ais aic measured' ;;
        *:--router-queue-policy)
            meaning='words:fcfs wspt lcfs' ;;
        *:--router-session-affinity-mode)
            meaning='words:hard soft' ;;
        *:--selector | *:-l)
            meaning='live:selector' ;;
        *:--stale)
            meaning='words:report starting always' ;;
        *:--suppress)
            meaning='words:DYR0101 DYR0102 DYR0103 DYR0104 DYR0201 DYR0202 DYR0203 DYR0204 DYR0205 DYR0206 DYR0207 DYR0208 DYR0209 DYR0210 DYR0211 DYR0212 DYR0301 DYR0302 DYR0303 DYR0304 DYR0305 DYR0306 DYR0307 DYR0308 DYR0309 DYR0401 DYR0402 DYR0403 DYR0404 DYR0405 DYR0406 DYR0407 DYR0408 DYR0409 DYR0410 DYR0411 DYR0412 DYR0501 DYR0502 DYR0503 DYR0701 DYR0702 DYR0703 DYR0704 DYR0705 DYR0706 DYR0707 DYR0708 DYR0709 DYR0710 DYR0711 DYR0712 DYR0713 DYR0714 DYR0715 DYR0716 DYR0717 DYR0718 DYR0719 DYR0720 DYR0721 DYR0722 DYR0723 DYR0724 DYR0725 DYR0726 DYR0727 DYR0728 DYR0730 DYR0734 DYR0740 DYR0741 DYR0742 DYR0743 DYR0744 DYR0745 DYR0746 DYR0748 DYR0760 DYR0761 DYR0762 DYR0763 DYR0764 DYR0765 DYR0766 DYR0767 DYR0768 DYR0769 DYR0780 DYR0785 DYR0790 DYT0001 DYT0002 DYT0003 DYT0004 DYT0005 DYT0101 DYT0102 DYT0103 DYT0104 DYT0105 DYT0106 DYT0107 DYT0108 DYT0109 DYT0110 DYT0111 DYT0112 DYT0113 DYT0114 DYT0115 DYT0116 DYT0117 DYT0118 DYT0119 DYT0120 DYT0201 DYT0202 DYT0203 DYT0204 DYT0205 DYT0206 DYT0207 DYT0208 DYT0209 DYT0210 DYT0211 DYT0212 DYT0213 DYT0214 DYT0215 DYT0301 DYT0302 DYT0303 DYT0304 DYT0401 DYT0402 DYT0403 DYT0404 DYT0405 DYT0406 DYT0407 DYT0408 DYT0409 DYT0410 DYT0411 DYT0501 DYT0502 DYT0503 DYT0504 DYT0505 DYT0506 DYT0507 DYT0601 DYT0602 DYT0603 DYT0604 DYT0701 DYT0702 DYT0703 DYT0704 DYT0705 DYT0706 DYT0707 DYT0708 DYT0709 DYT0710 DYT0801 DYT0802 DYT0803 DYT0804 DYT0805 DYT0901 DYT0902 DYT0903 DYT0904 DYT0905 DYT0906 DYT0907 DYT0908 DYT0909 BACKGROUND_TASK_FAILED BLOCKS_NOT_LISTED BLOCK_SIZE_MISMATCH CAPACITY_UNKNOWN DISCOVERY_INTERRUPTED ENGINE_ALREADY_ATTACHED ENGINE_NOT_READY ENGINE_RESTARTED ENGINE_TOKENIZERS_DIFFER EVENTS_LOST EVENTS_OVERFLOW EXTRA_KEYS_NOT_MODELLED FOREIGN_PUBLISHER GROUP_IGNORED INDEXER_LOST INDEX_OVER_LIMIT LEASE_LOST LEVEL_NOT_PUBLISHED LOAD_OVERDUE MALFORMED_BATCH MALFORMED_MESSAGE MODEL_FILES_DIFFER MODEL_FILES_INVALID MODEL_NOT_SERVED NO_TOKENIZER NO_WORKERS POLICY_CONFLICT PROCESS_RESTARTED REGISTRATION_INTERRUPTED REPLAY_UNAVAILABLE REPLICA_BEHIND REPLICA_OVER_LIMIT REPLICA_SILENT REPLICA_WORKERS_DIFFER REQUEST_PLANE_LOST ROUTER_LOST SNAPSHOT_NOT_WRITTEN SNAPSHOT_REFUSED SPEC_DIFFERS_FROM_ENGINE STREAM_DISCONNECTED TIER_NOT_DESCRIBED TOKENIZER_DIFFERS TOKEN_IDS_TOO_SHORT TOO_FEW_WELL TRACES_NOT_EXPORTED TRANSFER_CROSSED UNKNOWN_ADAPTER UNKNOWN_EVENT UNKNOWN_MEDIUM WORKERS_BUSY WORKERS_FILE_INVALID WORKER_CORDONED WORKER_EJECTED WORKER_REJECTED WORKER_UNREACHABLE' ;;
        *:--tokenizer)
            meaning='words:auto fast exact' ;;
        *:--active-decode-blocks-threshold | *:--active-prefill-tokens-threshold | *:--active-prefill-tokens-threshold-frac | *:--admin-token | *:--advertise-host | *:--ais-backend-version | *:--ais-system | *:--ais-tp-size | *:--api-key | *:--api-token | *:--at | *:--block-bytes | *:--block-size | *:--body-limit | *:--cache-salt | *:--canary | *:--capacity | *:--container | *:--controller-namespace | *:--data-parallel-size | *:--decision-memory | *:--decode-itl-ms | *:--default-output-tokens | *:--dgd | *:--disk-blocks | *:--disk-gb-per-s | *:--drain-timeout | *:--drain-timeout-s | *:--duration | *:--dyn-namespace | *:--dynamo-frontend | *:--eject-after | *:--eject-max-pause | *:--eject-pause | *:--encoder-cuda-to-cpu-ratio | *:--endpoint | *:--engine | *:--engine-api-key | *:--etcd-endpoints | *:--events-delay-ms | *:--events-loss | *:--fault-die-mid-stream-after | *:--fault-drop-events | *:--fault-refuse | *:--fault-slow-factor | *:--first-byte-timeout | *:--follow | *:--for | *:--from | *:--frontend | *:--header-timeout | *:--health-port | *:--host | *:--host-blocks | *:--host-gb-per-s | *:--http-host | *:--http-overload-status-code | *:--http-port | *:--idle-timeout | *:--image | *:--index-memory | *:--index-peer | *:--init-timeout | *:--itl-limit-ms | *:--keep-alive-timeout | *:--key-concurrency | *:--key-requests-per-minute | *:--kv-bytes-per-token | *:--kv-cache-block-size | *:--kv-events | *:--kv-events-buffer-steps | *:--kv-events-topic | *:--kv-hold-timeout-s | *:--kv-transfer-cross-domain-factor | *:--kv-transfer-ms-per-block | *:--kv-transfer-preferred-weight | *:--label-key | *:--lease-namespace | *:--level | *:--limit | *:--loads | *:--lora | *:--lose | *:--max-body-bytes | *:--max-bytes | *:--max-model-len | *:--max-num-batched-tokens | *:--max-num-seqs | *:--max-regress | *:--max-waiting | *:--migration-limit | *:--migration-max-seq-len | *:--min-rate | *:--min-requests | *:--model-name | *:--name | *:--namespace | *:--namespace-prefix | *:--nats-server | *:--otlp-endpoint | *:--otlp-sample-ratio | *:--outcome | *:--panic-threshold | *:--peer-connections | *:--peers | *:--pod-domain | *:--pod-kv-events | *:--pod-replay | *:--pod-role-label | *:--policy | *:--pool | *:--port | *:--prefer-taint | *:--preferred-weight | *:--prefill-tokens-per-s | *:--probe | *:--process-timeout | *:--processes | *:--rate | *:--ratio | *:--reasoning-parser | *:--record-max-bytes | *:--replay | *:--replays | *:--request-port | *:--response-port | *:--revert-if | *:--router | *:--router-active-request-expiry-secs | *:--router-bypass-decode-busy-threshold | *:--router-bypass-eff-isl-ratio-threshold | *:--router-bypass-eff-isl-threshold | *:--router-bypass-prefill-busy-threshold | *:--router-conditional-disagg-config | *:--router-decode-active-request-weight | *:--router-disk-cache-hit-weight | *:--router-host-cache-hit-weight | *:--router-kv-overlap-score-credit | *:--router-kv-overlap-score-credit-decay | *:--router-kv-transfer-topology-level | *:--router-kv-transfer-weight | *:--router-max-tree-size | *:--router-own-domains | *:--router-predicted-ttl-secs | *:--router-prefill-load-scale | *:--router-prune-target-ratio | *:--router-queue-max-requests | *:--router-queue-max-wait-secs | *:--router-queue-threshold | *:--router-replica-bind | *:--router-replica-group | *:--router-replica-nats | *:--router-replica-peer | *:--router-session-affinity-ttl-secs | *:--router-session-affinity-yield-blocks | *:--router-temperature | *:--router-token | *:--router-ttl-secs | *:--routers | *:--routing-group | *:--rpc-host | *:--search | *:--seed | *:--seeds | *:--select-service-port | *:--session-id | *:--set | *:--slot-tracker-port | *:--snapshot-interval | *:--sort-by | *:--speed | *:--speedup-ratio | *:--stream-timeout | *:--sync-delay-ms | *:--system-host | *:--system-port | *:--tail | *:--target | *:--timeout | *:--to | *:--token | *:--token-env | *:--tool-call-parser | *:--total-blocks | *:--trace-block-size | *:--ttft-limit | *:--unix-socket | *:--wait | *:--watch-namespace | *:--weight | *:--worker | *:--workers | *:--workload | *:--zone | *:--zones | *:-n)
            meaning='free' ;;
        *) meaning='' ;;
    esac
}

# Sets words, cword and cur: the line up to the cursor, rejoined where readline splits (: = @);
# and ahead: the part of cur before the word that readline replaces.
__dynctl_words() {
    local i part rest line=${COMP_LINE:0:COMP_POINT}
    words=() cword=0 ahead=''
    for ((i = 0; i <= COMP_CWORD; i++)); do
        rest=${line#"${line%%[![:space:]]*}"}
        ((i == COMP_CWORD)) && part=$rest || part=${COMP_WORDS[i]}
        if ((i > 0)) && [[ $rest == "$line" && -n $part ]]; then
            ahead=${words[cword]}
            words[cword]+=$part
        else
            ahead=''
            ((i > 0)) && ((++cword))
            words[cword]=$part
        fi
        line=${rest#"$part"}
    done
    cur=${words[cword]}
    # For readline a word begins after a : or =, and with an @.
    [[ $part == [:=] ]] && ahead=$cur
    ahead=${ahead%@}
}

# Offers the values of $1 for the part $value of the word; $lead is the part before it.
__dynctl_offer() {
    local line exe
    case $1 in
        words:*)
            while IFS= read -r line; do
                COMPREPLY+=("$line")
            done < <(compgen -W "${1#words:}" -- "$value")
            ;;
        live:*)
            exe=${words[0]}
            type -P -- "$exe" >/dev/null || exe=dynctl
            while IFS= read -r line; do
                COMPREPLY+=("$line")
            done < <("$exe" __complete "${1#live:}" "$value" "${words[@]:1:cword-1}" 2>/dev/null)
            if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]]; then
                compopt -o nospace 2>/dev/null
            fi
            ;;
        file | folder)
            # Let readline complete paths if it can, since it quotes them.
            [[ $1 == file ]] && line=default || line=dirnames
            compopt -o "$line" 2>/dev/null && return
            [[ $1 == file ]] && line=-f || line=-d
            while IFS= read -r line; do
                COMPREPLY+=("$line")
            done < <(compgen "$line" -- "$value")
            ;;
    esac
    for ((line = 0; line < ${#COMPREPLY[@]}; line++)); do
        COMPREPLY[line]=$lead${COMPREPLY[line]}
        COMPREPLY[line]=${COMPREPLY[line]#"$ahead"}
    done
}

_dynctl() {
    local IFS=$' \t\n' words cword cur ahead at='' place=0 closed='' word i
    local meaning='' value lead='' subs flags arguments more
    COMPREPLY=()
    __dynctl_words
    value=$cur
    __dynctl_command "$at"
    for ((i = 1; i < cword; i++)); do
        word=${words[i]}
        if [[ -n $closed ]]; then
            ((++place))
        elif [[ $word == -- ]]; then
            closed=1
        elif [[ $word == --*=* ]]; then
            continue
        elif [[ $word == -?* ]]; then
            __dynctl_meaning "$at" "$word"
            if [[ -n $meaning ]] && ((++i == cword)); then
                __dynctl_offer "$meaning"
                return
            fi
        elif [[ -n $subs && " $subs " == *" $word "* ]]; then
            at="${at:+$at }$word"
            __dynctl_command "$at"
        else
            ((++place))
        fi
    done
    if [[ -z $closed && $cur == --*=* ]]; then
        lead=${cur%%=*}=
        value=${cur#*=}
        __dynctl_meaning "$at" "${cur%%=*}"
        __dynctl_offer "$meaning"
    elif [[ -z $closed && $cur == -* ]]; then
        __dynctl_offer "words:$flags"
    elif [[ -n $subs ]]; then
        ((place == 0)) && __dynctl_offer "words:$subs"
    elif ((place < ${#arguments[@]})); then
        __dynctl_offer "${arguments[place]}"
    elif [[ -n $more ]]; then
        __dynctl_offer "$more"
    fi
}

complete -F _dynctl dynctl
