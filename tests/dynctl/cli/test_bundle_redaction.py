"""What is taken out of whatever is to be sent away, and what is left as it is."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from dynctl.base.options import GlobalOptions
from dynctl.cli.bundle.environment import environment
from dynctl.cli.bundle.redaction import MASK, Redactor, hashed, known_secrets
from dynctl.settings.router_options import ROUTER_OPTIONS

SECRET = 'p4ss/"word'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("etcd://root:hunter22@etcd:2379 is down", "etcd://***@etcd:2379 is down"),
        ("http://a:b@c@host:80/x", "http://***@host:80/x"),
        ("Authorization: Bearer abc.def-ghi", "Authorization: *** ***"),
        ("sent bearer abcdefgh", "sent bearer ***"),
        ("password=hunter22&x=1", "password=***&x=1"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.sig_-1 expired", "*** expired"),
        ("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----", MASK),
        ("http://127.0.0.1:8000/v1/route wants a token (401)",) * 2,
        ("10,240 active prefill tokens > 10,000",) * 2,
        ("active_prefill_tokens_threshold: 5; max_num_batched_tokens=8192",) * 2,
        ("required dynamo.topology/zone=zone-a",) * 2,
    ],
)
def test_texts(text, told):
    assert Redactor().text(text) == told


def test_a_known_secret_is_found_however_it_is_written():
    redactor = Redactor([SECRET])
    encoded = base64.b64encode(SECRET.encode()).decode()
    for written in (SECRET, "p4ss%2F%22word", 'p4ss/\\"word', encoded):
        assert redactor.text(f"<{written}>") == f"<{MASK}>"
        assert redactor.holds_secret(f"<{written}>".encode())
    assert not redactor.holds_secret(b"password")


def test_a_short_secret_is_masked_as_a_word_only():
    redactor = Redactor(["key"])
    assert redactor.text("key of keys: monkey") == f"{MASK} of keys: monkey"


def test_of_two_secrets_one_within_the_other_nothing_is_left():
    assert Redactor(["abcd", "abcdefgh"]).text("abcdefgh abcd") == f"{MASK} {MASK}"


def test_keys_say_what_is_a_secret_and_what_a_prompt():
    redacted = Redactor(["hunter22"]).plain(
        {
            "api_token": "anything",
            "client-key-data": "AAAA",
            "token_env": "MY_TOKEN",
            "prompt": "tell me",
            "messages": [{"role": "user", "content": "tell me"}],
            "tokens": [1, 2, 3],
            "tokens_total": 3,
            "active_prefill_tokens": 40,
            "nested": [{"note": "it was hunter22"}, 5, None, True, 1.5],
            "hunter22": "a key can hold one too",
        }
    )
    assert redacted == {
        "api_token": MASK,
        "client-key-data": MASK,
        "token_env": "MY_TOKEN",
        "prompt": hashed("tell me"),
        "messages": hashed([{"role": "user", "content": "tell me"}]),
        "tokens": hashed([1, 2, 3]),
        "tokens_total": 3,
        "active_prefill_tokens": 40,
        "nested": [{"note": f"it was {MASK}"}, 5, None, True, 1.5],
        MASK: "a key can hold one too",
    }
    assert "tell me" not in str(redacted)
    assert Redactor().plain({"tokens": 36})["tokens"] == 36


def test_variables_show_values_only_where_they_are_listed():
    shown = environment(
        {
            "DYN_NAMESPACE": "prod",
            "DYN_SOMETHING_NEW": "who knows",
            "DYNCTL_TOKEN": "t0ken",
            "NATS_AUTH_PASSWORD": "x",
            "ETCD_ENDPOINTS": "http://u:p@etcd:2379",
            "DYN_EMPTY": "",
            "HOME": "/home/me",
        }
    )
    assert shown == {
        "DYNCTL_TOKEN": MASK,
        "DYN_EMPTY": "",
        "DYN_NAMESPACE": "prod",
        "DYN_SOMETHING_NEW": MASK,
        "ETCD_ENDPOINTS": "http://u:p@etcd:2379",
        "NATS_AUTH_PASSWORD": MASK,
    }
    settings = {name: "1" for one in ROUTER_OPTIONS.values() for name in one.env}
    assert MASK not in environment(settings).values()


def test_secrets_come_from_options_variables_files_and_kubeconfigs(tmp_path: Path):
    (tmp_path / "token").write_text("from-a-file\n")
    (tmp_path / "client.key").write_text("-----BEGIN KEY-----\nMIIEvQIBADANBgkq\n-----END KEY-----")
    (tmp_path / "config").write_text(
        "current-context: lab\n"
        "users:\n"
        "- name: me\n"
        "  user: {token: kube-token, client-key: client.key, tokenFile: token}\n"
        "- name: plugin\n"
        "  user: {exec: {command: aws-authenticator, env: [{name: X, value: plugin-secret}]}}\n"
    )
    found = known_secrets(
        GlobalOptions(token_file=tmp_path / "token", kubeconfig=tmp_path / "config"),
        {
            "HF_TOKEN": "hf_abcdef",
            "NATS_SERVER": "nats://natsuser:natspass@n:4222",
            "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD": "10000",
            "TOKENIZERS_PARALLELISM": "nonsense",
            "ETCD_AUTH_CLIENT_KEY": str(tmp_path / "client.key"),
            "MY_SECRET_SWITCH": "true",
        },
    )
    assert found >= {"from-a-file", "kube-token", "plugin-secret", "hf_abcdef"}
    assert found >= {"natsuser", "natspass", "MIIEvQIBADANBgkq"}
    assert not found & {"10000", "nonsense", "true", "aws-authenticator", "lab"}
