"""What is shipped beside the package and made from it: the chart's objects of `topology sync`, and
plain manifests.

``python -m tests.shipping.artefacts`` writes them; the tests compare.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

# Read when imported, since the tests' environment is emptied of DYNCTL_* variables.
SHIP_PYTHON = os.environ.get("DYNCTL_SHIP_PYTHON", "")

ROOT: Final = Path(__file__).resolve().parents[2]
DEPLOY: Final = ROOT / "docs" / "deploy"
CHART: Final = DEPLOY / "chart"
NAMESPACE: Final = "dynctl"
#: Component -> the values with which the chart has it alone.
COMPONENTS: Final[dict[str, dict[str, Any]]] = {
    "frontend": {},
    "router": {"router": {"enabled": True}, "adminToken": {"secret": "dynctl"}},
    "indexer": {"frontend": {"enabled": False}, "indexer": {"enabled": True}},
    "epp": {"frontend": {"enabled": False}, "epp": {"enabled": True, "pool": "my-pool"}},
    "test": {
        "frontend": {"enabled": False},
        "test": {"enabled": True, "url": "http://dynctl-frontend:8000"},
        "adminToken": {"secret": "dynctl"},
    },
    "attach": {
        "frontend": {"enabled": False},
        "attach": {"enabled": True, "selector": {"app": "my-engine"}},
    },
    "sync": {"frontend": {"enabled": False}, "sync": {"enabled": True}},
}
#: Releases with a name of their own: no two files have the same object, so a folder can be applied.
RELEASES: Final = {"router": "dynctl-shared"}
_SECRET: Final = (
    "# Needs the Secret dynctl with the key token; without it pods stay in "
    "CreateContainerConfigError:\n# kubectl -n dynctl create secret generic dynctl "
    '--from-literal=token="$(openssl rand -hex 32)"\n'
)
HEADS: Final = {"router": _SECRET, "test": _SECRET}


def dynctl(*arguments: str) -> str:
    """What a command of this checkout prints."""
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "dynctl", *arguments],
        capture_output=True, text=True, check=False, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def helm(*arguments: str) -> Any:
    """What Helm answers, run by the Python that has it (`make test-ship`)."""
    program = str(Path(__file__).with_name("helm.py"))
    done = subprocess.run(
        [SHIP_PYTHON, program, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def rendered(
    values: Mapping[str, Any], namespace: str = NAMESPACE, release: str = "dynctl"
) -> list[dict[str, Any]]:
    """The objects of the chart with these values, as Helm renders them."""
    given = {"values": values, "name": release, "namespace": namespace}
    files = helm("render", str(CHART), json.dumps(given))
    return [
        item
        for name, text in sorted(files.items())
        if name.endswith(".yaml")
        for item in yaml.safe_load_all(text)
        if item is not None
    ]


def controller(
    namespace: str = NAMESPACE, image: str = "dynctl:0.1.0", watched: str | None = None
) -> list[dict[str, Any]]:
    """The objects of ``topology render controller``."""
    printed = dynctl(
        *("topology", "render", "controller"),
        *("--image", image, "--controller-namespace", namespace),
        *(() if watched is None else ("--watch-namespace", watched)),
    )
    items: list[dict[str, Any]] = yaml.safe_load(printed)["items"]
    return items


def sync_template() -> str:
    """The chart's template of `topology sync`."""

    def text(watched: str | None) -> str:
        objects = controller("zz-namespace", "zz-image:0", watched)
        made = "---\n".join(yaml.safe_dump(item, sort_keys=False) for item in objects)
        made = made.replace("zz-image:0", '{{ include "dynctl.image" . }}')
        made = made.replace("zz-watched", "{{ .Values.sync.watchNamespace }}")
        return made.replace("zz-namespace", "{{ .Release.Namespace }}")

    head = "{{- /* The objects of `dynctl topology render controller`; see `make deploy`. */}}\n"
    return (
        head
        + "{{- if .Values.sync.enabled }}\n{{- if .Values.sync.watchNamespace }}\n"
        + text("zz-watched")
        + "{{- else }}\n"
        + text(None)
        + "{{- end }}\n{{- end }}\n"
    )


def manifest(component: str) -> str:
    """The plain manifest of a component: what the chart renders with its default values."""
    head = (
        f"# Made from docs/deploy/chart by `make deploy`.\n# kubectl -n {NAMESPACE} apply -f FILE\n"
    )
    head += HEADS.get(component, "")
    objects = rendered(COMPONENTS[component], release=RELEASES.get(component, "dynctl"))
    return head + "---\n".join(yaml.safe_dump(item, sort_keys=False) for item in objects)


def main() -> None:
    (CHART / "templates" / "sync.yaml").write_text(sync_template())
    for component in COMPONENTS:
        (DEPLOY / "kubernetes" / f"{component}.yaml").write_text(manifest(component))


if __name__ == "__main__":
    main()
