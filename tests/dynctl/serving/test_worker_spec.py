"""Worker specs on the command line and in a file."""

import pytest

from dynctl.serving.engines.worker_spec import WorkerSpecError, parse_worker_spec, worker_spec
from dynctl.serving.engines.workers_file import WorkersFileError, read_workers_file
from router_core import Role


def test_everything_that_a_spec_can_say():
    spec = parse_worker_spec(
        "http://10.0.0.1:8001/v1/,name=p0,role=prefill,zone=zone-a,rack=r1,"
        "kv-events=tcp://10.0.0.1:5557,replay=tcp://*:5558,block_size=32,dp=4,total-blocks=1000,"
        "model=m,bootstrap=10.0.0.1:8998,can-prefill=false,device=CPU,taint=spot,taint=h100"
    )
    assert spec.url == "http://10.0.0.1:8001"
    assert (spec.name, spec.role, spec.model) == ("p0", Role.PREFILL, "m")
    assert spec.domains == {"zone": "zone-a", "rack": "r1"}
    assert (spec.kv_events, spec.replay) == ("tcp://10.0.0.1:5557", "tcp://*:5558")
    assert (spec.block_size, spec.dp, spec.total_blocks) == (32, 4, 1000)
    assert spec.bootstrap == "10.0.0.1:8998"
    assert spec.can_prefill is False
    assert spec.device == "cpu"
    assert spec.taints == ("spot", "h100")


def test_what_is_left_out_is_unknown_and_the_name_comes_from_the_address():
    spec = parse_worker_spec("http://127.0.0.1:8001")
    assert spec.name == "127.0.0.1:8001"
    assert (spec.role, spec.kv_events, spec.block_size, spec.model) == (None, None, None, None)
    assert parse_worker_spec("http://127.0.0.1:8001,kv-events=off").kv_events == ""
    local = parse_worker_spec("http://127.0.0.1:8001,kv-events=ipc:///run/kv.sock")
    assert local.kv_events == "ipc:///run/kv.sock"


def test_a_worker_keeps_its_id_over_restarts():
    one = parse_worker_spec("http://127.0.0.1:8001,name=a")
    other = parse_worker_spec("http://127.0.0.1:9999,name=a")
    assert one.worker_id == other.worker_id == 16629034431890738719
    assert one.worker_id != parse_worker_spec("http://127.0.0.1:8001,name=b").worker_id


@pytest.mark.parametrize("rest", ["", ",name=a,name=b", ":x,name=a", "?x,name=a", ",zone="])
def test_a_password_in_an_address_is_not_repeated(rest: str):
    for user in ("", "u", "u@v"):
        with pytest.raises(WorkerSpecError) as caught:
            parse_worker_spec(f"http://{user}:s3cret@127.0.0.1:1{rest}")
        assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "url is ''; expected http://HOST:PORT"),
        ("127.0.0.1:8001", "url is '127.0.0.1:8001'"),
        ("ftp://x:1", "expected http://HOST:PORT"),
        ("http://u:p@x:1", "must not have credentials"),
        ("http://x:99999", "url is"),
        ("http://x:1,name", "'name' is not key=value"),
        ("http://x:1,name=a,name=b", "name occurs twice"),
        ("http://x:1,role=prefil", "role is 'prefil'; expected aggregated or prefill or decode"),
        ("http://x:1,rol=prefill", "did you mean role?"),
        ("http://x:1,kv_event=tcp://x:1", "did you mean kv-events?"),
        ("http://x:1,kv-events=x:1", "expected tcp://HOST:PORT"),
        ("http://x:1,kv-events=ipc://kv.sock", "expected tcp://HOST:PORT or ipc:///PATH"),
        ("http://x:1,replay=tcp://x:99999", "replay is 'tcp://x:99999'"),
        ("http://x:1,block-size=0", "block-size is '0'; expected tokens per block, 1 to 4096"),
        ("http://x:1,block-size=x", "block-size is 'x'"),
        ("http://x:1,dp=9999", "expected data-parallel ranks, 1 to 1024"),
        ("http://x:1,zone=", "domain zone is ''"),
        ("http://x:1,zone=a=b", "without '='"),
        ("http://x:1,zone!=a", "domain 'zone!'"),
        ("http://x:1,name=a b", "name is 'a b'"),
        ("http://x:1,bootstrap=8998", "expected HOST:PORT"),
        ("http://x:1,can-prefill=perhaps", "expected true or false"),
        ("http://x:1,device=", "device is ''; expected cpu, or the kind of accelerator"),
    ],
)
def test_errors_name_key_value_and_expectation(text, says):
    with pytest.raises(WorkerSpecError) as caught:
        parse_worker_spec(text)
    assert says in str(caught.value)


def test_a_mapping_may_group_its_domains():
    spec = worker_spec({"url": "http://x:1", "domains": {"zone": "a"}, "rack": "r"}, where="w")
    assert spec.domains == {"zone": "a", "rack": "r"}
    slip = {"url": "http://x:1", "domains": {"roles": "a"}}
    assert worker_spec(slip, where="w").domains == {"roles": "a"}  # meant, since it is put there


def test_a_workers_file(tmp_path):
    path = tmp_path / "workers.yaml"
    path.write_text(
        "workers:\n"
        "  - url: http://127.0.0.1:8001\n    name: p0\n    role: prefill\n    zone: zone-a\n"
        "  - {url: 'http://127.0.0.1:8002', name: d0, role: decode, kv-events: false, dp: 2}\n"
    )
    first, second = read_workers_file(path)
    assert (first.name, first.domains) == ("p0", {"zone": "zone-a"})
    assert (second.kv_events, second.dp) == ("", 2)
    path.write_text("- {url: 'http://127.0.0.1:8001'}\n")
    assert read_workers_file(path)[0].name == "127.0.0.1:8001"
    path.write_text("workers: []\n")
    assert read_workers_file(path) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("workers: 3", "expected a list of workers"),
        ("", "expected a list of workers"),
        ("workers: [3]", "workers[0]: expected keys and values"),
        ("workers: [{name: a}]", "workers[0]: url is missing"),
        ("workers: [{url: 'http://x:1', role: x}]", "workers[0]: role is 'x'"),
        ("workers: [{url: 'http://x:1', name: a}, {url: 'http://x:2', name: a}]", "occurs twice"),
        ("workers: [", "invalid YAML: line"),
        ("- {url: 'http://x:1', url: 'http://x:2'}", "the key 'url' occurs twice"),
        ("- {url: 'http://x:1', role: !!bool x}", "invalid YAML"),
        ("!!python/object/apply:os.system ['true']", "invalid YAML"),
    ],
)
def test_a_bad_workers_file_names_the_entry(tmp_path, text, says):
    path = tmp_path / "workers.yaml"
    path.write_text(text)
    with pytest.raises(WorkersFileError) as caught:
        read_workers_file(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_name_like_a_date_is_text(tmp_path):
    path = tmp_path / "workers.yaml"
    path.write_text("- {url: 'http://x:1', name: 2026-13-45}")
    assert read_workers_file(path)[0].name == "2026-13-45"


def test_a_missing_workers_file(tmp_path):
    with pytest.raises(WorkersFileError, match="the file does not exist"):
        read_workers_file(tmp_path / "none.yaml")
