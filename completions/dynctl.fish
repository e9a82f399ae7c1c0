# Completion of dynctl in fish. Written by `dynctl completion fish`; do not edit.
#
#   dynctl completion fish | source                                   in this shell
#   dynctl completion fish > ~/.config/fish/completions/dynctl.fish   permanently
#
# Commands, options and fixed words are in this file. Only the names of running models, workers and
# domains and of contexts come from `dynctl __complete`, which takes at most 0.2 s.

# Prints the commands of the group $argv[1].
function __dynctl_commands
    switch "$argv[1]"
        case ''
            printf '%s\n' \
                'demo'\t'Start a two-zone fleet and explain four requests' \
                'serve'\t'Run a frontend, a router, an indexer, a shadow router, an engine or ..' \
                'route'\t'Show which workers would serve a prompt, and why' \
                'workers'\t'Workers of a router: list, one worker, cordon, drain, add, remove' \
                'topology'\t'Topology domains: capacity, policy, verify, plan, lint, sync' \
                'replay'\t'Simulate routing policies on a trace or a recording' \
                'top'\t'Watch domains, workers, decisions and alerts' \
                'decisions'\t'Past decisions of a router: list, tail' \
                'events'\t'KV events of the workers, live' \
                'thresholds'\t'Busy thresholds, live on the frontends' \
                'config'\t'Router settings and their sources' \
                'context'\t'Saved endpoints' \
                'check'\t'Check a live deployment: what is wrong, how to fix it' \
                'explain'\t'Explain the code of a finding' \
                'why'\t'Explain a past decision of a frontend' \
                'hits'\t'Show why the prefix hit rate is what it is, and what to change' \
                'audit'\t'Compare predictions with live traffic' \
                'record'\t'Record what a router sees and does, in a file' \
                'bundle'\t'Write a bundle file for a bug report' \
                'completion'\t'Print the shell completion script' \
                'version'\t'Print the versions of dynctl and of the frontends' \
                'options'\t'List the global options' \
                'help'\t'Show the help page of a command'
        case 'serve'
            printf '%s\n' \
                'frontend'\t'Run the OpenAI frontend with the router inside' \
                'router'\t'Run the router alone, for other frontends' \
                'indexer'\t'Run the index of cached blocks alone, over HTTP' \
                'observe'\t'Run a shadow router beside a live Dynamo' \
                'attach'\t'Register an engine as a worker of a Dynamo fleet' \
                'epp'\t'Run the router as a gateway\'s endpoint picker' \
                'engine'\t'Run a simulated OpenAI engine'
        case 'workers'
            printf '%s\n' \
                'list'\t'List the workers: role, topology, load, caches' \
                'show'\t'Show one worker: card, policy, taints, load' \
                'cordon'\t'Give a worker no new requests' \
                'uncordon'\t'Give a cordoned worker requests again' \
                'drain'\t'Cordon a worker' \
                'add'\t'Register a worker at a running router' \
                'remove'\t'Take a worker out of a running router'
        case 'topology'
            printf '%s\n' \
                'show'\t'Show domains: capacity, load, policy, stranded' \
                'verify'\t'Verify topology from node to router' \
                'plan'\t'Plan domains: ratio, losses, what to add' \
                'lint'\t'Check graph manifests, offline' \
                'render'\t'Print topology patches for pods' \
                'sync'\t'Copy topology labels from nodes to pods' \
                'wait'\t'Wait for a domain\'s topology file'
        case 'decisions'
            printf '%s\n' \
                'list'\t'List past decisions: where, cached, why' \
                'tail'\t'Show decisions as they are made'
        case 'events'
            printf '%s\n' \
                'tail'\t'Show KV events live, with gaps marked'
        case 'thresholds'
            printf '%s\n' \
                'get'\t'Show the current busy thresholds' \
                'set'\t'Set busy thresholds' \
                'watch'\t'Show changes of thresholds and ranks'
        case 'config'
            printf '%s\n' \
                'show'\t'Show every router setting and its source'
        case 'context'
            printf '%s\n' \
                'list'\t'List the contexts' \
                'use'\t'Make a context current' \
                'add'\t'Save the options of this command as a context' \
                'show'\t'Show the options in effect and their sources' \
                'remove'\t'Remove a context'
    end
end

# Prints the options of the command $argv[1].
function __dynctl_flags
    printf '%s\n' \
        '--frontend'\t'Frontend or router to query (repeatable: replicas)' \
        '--view'\t'Use a view saved with --save-view, offline' \
        '--recording'\t'Use a recording (dynctl record), at its end or at --at' \
        '--at'\t'Moment of --recording: 2026-11-22T12:04:31Z, 12:04:31, +90s, -30s' \
        '--demo'\t'Use the embedded demo fleet' \
        '--token'\t'Bearer token' \
        '--token-env'\t'Environment variable with the bearer token' \
        '--ca-cert'\t'Certificates (PEM) that sign https frontends' \
        '--context'\t'Saved endpoints to use (dynctl context list)' \
        '--discovery'\t'Discovery backend of a live Dynamo: file, etcd or kubernetes' \
        '--dyn-namespace'\t'Dynamo namespace, PREFIX* or * for all' \
        '--file-kv'\t'Directory of the file backend' \
        '--etcd-endpoints'\t'Members of etcd' \
        '--etcd-client'\t'Client for etcd: etcd3 (gRPC) or gateway (JSON)' \
        '--nats-server'\t'NATS servers for events' \
        '--namespace'\t'Kubernetes namespace' \
        '-n'\t'Kubernetes namespace' \
        '--all-namespaces'\t'All namespaces' \
        '-A'\t'All namespaces' \
        '--kube-context'\t'Context of the kubeconfig' \
        '--kubeconfig'\t'Kubeconfig file' \
        '--reach'\t'Connection to frontends in pods: direct, port-forward or auto' \
        '--no-color'\t'Use no colors or bold text' \
        '--debug'\t'Show the traceback of an error' \
        '--help'\t'Show the help page' \
        '-h'\t'Show the help page'
    switch "$argv[1]"
        case ''
            printf '%s\n' \
                '--version'\t'Print the version and exit' \
                '-V'\t'Print the version and exit' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'demo'
            printf '%s\n' \
                '--keep'\t'Keep the fleet running until Ctrl-C' \
                '--load'\t'With --keep: send traffic until Ctrl-C, with shared prefixes, a zone ..' \
                '--story'\t'Send four requests and explain them' \
                '--no-story'\t'Send four requests and explain them' \
                '--port'\t'Port of the frontend' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'serve'
            printf '%s\n' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches' \
                '--http-host'\t'Listen address' \
                '--host'\t'Listen address' \
                '--http-port'\t'Listen port' \
                '--port'\t'Listen port' \
                '--worker'\t'An engine (repeatable): URL, then any of name=, role=, DOMAIN=VALUE, ..' \
                '--workers-file'\t'The workers as YAML' \
                '--model-path'\t'Directory of tokenizer and chat template' \
                '--trust-template'\t'Do not bound the work of the chat template in --model-path: its time ..' \
                '--tokenizer'\t'auto: the fastest encoder that gives the same token ids' \
                '--model-name'\t'Model of workers that do not report it' \
                '--kv-cache-block-size'\t'Block size of workers that do not report it' \
                '--admin-token'\t'Bearer token of operators: changes and routing details' \
                '--api-token'\t'Bearer token of operators: changes and routing details' \
                '--log-decisions'\t'Log the winner of each hop, or all candidates with their costs' \
                '--log-format'\t'Format of log lines' \
                '--log-level'\t'Lowest severity to log' \
                '--decision-memory'\t'Memory for past decisions (dynctl why ID)' \
                '--record'\t'Record requests (hashes only), decisions, events and loads in a file ..' \
                '--record-max-bytes'\t'Size at which the recording becomes FILE.old and a new one begins' \
                '--index-memory'\t'Memory for the index of cached blocks' \
                '--drain-timeout'\t'Time for running requests to finish after SIGTERM' \
                '--system-port'\t'Separate port for health and metrics' \
                '--announce'\t'Print the address as one JSON line when ready' \
                '--router'\t'A dynctl serve router that knows the workers and decides, for any ..' \
                '--router-token'\t'The --admin-token of that router' \
                '--router-token-file'\t'File with the --admin-token of that router' \
                '--share-port'\t'Let other frontends with --router on this host listen on the same port' \
                '--processes'\t'Frontend processes behind the port' \
                '--process-timeout'\t'With --processes: a process without an answer for so long is killed ..' \
                '--namespace-prefix'\t'Serve all Dynamo namespaces that begin with this' \
                '--event-plane'\t'Event plane for what this frontend publishes to other routers ..' \
                '--response-port'\t'Port where Dynamo workers send their responses' \
                '--migration-limit'\t'How often a response may go on with another Dynamo worker after its ..' \
                '--migration-max-seq-len'\t'Prompt and output above which a response does not go on elsewhere' \
                '--answer-parsing'\t'How reasoning and tool calls are found in answers of Dynamo workers: ..' \
                '--admin-token-file'\t'File with the operators\' token' \
                '--api-key'\t'A key for clients of inference (repeatable)' \
                '--api-key-file'\t'Keys, one a line, then name=, requests-per-minute= and concurrency= ..' \
                '--key-requests-per-minute'\t'Requests that each key may start in a minute, in each of --processes' \
                '--key-concurrency'\t'Requests of each key that may run at the same time, in each of ..' \
                '--engine-api-key'\t'Key for engines that need one' \
                '--engine-api-key-file'\t'File with the key for engines' \
                '--tls-cert'\t'Certificate chain (PEM) for https' \
                '--tls-key'\t'Private key (PEM) of the certificate' \
                '--unix-socket'\t'A second listener for operators: only this user can open it' \
                '--system-host'\t'Listen address of --system-port' \
                '--compressed-requests'\t'Accept gzip and deflate bodies' \
                '--otlp-endpoint'\t'Send a trace of each request to this OpenTelemetry collector (OTLP ..' \
                '--otlp-sample-ratio'\t'Share of requests that begin a trace' \
                '--header-timeout'\t'Time from a connection, or from the first byte, to a complete header' \
                '--keep-alive-timeout'\t'Time that a connection stays open between two requests' \
                '--peer-connections'\t'Connections of one client address' \
                '--first-byte-timeout'\t'Time to the first output of a stream or a prefill hop' \
                '--idle-timeout'\t'Longest pause in an engine\'s stream' \
                '--eject-after'\t'Failed requests in a row after which an engine gets none for a pause' \
                '--eject-pause'\t'First pause' \
                '--eject-max-pause'\t'Longest pause' \
                '--panic-threshold'\t'Share of a model\'s workers that should be healthy' \
                '--router-replica-bind'\t'With --router-replica-sync: where other routers read this one\'s load ..' \
                '--router-replica-peer'\t'The --router-replica-bind of another router, tcp://HOST:PORT ..' \
                '--router-replica-nats'\t'Share load over NATS in place of ZMQ: nats://HOST:PORT, several with ..' \
                '--router-replica-group'\t'Over NATS only routers of one group share load' \
                '--index-peer'\t'Begin with the index of this frontend or router, and read from the ..' \
                '--preset'\t'Defaults of dynamo-1.6 or dynamo-0.9 or ttft or throughput' \
                '--router-mode'\t'Rule that chooses the worker' \
                '--router-kv-overlap-score-credit'\t'Blocks of prefill credited per cached block' \
                '--router-kv-overlap-score-credit-decay'\t'How fast the credit falls on workers with more active prefill than ..' \
                '--router-prefill-load-scale'\t'Weight of prefill blocks in the cost (0.9: the overlap score weight, ..' \
                '--router-decode-active-request-weight'\t'Cost in blocks of each active request of a worker' \
                '--router-temperature'\t'0 picks the lowest cost' \
                '--router-track-active-blocks'\t'Count the blocks of running requests as decode load' \
                '--no-router-track-active-blocks'\t'Count the blocks of running requests as decode load' \
                '--router-track-output-blocks'\t'Also count the blocks that generation adds' \
                '--no-router-track-output-blocks'\t'Also count the blocks that generation adds' \
                '--router-assume-kv-reuse'\t'Count a prompt block that running requests share once per worker' \
                '--no-router-assume-kv-reuse'\t'Count a prompt block that running requests share once per worker' \
                '--router-track-prefill-tokens'\t'Count prompt tokens that wait for their first output token as prefill ..' \
                '--no-router-track-prefill-tokens'\t'Count prompt tokens that wait for their first output token as prefill ..' \
                '--active-decode-blocks-threshold'\t'A rank is busy above this fraction of its KV blocks' \
                '--active-prefill-tokens-threshold'\t'A rank is busy above this many active prefill tokens' \
                '--active-prefill-tokens-threshold-frac'\t'A rank is busy above this multiple of its max_num_batched_tokens (may ..' \
                '--router-kv-transfer-topology-level'\t'Topology domain of the router\'s own KV-transfer policy (for workers ..' \
                '--kv-transfer-enforcement'\t'Required never crosses the domain, preferred makes crossing cost ..' \
                '--router-kv-transfer-mismatch-policy'\t'Alias of --kv-transfer-enforcement: fail means required' \
                '--kv-transfer-preferred-weight'\t'Weight of the preference, 0 to 1' \
                '--router-decode-capacity-guard'\t'Choose only prefill workers whose domain has an eligible decode worker' \
                '--no-router-decode-capacity-guard'\t'Choose only prefill workers whose domain has an eligible decode worker' \
                '--router-pair-selection'\t'Greedy chooses the best prefill worker and then decode, best the pair ..' \
                '--router-kv-transfer-weight'\t'Cost in blocks of a second of KV transfer between prefill and decode ..' \
                '--router-kv-transfer-qos'\t'YAML file with latency and bandwidth of each topology level' \
                '--router-own-domains'\t'The frontend\'s own topology domains (zone=a,rack=r1): the latency ..' \
                '--router-conditional-disagg'\t'Conditional disaggregation: a decode worker that has enough of a ..' \
                '--no-router-conditional-disagg'\t'Conditional disaggregation: a decode worker that has enough of a ..' \
                '--router-conditional-disagg-config'\t'The settings of this panel as Dynamo\'s JSON object, without the ..' \
                '--router-bypass-policy'\t'What leaves out the prefill hop: isl-bounding (a short rest of the ..' \
                '--router-bypass-eff-isl-threshold'\t'The decode worker prefills fewer prompt tokens than this by itself' \
                '--router-bypass-eff-isl-ratio-threshold'\t'The decode worker prefills less than this fraction of a prompt by itself' \
                '--router-bypass-prefill-busy-threshold'\t'A prefill worker is busy above this multiple of its ..' \
                '--router-bypass-decode-busy-threshold'\t'Keep the prefill hop where the decode worker would have more active ..' \
                '--router-bypass-require-can-prefill'\t'Leave out the prefill hop only for decode workers that can prefill ..' \
                '--no-router-bypass-require-can-prefill'\t'Leave out the prefill hop only for decode workers that can prefill ..' \
                '--router-taints-in-all-modes'\t'Apply taints and KV-transfer policies in modes other than kv too ..' \
                '--no-router-taints-in-all-modes'\t'Apply taints and KV-transfer policies in modes other than kv too ..' \
                '--router-on-degraded'\t'What cached blocks count for while a worker\'s index is incomplete: ..' \
                '--router-session-affinity-ttl-secs'\t'Session affinity: seconds after the last request of a session ..' \
                '--router-session-affinity-mode'\t'Session affinity: keep the worker while it is eligible (hard), or ..' \
                '--router-session-affinity-yield-blocks'\t'Soft session affinity: blocks by which the session\'s worker may cost ..' \
                '--router-active-request-expiry-secs'\t'Seconds without progress after which a booking expires' \
                '--http-overload-status-code'\t'HTTP status when every eligible worker is busy' \
                '--router-kv-events'\t'Index what workers cache from their KV events (off: estimate it from ..' \
                '--no-router-kv-events'\t'Index what workers cache from their KV events (off: estimate it from ..' \
                '--router-approximate-cache-policy'\t'Approximate mode: forget what was not routed for the TTL (ttl), or ..' \
                '--router-ttl-secs'\t'Approximate mode: seconds for which a routed prefix counts as cached' \
                '--router-max-tree-size'\t'Approximate mode: blocks kept before pruning (none: 1,048,576)' \
                '--router-prune-target-ratio'\t'Approximate mode: fraction of the blocks kept by pruning' \
                '--router-queue-threshold'\t'Requests wait while every worker holds more active prefill tokens ..' \
                '--router-queue-policy'\t'Order of the router queue' \
                '--router-policy-config'\t'YAML file with the policy classes of the router queue' \
                '--router-queue-max-requests'\t'Requests that may wait in the router queue' \
                '--router-queue-max-wait-secs'\t'Seconds that a request may wait in the router queue before it is refused' \
                '--router-host-cache-hit-weight'\t'Credit of a block cached in host memory' \
                '--router-disk-cache-hit-weight'\t'Credit of a block cached on disk' \
                '--router-replica-sync'\t'Share active-request state between router replicas' \
                '--no-router-replica-sync'\t'Share active-request state between router replicas' \
                '--router-predicted-ttl-secs'\t'Seconds for which a routed prefix counts as cached before its events ..' \
                '--router-prefill-load-model'\t'How active prefill tokens fall with time: ais or aic (by an estimate ..' \
                '--ais-backend'\t'Prefill load model: the engine (the estimate is the same for each)' \
                '--ais-backend-version'\t'Prefill load model: the backend\'s version' \
                '--ais-system'\t'Prefill load model: the accelerator, for example h200_sxm' \
                '--ais-model-path'\t'Prefill load model: directory of the model, with its config.json' \
                '--ais-tp-size'\t'Prefill load model: accelerators that share the model (none: 1)' \
                '--encoder-cuda-to-cpu-ratio'\t'Throughput of a non-CPU worker relative to a CPU worker' \
                '--serve-indexer'\t'Serve this router\'s index to other routers' \
                '--no-serve-indexer'\t'Serve this router\'s index to other routers' \
                '--use-remote-indexer'\t'Query a served indexer instead of keeping an index' \
                '--no-use-remote-indexer'\t'Query a served indexer instead of keeping an index' \
                '--router-durable-kv-events'\t'Read KV events from JetStream (deprecated in Dynamo)' \
                '--no-router-durable-kv-events'\t'Read KV events from JetStream (deprecated in Dynamo)' \
                '--router-reset-states'\t'Remove KV events and snapshot from JetStream at start, for all routers' \
                '--no-router-reset-states'\t'Remove KV events and snapshot from JetStream at start, for all routers'
        case 'serve frontend'
            printf '%s\n' \
                '--http-host'\t'Listen address' \
                '--host'\t'Listen address' \
                '--http-port'\t'Listen port' \
                '--port'\t'Listen port' \
                '--worker'\t'An engine (repeatable): URL, then any of name=, role=, DOMAIN=VALUE, ..' \
                '--workers-file'\t'The workers as YAML' \
                '--model-path'\t'Directory of tokenizer and chat template' \
                '--trust-template'\t'Do not bound the work of the chat template in --model-path: its time ..' \
                '--tokenizer'\t'auto: the fastest encoder that gives the same token ids' \
                '--model-name'\t'Model of workers that do not report it' \
                '--kv-cache-block-size'\t'Block size of workers that do not report it' \
                '--admin-token'\t'Bearer token of operators: changes and routing details' \
                '--api-token'\t'Bearer token of operators: changes and routing details' \
                '--log-decisions'\t'Log the winner of each hop, or all candidates with their costs' \
                '--log-format'\t'Format of log lines' \
                '--log-level'\t'Lowest severity to log' \
                '--decision-memory'\t'Memory for past decisions (dynctl why ID)' \
                '--record'\t'Record requests (hashes only), decisions, events and loads in a file ..' \
                '--record-max-bytes'\t'Size at which the recording becomes FILE.old and a new one begins' \
                '--index-memory'\t'Memory for the index of cached blocks' \
                '--drain-timeout'\t'Time for running requests to finish after SIGTERM' \
                '--system-port'\t'Separate port for health and metrics' \
                '--announce'\t'Print the address as one JSON line when ready' \
                '--router'\t'A dynctl serve router that knows the workers and decides, for any ..' \
                '--router-token'\t'The --admin-token of that router' \
                '--router-token-file'\t'File with the --admin-token of that router' \
                '--share-port'\t'Let other frontends with --router on this host listen on the same port' \
                '--processes'\t'Frontend processes behind the port' \
                '--process-timeout'\t'With --processes: a process without an answer for so long is killed ..' \
                '--namespace-prefix'\t'Serve all Dynamo namespaces that begin with this' \
                '--event-plane'\t'Event plane for what this frontend publishes to other routers ..' \
                '--response-port'\t'Port where Dynamo workers send their responses' \
                '--migration-limit'\t'How often a response may go on with another Dynamo worker after its ..' \
                '--migration-max-seq-len'\t'Prompt and output above which a response does not go on elsewhere' \
                '--answer-parsing'\t'How reasoning and tool calls are found in answers of Dynamo workers: ..' \
                '--admin-token-file'\t'File with the operators\' token' \
                '--api-key'\t'A key for clients of inference (repeatable)' \
                '--api-key-file'\t'Keys, one a line, then name=, requests-per-minute= and concurrency= ..' \
                '--key-requests-per-minute'\t'Requests that each key may start in a minute, in each of --processes' \
                '--key-concurrency'\t'Requests of each key that may run at the same time, in each of ..' \
                '--engine-api-key'\t'Key for engines that need one' \
                '--engine-api-key-file'\t'File with the key for engines' \
                '--tls-cert'\t'Certificate chain (PEM) for https' \
                '--tls-key'\t'Private key (PEM) of the certificate' \
                '--unix-socket'\t'A second listener for operators: only this user can open it' \
                '--system-host'\t'Listen address of --system-port' \
                '--compressed-requests'\t'Accept gzip and deflate bodies' \
                '--otlp-endpoint'\t'Send a trace of each request to this OpenTelemetry collector (OTLP ..' \
                '--otlp-sample-ratio'\t'Share of requests that begin a trace' \
                '--header-timeout'\t'Time from a connection, or from the first byte, to a complete header' \
                '--keep-alive-timeout'\t'Time that a connection stays open between two requests' \
                '--peer-connections'\t'Connections of one client address' \
                '--first-byte-timeout'\t'Time to the first output of a stream or a prefill hop' \
                '--idle-timeout'\t'Longest pause in an engine\'s stream' \
                '--eject-after'\t'Failed requests in a row after which an engine gets none for a pause' \
                '--eject-pause'\t'First pause' \
                '--eject-max-pause'\t'Longest pause' \
                '--panic-threshold'\t'Share of a model\'s workers that should be healthy' \
                '--router-replica-bind'\t'With --router-replica-sync: where other routers read this one\'s load ..' \
                '--router-replica-peer'\t'The --router-replica-bind of another router, tcp://HOST:PORT ..' \
                '--router-replica-nats'\t'Share load over NATS in place of ZMQ: nats://HOST:PORT, several with ..' \
                '--router-replica-group'\t'Over NATS only routers of one group share load' \
                '--index-peer'\t'Begin with the index of this frontend or router, and read from the ..' \
                '--preset'\t'Defaults of dynamo-1.6 or dynamo-0.9 or ttft or throughput' \
                '--router-mode'\t'Rule that chooses the worker' \
                '--router-kv-overlap-score-credit'\t'Blocks of prefill credited per cached block' \
                '--router-kv-overlap-score-credit-decay'\t'How fast the credit falls on workers with more active prefill than ..' \
                '--router-prefill-load-scale'\t'Weight of prefill blocks in the cost (0.9: the overlap score weight, ..' \
                '--router-decode-active-request-weight'\t'Cost in blocks of each active request of a worker' \
                '--router-temperature'\t'0 picks the lowest cost' \
                '--router-track-active-blocks'\t'Count the blocks of running requests as decode load' \
                '--no-router-track-active-blocks'\t'Count the blocks of running requests as decode load' \
                '--router-track-output-blocks'\t'Also count the blocks that generation adds' \
                '--no-router-track-output-blocks'\t'Also count the blocks that generation adds' \
                '--router-assume-kv-reuse'\t'Count a prompt block that running requests share once per worker' \
                '--no-router-assume-kv-reuse'\t'Count a prompt block that running requests share once per worker' \
                '--router-track-prefill-tokens'\t'Count prompt tokens that wait for their first output token as prefill ..' \
                '--no-router-track-prefill-tokens'\t'Count prompt tokens that wait for their first output token as prefill ..' \
                '--active-decode-blocks-threshold'\t'A rank is busy above this fraction of its KV blocks' \
                '--active-prefill-tokens-threshold'\t'A rank is busy above this many active prefill tokens' \
                '--active-prefill-tokens-threshold-frac'\t'A rank is busy above this multiple of its max_num_batched_tokens (may ..' \
                '--router-kv-transfer-topology-level'\t'Topology domain of the router\'s own KV-transfer policy (for workers ..' \
                '--kv-transfer-enforcement'\t'Required never crosses the domain, preferred makes crossing cost ..' \
                '--router-kv-transfer-mismatch-policy'\t'Alias of --kv-transfer-enforcement: fail means required' \
                '--kv-transfer-preferred-weight'\t'Weight of the preference, 0 to 1' \
                '--router-decode-capacity-guard'\t'Choose only prefill workers whose domain has an eligible decode worker' \
                '--no-router-decode-capacity-guard'\t'Choose only prefill workers whose domain has an eligible decode worker' \
                '--router-pair-selection'\t'Greedy chooses the best prefill worker and then decode, best the pair ..' \
                '--router-kv-transfer-weight'\t'Cost in blocks of a second of KV transfer between prefill and decode ..' \
                '--router-kv-transfer-qos'\t'YAML file with latency and bandwidth of each topology level' \
                '--router-own-domains'\t'The frontend\'s own topology domains (zone=a,rack=r1): the latency ..' \
                '--router-conditional-disagg'\t'Conditional disaggregation: a decode worker that has enough of a ..' \
                '--no-router-conditional-disagg'\t'Conditional disaggregation: a decode worker that has enough of a ..' \
                '--router-conditional-disagg-config'\t'The settings of this panel as Dynamo\'s JSON object, without the ..' \
                '--router-bypass-policy'\t'What leaves out the prefill hop: isl-bounding (a short rest of the ..' \
                '--router-bypass-eff-isl-threshold'\t'The decode worker prefills fewer prompt tokens than this by itself' \
                '--router-bypass-eff-isl-ratio-threshold'\t'The decode worker prefills less than this fraction of a prompt by itself' \
                '--router-bypass-prefill-busy-threshold'\t'A prefill worker is busy above this multiple of its ..' \
                '--router-bypass-decode-busy-threshold'\t'Keep the prefill hop where the decode worker would have more active ..' \
                '--router-bypass-require-can-prefill'\t'Leave out the prefill hop only for decode workers that can prefill ..' \
                '--no-router-bypass-require-can-prefill'\t'Leave out the prefill hop only for decode workers that can prefill ..' \
                '--router-taints-in-all-modes'\t'Apply taints and KV-transfer policies in modes other than kv too ..' \
                '--no-router-taints-in-all-modes'\t'Apply taints and KV-transfer policies in modes other than kv too ..' \
                '--router-on-degraded'\t'What cached blocks count for while a worker\'s index is incomplete: ..' \
                '--router-session-affinity-ttl-secs'\t'Session affinity: seconds after the last request of a session ..' \
                '--router-session-affinity-mode'\t'Session affinity: keep the worker while it is eligible (hard), or ..' \
                '--router-session-affinity-yield-blocks'\t'Soft session affinity: blocks by which the session\'s worker may cost ..' \
                '--router-active-request-expiry-secs'\t'Seconds without progress after which a booking expires' \
                '--http-overload-status-code'\t'HTTP status when every eligible worker is busy' \
                '--router-kv-events'\t'Index what workers cache from their KV events (off: estimate it from ..' \
                '--no-router-kv-events'\t'Index what workers cache from their KV events (off: estimate it from ..' \
                '--router-approximate-cache-policy'\t'Approximate mode: forget what was not routed for the TTL (ttl), or ..' \
                '--router-ttl-secs'\t'Approximate mode: seconds for which a routed prefix counts as cached' \
                '--router-max-tree-size'\t'Approximate mode: blocks kept before pruning (none: 1,048,576)' \
                '--router-prune-target-ratio'\t'Approximate mode: fraction of the blocks kept by pruning' \
                '--router-queue-threshold'\t'Requests wait while every worker holds more active prefill tokens ..' \
                '--router-queue-policy'\t'Order of the router queue' \
                '--router-policy-config'\t'YAML file with the policy classes of the router queue' \
                '--router-queue-max-requests'\t'Requests that may wait in the router queue' \
                '--router-queue-max-wait-secs'\t'Seconds that a request may wait in the router queue before it is refused' \
                '--router-host-cache-hit-weight'\t'Credit of a block cached in host memory' \
                '--router-disk-cache-hit-weight'\t'Credit of a block cached on disk' \
                '--router-replica-sync'\t'Share active-request state between router replicas' \
                '--no-router-replica-sync'\t'Share active-request state between router replicas' \
                '--router-predicted-ttl-secs'\t'Seconds for which a routed prefix counts as cached before its events ..' \
                '--router-prefill-load-model'\t'How active prefill tokens fall with time: ais or aic (by an estimate ..' \
                '--ais-backend'\t'Prefill load model: the engine (the estimate is the same for each)' \
                '--ais-backend-version'\t'Prefill load model: the backend\'s version' \
                '--ais-system'\t'Prefill load model: the accelerator, for example h200_sxm' \
                '--ais-model-path'\t'Prefill load model: directory of the model, with its config.json' \
                '--ais-tp-size'\t'Prefill load model: accelerators that share the model (none: 1)' \
                '--encoder-cuda-to-cpu-ratio'\t'Throughput of a non-CPU worker relative to a CPU worker' \
                '--serve-indexer'\t'Serve this router\'s index to other routers' \
                '--no-serve-indexer'\t'Serve this router\'s index to other routers' \
                '--use-remote-indexer'\t'Query a served indexer instead of keeping an index' \
                '--no-use-remote-indexer'\t'Query a served indexer instead of keeping an index' \
                '--router-durable-kv-events'\t'Read KV events from JetStream (deprecated in Dynamo)' \
                '--no-router-durable-kv-events'\t'Read KV events from JetStream (deprecated in Dynamo)' \
                '--router-reset-states'\t'Remove KV events and snapshot from JetStream at start, for all routers' \
                '--no-router-reset-states'\t'Remove KV events and snapshot from JetStream at start, for all routers' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'serve router'
            printf '%s\n' \
                '--http-host'\t'Listen address' \
                '--host'\t'Listen address' \
                '--http-port'\t'Listen port' \
                '--port'\t'Listen port' \
                '--worker'\t'An engine (repeatable): URL, then any of name=, role=, DOMAIN=VALUE, ..' \
                '--workers-file'\t'The workers as YAML' \
                '--model-path'\t'Directory of tokenizer and chat template' \
                '--trust-template'\t'Do not bound the work of the chat template in --model-path: its time ..' \
                '--tokenizer'\t'auto: the fastest encoder that gives the same token ids' \
                '--model-name'\t'Model of workers that do not report it' \
                '--kv-cache-block-size'\t'Block size of workers that do not report it' \
                '--admin-token'\t'Bearer token of operators: changes and routing details' \
                '--api-token'\t'Bearer token of operators: changes and routing details' \
                '--log-decisions'\t'Log the winner of each hop, or all candidates with their costs' \
                '--log-format'\t'Format of log lines' \
                '--log-level'\t'Lowest severity to log' \
                '--decision-memory'\t'Memory for past decisions (dynctl why ID)' \
                '--record'\t'Record requests (hashes only), decisions, events and loads in a file ..' \
                '--record-max-bytes'\t'Size at which the recording becomes FILE.old and a new one begins' \
                '--index-memory'\t'Memory for the index of cached blocks' \
                '--drain-timeout'\t'Time for running requests to finish after SIGTERM' \
                '--system-port'\t'Separate port for health and metrics' \
                '--announce'\t'Print the address as one JSON line when ready' \
                '--endpoint'\t'Be a component of Dynamo: route among the workers of this endpoint, ..' \
                '--rpc-host'\t'With --endpoint: address for requests of Dynamo\'s processes, which is ..' \
                '--response-port'\t'Port where Dynamo workers send their responses' \
                '--select-service-port'\t'Answer there as Dynamo\'s selection service, for workers that its ..' \
                '--slot-tracker-port'\t'Answer there as Dynamo\'s slot tracker: load that its clients report' \
                '--admin-token-file'\t'File with the operators\' token' \
                '--api-key'\t'A key for clients of inference (repeatable)' \
                '--api-key-file'\t'Keys, one a line, then name=, requests-per-minute= and concurrency= ..' \
                '--key-requests-per-minute'\t'Requests that each key may start in a minute, in each of --processes' \
                '--key-concurrency'\t'Requests of each key that may run at the same time, in each of ..' \
                '--engine-api-key'\t'Key for engines that need one' \
                '--engine-api-key-file'\t'File with the key for engines' \
                '--tls-cert'\t'Certificate chain (PEM) for https' \
                '--tls-key'\t'Private key (PEM) of the certificate' \
                '--unix-socket'\t'A second listener for operators: only this user can open it' \
                '--system-host'\t'Listen address of --system-port' \
                '--compressed-requests'\t'Accept gzip and deflate bodies' \
                '--otlp-endpoint'\t'Send a trace of each request to this OpenTelemetry collector (OTLP ..' \
                '--otlp-sample-ratio'\t'Share of requests that begin a trace' \
                '--header-timeout'\t'Time from a connection, or from the first byte, to a complete header' \
                '--keep-alive-timeout'\t'Time that a connection stays open between two requests' \
                '--peer-connections'\t'Connections of one client address' \
                '--first-byte-timeout'\t'Time to the first output of a stream or a prefill hop' \
                '--idle-timeout'\t'Longest pause in an engine\'s stream' \
                '--eject-after'\t'Failed requests in a row after which an engine gets none for a pause' \
                '--eject-pause'\t'First pause' \
                '--eject-max-pause'\t'Longest pause' \
                '--panic-threshold'\t'Share of a model\'s workers that should be healthy' \
                '--router-replica-bind'\t'With --router-replica-sync: where other routers read this one\'s load ..' \
                '--router-replica-peer'\t'The --router-replica-bind of another router, tcp://HOST:PORT ..' \
                '--router-replica-nats'\t'Share load over NATS in place of ZMQ: nats://HOST:PORT, several with ..' \
                '--router-replica-group'\t'Over NATS only routers of one group share load' \
                '--index-peer'\t'Begin with the index of this frontend or router, and read from the ..' \
                '--preset'\t'Defaults of dynamo-1.6 or dynamo-0.9 or ttft or throughput' \
                '--router-mode'\t'Rule that chooses the worker' \
                '--router-kv-overlap-score-credit'\t'Blocks of prefill credited per cached block' \
                '--router-kv-overlap-score-credit-decay'\t'How fast the credit falls on workers with more active prefill than ..' \
                '--router-prefill-load-scale'\t'Weight of prefill blocks in the cost (0.9: the overlap score weight, ..' \
                '--router-decode-active-request-weight'\t'Cost in blocks of each active request of a worker' \
                '--router-temperature'\t'0 picks the lowest cost' \
                '--router-track-active-blocks'\t'Count the blocks of running requests as decode load' \
                '--no-router-track-active-blocks'\t'Count the blocks of running requests as decode load' \
                '--router-track-output-blocks'\t'Also count the blocks that generation adds' \
                '--no-router-track-output-blocks'\t'Also count the blocks that generation adds' \
                '--router-assume-kv-reuse'\t'Count a prompt block that running requests share once per worker' \
                '--no-router-assume-kv-reuse'\t'Count a prompt block that running requests share once per worker' \
                '--router-track-prefill-tokens'\t'Count prompt tokens that wait for their first output token as prefill ..' \
                '--no-router-track-prefill-tokens'\t'Count prompt tokens that wait for their first output token as prefill ..' \
                '--active-decode-blocks-threshold'\t'A rank is busy above this fraction of its KV blocks' \
                '--active-prefill-tokens-threshold'\t'A rank is busy above this many active prefill tokens' \
                '--active-prefill-tokens-threshold-frac'\t'A rank is busy above this multiple of its max_num_batched_tokens (may ..' \
                '--router-kv-transfer-topology-level'\t'Topology domain of the router\'s own KV-transfer policy (for workers ..' \
                '--kv-transfer-enforcement'\t'Required never crosses the domain, preferred makes crossing cost ..' \
                '--router-kv-transfer-mismatch-policy'\t'Alias of --kv-transfer-enforcement: fail means required' \
                '--kv-transfer-preferred-weight'\t'Weight of the preference, 0 to 1' \
                '--router-decode-capacity-guard'\t'Choose only prefill workers whose domain has an eligible decode worker' \
                '--no-router-decode-capacity-guard'\t'Choose only prefill workers whose domain has an eligible decode worker' \
                '--router-pair-selection'\t'Greedy chooses the best prefill worker and then decode, best the pair ..' \
                '--router-kv-transfer-weight'\t'Cost in blocks of a second of KV transfer between prefill and decode ..' \
                '--router-kv-transfer-qos'\t'YAML file with latency and bandwidth of each topology level' \
                '--router-own-domains'\t'The frontend\'s own topology domains (zone=a,rack=r1): the latency ..' \
                '--router-conditional-disagg'\t'Conditional disaggregation: a decode worker that has enough of a ..' \
                '--no-router-conditional-disagg'\t'Conditional disaggregation: a decode worker that has enough of a ..' \
                '--router-conditional-disagg-config'\t'The settings of this panel as Dynamo\'s JSON object, without the ..' \
                '--router-bypass-policy'\t'What leaves out the prefill hop: isl-bounding (a short rest of the ..' \
                '--router-bypass-eff-isl-threshold'\t'The decode worker prefills fewer prompt tokens than this by itself' \
                '--router-bypass-eff-isl-ratio-threshold'\t'The decode worker prefills less than this fraction of a prompt by itself' \
                '--router-bypass-prefill-busy-threshold'\t'A prefill worker is busy above this multiple of its ..' \
                '--router-bypass-decode-busy-threshold'\t'Keep the prefill hop where the decode worker would have more active ..' \
                '--router-bypass-require-can-prefill'\t'Leave out the prefill hop only for decode workers that can prefill ..' \
                '--no-router-bypass-require-can-prefill'\t'Leave out the prefill hop only for decode workers that can prefill ..' \
                '--router-taints-in-all-modes'\t'Apply taints and KV-transfer policies in modes other than kv too ..' \
                '--no-router-taints-in-all-modes'\t'Apply taints and KV-transfer policies in modes other than kv too ..' \
                '--router-on-degraded'\t'What cached blocks count for while a worker\'s index is incomplete: ..' \
                '--router-session-affinity-ttl-secs'\t'Session affinity: seconds after the last request of a session ..' \
                '--router-session-affinity-mode'\t'Session affinity: keep the worker while it is eligible (hard), or ..' \
                '--router-session-affinity-yield-blocks'\t'Soft session affinity: blocks by which the session\'s worker may cost ..' \
                '--router-active-request-expiry-secs'\t'Seconds without progress after which a booking expires' \
                '--http-overload-status-code'\t'HTTP status when every eligible worker is busy' \
                '--router-kv-events'\t'Index what workers cache from their KV events (off: estimate it from ..' \
                '--no-router-kv-events'\t'Index what workers cache from their KV events (off: estimate it from ..' \
                '--router-approximate-cache-policy'\t'Approximate mode: forget what was not routed for the TTL (ttl), or ..' \
                '--router-ttl-secs'\t'Approximate mode: seconds for which a routed prefix counts as cached' \
                '--router-max-tree-size'\t'Approximate mode: blocks kept before pruning (none: 1,048,576)' \
                '--router-prune-target-ratio'\t'Approximate mode: fraction of the blocks kept by pruning' \
                '--router-queue-threshold'\t'Requests wait while every worker holds more active prefill tokens ..' \
                '--router-queue-policy'\t'Order of the router queue' \
                '--router-policy-config'\t'YAML file with the policy classes of the router queue' \
                '--router-queue-max-requests'\t'Requests that may wait in the router queue' \
                '--router-queue-max-wait-secs'\t'Seconds that a request may wait in the router queue before it is refused' \
                '--router-host-cache-hit-weight'\t'Credit of a block cached in host memory' \
                '--router-disk-cache-hit-weight'\t'Credit of a block cached on disk' \
                '--router-replica-sync'\t'Share active-request state between router replicas' \
                '--no-router-replica-sync'\t'Share active-request state between router replicas' \
                '--router-predicted-ttl-secs'\t'Seconds for which a routed prefix counts as cached before its events ..' \
                '--router-prefill-load-model'\t'How active prefill tokens fall with time: ais or aic (by an estimate ..' \
                '--ais-backend'\t'Prefill load model: the engine (the estimate is the same for each)' \
                '--ais-backend-version'\t'Prefill load model: the backend\'s version' \
                '--ais-system'\t'Prefill load model: the accelerator, for example h200_sxm' \
                '--ais-model-path'\t'Prefill load model: directory of the model, with its config.json' \
                '--ais-tp-size'\t'Prefill load model: accelerators that share the model (none: 1)' \
                '--encoder-cuda-to-cpu-ratio'\t'Throughput of a non-CPU worker relative to a CPU worker' \
                '--serve-indexer'\t'Serve this router\'s index to other routers' \
                '--no-serve-indexer'\t'Serve this router\'s index to other routers' \
                '--use-remote-indexer'\t'Query a served indexer instead of keeping an index' \
                '--no-use-remote-indexer'\t'Query a served indexer instead of keeping an index' \
                '--router-durable-kv-events'\t'Read KV events from JetStream (deprecated in Dynamo)' \
                '--no-router-durable-kv-events'\t'Read KV events from JetStream (deprecated in Dynamo)' \
                '--router-reset-states'\t'Remove KV events and snapshot from JetStream at start, for all routers' \
                '--no-router-reset-states'\t'Remove KV events and snapshot from JetStream at start, for all routers' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'serve indexer'
            printf '%s\n' \
                '--http-host'\t'Listen address' \
                '--host'\t'Listen address' \
                '--port'\t'Listen port' \
                '--http-port'\t'Listen port' \
                '--workers'\t'Engines to follow: number and ZMQ address of the KV events, separated ..' \
                '--replays'\t'Their replay sockets: what was cached before or missed is read there' \
                '--block-size'\t'Block size of the engines of --workers' \
                '--model-name'\t'Model of the engines of --workers' \
                '--routing-group'\t'Routing group of the engines of --workers' \
                '--peers'\t'Begin with the index of the first of these indexers that answers ..' \
                '--snapshot'\t'Keep a snapshot of the index in this directory, and begin with it: a ..' \
                '--snapshot-interval'\t'Time between two snapshots' \
                '--admin-token'\t'Bearer token of operators: changes and routing details' \
                '--api-token'\t'Bearer token of operators: changes and routing details' \
                '--admin-token-file'\t'File with the operators\' token' \
                '--index-memory'\t'Memory for the index of cached blocks' \
                '--log-format'\t'Format of log lines' \
                '--log-level'\t'Lowest severity to log' \
                '--announce'\t'Print the address as one JSON line when ready' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'serve observe'
            printf '%s\n' \
                '--http-host'\t'Listen address' \
                '--host'\t'Listen address' \
                '--http-port'\t'Listen port' \
                '--port'\t'Listen port' \
                '--frontend-log'\t'The log of a Dynamo frontend: its costs and refusals, and its choices ..' \
                '--model-path'\t'Directory of tokenizer and chat template' \
                '--admin-token'\t'Bearer token of operators: changes and routing details' \
                '--api-token'\t'Bearer token of operators: changes and routing details' \
                '--log-format'\t'Format of log lines' \
                '--log-level'\t'Lowest severity to log' \
                '--decision-memory'\t'Memory for past decisions (dynctl why ID)' \
                '--record'\t'Record requests (hashes only), decisions, events and loads in a file ..' \
                '--record-max-bytes'\t'Size at which the recording becomes FILE.old and a new one begins' \
                '--index-memory'\t'Memory for the index of cached blocks' \
                '--system-port'\t'Separate port for health and metrics' \
                '--announce'\t'Print the address as one JSON line when ready' \
                '--admin-token-file'\t'File with the operators\' token' \
                '--tls-cert'\t'Certificate chain (PEM) for https' \
                '--tls-key'\t'Private key (PEM) of the certificate' \
                '--unix-socket'\t'A second listener for operators: only this user can open it' \
                '--system-host'\t'Listen address of --system-port' \
                '--header-timeout'\t'Time from a connection, or from the first byte, to a complete header' \
                '--keep-alive-timeout'\t'Time that a connection stays open between two requests' \
                '--peer-connections'\t'Connections of one client address' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'serve attach'
            printf '%s\n' \
                '--engine'\t'The engine: URL, then any of kv-events=, replay=, model=, role=, ..' \
                '--engine-type'\t'API of the engine' \
                '--model-path'\t'Directory of the engine\'s model: frontends get its tokenizer from the ..' \
                '--max-num-seqs'\t'Requests that the engine runs at once, for the card' \
                '--tool-call-parser'\t'Parser of tool calls that the frontend uses for this model' \
                '--reasoning-parser'\t'Parser of reasoning that the frontend uses for this model' \
                '--endpoint'\t'Endpoint to register' \
                '--event-plane'\t'Event plane of the fleet' \
                '--request-plane'\t'How requests of frontends arrive' \
                '--host'\t'Address to listen at and to register: requests, events and the system ..' \
                '--request-port'\t'Port of the request plane over TCP' \
                '--system-port'\t'Port for health, metrics and the model\'s files' \
                '--drain-timeout'\t'Time for running requests to finish after SIGTERM' \
                '--announce'\t'Print the addresses as one JSON line when listening' \
                '--log-format'\t'Format of log lines' \
                '--log-level'\t'Lowest severity to log' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'serve epp'
            printf '%s\n' \
                '--host'\t'Listen address for gateways and health' \
                '--port'\t'ext_proc port for gateways (gRPC)' \
                '--health-port'\t'gRPC health, without TLS' \
                '--tls'\t'TLS for gateways' \
                '--no-tls'\t'TLS for gateways' \
                '--tls-cert'\t'Certificate chain (PEM) for gateways' \
                '--tls-key'\t'Private key (PEM) of the certificate' \
                '--body-limit'\t'Largest body of a request' \
                '--stream-timeout'\t'Longest time without a message of the gateway about a request' \
                '--http-host'\t'Listen address of metrics and of the operators\' HTTP' \
                '--http-port'\t'Port of metrics and of the operators\' HTTP' \
                '--pool'\t'An InferencePool of the cluster, in the namespace of -n: its ready ..' \
                '--pod-kv-events'\t'ZMQ port of the pods\' KV events' \
                '--pod-replay'\t'ZMQ port of the pods\' replay sockets, likewise' \
                '--pod-role-label'\t'Pod label with the role: prefill or decode' \
                '--pod-domain'\t'A topology domain and the pod label with its value (repeatable)' \
                '--dynamo-frontend'\t'With --discovery: where the gateway sends requests, a Dynamo frontend ..' \
                '--namespace-prefix'\t'Serve all Dynamo namespaces that begin with this' \
                '--event-plane'\t'Event plane for what this frontend publishes to other routers ..' \
                '--worker'\t'An engine (repeatable): URL, then any of name=, role=, DOMAIN=VALUE, ..' \
                '--workers-file'\t'The workers as YAML' \
                '--model-path'\t'Directory of tokenizer and chat template' \
                '--trust-template'\t'Do not bound the work of the chat template in --model-path: its time ..' \
                '--tokenizer'\t'auto: the fastest encoder that gives the same token ids' \
                '--model-name'\t'Model of workers that do not report it' \
                '--kv-cache-block-size'\t'Block size of workers that do not report it' \
                '--admin-token'\t'Bearer token of operators: changes and routing details' \
                '--api-token'\t'Bearer token of operators: changes and routing details' \
                '--log-decisions'\t'Log the winner of each hop, or all candidates with their costs' \
                '--log-format'\t'Format of log lines' \
                '--log-level'\t'Lowest severity to log' \
                '--decision-memory'\t'Memory for past decisions (dynctl why ID)' \
                '--record'\t'Record requests (hashes only), decisions, events and loads in a file ..' \
                '--record-max-bytes'\t'Size at which the recording becomes FILE.old and a new one begins' \
                '--index-memory'\t'Memory for the index of cached blocks' \
                '--drain-timeout'\t'Time for running requests to finish after SIGTERM' \
                '--system-port'\t'Separate port for health and metrics' \
                '--announce'\t'Print the address as one JSON line when ready' \
                '--admin-token-file'\t'File with the operators\' token' \
                '--engine-api-key'\t'Key for engines that need one' \
                '--engine-api-key-file'\t'File with the key for engines' \
                '--unix-socket'\t'A second listener for operators: only this user can open it' \
                '--system-host'\t'Listen address of --system-port' \
                '--otlp-endpoint'\t'Send a trace of each request to this OpenTelemetry collector (OTLP ..' \
                '--otlp-sample-ratio'\t'Share of requests that begin a trace' \
                '--header-timeout'\t'Time from a connection, or from the first byte, to a complete header' \
                '--keep-alive-timeout'\t'Time that a connection stays open between two requests' \
                '--peer-connections'\t'Connections of one client address' \
                '--eject-after'\t'Failed requests in a row after which an engine gets none for a pause' \
                '--eject-pause'\t'First pause' \
                '--eject-max-pause'\t'Longest pause' \
                '--panic-threshold'\t'Share of a model\'s workers that should be healthy' \
                '--router-replica-bind'\t'With --router-replica-sync: where other routers read this one\'s load ..' \
                '--router-replica-peer'\t'The --router-replica-bind of another router, tcp://HOST:PORT ..' \
                '--router-replica-nats'\t'Share load over NATS in place of ZMQ: nats://HOST:PORT, several with ..' \
                '--router-replica-group'\t'Over NATS only routers of one group share load' \
                '--index-peer'\t'Begin with the index of this frontend or router, and read from the ..' \
                '--preset'\t'Defaults of dynamo-1.6 or dynamo-0.9 or ttft or throughput' \
                '--router-mode'\t'Rule that chooses the worker' \
                '--router-kv-overlap-score-credit'\t'Blocks of prefill credited per cached block' \
                '--router-kv-overlap-score-credit-decay'\t'How fast the credit falls on workers with more active prefill than ..' \
                '--router-prefill-load-scale'\t'Weight of prefill blocks in the cost (0.9: the overlap score weight, ..' \
                '--router-decode-active-request-weight'\t'Cost in blocks of each active request of a worker' \
                '--router-temperature'\t'0 picks the lowest cost' \
                '--router-track-active-blocks'\t'Count the blocks of running requests as decode load' \
                '--no-router-track-active-blocks'\t'Count the blocks of running requests as decode load' \
                '--router-track-output-blocks'\t'Also count the blocks that generation adds' \
                '--no-router-track-output-blocks'\t'Also count the blocks that generation adds' \
                '--router-assume-kv-reuse'\t'Count a prompt block that running requests share once per worker' \
                '--no-router-assume-kv-reuse'\t'Count a prompt block that running requests share once per worker' \
                '--router-track-prefill-tokens'\t'Count prompt tokens that wait for their first output token as prefill ..' \
                '--no-router-track-prefill-tokens'\t'Count prompt tokens that wait for their first output token as prefill ..' \
                '--active-decode-blocks-threshold'\t'A rank is busy above this fraction of its KV blocks' \
                '--active-prefill-tokens-threshold'\t'A rank is busy above this many active prefill tokens' \
                '--active-prefill-tokens-threshold-frac'\t'A rank is busy above this multiple of its max_num_batched_tokens (may ..' \
                '--router-kv-transfer-topology-level'\t'Topology domain of the router\'s own KV-transfer policy (for workers ..' \
                '--kv-transfer-enforcement'\t'Required never crosses the domain, preferred makes crossing cost ..' \
                '--router-kv-transfer-mismatch-policy'\t'Alias of --kv-transfer-enforcement: fail means required' \
                '--kv-transfer-preferred-weight'\t'Weight of the preference, 0 to 1' \
                '--router-decode-capacity-guard'\t'Choose only prefill workers whose domain has an eligible decode worker' \
                '--no-router-decode-capacity-guard'\t'Choose only prefill workers whose domain has an eligible decode worker' \
                '--router-pair-selection'\t'Greedy chooses the best prefill worker and then decode, best the pair ..' \
                '--router-kv-transfer-weight'\t'Cost in blocks of a second of KV transfer between prefill and decode ..' \
                '--router-kv-transfer-qos'\t'YAML file with latency and bandwidth of each topology level' \
                '--router-own-domains'\t'The frontend\'s own topology domains (zone=a,rack=r1): the latency ..' \
                '--router-conditional-disagg'\t'Conditional disaggregation: a decode worker that has enough of a ..' \
                '--no-router-conditional-disagg'\t'Conditional disaggregation: a decode worker that has enough of a ..' \
                '--router-conditional-disagg-config'\t'The settings of this panel as Dynamo\'s JSON object, without the ..' \
                '--router-bypass-policy'\t'What leaves out the prefill hop: isl-bounding (a short rest of the ..' \
                '--router-bypass-eff-isl-threshold'\t'The decode worker prefills fewer prompt tokens than this by itself' \
                '--router-bypass-eff-isl-ratio-threshold'\t'The decode worker prefills less than this fraction of a prompt by itself' \
                '--router-bypass-prefill-busy-threshold'\t'A prefill worker is busy above this multiple of its ..' \
                '--router-bypass-decode-busy-threshold'\t'Keep the prefill hop where the decode worker would have more active ..' \
                '--router-bypass-require-can-prefill'\t'Leave out the prefill hop only for decode workers that can prefill ..' \
                '--no-router-bypass-require-can-prefill'\t'Leave out the prefill hop only for decode workers that can prefill ..' \
                '--router-taints-in-all-modes'\t'Apply taints and KV-transfer policies in modes other than kv too ..' \
                '--no-router-taints-in-all-modes'\t'Apply taints and KV-transfer policies in modes other than kv too ..' \
                '--router-on-degraded'\t'What cached blocks count for while a worker\'s index is incomplete: ..' \
                '--router-session-affinity-ttl-secs'\t'Session affinity: seconds after the last request of a session ..' \
                '--router-session-affinity-mode'\t'Session affinity: keep the worker while it is eligible (hard), or ..' \
                '--router-session-affinity-yield-blocks'\t'Soft session affinity: blocks by which the session\'s worker may cost ..' \
                '--router-active-request-expiry-secs'\t'Seconds without progress after which a booking expires' \
                '--http-overload-status-code'\t'HTTP status when every eligible worker is busy' \
                '--router-kv-events'\t'Index what workers cache from their KV events (off: estimate it from ..' \
                '--no-router-kv-events'\t'Index what workers cache from their KV events (off: estimate it from ..' \
                '--router-approximate-cache-policy'\t'Approximate mode: forget what was not routed for the TTL (ttl), or ..' \
                '--router-ttl-secs'\t'Approximate mode: seconds for which a routed prefix counts as cached' \
                '--router-max-tree-size'\t'Approximate mode: blocks kept before pruning (none: 1,048,576)' \
                '--router-prune-target-ratio'\t'Approximate mode: fraction of the blocks kept by pruning' \
                '--router-queue-threshold'\t'Requests wait while every worker holds more active prefill tokens ..' \
                '--router-queue-policy'\t'Order of the router queue' \
                '--router-policy-config'\t'YAML file with the policy classes of the router queue' \
                '--router-queue-max-requests'\t'Requests that may wait in the router queue' \
                '--router-queue-max-wait-secs'\t'Seconds that a request may wait in the router queue before it is refused' \
                '--router-host-cache-hit-weight'\t'Credit of a block cached in host memory' \
                '--router-disk-cache-hit-weight'\t'Credit of a block cached on disk' \
                '--router-replica-sync'\t'Share active-request state between router replicas' \
                '--no-router-replica-sync'\t'Share active-request state between router replicas' \
                '--router-predicted-ttl-secs'\t'Seconds for which a routed prefix counts as cached before its events ..' \
                '--router-prefill-load-model'\t'How active prefill tokens fall with time: ais or aic (by an estimate ..' \
                '--ais-backend'\t'Prefill load model: the engine (the estimate is the same for each)' \
                '--ais-backend-version'\t'Prefill load model: the backend\'s version' \
                '--ais-system'\t'Prefill load model: the accelerator, for example h200_sxm' \
                '--ais-model-path'\t'Prefill load model: directory of the model, with its config.json' \
                '--ais-tp-size'\t'Prefill load model: accelerators that share the model (none: 1)' \
                '--encoder-cuda-to-cpu-ratio'\t'Throughput of a non-CPU worker relative to a CPU worker' \
                '--serve-indexer'\t'Serve this router\'s index to other routers' \
                '--no-serve-indexer'\t'Serve this router\'s index to other routers' \
                '--use-remote-indexer'\t'Query a served indexer instead of keeping an index' \
                '--no-use-remote-indexer'\t'Query a served indexer instead of keeping an index' \
                '--router-durable-kv-events'\t'Read KV events from JetStream (deprecated in Dynamo)' \
                '--no-router-durable-kv-events'\t'Read KV events from JetStream (deprecated in Dynamo)' \
                '--router-reset-states'\t'Remove KV events and snapshot from JetStream at start, for all routers' \
                '--no-router-reset-states'\t'Remove KV events and snapshot from JetStream at start, for all routers' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'serve engine'
            printf '%s\n' \
                '--name'\t'Name shown in logs and in /engine/info' \
                '--model'\t'Model name served on the OpenAI endpoints' \
                '--model-path'\t'Directory with tokenizer.json and its config' \
                '--role'\t'Phases that the engine serves' \
                '--can-prefill'\t'A decode engine prefills a request that arrives without a hand-off' \
                '--no-can-prefill'\t'A decode engine prefills a request that arrives without a hand-off' \
                '--host'\t'Address to listen on' \
                '--advertise-host'\t'Address of this engine for others' \
                '--port'\t'HTTP port' \
                '--block-size'\t'Tokens in a KV block' \
                '--total-blocks'\t'KV blocks of each data-parallel rank' \
                '--host-blocks'\t'KV blocks of each rank in host memory, for what its own blocks evict' \
                '--disk-blocks'\t'KV blocks of each rank on disk, for what host memory evicts' \
                '--host-gb-per-s'\t'Loading from host memory to a rank, 10^9 bytes per second' \
                '--disk-gb-per-s'\t'Loading from disk to a rank, 10^9 bytes per second' \
                '--kv-bytes-per-token'\t'Bytes of KV cache of a token, which loading takes its time for' \
                '--max-model-len'\t'Context length in tokens' \
                '--max-num-seqs'\t'Requests that run on a rank at the same time' \
                '--max-waiting'\t'Requests that may wait on a rank' \
                '--max-num-batched-tokens'\t'Token budget of one engine step' \
                '--data-parallel-size'\t'Data-parallel ranks, each with its own cache and events' \
                '--lora'\t'Also serve this LoRA adapter\'s name (repeatable)' \
                '--prefill-tokens-per-s'\t'Prefill speed of a rank, tokens per second' \
                '--decode-itl-ms'\t'Duration of a decode step, milliseconds' \
                '--speedup-ratio'\t'Divide every simulated duration by this' \
                '--default-output-tokens'\t'Output length of a request that sets no max_tokens' \
                '--seed'\t'Seed of the generated text' \
                '--kv-transfer-ms-per-block'\t'Time to pull one KV block from a prefill engine, ms' \
                '--kv-transfer-cross-domain-factor'\t'Factor for the time of a pull between different values of the KV ..' \
                '--kv-load-failure-policy'\t'Reaction of a decode engine if the prefill engine lost the KV blocks' \
                '--kv-hold-timeout-s'\t'Seconds that a prefill engine keeps unpulled blocks and a decode ..' \
                '--kv-events'\t'ZMQ endpoint of the KV events' \
                '--replay'\t'ZMQ endpoint that replays recent KV events, ranks as above' \
                '--kv-events-topic'\t'First frame of each KV event message' \
                '--kv-events-buffer-steps'\t'KV event batches kept for replay (at most 16 MiB)' \
                '--max-body-bytes'\t'Largest accepted request body' \
                '--drain-timeout-s'\t'Seconds for running requests to finish after SIGTERM' \
                '--fault-slow-factor'\t'Multiply every simulated duration by this factor' \
                '--fault-refuse'\t'Return this HTTP status for /health and every inference request' \
                '--fault-die-mid-stream-after'\t'Cut the connection after this many output tokens' \
                '--fault-stop-publishing'\t'Number and keep KV event batches for replay, but do not send them' \
                '--no-fault-stop-publishing'\t'Number and keep KV event batches for replay, but do not send them' \
                '--fault-drop-events'\t'Do not send the next N KV event batches' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'route'
            printf '%s\n' \
                '--explain'\t'Explain the decision, hop by hop' \
                '--all'\t'List all candidates and rejections (with --explain)' \
                '--raw'\t'Use PROMPT as it is, without a chat template' \
                '--messages'\t'Chat messages, or a whole request body, as JSON' \
                '--tokens'\t'Token ids: a JSON list, or separated by white space' \
                '--model'\t'Model' \
                '--model-path'\t'Tokenizer directory, for a --view from another machine' \
                '--require-taint'\t'Only workers with this taint (repeatable)' \
                '--prefer-taint'\t'Prefer this taint with weight W (repeatable)' \
                '--lora'\t'LoRA adapter' \
                '--cache-salt'\t'Cache salt of the request' \
                '--session'\t'The request has a session id (x-session-id)' \
                '--session-id'\t'Session of the request, for a dynctl frontend' \
                '--follow'\t'Follow a live Dynamo until its running requests are known one by one' \
                '--pin-prefill'\t'Force the prefill worker' \
                '--pin-decode'\t'Force the decode worker' \
                '--set'\t'Change a setting or a load, for example ..' \
                '--save-view'\t'Save the router\'s state' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'workers'
            printf '%s\n' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'workers list'
            printf '%s\n' \
                '--model'\t'Only workers of this model' \
                '--role'\t'Only prefill, decode or aggregated' \
                '--selector'\t'Only workers that match: domain, name, role, model or status' \
                '-l'\t'Only workers that match: domain, name, role, model or status' \
                '--sort-by'\t'Sort by a column, for example cached_blocks' \
                '--no-headers'\t'Print the rows without a heading' \
                '--watch'\t'Show the list again every 2 s, until Ctrl-C' \
                '-w'\t'Show the list again every 2 s, until Ctrl-C' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'workers show'
            printf '%s\n' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'workers cordon'
            printf '%s\n' \
                '--dry-run'\t'Show what would change' \
                '--yes'\t'Change the fleet at the default address without a question' \
                '-y'\t'Change the fleet at the default address without a question' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'workers uncordon'
            printf '%s\n' \
                '--dry-run'\t'Show what would change' \
                '--yes'\t'Change the fleet at the default address without a question' \
                '-y'\t'Change the fleet at the default address without a question' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'workers drain'
            printf '%s\n' \
                '--wait'\t'Wait at most this long: 10m' \
                '--dry-run'\t'Show what would change' \
                '--yes'\t'Change the fleet at the default address without a question' \
                '-y'\t'Change the fleet at the default address without a question' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token'
        case 'workers add'
            printf '%s\n' \
                '--dry-run'\t'Show what would change' \
                '--yes'\t'Change the fleet at the default address without a question' \
                '-y'\t'Change the fleet at the default address without a question' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'workers remove'
            printf '%s\n' \
                '--dry-run'\t'Show what would change' \
                '--yes'\t'Change the fleet at the default address without a question' \
                '-y'\t'Change the fleet at the default address without a question' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'topology'
            printf '%s\n' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'topology show'
            printf '%s\n' \
                '--domain'\t'Domain to group by (zone, rack, ..)' \
                '--model'\t'Only workers of this model' \
                '--selector'\t'Only workers that match: domain, name, role, model or status' \
                '-l'\t'Only workers that match: domain, name, role, model or status' \
                '--sort-by'\t'Sort by a column, for example ratio' \
                '--no-headers'\t'Print the rows without a heading' \
                '--watch'\t'Show the list again every 2 s, until Ctrl-C' \
                '-w'\t'Show the list again every 2 s, until Ctrl-C' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'topology verify'
            printf '%s\n' \
                '--dgd'\t'Only this DynamoGraphDeployment (repeatable)' \
                '--exec'\t'Read topology files in pods: of all workers, a sample, none' \
                '--logs'\t'Read the start of logs: of all workers, a sample, none' \
                '--probe'\t'Send N chats of one token to each model of each frontend and check ..' \
                '--path'\t'Check only this topology mount, inside a worker\'s pod' \
                '--domain'\t'With --path: the domain to check' \
                '--file'\t'Check manifests instead, as topology lint does' \
                '-f'\t'Check manifests instead, as topology lint does' \
                '--fail-on'\t'Level for exit code 1: fail, or warn as well' \
                '--suppress'\t'Suppress a check or a finding (repeatable): --suppress \'DYT0902=Pod ..' \
                '--wait'\t'Repeat the checks until none fails, at most this long: 5m' \
                '--list-checks'\t'List all checks and exit' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token'
        case 'topology plan'
            printf '%s\n' \
                '--capacity'\t'Number of workers in one domain value (repeatable)' \
                '--file'\t'Count the replicas in a manifest' \
                '-f'\t'Count the replicas in a manifest' \
                '--domain'\t'Domain to group by (zone, rack, ..)' \
                '--over'\t'All values of the domain, for unpinned workers and for --target' \
                '--ratio'\t'Target ratio of prefill to decode workers' \
                '--target'\t'Target fleet, split evenly over the values' \
                '--enforcement'\t'Plan for this policy: required, preferred, fallback or none' \
                '--model'\t'Only workers of this model (live)' \
                '--dgd'\t'Count the pods of this DynamoGraphDeployment (repeatable)' \
                '--no-headers'\t'Print the rows without a heading' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'topology lint'
            printf '%s\n' \
                '--file'\t'Manifest in YAML or JSON' \
                '-f'\t'Manifest in YAML or JSON' \
                '--fail-on'\t'Level for exit code 1: fail, or warn as well' \
                '--suppress'\t'Suppress a check or a finding (repeatable): --suppress \'DYT0902=Pod ..' \
                '--against'\t'Also compare with this cluster: node labels, Grove topology, running ..' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'topology render'
            printf '%s\n' \
                '--controller'\t'The same as `controller`' \
                '--domain'\t'pod: the KV-transfer domain' \
                '--label-key'\t'pod: the label of a domain (repeatable)' \
                '--enforcement'\t'pod: required or preferred' \
                '--weight'\t'pod: weight of the preference, 0 to 1' \
                '--container'\t'pod: container of the engine' \
                '--mount-path'\t'pod: mount path of the topology files' \
                '--init-wait'\t'pod: start the worker once its domain has a value' \
                '--image'\t'Image with dynctl, for --init-wait and controller' \
                '--init-timeout'\t'pod: timeout of --init-wait' \
                '--level'\t'cluster-topology: level and its node label (repeatable, broad to narrow)' \
                '--name'\t'cluster-topology: name of the object' \
                '--kind'\t'cluster-topology: ClusterTopologyBinding, or ClusterTopology for ..' \
                '--controller-namespace'\t'controller: the namespace that it runs in' \
                '--watch-namespace'\t'controller: only pods there' \
                '--stale'\t'controller: which labels that differ from the node\'s it replaces' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'topology sync'
            printf '%s\n' \
                '--stale'\t'Which labels that differ from the node\'s are replaced: none' \
                '--once'\t'Look at every pod once, print the labels and end' \
                '--dry-run'\t'Write nothing' \
                '--leader-elect'\t'Write only while holding the lease, so that several may run' \
                '--no-leader-elect'\t'Write only while holding the lease, so that several may run' \
                '--lease-namespace'\t'Namespace of the lease dynctl-topology-sync' \
                '--system-host'\t'Address of health and metrics' \
                '--system-port'\t'Port of /healthz, /readyz and /metrics' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'topology wait'
            printf '%s\n' \
                '--path'\t'Directory of topology files' \
                '--domain'\t'Domain to wait for' \
                '--timeout'\t'Give up after this long: 30s, 2m' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'replay'
            printf '%s\n' \
                '--generate'\t'Generate requests instead: agentic, chat, rag or batch' \
                '--workload'\t'Parameter of --generate (repeatable): requests, rate, prompts, ..' \
                '--trace-block-size'\t'Tokens of a hash id, or of a generated block' \
                '--speed'\t'Multiply the rate' \
                '--spread'\t'Spread requests of one time evenly until the next time' \
                '--limit'\t'Only the first N requests' \
                '--model'\t'Only requests of this model' \
                '--skip-bad'\t'Leave bad lines out and count them' \
                '--policy'\t'round-robin, random, least-loaded, power-of-two, approximate, kv, ..' \
                '--routers'\t'Routers' \
                '--sync'\t'Routers share their bookings' \
                '--no-sync'\t'Routers share their bookings' \
                '--sync-delay-ms'\t'Time of a booking to the other routers, ms' \
                '--seed'\t'First seed: random choices, generated requests' \
                '--seeds'\t'Simulate N seeds' \
                '--workers'\t'Aggregated workers' \
                '--zones'\t'Spread --workers over these zones' \
                '--capacity'\t'Workers in one domain value (repeatable)' \
                '--file'\t'The replicas of a manifest' \
                '-f'\t'The replicas of a manifest' \
                '--domain'\t'Domain of --capacity and --file' \
                '--data-parallel-size'\t'Ranks of a worker' \
                '--bootstrap'\t'Prefill and decode worker get a request at once, as with SGLang\'s ..' \
                '--no-bootstrap'\t'Prefill and decode worker get a request at once, as with SGLang\'s ..' \
                '--enforcement'\t'KV transfer policy of the workers: none, preferred, required or fallback' \
                '--preferred-weight'\t'Weight of --enforcement preferred' \
                '--block-bytes'\t'Bytes of a KV block' \
                '--events-delay-ms'\t'Time from a cache event to the router, ms' \
                '--events-loss'\t'Share of KV event batches that are lost' \
                '--lose'\t'Lose a zone or a worker, until a time: zone-a@60s, 3@10s..40s ..' \
                '--migration-limit'\t'How often a request with output goes on with another worker after its ..' \
                '--migration-max-seq-len'\t'Prompts with more tokens do not go on elsewhere' \
                '--ttft-limit'\t'Goodput: longest TTFT' \
                '--itl-limit-ms'\t'Goodput: longest inter-token latency, ms' \
                '--plot'\t'Write a plot of TTFT and goodput against load' \
                '--loads'\t'Multiples of the rate to simulate' \
                '--max-regress'\t'Exit code 1 if a policy is worse than the first by more, for example 2%' \
                '--fail-on'\t'Level for exit code 1: fail, or warn as well' \
                '--search'\t'Tune the numeric settings of the one --policy with N simulations' \
                '--block-size'\t'Tokens in a KV block' \
                '--total-blocks'\t'KV blocks of each data-parallel rank' \
                '--host-blocks'\t'KV blocks of each rank in host memory, for what its own blocks evict' \
                '--disk-blocks'\t'KV blocks of each rank on disk, for what host memory evicts' \
                '--max-num-seqs'\t'Requests that run on a rank at the same time' \
                '--max-waiting'\t'Requests that may wait on a rank' \
                '--max-num-batched-tokens'\t'Token budget of one engine step' \
                '--prefill-tokens-per-s'\t'Prefill speed of a rank, tokens per second' \
                '--decode-itl-ms'\t'Duration of a decode step, milliseconds' \
                '--kv-transfer-ms-per-block'\t'Time to pull one KV block from a prefill engine, ms' \
                '--kv-transfer-cross-domain-factor'\t'Factor for the time of a pull between different values of the KV ..' \
                '--host-gb-per-s'\t'Loading from host memory to a rank, 10^9 bytes per second' \
                '--disk-gb-per-s'\t'Loading from disk to a rank, 10^9 bytes per second' \
                '--kv-bytes-per-token'\t'Bytes of KV cache of a token, which loading takes its time for' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'top'
            printf '%s\n' \
                '--once'\t'Print one frame and exit (also with -o json or yaml)' \
                '--rate'\t'Refresh interval' \
                '--domain'\t'Group by this domain (zone, rack, ..)' \
                '--readonly'\t'Do not allow changes of thresholds' \
                '--speed'\t'Play a --recording from --at on, N times as fast' \
                '--frontend-log'\t'Read a live Dynamo\'s decisions from its frontend\'s log' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'decisions'
            printf '%s\n' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches' \
                '--refused'\t'Only refusals' \
                '--outcome'\t'Only requests that ended so: complete, failed, cut (in mid-stream), ..' \
                '--moved'\t'Only decisions that missing decode workers moved' \
                '--model'\t'Only this model' \
                '--zone'\t'Only decisions for workers of this zone (or rack, ..): zone-a, or ..' \
                '--worker'\t'Only this worker: name or id, or its unique end' \
                '--limit'\t'The last N decisions' \
                '--no-headers'\t'Print the rows without a heading' \
                '--frontend-log'\t'Read a live Dynamo\'s decisions from its frontend\'s log'
        case 'decisions list'
            printf '%s\n' \
                '--refused'\t'Only refusals' \
                '--outcome'\t'Only requests that ended so: complete, failed, cut (in mid-stream), ..' \
                '--moved'\t'Only decisions that missing decode workers moved' \
                '--model'\t'Only this model' \
                '--zone'\t'Only decisions for workers of this zone (or rack, ..): zone-a, or ..' \
                '--worker'\t'Only this worker: name or id, or its unique end' \
                '--limit'\t'The last N decisions' \
                '--no-headers'\t'Print the rows without a heading' \
                '--frontend-log'\t'Read a live Dynamo\'s decisions from its frontend\'s log' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'decisions tail'
            printf '%s\n' \
                '--refused'\t'Only refusals' \
                '--outcome'\t'Only requests that ended so: complete, failed, cut (in mid-stream), ..' \
                '--moved'\t'Only decisions that missing decode workers moved' \
                '--model'\t'Only this model' \
                '--zone'\t'Only decisions for workers of this zone (or rack, ..): zone-a, or ..' \
                '--worker'\t'Only this worker: name or id, or its unique end' \
                '--tail'\t'Begin with the last N' \
                '--limit'\t'Stop after N lines' \
                '--duration'\t'Stop after this time: 10m' \
                '--no-headers'\t'Print the rows without a heading' \
                '--frontend-log'\t'Read a live Dynamo\'s decisions from its frontend\'s log' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'events'
            printf '%s\n' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'events tail'
            printf '%s\n' \
                '--worker'\t'Only this worker (repeatable): name or id, or the unique end of it' \
                '--selector'\t'Only workers that match: domain, name, role or model' \
                '-l'\t'Only workers that match: domain, name, role or model' \
                '--kind'\t'Only this kind (repeatable): stored, removed, cleared, gap, restart, .' \
                '--load'\t'Also show load reports and routers\' bookings' \
                '--limit'\t'Stop after N lines' \
                '--duration'\t'Stop after this time: 10m' \
                '--no-headers'\t'Print the rows without a heading' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'thresholds'
            printf '%s\n' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'thresholds get'
            printf '%s\n' \
                '--ranks'\t'Also show each rank: signal, limit, latch, age, effect (also -o wide)' \
                '--ask'\t'Find out with one dry run per worker which workers a Dynamo frontend ..' \
                '--watch'\t'Show the list again every 2 s, until Ctrl-C' \
                '-w'\t'Show the list again every 2 s, until Ctrl-C' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'thresholds set'
            printf '%s\n' \
                '--active-decode-blocks'\t'Busy above this fraction of a rank\'s KV blocks' \
                '--active-decode-blocks-threshold'\t'Busy above this fraction of a rank\'s KV blocks' \
                '--active-prefill-tokens'\t'Busy above this many active prefill tokens' \
                '--active-prefill-tokens-threshold'\t'Busy above this many active prefill tokens' \
                '--active-prefill-tokens-frac'\t'Busy above this multiple of max_num_batched_tokens' \
                '--active-prefill-tokens-threshold-frac'\t'Busy above this multiple of max_num_batched_tokens' \
                '--dry-run'\t'Show which ranks would change' \
                '--partial'\t'If a replica fails, keep the thresholds of the other replicas' \
                '--wait'\t'Wait until the thresholds are in effect on every replica, at most ..' \
                '--canary'\t'Set the thresholds on trial for this long: 10m' \
                '--revert-if'\t'What ends a --canary: refused, errors, hits, ttft_pNN or itl_pNN, ..' \
                '--min-requests'\t'Requests that a condition of a --canary needs before it is believed' \
                '--yes'\t'Change the fleet at the default address without a question' \
                '-y'\t'Change the fleet at the default address without a question' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token'
        case 'thresholds watch'
            printf '%s\n' \
                '--rate'\t'Refresh interval' \
                '--limit'\t'Stop after N lines' \
                '--duration'\t'Stop after this time: 10m' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'config'
            printf '%s\n' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'config show'
            printf '%s\n' \
                '--advise'\t'Show values that fit the lengths of the requests of a live frontend' \
                '--namespace-prefix'\t'Serve all Dynamo namespaces that begin with this' \
                '--event-plane'\t'Event plane for what this frontend publishes to other routers ..' \
                '--migration-limit'\t'How often a response may go on with another Dynamo worker after its ..' \
                '--migration-max-seq-len'\t'Prompt and output above which a response does not go on elsewhere' \
                '--model-name'\t'Model of workers that do not report it' \
                '--kv-cache-block-size'\t'Block size of workers that do not report it' \
                '--index-memory'\t'Memory for the index of cached blocks' \
                '--first-byte-timeout'\t'Time to the first output of a stream or a prefill hop' \
                '--idle-timeout'\t'Longest pause in an engine\'s stream' \
                '--eject-after'\t'Failed requests in a row after which an engine gets none for a pause' \
                '--eject-pause'\t'First pause' \
                '--eject-max-pause'\t'Longest pause' \
                '--panic-threshold'\t'Share of a model\'s workers that should be healthy' \
                '--router-replica-bind'\t'With --router-replica-sync: where other routers read this one\'s load ..' \
                '--router-replica-peer'\t'The --router-replica-bind of another router, tcp://HOST:PORT ..' \
                '--router-replica-nats'\t'Share load over NATS in place of ZMQ: nats://HOST:PORT, several with ..' \
                '--router-replica-group'\t'Over NATS only routers of one group share load' \
                '--index-peer'\t'Begin with the index of this frontend or router, and read from the ..' \
                '--preset'\t'Defaults of dynamo-1.6 or dynamo-0.9 or ttft or throughput' \
                '--router-mode'\t'Rule that chooses the worker' \
                '--router-kv-overlap-score-credit'\t'Blocks of prefill credited per cached block' \
                '--router-kv-overlap-score-credit-decay'\t'How fast the credit falls on workers with more active prefill than ..' \
                '--router-prefill-load-scale'\t'Weight of prefill blocks in the cost (0.9: the overlap score weight, ..' \
                '--router-decode-active-request-weight'\t'Cost in blocks of each active request of a worker' \
                '--router-temperature'\t'0 picks the lowest cost' \
                '--router-track-active-blocks'\t'Count the blocks of running requests as decode load' \
                '--no-router-track-active-blocks'\t'Count the blocks of running requests as decode load' \
                '--router-track-output-blocks'\t'Also count the blocks that generation adds' \
                '--no-router-track-output-blocks'\t'Also count the blocks that generation adds' \
                '--router-assume-kv-reuse'\t'Count a prompt block that running requests share once per worker' \
                '--no-router-assume-kv-reuse'\t'Count a prompt block that running requests share once per worker' \
                '--router-track-prefill-tokens'\t'Count prompt tokens that wait for their first output token as prefill ..' \
                '--no-router-track-prefill-tokens'\t'Count prompt tokens that wait for their first output token as prefill ..' \
                '--active-decode-blocks-threshold'\t'A rank is busy above this fraction of its KV blocks' \
                '--active-prefill-tokens-threshold'\t'A rank is busy above this many active prefill tokens' \
                '--active-prefill-tokens-threshold-frac'\t'A rank is busy above this multiple of its max_num_batched_tokens (may ..' \
                '--router-kv-transfer-topology-level'\t'Topology domain of the router\'s own KV-transfer policy (for workers ..' \
                '--kv-transfer-enforcement'\t'Required never crosses the domain, preferred makes crossing cost ..' \
                '--router-kv-transfer-mismatch-policy'\t'Alias of --kv-transfer-enforcement: fail means required' \
                '--kv-transfer-preferred-weight'\t'Weight of the preference, 0 to 1' \
                '--router-decode-capacity-guard'\t'Choose only prefill workers whose domain has an eligible decode worker' \
                '--no-router-decode-capacity-guard'\t'Choose only prefill workers whose domain has an eligible decode worker' \
                '--router-pair-selection'\t'Greedy chooses the best prefill worker and then decode, best the pair ..' \
                '--router-kv-transfer-weight'\t'Cost in blocks of a second of KV transfer between prefill and decode ..' \
                '--router-kv-transfer-qos'\t'YAML file with latency and bandwidth of each topology level' \
                '--router-own-domains'\t'The frontend\'s own topology domains (zone=a,rack=r1): the latency ..' \
                '--router-conditional-disagg'\t'Conditional disaggregation: a decode worker that has enough of a ..' \
                '--no-router-conditional-disagg'\t'Conditional disaggregation: a decode worker that has enough of a ..' \
                '--router-conditional-disagg-config'\t'The settings of this panel as Dynamo\'s JSON object, without the ..' \
                '--router-bypass-policy'\t'What leaves out the prefill hop: isl-bounding (a short rest of the ..' \
                '--router-bypass-eff-isl-threshold'\t'The decode worker prefills fewer prompt tokens than this by itself' \
                '--router-bypass-eff-isl-ratio-threshold'\t'The decode worker prefills less than this fraction of a prompt by itself' \
                '--router-bypass-prefill-busy-threshold'\t'A prefill worker is busy above this multiple of its ..' \
                '--router-bypass-decode-busy-threshold'\t'Keep the prefill hop where the decode worker would have more active ..' \
                '--router-bypass-require-can-prefill'\t'Leave out the prefill hop only for decode workers that can prefill ..' \
                '--no-router-bypass-require-can-prefill'\t'Leave out the prefill hop only for decode workers that can prefill ..' \
                '--router-taints-in-all-modes'\t'Apply taints and KV-transfer policies in modes other than kv too ..' \
                '--no-router-taints-in-all-modes'\t'Apply taints and KV-transfer policies in modes other than kv too ..' \
                '--router-on-degraded'\t'What cached blocks count for while a worker\'s index is incomplete: ..' \
                '--router-session-affinity-ttl-secs'\t'Session affinity: seconds after the last request of a session ..' \
                '--router-session-affinity-mode'\t'Session affinity: keep the worker while it is eligible (hard), or ..' \
                '--router-session-affinity-yield-blocks'\t'Soft session affinity: blocks by which the session\'s worker may cost ..' \
                '--router-active-request-expiry-secs'\t'Seconds without progress after which a booking expires' \
                '--http-overload-status-code'\t'HTTP status when every eligible worker is busy' \
                '--router-kv-events'\t'Index what workers cache from their KV events (off: estimate it from ..' \
                '--no-router-kv-events'\t'Index what workers cache from their KV events (off: estimate it from ..' \
                '--router-approximate-cache-policy'\t'Approximate mode: forget what was not routed for the TTL (ttl), or ..' \
                '--router-ttl-secs'\t'Approximate mode: seconds for which a routed prefix counts as cached' \
                '--router-max-tree-size'\t'Approximate mode: blocks kept before pruning (none: 1,048,576)' \
                '--router-prune-target-ratio'\t'Approximate mode: fraction of the blocks kept by pruning' \
                '--router-queue-threshold'\t'Requests wait while every worker holds more active prefill tokens ..' \
                '--router-queue-policy'\t'Order of the router queue' \
                '--router-policy-config'\t'YAML file with the policy classes of the router queue' \
                '--router-queue-max-requests'\t'Requests that may wait in the router queue' \
                '--router-queue-max-wait-secs'\t'Seconds that a request may wait in the router queue before it is refused' \
                '--router-host-cache-hit-weight'\t'Credit of a block cached in host memory' \
                '--router-disk-cache-hit-weight'\t'Credit of a block cached on disk' \
                '--router-replica-sync'\t'Share active-request state between router replicas' \
                '--no-router-replica-sync'\t'Share active-request state between router replicas' \
                '--router-predicted-ttl-secs'\t'Seconds for which a routed prefix counts as cached before its events ..' \
                '--router-prefill-load-model'\t'How active prefill tokens fall with time: ais or aic (by an estimate ..' \
                '--ais-backend'\t'Prefill load model: the engine (the estimate is the same for each)' \
                '--ais-backend-version'\t'Prefill load model: the backend\'s version' \
                '--ais-system'\t'Prefill load model: the accelerator, for example h200_sxm' \
                '--ais-model-path'\t'Prefill load model: directory of the model, with its config.json' \
                '--ais-tp-size'\t'Prefill load model: accelerators that share the model (none: 1)' \
                '--encoder-cuda-to-cpu-ratio'\t'Throughput of a non-CPU worker relative to a CPU worker' \
                '--serve-indexer'\t'Serve this router\'s index to other routers' \
                '--no-serve-indexer'\t'Serve this router\'s index to other routers' \
                '--use-remote-indexer'\t'Query a served indexer instead of keeping an index' \
                '--no-use-remote-indexer'\t'Query a served indexer instead of keeping an index' \
                '--router-durable-kv-events'\t'Read KV events from JetStream (deprecated in Dynamo)' \
                '--no-router-durable-kv-events'\t'Read KV events from JetStream (deprecated in Dynamo)' \
                '--router-reset-states'\t'Remove KV events and snapshot from JetStream at start, for all routers' \
                '--no-router-reset-states'\t'Remove KV events and snapshot from JetStream at start, for all routers' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'context'
            printf '%s\n' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'context list'
            printf '%s\n' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'context use'
            printf '%s\n' \
                '--none'\t'Make no context current' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'context add'
            printf '%s\n' \
                '--force'\t'Replace an existing context' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'context show'
            printf '%s\n' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'context remove'
            printf '%s\n' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'check'
            printf '%s\n' \
                '--fail-on'\t'Level for exit code 1: fail, or warn as well' \
                '--suppress'\t'Suppress a check or a finding (repeatable): --suppress \'DYT0902=Pod ..' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'explain'
            printf '%s\n' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'why'
            printf '%s\n' \
                '--last'\t'Explain the last decision' \
                '--all'\t'List all candidates and rejections' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'hits'
            printf '%s\n' \
                '--for'\t'Record a live router for this time, as 5m' \
                '--record'\t'Keep the recording of a live router, so that replays can show gains' \
                '--by'\t'Group by model, domain, tenant, hour or worker' \
                '--from'\t'Judge requests from this time on: 12:04:31, +90s, an ISO time' \
                '--to'\t'Judge requests before this time' \
                '--skip-bad'\t'Leave damaged chunks and bad lines out' \
                '--generate'\t'Generate requests instead of a trace: agentic, chat, rag or batch' \
                '--policy'\t'As replay --policy' \
                '--workers'\t'Workers' \
                '--total-blocks'\t'KV blocks of a worker' \
                '--routers'\t'Routers' \
                '--limit'\t'Only the first N requests' \
                '--seed'\t'Seed' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'audit'
            printf '%s\n' \
                '--min-rate'\t'Exit code 1 below this rate of hits, or where nothing was compared' \
                '--duration'\t'Stop after this time: 10m' \
                '--log'\t'Log of a Dynamo frontend, - for standard input: its costs are ..' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'record'
            printf '%s\n' \
                '--output'\t'Same as the argument FILE, or an output format (json, yaml, ..)' \
                '-o'\t'Same as the argument FILE, or an output format (json, yaml, ..)' \
                '--for'\t'Stop after this time, as 30s or 10m' \
                '--max-bytes'\t'Stop at this size' \
                '--show'\t'Show what the file has' \
                '--skip-bad'\t'With --show: leave damaged chunks out' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'bundle'
            printf '%s\n' \
                '--to'\t'Same as the argument FILE' \
                '--output'\t'Same as the argument FILE, or an output format (json, yaml, ..)' \
                '-o'\t'Same as the argument FILE, or an output format (json, yaml, ..)' \
                '--force'\t'Overwrite an existing file' \
                '--kubernetes'\t'Include topology verify of the kubeconfig\'s cluster' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'completion'
            printf '%s\n' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'version'
            printf '%s\n' \
                '--client'\t'Print the version of this client only' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'options'
            printf '%s\n' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
        case 'help'
            printf '%s\n' \
                '--output'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '-o'\t'Output format: table, wide, json, jsonl, yaml, name' \
                '--timeout'\t'Timeout of a request' \
                '--token-file'\t'File with the bearer token' \
                '--wait'\t'Time limit for reading the workers\' caches'
    end
end

# Prints the possible values of each argument of the command $argv[1].
function __dynctl_arguments
    switch "$argv[1]"
        case 'route'
            printf '%s\n' \
                'free'
        case 'workers show'
            printf '%s\n' \
                'live:worker'
        case 'workers cordon'
            printf '%s\n' \
                'live:worker'
        case 'workers uncordon'
            printf '%s\n' \
                'live:worker'
        case 'workers drain'
            printf '%s\n' \
                'live:worker'
        case 'workers add'
            printf '%s\n' \
                'free'
        case 'workers remove'
            printf '%s\n' \
                'live:worker'
        case 'topology lint'
            printf '%s\n' \
                'file' \
                +
        case 'topology render'
            printf '%s\n' \
                'words:pod cluster-topology controller'
        case 'replay'
            printf '%s\n' \
                'file'
        case 'thresholds get'
            printf '%s\n' \
                'live:model'
        case 'thresholds set'
            printf '%s\n' \
                'live:model'
        case 'context use'
            printf '%s\n' \
                'live:context'
        case 'context add'
            printf '%s\n' \
                'free'
        case 'context show'
            printf '%s\n' \
                'live:context'
        case 'context remove'
            printf '%s\n' \
                'live:context'
        case 'explain'
            printf '%s\n' \
                'words:DYR0101 DYR0102 DYR0103 DYR0104 DYR0201 DYR0202 DYR0203 DYR0204 DYR0205 DYR0206 DYR0207 DYR0208 DYR0209 DYR0210 DYR0211 DYR0212 DYR0301 DYR0302 DYR0303 DYR0304 DYR0305 DYR0306 DYR0307 DYR0308 DYR0309 DYR0401 DYR0402 DYR0403 DYR0404 DYR0405 DYR0406 DYR0407 DYR0408 DYR0409 DYR0410 DYR0411 DYR0412 DYR0501 DYR0502 DYR0503 DYR0701 DYR0702 DYR0703 DYR0704 DYR0705 DYR0706 DYR0707 DYR0708 DYR0709 DYR0710 DYR0711 DYR0712 DYR0713 DYR0714 DYR0715 DYR0716 DYR0717 DYR0718 DYR0719 DYR0720 DYR0721 DYR0722 DYR0723 DYR0724 DYR0725 DYR0726 DYR0727 DYR0728 DYR0730 DYR0734 DYR0740 DYR0741 DYR0742 DYR0743 DYR0744 DYR0745 DYR0746 DYR0748 DYR0760 DYR0761 DYR0762 DYR0763 DYR0764 DYR0765 DYR0766 DYR0767 DYR0768 DYR0769 DYR0780 DYR0785 DYR0790 DYT0001 DYT0002 DYT0003 DYT0004 DYT0005 DYT0101 DYT0102 DYT0103 DYT0104 DYT0105 DYT0106 DYT0107 DYT0108 DYT0109 DYT0110 DYT0111 DYT0112 DYT0113 DYT0114 DYT0115 DYT0116 DYT0117 DYT0118 DYT0119 DYT0120 DYT0201 DYT0202 DYT0203 DYT0204 DYT0205 DYT0206 DYT0207 DYT0208 DYT0209 DYT0210 DYT0211 DYT0212 DYT0213 DYT0214 DYT0215 DYT0301 DYT0302 DYT0303 DYT0304 DYT0401 DYT0402 DYT0403 DYT0404 DYT0405 DYT0406 DYT0407 DYT0408 DYT0409 DYT0410 DYT0411 DYT0501 DYT0502 DYT0503 DYT0504 DYT0505 DYT0506 DYT0507 DYT0601 DYT0602 DYT0603 DYT0604 DYT0701 DYT0702 DYT0703 DYT0704 DYT0705 DYT0706 DYT0707 DYT0708 DYT0709 DYT0710 DYT0801 DYT0802 DYT0803 DYT0804 DYT0805 DYT0901 DYT0902 DYT0903 DYT0904 DYT0905 DYT0906 DYT0907 DYT0908 DYT0909 BACKGROUND_TASK_FAILED BLOCKS_NOT_LISTED BLOCK_SIZE_MISMATCH CAPACITY_UNKNOWN DISCOVERY_INTERRUPTED ENGINE_ALREADY_ATTACHED ENGINE_NOT_READY ENGINE_RESTARTED ENGINE_TOKENIZERS_DIFFER EVENTS_LOST EVENTS_OVERFLOW EXTRA_KEYS_NOT_MODELLED FOREIGN_PUBLISHER GROUP_IGNORED INDEXER_LOST INDEX_OVER_LIMIT LEASE_LOST LEVEL_NOT_PUBLISHED LOAD_OVERDUE MALFORMED_BATCH MALFORMED_MESSAGE MODEL_FILES_DIFFER MODEL_FILES_INVALID MODEL_NOT_SERVED NO_TOKENIZER NO_WORKERS POLICY_CONFLICT PROCESS_RESTARTED REGISTRATION_INTERRUPTED REPLAY_UNAVAILABLE REPLICA_BEHIND REPLICA_OVER_LIMIT REPLICA_SILENT REPLICA_WORKERS_DIFFER REQUEST_PLANE_LOST ROUTER_LOST SNAPSHOT_NOT_WRITTEN SNAPSHOT_REFUSED SPEC_DIFFERS_FROM_ENGINE STREAM_DISCONNECTED TIER_NOT_DESCRIBED TOKENIZER_DIFFERS TOKEN_IDS_TOO_SHORT TOO_FEW_WELL TRACES_NOT_EXPORTED TRANSFER_CROSSED UNKNOWN_ADAPTER UNKNOWN_EVENT UNKNOWN_MEDIUM WORKERS_BUSY WORKERS_FILE_INVALID WORKER_CORDONED WORKER_EJECTED WORKER_REJECTED WORKER_UNREACHABLE'
        case 'why'
            printf '%s\n' \
                'free'
        case 'hits'
            printf '%s\n' \
                'file' \
                +
        case 'record'
            printf '%s\n' \
                'file'
        case 'bundle'
            printf '%s\n' \
                'file'
        case 'completion'
            printf '%s\n' \
                'words:bash zsh fish'
        case 'help'
            printf '%s\n' \
                'words:demo serve route workers topology replay top decisions events thresholds config context check explain why hits audit record bundle completion version options help' \
                +
    end
end

# Prints the values of option $argv[2] of the command $argv[1]; nothing for a switch.
function __dynctl_meaning
    switch "$argv[1]:$argv[2]"
        case 'thresholds set:--active-decode-blocks-threshold' 'thresholds set:--active-prefill-tokens-threshold' 'thresholds set:--active-prefill-tokens-threshold-frac'
            echo 'words:off'
        case 'bundle:--to'
            echo 'file'
        case 'topology render:--enforcement'
            echo 'words:required preferred'
        case 'replay:--enforcement'
            echo 'words:none preferred required fallback'
        case 'events tail:--kind'
            echo 'words:stored removed cleared unknown gap restart malformed foreign disconnect reconnect joined left skipped load booked prefilled freed'
        case 'demo:--output' 'top:--output' 'completion:--output' 'demo:-o' 'top:-o' 'completion:-o'
            echo 'words:table wide json jsonl yaml'
        case 'topology verify:--output' 'topology lint:--output' 'check:--output' 'topology verify:-o' 'topology lint:-o' 'check:-o'
            echo 'words:table wide json jsonl yaml name junit'
        case 'topology render:--output' 'topology render:-o'
            echo 'words:table yaml json'
        case 'replay:--output' 'replay:-o'
            echo 'words:table wide json jsonl yaml name csv'
        case 'decisions tail:--output' 'events tail:--output' 'thresholds watch:--output' 'decisions tail:-o' 'events tail:-o' 'thresholds watch:-o'
            echo 'words:table wide jsonl'
        case 'decisions:--worker' 'decisions list:--worker' 'decisions tail:--worker' 'events tail:--worker'
            echo 'live:worker'
        case 'topology render:--domain' 'serve engine:--model'
            echo 'free'
        case '*:--active-decode-blocks' '*:--active-prefill-tokens' '*:--active-prefill-tokens-frac'
            echo 'words:off'
        case '*:--admin-token-file' '*:--api-key-file' '*:--ca-cert' '*:--engine-api-key-file' '*:--file' '*:--frontend-log' '*:--kubeconfig' '*:--log' '*:--messages' '*:--plot' '*:--record' '*:--recording' '*:--router-kv-transfer-qos' '*:--router-policy-config' '*:--router-token-file' '*:--save-view' '*:--tls-cert' '*:--tls-key' '*:--token-file' '*:--tokens' '*:--view' '*:--workers-file' '*:-f'
            echo 'file'
        case '*:--against' '*:--kube-context'
            echo 'live:kube-context'
        case '*:--ais-backend'
            echo 'words:vllm sglang trtllm'
        case '*:--ais-model-path' '*:--file-kv' '*:--model-path' '*:--mount-path' '*:--path' '*:--snapshot'
            echo 'folder'
        case '*:--answer-parsing'
            echo 'words:text dynamo-1.6'
        case '*:--by'
            echo 'words:model domain tenant hour worker'
        case '*:--context'
            echo 'live:context'
        case '*:--discovery'
            echo 'words:file etcd kubernetes'
        case '*:--domain'
            echo 'live:domain'
        case '*:--enforcement'
            echo 'words:required preferred fallback none'
        case '*:--engine-type'
            echo 'words:auto vllm sglang'
        case '*:--etcd-client'
            echo 'words:etcd3 gateway'
        case '*:--event-plane'
            echo 'words:zmq nats'
        case '*:--exec' '*:--logs'
            echo 'words:auto all sample none'
        case '*:--fail-on'
            echo 'words:fail warn'
        case '*:--generate'
            echo 'words:agentic chat rag batch'
        case '*:--kind'
            echo 'words:ClusterTopologyBinding ClusterTopology'
        case '*:--kv-load-failure-policy'
            echo 'words:recompute fail'
        case '*:--kv-transfer-enforcement'
            echo 'words:required preferred fallback'
        case '*:--log-decisions'
            echo 'words:off winner all'
        case '*:--log-format'
            echo 'words:text json'
        case '*:--log-level'
            echo 'words:debug info warning error'
        case '*:--model'
            echo 'live:model'
        case '*:--output' '*:-o'
            echo 'words:table wide json jsonl yaml name'
        case '*:--over'
            echo 'live:domain-value'
        case '*:--pin-decode' '*:--pin-prefill'
            echo 'live:worker'
        case '*:--preset'
            echo 'words:dynamo-1.6 dynamo-0.9 ttft throughput'
        case '*:--reach'
            echo 'words:auto direct port-forward'
        case '*:--request-plane'
            echo 'words:tcp nats'
        case '*:--require-taint'
            echo 'live:taint'
        case '*:--role'
            echo 'words:aggregated prefill decode'
        case '*:--router-approximate-cache-policy'
            echo 'words:ttl lru'
        case '*:--router-bypass-policy'
            echo 'words:isl-bounding prefill-load isl-or-load'
        case '*:--router-kv-transfer-mismatch-policy'
            echo 'words:fail fallback'
        case '*:--router-mode'
            echo 'words:kv round-robin random power-of-two least-loaded direct device-aware-weighted'
        case '*:--router-on-degraded'
            echo 'words:discount approximate load-only full'
        case '*:--router-pair-selection'
            echo 'words:greedy best'
        case '*:--router-prefill-load-model'
            echo 'words:none ais aic measured'
        case '*:--router-queue-policy'
            echo 'words:fcfs wspt lcfs'
        case '*:--router-session-affinity-mode'
            echo 'words:hard soft'
        case '*:--selector' '*:-l'
            echo 'live:selector'
        case '*:--stale'
            echo 'words:report starting always'
        case '*:--suppress'
            echo 'words:DYR0101 DYR0102 DYR0103 DYR0104 DYR0201 DYR0202 DYR0203 DYR0204 DYR0205 DYR0206 DYR0207 DYR0208 DYR0209 DYR0210 DYR0211 DYR0212 DYR0301 DYR0302 DYR0303 DYR0304 DYR0305 DYR0306 DYR0307 DYR0308 DYR0309 DYR0401 DYR0402 DYR0403 DYR0404 DYR0405 DYR0406 DYR0407 DYR0408 DYR0409 DYR0410 DYR0411 DYR0412 DYR0501 DYR0502 DYR0503 DYR0701 DYR0702 DYR0703 DYR0704 DYR0705 DYR0706 DYR0707 DYR0708 DYR0709 DYR0710 DYR0711 DYR0712 DYR0713 DYR0714 DYR0715 DYR0716 DYR0717 DYR0718 DYR0719 DYR0720 DYR0721 DYR0722 DYR0723 DYR0724 DYR0725 DYR0726 DYR0727 DYR0728 DYR0730 DYR0734 DYR0740 DYR0741 DYR0742 DYR0743 DYR0744 DYR0745 DYR0746 DYR0748 DYR0760 DYR0761 DYR0762 DYR0763 DYR0764 DYR0765 DYR0766 DYR0767 DYR0768 DYR0769 DYR0780 DYR0785 DYR0790 DYT0001 DYT0002 DYT0003 DYT0004 DYT0005 DYT0101 DYT0102 DYT0103 DYT0104 DYT0105 DYT0106 DYT0107 DYT0108 DYT0109 DYT0110 DYT0111 DYT0112 DYT0113 DYT0114 DYT0115 DYT0116 DYT0117 DYT0118 DYT0119 DYT0120 DYT0201 DYT0202 DYT0203 DYT0204 DYT0205 DYT0206 DYT0207 DYT0208 DYT0209 DYT0210 DYT0211 DYT0212 DYT0213 DYT0214 DYT0215 DYT0301 DYT0302 DYT0303 DYT0304 DYT0401 DYT0402 DYT0403 DYT0404 DYT0405 DYT0406 DYT0407 DYT0408 DYT0409 DYT0410 DYT0411 DYT0501 DYT0502 DYT0503 DYT0504 DYT0505 DYT0506 DYT0507 DYT0601 DYT0602 DYT0603 DYT0604 DYT0701 DYT0702 DYT0703 DYT0704 DYT0705 DYT0706 DYT0707 DYT0708 DYT0709 DYT0710 DYT0801 DYT0802 DYT0803 DYT0804 DYT0805 DYT0901 DYT0902 DYT0903 DYT0904 DYT0905 DYT0906 DYT0907 DYT0908 DYT0909 BACKGROUND_TASK_FAILED BLOCKS_NOT_LISTED BLOCK_SIZE_MISMATCH CAPACITY_UNKNOWN DISCOVERY_INTERRUPTED ENGINE_ALREADY_ATTACHED ENGINE_NOT_READY ENGINE_RESTARTED ENGINE_TOKENIZERS_DIFFER EVENTS_LOST EVENTS_OVERFLOW EXTRA_KEYS_NOT_MODELLED FOREIGN_PUBLISHER GROUP_IGNORED INDEXER_LOST INDEX_OVER_LIMIT LEASE_LOST LEVEL_NOT_PUBLISHED LOAD_OVERDUE MALFORMED_BATCH MALFORMED_MESSAGE MODEL_FILES_DIFFER MODEL_FILES_INVALID MODEL_NOT_SERVED NO_TOKENIZER NO_WORKERS POLICY_CONFLICT PROCESS_RESTARTED REGISTRATION_INTERRUPTED REPLAY_UNAVAILABLE REPLICA_BEHIND REPLICA_OVER_LIMIT REPLICA_SILENT REPLICA_WORKERS_DIFFER REQUEST_PLANE_LOST ROUTER_LOST SNAPSHOT_NOT_WRITTEN SNAPSHOT_REFUSED SPEC_DIFFERS_FROM_ENGINE STREAM_DISCONNECTED TIER_NOT_DESCRIBED TOKENIZER_DIFFERS TOKEN_IDS_TOO_SHORT TOO_FEW_WELL TRACES_NOT_EXPORTED TRANSFER_CROSSED UNKNOWN_ADAPTER UNKNOWN_EVENT UNKNOWN_MEDIUM WORKERS_BUSY WORKERS_FILE_INVALID WORKER_CORDONED WORKER_EJECTED WORKER_REJECTED WORKER_UNREACHABLE'
        case '*:--tokenizer'
            echo 'words:auto fast exact'
        case '*:--active-decode-blocks-threshold' '*:--active-prefill-tokens-threshold' '*:--active-prefill-tokens-threshold-frac' '*:--admin-token' '*:--advertise-host' '*:--ais-backend-version' '*:--ais-system' '*:--ais-tp-size' '*:--api-key' '*:--api-token' '*:--at' '*:--block-bytes' '*:--block-size' '*:--body-limit' '*:--cache-salt' '*:--canary' '*:--capacity' '*:--container' '*:--controller-namespace' '*:--data-parallel-size' '*:--decision-memory' '*:--decode-itl-ms' '*:--default-output-tokens' '*:--dgd' '*:--disk-blocks' '*:--disk-gb-per-s' '*:--drain-timeout' '*:--drain-timeout-s' '*:--duration' '*:--dyn-namespace' '*:--dynamo-frontend' '*:--eject-after' '*:--eject-max-pause' '*:--eject-pause' '*:--encoder-cuda-to-cpu-ratio' '*:--endpoint' '*:--engine' '*:--engine-api-key' '*:--etcd-endpoints' '*:--events-delay-ms' '*:--events-loss' '*:--fault-die-mid-stream-after' '*:--fault-drop-events' '*:--fault-refuse' '*:--fault-slow-factor' '*:--first-byte-timeout' '*:--follow' '*:--for' '*:--from' '*:--frontend' '*:--header-timeout' '*:--health-port' '*:--host' '*:--host-blocks' '*:--host-gb-per-s' '*:--http-host' '*:--http-overload-status-code' '*:--http-port' '*:--idle-timeout' '*:--image' '*:--index-memory' '*:--index-peer' '*:--init-timeout' '*:--itl-limit-ms' '*:--keep-alive-timeout' '*:--key-concurrency' '*:--key-requests-per-minute' '*:--kv-bytes-per-token' '*:--kv-cache-block-size' '*:--kv-events' '*:--kv-events-buffer-steps' '*:--kv-events-topic' '*:--kv-hold-timeout-s' '*:--kv-transfer-cross-domain-factor' '*:--kv-transfer-ms-per-block' '*:--kv-transfer-preferred-weight' '*:--label-key' '*:--lease-namespace' '*:--level' '*:--limit' '*:--loads' '*:--lora' '*:--lose' '*:--max-body-bytes' '*:--max-bytes' '*:--max-model-len' '*:--max-num-batched-tokens' '*:--max-num-seqs' '*:--max-regress' '*:--max-waiting' '*:--migration-limit' '*:--migration-max-seq-len' '*:--min-rate' '*:--min-requests' '*:--model-name' '*:--name' '*:--namespace' '*:--namespace-prefix' '*:--nats-server' '*:--otlp-endpoint' '*:--otlp-sample-ratio' '*:--outcome' '*:--panic-threshold' '*:--peer-connections' '*:--peers' '*:--pod-domain' '*:--pod-kv-events' '*:--pod-replay' '*:--pod-role-label' '*:--policy' '*:--pool' '*:--port' '*:--prefer-taint' '*:--preferred-weight' '*:--prefill-tokens-per-s' '*:--probe' '*:--process-timeout' '*:--processes' '*:--rate' '*:--ratio' '*:--reasoning-parser' '*:--record-max-bytes' '*:--replay' '*:--replays' '*:--request-port' '*:--response-port' '*:--revert-if' '*:--router' '*:--router-active-request-expiry-secs' '*:--router-bypass-decode-busy-threshold' '*:--router-bypass-eff-isl-ratio-threshold' '*:--router-bypass-eff-isl-threshold' '*:--router-bypass-prefill-busy-threshold' '*:--router-conditional-disagg-config' '*:--router-decode-active-request-weight' '*:--router-disk-cache-hit-weight' '*:--router-host-cache-hit-weight' '*:--router-kv-overlap-score-credit' '*:--router-kv-overlap-score-credit-decay' '*:--router-kv-transfer-topology-level' '*:--router-kv-transfer-weight' '*:--router-max-tree-size' '*:--router-own-domains' '*:--router-predicted-ttl-secs' '*:--router-prefill-load-scale' '*:--router-prune-target-ratio' '*:--router-queue-max-requests' '*:--router-queue-max-wait-secs' '*:--router-queue-threshold' '*:--router-replica-bind' '*:--router-replica-group' '*:--router-replica-nats' '*:--router-replica-peer' '*:--router-session-affinity-ttl-secs' '*:--router-session-affinity-yield-blocks' '*:--router-temperature' '*:--router-token' '*:--router-ttl-secs' '*:--routers' '*:--routing-group' '*:--rpc-host' '*:--search' '*:--seed' '*:--seeds' '*:--select-service-port' '*:--session-id' '*:--set' '*:--slot-tracker-port' '*:--snapshot-interval' '*:--sort-by' '*:--speed' '*:--speedup-ratio' '*:--stream-timeout' '*:--sync-delay-ms' '*:--system-host' '*:--system-port' '*:--tail' '*:--target' '*:--timeout' '*:--to' '*:--token' '*:--token-env' '*:--tool-call-parser' '*:--total-blocks' '*:--trace-block-size' '*:--ttft-limit' '*:--unix-socket' '*:--wait' '*:--watch-namespace' '*:--weight' '*:--worker' '*:--workers' '*:--workload' '*:--zone' '*:--zones' '*:-n'
            echo 'free'
    end
end

# Prints the values of $argv[1] for the value $argv[2]; $argv[3] is the part of the word before it,
# $argv[4] the program, and the rest the words before.
function __dynctl_offer
    set -l lead $argv[3]
    switch $argv[1]
        case 'words:*'
            for word in (string split ' ' -- (string replace 'words:' '' -- $argv[1]))
                printf '%s\n' "$lead$word"
            end
        case 'live:*'
            set -l exe $argv[4]
            set -l kind (string replace 'live:' '' -- $argv[1])
            type -q -- "$exe"; or set exe dynctl
            for word in (command $exe __complete $kind "$argv[2]" $argv[5..-1] 2>/dev/null)
                printf '%s\n' "$lead$word"
            end
        case file
            for word in (__fish_complete_path "$argv[2]")
                printf '%s\n' "$lead$word"
            end
        case folder
            for word in (__fish_complete_directories "$argv[2]" '')
                printf '%s\n' "$lead$word"
            end
    end
end

function __dynctl_complete
    set -l before (commandline -opc)
    set -l current (commandline -ct)
    set -l exe $before[1]
    set -e before[1]
    set -l at ''
    set -l place 1
    set -l closed ''
    set -l meaning ''
    for word in $before
        if test -n "$meaning"
            set meaning ''
        else if test -n "$closed"
            set place (math $place + 1)
        else if test "x$word" = x--
            set closed yes
        else if string match -q -- '--*=*' $word
            continue
        else if string match -qr -- '^-.' $word
            set meaning (__dynctl_meaning "$at" $word)
        else if contains -- $word (__dynctl_commands "$at" | string replace -r '\t.*' '')
            set at (string trim -- "$at $word")
        else
            set place (math $place + 1)
        end
    end
    if test -n "$meaning"
        __dynctl_offer $meaning "$current" '' $exe $before
    else if test -z "$closed"; and string match -q -- '--*=*' "$current"
        set -l parts (string split -m 1 '=' -- $current)
        set meaning (__dynctl_meaning "$at" $parts[1])
        __dynctl_offer "$meaning" "$parts[2]" "$parts[1]=" $exe $before
    else if test -z "$closed"; and string match -q -- '-*' "$current"
        __dynctl_flags "$at"
    else
        set -l names (__dynctl_commands "$at")
        set -l arguments (__dynctl_arguments "$at")
        if test (count $names) -gt 0
            test $place -eq 1; and printf '%s\n' $names
        else if test (count $arguments) -gt 0
            # After a `+` the last argument repeats.
            if test "$arguments[-1]" = +
                set -e arguments[-1]
                test $place -gt (count $arguments); and set place (count $arguments)
            end
            test $place -le (count $arguments)
            and __dynctl_offer $arguments[$place] "$current" '' $exe $before
        end
    end
end

complete -c dynctl -f -a '(__dynctl_complete)'
