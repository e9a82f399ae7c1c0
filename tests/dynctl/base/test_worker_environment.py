"""The worker environment contract, row by row, on a fake clock.

Messages marked "captured" are those of Dynamo 1.6.1 workers (topology-validation-mocker.txt,
log-topology-missing.txt).
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from dynctl.base.worker_environment import (
    DEFAULT_MOUNT_PATH,
    VARIABLES,
    TopologyConfig,
    TopologyEnvironmentError,
    read_domain_files,
    read_worker_environment,
    variables_without_effect,
)


class World:
    """A clock that moves only when the reader sleeps, and what was logged."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.sleeps: list[float] = []
        self.lines: list[tuple[int, str]] = []
        self.at: dict[int, Callable[[], object]] = {}

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.time += seconds
        self.at.pop(len(self.sleeps), lambda: None)()

    def read(self, env: Mapping[str, str]) -> TopologyConfig | None:
        return read_worker_environment(
            env,
            now=lambda: self.time,
            sleep=self.sleep,
            log=lambda level, line: self.lines.append((level, line)),
        )


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    (tmp_path / "zone").write_text("us-east-1a\n")
    return tmp_path


def env(mount: Path, **more: str) -> dict[str, str]:
    return {
        "DYN_TOPOLOGY_ENABLED": "true",
        "DYN_TOPOLOGY_MOUNT_PATH": str(mount),
        "DYN_KV_TRANSFER_DOMAIN": "zone",
    } | more


# -- switched on or off ------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["true", "True", "1", "on", "YES", " yes "])
@pytest.mark.seed("router-topology: worker environment: DYN_TOPOLOGY_ENABLED")
def test_truthy_words_turn_it_on(world: World, mount: Path, word: str) -> None:
    assert world.read(env(mount, DYN_TOPOLOGY_ENABLED=word)) is not None


@pytest.mark.parametrize("word", ["", "false", "0", "off", "no", "False"])
def test_falsy_words_keep_it_off_in_silence(world: World, mount: Path, word: str) -> None:
    assert world.read(env(mount, DYN_TOPOLOGY_ENABLED=word)) is None
    assert world.lines == []


def test_unset_is_off(world: World) -> None:
    assert world.read({"DYN_KV_TRANSFER_DOMAIN": "zone"}) is None
    assert world.lines == []


def test_an_unknown_word_warns_and_stays_off(world: World, mount: Path) -> None:
    assert world.read(env(mount, DYN_TOPOLOGY_ENABLED="maybe")) is None
    captured = (
        "Unrecognized DYN_TOPOLOGY_ENABLED='maybe', treating as disabled; use 'true'/'false' "
        "(or 1/0, on/off, yes/no)"
    )
    assert world.lines == [(logging.WARNING, captured)]


# -- the domain --------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, "", "  "])
@pytest.mark.seed("router-topology: worker environment: DYN_KV_TRANSFER_DOMAIN")
def test_no_transfer_domain_fails_at_once(world: World, mount: Path, value: str | None) -> None:
    variables = env(mount)
    del variables["DYN_KV_TRANSFER_DOMAIN"]
    if value is not None:
        variables["DYN_KV_TRANSFER_DOMAIN"] = value
    with pytest.raises(TopologyEnvironmentError) as error:
        world.read(variables)
    assert str(error.value).startswith(
        "DYN_TOPOLOGY_ENABLED is set but DYN_KV_TRANSFER_DOMAIN is not set."
    )
    assert str(error.value).endswith("Exiting.")
    assert world.sleeps == []


@pytest.mark.parametrize("domain", ["../zone", "a/b", ".zone"])
def test_a_domain_is_a_plain_file_name(world: World, mount: Path, domain: str) -> None:
    with pytest.raises(TopologyEnvironmentError, match="DYN_KV_TRANSFER_DOMAIN is"):
        world.read(env(mount, DYN_KV_TRANSFER_DOMAIN=domain))


@pytest.mark.seed("dep-topology: startup failures: topology files not present")
@pytest.mark.parametrize("content", [None, "", " \n"])
def test_a_missing_or_empty_file_is_polled_for_30_seconds(
    world: World, tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "zone").write_text(content)
    with pytest.raises(TopologyEnvironmentError) as error:
        world.read(env(tmp_path))
    captured = (
        f"DYN_TOPOLOGY_ENABLED is set but topology file {tmp_path}/zone was not populated within "
        "30s. This indicates the configured topology source did not publish the selected transfer "
        "domain. Exiting."
    )
    assert str(error.value) == captured
    assert world.sleeps == [1.0] * 30
    assert world.lines == [
        (
            logging.INFO,
            f"Waiting for topology domain zone in {tmp_path} ({left}s remaining)...",
        )
        for left in range(30, 0, -1)
    ]


def test_a_slow_clock_does_not_wait_longer_than_30_seconds(world: World, tmp_path: Path) -> None:
    oversleeps = World()
    oversleeps.sleep = lambda seconds: setattr(  # type: ignore[method-assign]
        oversleeps, "time", oversleeps.time + seconds + 6.5
    )
    with pytest.raises(TopologyEnvironmentError, match="within 30s"):
        oversleeps.read(env(tmp_path))
    assert oversleeps.time - 1000.0 < 40
    assert [line.rpartition("(")[2] for _, line in oversleeps.lines] == [
        f"{left}s remaining)..." for left in (30, 29, 28, 27)
    ]


def test_a_missing_directory_is_waited_for_too(world: World, tmp_path: Path) -> None:
    later = tmp_path / "later"

    def mount() -> None:
        later.mkdir()
        (later / "zone").write_text("b")

    world.at[3] = mount
    config = world.read(env(later))
    assert config is not None
    assert config.topology_domains == {"zone": "b"}
    assert world.sleeps == [1.0] * 3


def test_a_file_that_fills_in_the_last_second_counts(world: World, tmp_path: Path) -> None:
    world.at[30] = lambda: (tmp_path / "zone").write_text("a")
    config = world.read(env(tmp_path))
    assert config is not None
    assert len(world.sleeps) == 30


def test_other_domains_are_not_waited_for(world: World, mount: Path) -> None:
    (mount / "rack").write_text("")
    config = world.read(env(mount))
    assert config is not None
    assert config.topology_domains == {"zone": "us-east-1a"}
    assert world.sleeps == []


# -- the files ---------------------------------------------------------------------------------


def test_the_seeds_example(world: World, mount: Path) -> None:
    config = world.read(env(mount, DYN_KV_TRANSFER_ENFORCEMENT="required"))
    assert config == TopologyConfig({"zone": "us-east-1a"}, "zone", "required", None)
    level, line = world.lines[-1]
    assert level == logging.INFO
    assert line.startswith("Topology config: TopologyConfig(topology_domains={'zone': ")
    assert line.endswith(f"(from {mount})")


@pytest.mark.seed("router-topology: worker environment: hidden and empty files")
def test_every_visible_file_with_content_is_a_domain(mount: Path) -> None:
    (mount / "rack").write_text("  rack-22 \n")
    (mount / "empty").write_text("\n")
    (mount / ".hidden").write_text("x")
    (mount / "folder").mkdir()
    assert read_domain_files(mount) == {"rack": "rack-22", "zone": "us-east-1a"}


def test_a_downward_api_volume_is_followed_through_its_links(tmp_path: Path) -> None:
    """The kubelet's layout: zone -> ..data/zone, ..data -> ..2026_11_21_.../."""
    real = tmp_path / "..2026_11_21_09_00_00.123"
    real.mkdir()
    (real / "zone").write_text("zone-a")
    (tmp_path / "..data").symlink_to(real.name)
    (tmp_path / "zone").symlink_to("..data/zone")
    (tmp_path / "dangling").symlink_to("..data/gone")
    assert read_domain_files(tmp_path) == {"zone": "zone-a"}


@pytest.mark.seed("dep-topology: compatibility: empty topology_domains")
def test_a_missing_directory_has_no_domains(tmp_path: Path) -> None:
    assert read_domain_files(tmp_path / "none") == {}


def test_an_oversized_or_binary_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "zone").write_text("x" * 5000)
    with pytest.raises(TopologyEnvironmentError, match="zone is larger than 4096 bytes"):
        read_domain_files(tmp_path)
    (tmp_path / "zone").write_bytes(b"\xff\xfe")
    with pytest.raises(TopologyEnvironmentError, match="zone is not UTF-8"):
        read_domain_files(tmp_path)


def test_too_many_files_are_refused(tmp_path: Path) -> None:
    for number in range(257):
        (tmp_path / f"d{number}").write_text("x")
    with pytest.raises(TopologyEnvironmentError, match="more than 256 topology files"):
        read_domain_files(tmp_path)


def test_a_value_that_cannot_be_a_taint_is_refused(world: World, mount: Path) -> None:
    (mount / "zone").write_text("a=b")
    with pytest.raises(TopologyEnvironmentError, match="value of topology domain 'zone'"):
        world.read(env(mount))


@pytest.mark.seed("router-topology: worker environment: DYN_TOPOLOGY_MOUNT_PATH")
def test_the_default_directory(world: World) -> None:
    assert DEFAULT_MOUNT_PATH == "/etc/dynamo/topology"
    variables = env(Path("/unused"))
    del variables["DYN_TOPOLOGY_MOUNT_PATH"]
    if Path(DEFAULT_MOUNT_PATH).exists():
        pytest.skip("this machine has a real topology directory")
    with pytest.raises(TopologyEnvironmentError, match="/etc/dynamo/topology/zone"):
        world.read(variables)


# -- the policy --------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [None, "", "required"])
@pytest.mark.seed("router-topology: worker environment: DYN_KV_TRANSFER_ENFORCEMENT")
@pytest.mark.seed("kubernetes-topology: pipeline: enforcement defaults to required")
def test_enforcement_defaults_to_required(world: World, mount: Path, raw: str | None) -> None:
    variables = env(mount) if raw is None else env(mount, DYN_KV_TRANSFER_ENFORCEMENT=raw)
    config = world.read(variables)
    assert config is not None
    assert config.kv_transfer_enforcement == "required"
    assert config.kv_transfer_preferred_weight is None


@pytest.mark.parametrize("raw", ["sometimes", "Required", "PREFERRED"])
def test_enforcement_is_spelled_exactly(world: World, mount: Path, raw: str) -> None:
    with pytest.raises(TopologyEnvironmentError) as error:
        world.read(env(mount, DYN_KV_TRANSFER_ENFORCEMENT=raw))
    captured = f"kv_transfer_enforcement must be 'required' or 'preferred', got \"{raw}\""
    assert str(error.value).startswith(captured)


@pytest.mark.parametrize(("raw", "weight"), [("0.85", 0.85), ("0", 0.0), ("1", 1.0)])
@pytest.mark.seed("router-topology: worker environment: DYN_KV_TRANSFER_PREFERRED_WEIGHT")
def test_preferred_takes_a_weight(world: World, mount: Path, raw: str, weight: float) -> None:
    config = world.read(
        env(
            mount,
            DYN_KV_TRANSFER_ENFORCEMENT="preferred",
            DYN_KV_TRANSFER_PREFERRED_WEIGHT=raw,
        )
    )
    assert config is not None
    assert config.kv_transfer_enforcement == "preferred"
    assert config.kv_transfer_preferred_weight == weight


@pytest.mark.parametrize(
    ("enforcement", "raw", "captured"),
    [
        (
            "preferred",
            "",
            "__all__: kv_transfer_preferred_weight is required when kv_transfer_enforcement is "
            "preferred",
        ),
        (
            "preferred",
            "1.5",
            'kv_transfer_preferred_weight: Validation error: range [{"value": Number(1.5), '
            '"min": Number(0.0), "max": Number(1.0)}]',
        ),
        (
            "preferred",
            "-0.1",
            'kv_transfer_preferred_weight: Validation error: range [{"value": Number(-0.1), ',
        ),
        ("preferred", "nan", "kv_transfer_preferred_weight: Validation error: range"),
        ("preferred", "inf", "kv_transfer_preferred_weight: Validation error: range"),
        ("preferred", "abc", "could not convert string to float: 'abc'"),
        ("required", "abc", "could not convert string to float: 'abc'"),
        ("required", "0.5", "kv_transfer_preferred_weight is only allowed when"),
    ],
)
def test_a_bad_weight_is_refused(
    world: World, mount: Path, enforcement: str, raw: str, captured: str
) -> None:
    with pytest.raises(TopologyEnvironmentError) as error:
        world.read(
            env(
                mount,
                DYN_KV_TRANSFER_ENFORCEMENT=enforcement,
                DYN_KV_TRANSFER_PREFERRED_WEIGHT=raw,
            )
        )
    assert str(error.value).startswith(captured)


@pytest.mark.parametrize(
    ("variables", "plain"),
    [
        (
            {"DYN_KV_TRANSFER_ENFORCEMENT": "sometimes"},
            "Set DYN_KV_TRANSFER_ENFORCEMENT to required or preferred",
        ),
        (
            {
                "DYN_KV_TRANSFER_ENFORCEMENT": "preferred",
                "DYN_KV_TRANSFER_PREFERRED_WEIGHT": "1.5",
            },
            "DYN_KV_TRANSFER_PREFERRED_WEIGHT is 1.5; expected a number from 0 to 1",
        ),
        (
            {"DYN_KV_TRANSFER_ENFORCEMENT": "preferred"},
            "set DYN_KV_TRANSFER_PREFERRED_WEIGHT to 0..1",
        ),
        (
            {"DYN_KV_TRANSFER_PREFERRED_WEIGHT": "abc"},
            "DYN_KV_TRANSFER_PREFERRED_WEIGHT; expected a number 0..1",
        ),
        ({"DYN_KV_TRANSFER_PREFERRED_WEIGHT": "0.5"}, "DYN_KV_TRANSFER_PREFERRED_WEIGHT"),
        ({"DYN_KV_TRANSFER_DOMAIN": "a=b"}, "DYN_KV_TRANSFER_DOMAIN"),
        ({"DYN_KV_TRANSFER_DOMAIN": "a/b"}, "DYN_KV_TRANSFER_DOMAIN is 'a/b'"),
    ],
)
def test_a_bad_value_is_refused_before_the_wait_for_a_file(
    world: World, tmp_path: Path, variables: dict[str, str], plain: str
) -> None:
    with pytest.raises(TopologyEnvironmentError) as error:
        world.read(env(tmp_path / "later", **variables))
    assert plain in str(error.value)
    assert (world.sleeps, world.lines) == ([], [])


def test_a_mount_path_that_is_a_file_is_refused_before_the_wait(
    world: World, tmp_path: Path
) -> None:
    path = tmp_path / "zone"
    path.write_text("a")
    with pytest.raises(TopologyEnvironmentError, match="which is not a directory"):
        world.read(env(path))
    assert world.sleeps == []


@pytest.mark.parametrize("enabled", [None, "", "true", "false"])
def test_variables_without_the_switch_are_named(enabled: str | None) -> None:
    variables = dict.fromkeys(VARIABLES, "x")
    if enabled is not None:
        variables["DYN_TOPOLOGY_ENABLED"] = enabled
    named = list(VARIABLES) if not enabled else []
    assert variables_without_effect(variables) == named
