"""The shim in processes of its own, since what is imported stays imported."""

import subprocess
import sys
from pathlib import Path

from tests.waiting import patience

ROOT = Path(__file__).parents[3]


def run(program: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=patience(60),
        check=False,
    )


def test_the_messages_are_those_of_etcd():
    done = run(
        "from dynctl.adapters.etcd.shim import load_etcdrpc\n"
        "rpc = load_etcdrpc()\n"
        "request = rpc.RangeRequest(key=b'v1/', range_end=b'v10', limit=500, revision=2**62)\n"
        "print(request.SerializeToString().hex())\n"
        "print(rpc.RangeRequest.FromString(request.SerializeToString()) == request)\n"
        "print(rpc.RangeRequest.ASCEND, rpc.AlarmType.Value('NOSPACE'), rpc.NOSPACE)\n"
        "import etcd3\n"
        "print(etcd3.etcdrpc is rpc, rpc is load_etcdrpc())\n",
        "-W",
        "error",
    )
    assert done.stderr == ""
    expected = "0a0376312f120376313018f40320" + "80" * 8 + "40"
    assert done.stdout.split("\n") == [expected, "True", "1 1 1", "True True", ""]


def test_another_librarys_kv_proto_is_not_in_the_way():
    done = run(
        "from google.protobuf import descriptor_pb2, descriptor_pool\n"
        "other = descriptor_pb2.FileDescriptorProto(name='kv.proto', package='somebody')\n"
        "descriptor_pool.Default().AddSerializedFile(other.SerializeToString())\n"
        "from dynctl.adapters.etcd.shim import load_etcdrpc\n"
        "print(load_etcdrpc().RangeRequest.DESCRIPTOR.full_name)\n"
    )
    assert done.stdout == "etcdserverpb.RangeRequest\n", done.stderr


def test_a_missing_etcd3_is_named_with_what_to_do():
    done = run(
        "import asyncio, sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'etcd3': raise ModuleNotFoundError('hidden')\n"
        "sys.meta_path.insert(0, Hidden())\n"
        "from dynctl.base.errors import Unreachable\n"
        "from dynctl.adapters.etcd.grpc import Etcd3Discovery\n"
        "async def main():\n"
        "    try:\n"
        "        await Etcd3Discovery(['127.0.0.1:1']).list()\n"
        "    except Unreachable as error:\n"
        "        print(error)\n"
        "asyncio.run(main())\n"
    )
    assert "the etcd3 library does not work" in done.stdout, done.stderr
    assert "reinstall dynctl with its dependencies" in done.stdout


def test_nothing_is_imported_before_it_is_needed():
    done = run(
        "import sys\n"
        "import dynctl.adapters.etcd.grpc\n"
        "print([name for name in ('etcd3', 'grpc', 'google.protobuf') if name in sys.modules])\n"
    )
    assert done.stdout == "[]\n", done.stderr
