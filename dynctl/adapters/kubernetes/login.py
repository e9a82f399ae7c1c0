"""Authentication at an API server: the official client's configuration, and credentials.

The client reads certificates, passwords and proxies and runs credential plugins. Tokens are kept
here, because they expire during a watch: a plugin runs again when its token has expired or was
refused, a token's file is read for each request. A kubeconfig is never written.
"""

from __future__ import annotations

import base64
import os
import ssl
import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import quote

from dynctl.adapters.kubernetes.kubeconfig import IN_CLUSTER, KubeContext
from dynctl.base.errors import Unreachable, UsageProblem, file_problem, single_line
from dynctl.base.files import expect_regular, read_file

_LONGEST_TOKEN: Final = 1 << 20
_SKEW: Final = timedelta(seconds=15)
_SHORTEST_SECRET: Final = 5
_NO_SECRETS: Final = ("command", "apiVersion", "name", "installHint", "interactiveMode")


class Login:
    """``configuration`` is the client's, ``tls`` for other connections.

    Opening it runs a credential plugin if the user has one. Raises UsageProblem, or
    Unreachable if the plugin returned no credentials.
    """

    def __init__(self, context: KubeContext) -> None:
        self.context = context
        self._lock = threading.Lock()
        self._token = ""
        self._ends: datetime | None = None
        user = dict(context.user)
        self._plugin: Mapping[str, Any] = user.pop("exec", None) or {}
        self._token_file: str = user.pop("tokenFile", "")
        if self._plugin:
            user |= self._from_plugin()
        elif self._token_file:
            user.pop("token", None)
        elif "auth-provider" in user:
            # The client would renew such a token without saving the new one, and log kubectl out.
            self._token = _provider_token(context, user.pop("auth-provider"))
        self.configuration = _configure(context, user)
        self.tls = _tls(context, self.configuration)

    def headers(self) -> list[tuple[str, str]]:
        """The headers with the credentials, renewed if expired; a name may occur several times."""
        found = list(_impersonation_headers(self.context.user))
        with self._lock:
            if self._plugin and self._ends is not None and _now() + _SKEW >= self._ends:
                self._from_plugin()
            token = self._read_token() if self._token_file else self._token
        if token:
            found.append(("Authorization", f"Bearer {token}"))
        else:
            given = self.configuration.auth_settings().get("BearerToken", {}).get("value")
            if given:
                found.append(("Authorization", given))
        return found

    def renew(self) -> bool:
        """After a refusal: whether there are new credentials."""
        if not self._plugin:
            return False
        with self._lock:
            before = self._token
            self._from_plugin()
            return self._token != before

    def refused(self) -> Unreachable:
        """The API server did not accept the credentials."""
        name = self.context.name
        if name == IN_CLUSTER:
            return Unreachable(
                f"the API server {self.context.server} does not accept the token of this pod's "
                "service account",
                "was the service account deleted? restart the pod",
            )
        return Unreachable(
            f"the API server {self.context.server} does not accept the credentials of context "
            f"{name} (expired token?)",
            f"log in again, then run `kubectl --context {name} auth whoami` as a test",
        )

    def _read_token(self) -> str:
        try:
            return read_file(self._token_file, _LONGEST_TOKEN)[:_LONGEST_TOKEN].decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            why = file_problem(error) if isinstance(error, OSError) else "not text"
            raise Unreachable(
                f"the token of context {self.context.name} is not readable in "
                f"{self._token_file}: {why}"
            ) from None

    def _from_plugin(self) -> dict[str, Any]:
        """Run it and keep its token; returns its client certificate as of a user entry."""
        status = _plugin_status(self.context, self._plugin)
        token, ends = status.get("token"), status.get("expirationTimestamp")
        self._token = token if isinstance(token, str) else ""
        self._ends = _moment(ends)
        pair = {
            "client-certificate-data": _base64(status.get("clientCertificateData")),
            "client-key-data": _base64(status.get("clientKeyData")),
        }
        if all(pair.values()):
            return pair
        if not self._token:
            raise Unreachable(
                f"the credential plugin of context {self.context.name} returned neither a token "
                "nor a client certificate",
                f"does `kubectl --context {self.context.name} auth whoami` work?",
            )
        return {}


def _configure(context: KubeContext, user: Mapping[str, Any]) -> Any:
    """The client's Configuration of this context; without plugin and token file."""
    from kubernetes import client, config

    entry: dict[str, Any] = {"cluster": "it"}
    entry |= {"user": "it"} if user else {}
    document = {
        "current-context": "it",
        "contexts": [{"name": "it", "context": entry}],
        "clusters": [{"name": "it", "cluster": dict(context.cluster)}],
        "users": [{"name": "it", "user": dict(user)}] if user else [],
    }
    configuration: Any = client.Configuration()
    load: Any = config.load_kube_config_from_dict
    try:
        load(document, context="it", client_configuration=configuration, persist_config=False)
    except (config.ConfigException, OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageProblem(
            f"kubeconfig {context.origin}: context {context.name} is invalid: "
            f"{_without_secrets(str(error), context)}"
        ) from None
    # Client 32 ignores it.
    if context.cluster.get("proxy-url"):
        configuration.proxy = context.cluster["proxy-url"]
    return configuration


def _tls(context: KubeContext, configuration: Any) -> ssl.SSLContext | None:
    """Created before a request, so that an invalid certificate is reported as such."""
    if not context.server.startswith("https:"):
        return None
    part = f"certificate-authority of context {context.name}"
    try:
        named = (configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file)
        for file in filter(None, named):
            expect_regular(file)
        tls = ssl.create_default_context(cafile=configuration.ssl_ca_cert or None)
        if configuration.cert_file:
            part = f"client-certificate and client-key of user {context.user_name}"
            # Without this, OpenSSL would prompt for a password on the terminal.
            tls.load_cert_chain(configuration.cert_file, configuration.key_file, lambda: b"")
    except (ssl.SSLError, OSError, ValueError):
        raise UsageProblem(
            f"kubeconfig {context.origin}: the {part} is invalid: expected PEM, a key without "
            "a password that belongs to its certificate"
        ) from None
    if not configuration.verify_ssl:
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
    return tls


def _plugin_status(context: KubeContext, plugin: Mapping[str, Any]) -> Mapping[str, Any]:
    """The output of a credential plugin: the ``status`` of its ExecCredential."""
    from kubernetes import config
    from kubernetes.config import exec_provider, kube_config

    provider: Any = exec_provider.ExecProvider
    node: Any = kube_config.ConfigNode
    command = plugin.get("command")
    name = os.path.basename(command) if isinstance(command, str) else ""
    title = f"the credential plugin {name or '(none)'} of context {context.name}"
    try:
        cluster = node("cluster", dict(context.cluster))
        status: Any = provider(node("exec", dict(plugin)), None, cluster).run()
    except FileNotFoundError:
        hint = plugin.get("installHint")
        raise UsageProblem(
            f"{title} is not installed", hint if isinstance(hint, str) else "is it on PATH?"
        ) from None
    except PermissionError:
        raise UsageProblem(f"{title} is not executable") from None
    except (config.ConfigException, OSError) as error:
        raise Unreachable(
            f"{title} failed: {_without_secrets(str(error), context)}",
            f"log in again, then run `kubectl --context {context.name} auth whoami` as a test",
        ) from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UsageProblem(
            f"{title} is configured wrongly, or its output is not an ExecCredential"
        ) from None
    return status if isinstance(status, Mapping) else {}


def _provider_token(context: KubeContext, provider: Any) -> str:
    """The token that kubectl saved for an auth-provider."""
    settings = provider.get("config") if isinstance(provider, Mapping) else None
    for key in ("id-token", "access-token"):
        token = settings.get(key) if isinstance(settings, Mapping) else None
        if isinstance(token, str) and token:
            return token
    raise UsageProblem(
        f"user {context.user_name} of context {context.name} has an auth-provider without "
        "a saved token",
        f"`kubectl --context {context.name} auth whoami` fetches one; or use a credential plugin",
    )


def _impersonation_headers(user: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The impersonation headers; the client ignores them and would act as another user."""
    for key, header in (("as", "User"), ("as-uid", "Uid"), ("as-groups", "Group")):
        values = user.get(key) or []
        for value in values if isinstance(values, list) else [values]:
            yield f"Impersonate-{header}", str(value)
    more = user.get("as-user-extra")
    for key, values in more.items() if isinstance(more, Mapping) else ():
        for value in values if isinstance(values, list) else [values]:
            yield f"Impersonate-Extra-{quote(str(key), safe='')}", str(value)


def _without_secrets(text: str, context: KubeContext) -> str:
    """A foreign message as one line, without any value of the user's entry."""
    for secret in sorted(_values(context.user), key=len, reverse=True):
        text = text.replace(secret, "***")
    return single_line(text)


def _values(value: Any) -> set[str]:
    if isinstance(value, Mapping):
        return {
            one for key, item in value.items() if key not in _NO_SECRETS for one in _values(item)
        }
    if isinstance(value, list):
        return {one for item in value for one in _values(item)}
    return {value} if isinstance(value, str) and len(value) >= _SHORTEST_SECRET else set()


def _base64(value: Any) -> str:
    return base64.b64encode(value.encode()).decode() if isinstance(value, str) and value else ""


def _moment(value: Any) -> datetime | None:
    try:
        found = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return found if found is None or found.tzinfo is not None else found.replace(tzinfo=UTC)


def _now() -> datetime:
    return datetime.now(UTC)
