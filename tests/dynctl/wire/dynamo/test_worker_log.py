from dynctl.wire.dynamo.worker_log import read_start_log

CONFIGURED = (
    "2026-11-21T12:00:02Z  INFO topology.read_topology_config: Topology config: "
    "TopologyConfig(topology_domains={'zone': 'us-east-1a', 'rack': 'r)1'}, "
    "kv_transfer_domain='zone', kv_transfer_enforcement='preferred', "
    "kv_transfer_preferred_weight=0.85) (from /etc/dynamo/topology)"
)
TIMED_OUT = (
    "ERROR topology: DYN_TOPOLOGY_ENABLED is set but topology file /etc/dynamo/topology/zone was "
    "not populated within 30s. Exiting."
)


def test_the_line_of_success_has_domains_and_policy() -> None:
    config = read_start_log(["something else", CONFIGURED, "and more"]).config

    assert config == {
        "topology_domains": {"zone": "us-east-1a", "rack": "r)1"},
        "kv_transfer_domain": "zone",
        "kv_transfer_enforcement": "preferred",
        "kv_transfer_preferred_weight": 0.85,
    }


def test_the_line_without_its_mount_is_read_too() -> None:
    line = CONFIGURED.partition(" (from")[0]

    assert read_start_log([line]).config is not None


def test_the_last_start_in_a_log_counts() -> None:
    later = CONFIGURED.replace("us-east-1a", "us-east-1b")
    config = read_start_log([CONFIGURED, TIMED_OUT, later]).config

    assert config is not None
    assert config["topology_domains"]["zone"] == "us-east-1b"


def test_a_timed_out_worker_and_an_unregistered_worker_differ() -> None:
    refused = "WARN Failed to persist metadata to CR, rolling back local state: forbidden"

    gave_up = read_start_log([TIMED_OUT])
    unregistered = read_start_log([refused])

    assert "was not populated within 30s" in gave_up.timed_out
    assert not gave_up.not_persisted
    assert "forbidden" in unregistered.not_persisted
    assert not unregistered.timed_out


def test_a_coloured_line_is_read_from_its_first_word() -> None:
    """As Dynamo 1.6.1 writes them in a pod; the refusal goes on for hundreds of characters."""
    time = "\x1b[2m2026-11-21T12:00:02.425576Z\x1b[0m \x1b[33m WARN\x1b[0m "
    place = "\x1b[2mdynamo_runtime::discovery::kube\x1b[0m\x1b[2m:\x1b[0m "
    failed = "Failed to persist metadata to CR, rolling back local state: "
    found = read_start_log(
        [
            f"{time}{place}{failed}Failed to apply DynamoWorkerMetadata prod/w: {'x' * 900}\n",
            f"{time}{TIMED_OUT}\x1b[0m\n",
        ]
    )
    assert found.not_persisted.startswith(failed + "Failed to apply DynamoWorkerMetadata prod/w")
    assert found.timed_out == TIMED_OUT.partition(": ")[2]
    gave_up = read_start_log([f"{time}/etc/zone was not populated within 30s\x1b[0m"])
    assert gave_up.timed_out == "was not populated within 30s"


def test_an_invalid_configuration_is_none() -> None:
    for strange in (
        "Topology config: TopologyConfig(topology_domains=__import__('os'))",
        "Topology config: TopologyConfig(" + "x" * 50_000 + ")",
        "Topology config: TopologyConfig(()",
        "Topology config: None",
    ):
        assert read_start_log([strange]).config is None


def test_long_lines_are_shortened() -> None:
    assert len(read_start_log(["x" * 10_000 + TIMED_OUT]).timed_out) <= 300
