"""``--router-policy-config``: the policy classes of the router queue, as YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from dynctl.base.errors import UsageProblem, file_problem
from dynctl.base.yaml_reader import YamlError, read_yaml_file
from router_core import (
    NO_CLASSES,
    ConfigError,
    PolicyClasses,
    RouterConfig,
    read_policy_classes,
)

_MOST_BYTES: Final = 1 << 20
_NAME: Final = "--router-policy-config"


def policy_classes(config: RouterConfig, typed: str = _NAME) -> PolicyClasses:
    """The classes of the file that ``config`` names; none where it names none.

    ``typed``: the setting as the user typed it. Raises UsageProblem with file, field and value.
    """
    if config.router_policy_config is None:
        return NO_CLASSES
    path = Path(config.router_policy_config)
    try:
        return read_policy_classes(read_yaml_file(path, most_bytes=_MOST_BYTES))
    except OSError as error:
        problem = file_problem(error)
    except YamlError as error:
        problem = f"not YAML: {error}"
    except ConfigError as error:
        problem = str(error)
    raise UsageProblem(
        f"{typed} {path}: {problem}",
        "expected default_policy_family, uncached_isl_buckets and policy_classes "
        "(docs/routing/queue.md#policy-classes has an example)",
    )
